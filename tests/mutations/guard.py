"""A plugin for the pytest that :mod:`tests.mutations` starts: it tests the given copy, and says what it ran.

``SHARDWISE_MUTATED`` is the folder of the copy of the package, ``SHARDWISE_MUTATION_REPORT`` the file to write.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

_collected: list[str] = []
_broken: list[str] = []
_failed: list[str] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    import shardwise

    copy = Path(os.environ["SHARDWISE_MUTATED"])
    if Path(str(shardwise.__file__)).parent != copy:
        pytest.exit(f"the tests import {shardwise.__file__} and not the copy in {copy}", returncode=3)


def pytest_collection() -> None:
    """A failing example is enough: making it small takes longer than finding it."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutations", settings.default, phases=phases)
    settings.load_profile("mutations")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _broken.append(report.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    _collected.extend(item.nodeid for item in session.items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = {"collected": _collected, "broken": _broken, "failed": _failed}
    Path(os.environ["SHARDWISE_MUTATION_REPORT"]).write_text(json.dumps(found), encoding="utf-8")
