"""examples/diffusers_loop.py and diffusers_accelerate.py under torchrun: killed, resumed, and opened by diffusers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from examples.diffusers_loop import WITHOUT, sample
from tests.harness.process import ROOT, worker_env
from tests.harness.tiers import nightly_rows

STEPS = 30


def start(example: str, out: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    with_accelerate = "accelerate" in example
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *([str(ROOT / "tests/harness/accelerate_on_cpu.py")] if with_accelerate else []),
        *(str(ROOT / f"examples/{example}.py"), "--out", str(out), "--steps", str(STEPS), *options),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=worker_env(), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def launch(example: str, out: Path, ranks: int, *options: str) -> dict[int, float]:
    """The losses of the steps that it took."""
    process = start(example, out, ranks, *options)
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    return {int(step): loss for step, loss in json.loads(line).items()}


def kill_once_saved(example: str, out: Path, *options: str) -> None:
    """Kill all processes at once, some time after the first save."""
    process = start(example, out, 2, *options)
    deadline = time.monotonic() + 120
    try:
        while not [*out.glob("checkpoints/step-*"), *out.glob("checkpoint-*")]:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for rank in _ranks_of(out):  # torchrun gives each a session of its own
            os.kill(rank, signal.SIGKILL)
        process.communicate(timeout=30)
    assert not (out / f"export-{STEPS}").exists(), "it was done already"


def _ranks_of(out: Path) -> list[int]:
    """Processes with this directory among their arguments."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(out).encode() in arguments:
                found.append(int(process.name))
    return found


def opened(kind: str, base: Path, export: Path, lora: bool) -> Any:
    none = dict.fromkeys(WITHOUT[kind])
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(base if lora else export), **none)
    if lora:
        pipeline.load_lora_weights(export)
    return pipeline


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "kind", "lora"),
    [
        ("diffusers_accelerate", "flux", True),
        *nightly_rows(
            ("diffusers_loop", "flux", False),
            ("diffusers_loop", "wan", True),
            ("diffusers_loop", "wan", False),
            ("diffusers_loop", "flux", True),
            ("diffusers_accelerate", "wan", False),
            ("diffusers_accelerate", "flux", False),
            ("diffusers_accelerate", "wan", True),
        ),
    ],
)
def test_resumes_bitwise_after_a_kill(tmp_path: Path, example: str, kind: str, lora: bool) -> None:
    options = ("--model", kind, *(("--lora",) if lora else ()))
    whole = launch(example, tmp_path / "whole", 2, *options)
    assert list(whole) == list(range(1, STEPS + 1))
    kill_once_saved(example, tmp_path / "killed", *options)
    rest = launch(example, tmp_path / "killed", 2, *options)
    assert 2 < min(rest) <= STEPS
    assert rest == {step: whole[step] for step in rest}, "bitwise, as if it never stopped"
    name = f"samples-{STEPS}.pt"
    samples = torch.load(tmp_path / "whole" / name)
    assert torch.equal(torch.load(tmp_path / "killed" / name)["after"], samples["after"])
    base, export = (tmp_path / "whole" / folder for folder in ("base", f"export-{STEPS}"))
    torch.testing.assert_close(
        sample(kind, opened(kind, base, export, lora)), samples["after"], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(samples["before"], samples["after"], atol=1e-3)
    first, last = (sum(whole[step] for step in steps) for steps in (range(1, 6), range(STEPS - 4, STEPS + 1)))
    assert last < first - (0.1 if not lora else 0), "it learns"
