"""Marker and size of the fault tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "faults: kills processes at random instants; SHARDWISE_KILLS says how often"
    )
