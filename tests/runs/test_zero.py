"""DeepSpeed ZeRO's checkpoints: read as boxes on any number of ranks, with the optimizer, and refused where the files don't fit together.

The layout is written by _zero_layout.py, and by DeepSpeed itself where it's installed (``make loggers``).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.catalog.zero import read_zero
from tests.docs.blocks import ROOT
from tests.harness.pool import RankPool
from tests.runs import _zero_fns as fns
from tests.runs._zero_layout import Tensors, write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EVERY = [(stage, dtype) for stage in (1, 2, 3) for dtype in DTYPES]


def made(root: Path, stage: int, dtype: str, ranks: int = 2, **options: Any) -> dict[str, Tensors]:
    """Write a checkpoint of :class:`._zero_fns.Net`; gives what must be read: masters and others, and moments."""
    torch.manual_seed(3)
    model = fns.Net()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [{names[id(p)]: torch.randn(p.shape) for p in g["params"]} for g in fns.groups_of(model)]
    moments = {key: {n: torch.rand(t.shape) for g in groups for n, t in g.items()} for key in fns.MOMENTS}
    frozen = {n: p.detach().to(DTYPES[dtype]) for n, p in model.named_parameters() if not p.requires_grad}
    buffers = {"running": torch.randn(5, dtype=DTYPES[dtype]), "count": torch.tensor(9)}
    shared = {"head.weight": "embed.weight"}
    write(
        root,
        stage,
        ranks,
        DTYPES[dtype],
        groups,
        moments,
        frozen=frozen,
        buffers=buffers,
        shared=shared,
        **options,
    )
    masters = {n: t for g in groups for n, t in g.items()}
    return {
        "model": {**masters, **frozen, **buffers, "head.weight": masters["embed.weight"]},
        "moments": {f"{n}.{key}": t for key, of in moments.items() for n, t in of.items()},
    }


def really_made(root: Path, stage: int, dtype: str, ranks: int, *options: str) -> dict[str, Tensors]:
    """The same by DeepSpeed, with what its own tools read."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = ["-m", "tests.runs._zero_fns", str(root), str(stage), dtype, *options]
    done = subprocess.run([*launched, *words], env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    tool = importlib.import_module("deepspeed.utils.zero_to_fp32")
    with contextlib.redirect_stdout(io.StringIO()):
        merged = tool.get_fp32_state_dict_from_zero_checkpoint(str(root))
    expected = torch.load(root / "expected.pt")
    assert all(torch.equal(expected[n], t) for n, t in merged.items() if n in expected)
    return {"model": merged, "moments": {n: t for n, t in expected.items() if n not in merged}}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that aren't the same bit for bit. Buffers of a 16-bit dtype are compared in the dtype that's expected."""
    assert found.keys() >= expected.keys()
    return [n for n, t in expected.items() if not torch.equal(found[n].to(t.dtype), t)]


def check(ranks: RankPool, root: Path, expected: dict[str, Tensors], now: int) -> None:
    results = ranks.run_ranks(now, fns.takes_over, str(root))
    for one in results:
        assert differences(one["model"], expected["model"]) == []
        assert one["moments"].keys() == expected["moments"].keys()
        assert differences(one["moments"], expected["moments"]) == []
        assert (one["steps"], one["step"]) == ({2.0}, 2)
        assert one["rates"] == [(1e-2, 0.1), (1e-2, 0.0)]
    step = read_zero(str(root / "global_step2"))
    tensors = [t for n, t in step.catalog.tensors.items() if n != "head.weight"]
    states = [t for of in step.optimizer["state"].values() for t in of.values()]  # type: ignore[index]
    needed = sum(t.nbytes for t in (*tensors, *states))
    assert sum(one["read"] for one in results) <= 1.02 * needed


@pytest.mark.parametrize(("stage", "dtype"), EVERY)
@pytest.mark.parametrize("now", [1, 2, 3])
def test_a_run_is_restored_at_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, stage: int, dtype: str, now: int
) -> None:
    """Masters, moments and the step, bit for bit, and no byte is read that no rank needs."""
    check(ranks, tmp_path / "run", made(tmp_path / "run", stage, dtype), now)


@pytest.mark.parametrize(("stage", "dtype"), EVERY)
def test_a_run_of_deepspeed_itself(ranks: RankPool, tmp_path: Path, stage: int, dtype: str) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    expected = really_made(tmp_path / "run", stage, dtype, 2)
    for now in (1, 2, 3):
        check(ranks, tmp_path / "run", expected, now)


@pytest.mark.parametrize(
    ("stage", "ranks", "options"),
    [
        (1, 3, {"deal": True}),
        (2, 3, {"align_params": True}),
        (2, 3, {"align_params": True, "deal": True}),
        (3, 5, {}),
    ],
)
def test_other_layouts(tmp_path: Path, stage: int, ranks: int, options: dict[str, bool]) -> None:
    expected = made(tmp_path / "run", stage, "bf16", ranks, **options)
    model = fns.Net()
    sw.load(model, tmp_path / "run")
    assert differences(model.state_dict(), expected["model"]) == []


@pytest.mark.parametrize(("stage", "ranks", "options"), [(2, 3, ["dealt"]), (3, 3, ["subgroups"])])
def test_other_layouts_of_deepspeed_itself(
    tmp_path: Path, stage: int, ranks: int, options: list[str]
) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    expected = really_made(tmp_path / "run", stage, "bf16", ranks, *options)
    model = fns.Net()
    sw.load(model, tmp_path / "run")
    assert differences(model.state_dict(), expected["model"]) == []
