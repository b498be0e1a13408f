"""One S3 server for all tests of this folder that a lane runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.object_store import Proxy, S3Server, s3_server, use_store


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    """In front of the server; this process uses the bucket through it."""
    with Proxy(server.port) as found:
        use_store(found.endpoint)
        yield found
