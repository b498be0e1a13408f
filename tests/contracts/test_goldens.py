"""The public boundary does what the goldens say: bits of every shard, bytes and requests read, every file written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contracts import goldens
from tests.harness.pool import RankPool


@pytest.mark.needs("transformers>=5.23", "writes the same files")
def test_goldens(ranks: RankPool, tmp_path: Path) -> None:
    now = json.loads(json.dumps(goldens.found(ranks, tmp_path)))
    changed = goldens.different(now, json.loads(goldens.FILE.read_text()))
    assert not changed, "\n".join(
        ["python -m tests.contracts.goldens, if this is meant to change:", *changed]
    )
    assert all(one["restore"]["as saved"] for answers in now.values() for one in answers)


def test_a_change_is_seen() -> None:
    then = json.loads(goldens.FILE.read_text())
    now = json.loads(goldens.FILE.read_text())
    (kind, *_) = now
    now[kind][0]["load_pretrained"]["bytes_read"] += 1
    (name, *_) = now[kind][0]["save"]
    del now[kind][0]["save"][name]
    assert len(goldens.different(now, then)) == 2
