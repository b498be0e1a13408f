"""The simulated device, compiled once and kept; a session's first test waits about half a minute for it."""

from __future__ import annotations

import pytest

from tests.device import build


@pytest.fixture(scope="session")
def simgpu() -> None:
    """Skips where nothing can compile it; fails where it does not compile."""
    missing = build.what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    build.built()
