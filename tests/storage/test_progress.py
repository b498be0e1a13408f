"""Progress of what goes to and comes from stores: the bytes of tensors and files, not of requests; on a terminal, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.harness.object_store import BUCKET, SECRET, Asked, Do, Proxy
from tests.harness.pool import RankPool
from tests.operations import _progress_fns as fns
from tests.operations.test_bars import ESCAPE, in_terminal, screen

ROOT = f"s3://{BUCKET}/progress"


def test_there_and_back(proxy: Proxy, tmp_path: Path) -> None:
    fns.there_and_back(ROOT, str(tmp_path))


def test_two_ranks(ranks: RankPool, proxy: Proxy, tmp_path: Path) -> None:
    ranks.run_ranks(2, fns.there_and_back, f"{ROOT}/ranks", str(tmp_path), proxy.endpoint)


@pytest.mark.processes
@pytest.mark.nightly
def test_a_bar_with_rate_and_remaining_time(proxy: Proxy, tmp_path: Path) -> None:
    """Of a command that reads from a slow store."""
    model = nn.Linear(3000, 4000)  # three blocks of 16 MiB
    step = tmp_path / "step-00000003"
    sw.save(sw.TrainState(model=model), step, step=3)
    sw.copy_checkpoint(step, f"{ROOT}/slow/{step.name}")
    proxy.reset(lambda asked: Do(piece_s=0.004) if asked.method == "GET" else None)
    environment = {
        "AWS_ENDPOINT_URL": proxy.endpoint,
        "AWS_ACCESS_KEY_ID": "AKID",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "shardwise", "verify", f"{ROOT}/slow/{step.name}", "--threads", "1"]
    status, out, shown = in_terminal(command, env=environment)
    assert (status, "ok" in out) == (0, True), shown
    lines = re.split(r"[\r\n]+", ESCAPE.sub("", shown))
    expected = r"verify step-00000003 ━+╸?.* \d.*iB/45\.\d MiB \d.*iB/s 0:00:\d\d"
    assert [line for line in lines if re.match(expected, line)], lines
    assert screen(shown) == []


def test_a_failure_of_the_store(proxy: Proxy, tmp_path: Path) -> None:
    model = nn.Linear(1000, 2000)
    sw.save(sw.TrainState(model=model), f"{ROOT}/lost/step", step=3)

    def gone(asked: Asked) -> Do | None:
        return (
            Do(status=404) if asked.method == "GET" and "safetensors" in asked.path and asked.first else None
        )

    heard: fns.Found = []
    proxy.reset(gone)
    with sw.progress(heard.append), pytest.raises(sw.errors.SourceError):
        sw.load(model, f"{ROOT}/lost/step")
    assert [one.state for one in heard][-1] == "failed"
    assert heard[-1].done_bytes < heard[-1].total_bytes
    assert torch.is_tensor(model.weight)
