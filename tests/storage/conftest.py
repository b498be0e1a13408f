"""One S3 server for all tests of this folder that a lane runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.object_store import S3Server, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found
