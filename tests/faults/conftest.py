"""Marker and size of the fault tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "faults: kills, stops and starves processes; SHARDWISE_KILLS says how many random instants test_kill.py tries",
    )
