"""Eight experts, stored one by one, on numbers of ranks that do not divide them, and on more ranks than experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.harness.process import ROOT, worker_env
from tests.harness.tiers import nightly_rows
from tests.planning import _expert_counts_fns as fns

KINDS = ("qwen3-moe", "mixtral")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for kind in KINDS:
        found.append(str(tmp_path_factory.mktemp("hub") / kind))
        fns.write_checkpoint(kind, Path(found[-1]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("world_size", "held"), [(5, [2, 2, 2, 2, 0]), *nightly_rows((3, [3, 3, 2]), (16, [1] * 8 + [0] * 8))]
)
def test_experts_on_ranks_that_they_do_not_divide_by(
    directories: list[str], tmp_path: Path, world_size: int, held: list[int]
) -> None:
    """Loaded as the ordinary model is, trained as it is, saved, and restored with equal digests and optimizer."""
    command = [
        sys.executable,
        "-m",
        "tests.planning._expert_counts_fns",
        str(world_size),
        str(tmp_path),
        *directories,
    ]
    done = subprocess.run(
        command,
        env=worker_env(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=len(KINDS) * (fns.TIMEOUT_S + 20) + 30,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for directory in directories:
        part = tmp_path / f"{Path(directory).name}-{world_size}"
        results = torch.load(part / "results.pt")
        assert [r["experts"] for r in results] == held
        assert len({r["loss"] for r in results}) == 1
        assert sum(r["bytes_read"] for r in results) <= 1.05 * results[0]["model_bytes"]
        # And on one process, without a group.
        step = part / "run" / "step-00000001"
        model, report = sw.load_pretrained(step, return_report=True)
        assert report.verified == "digest"
        assert sw.digest(model) == results[0]["digest"]
