"""The programs of the pages, from the pages' own text: run to the end, run again, and run after a SIGKILL."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise.cli import main
from tests.docs.blocks import ROOT, blocks
from tests.docs.shown import run_and_check, values
from tests.harness.command import runner
from tests.harness.tiers import nightly_but

pytestmark = pytest.mark.slow

#: What the programs leave to their reader. ``train_one_step`` ends its process, as the OOM killer does, where a test says so.
BEFORE = """
import os, signal
import torch
from torch import nn
from torch.utils.data import DataLoader
import torch.distributed as dist

torch.manual_seed(0)
my_dataloader = DataLoader([torch.arange(k, k + 4) for k in range(8)], batch_size=2, shuffle=True)
steps_taken = 0


def train_one_step(model, optimizer, batch):
    global steps_taken
    steps_taken += 1
    if steps_taken == int(os.environ.get("KILL_IN_STEP", 0)):
        os.kill(os.getpid(), int(os.environ.get("SIGNAL", signal.SIGKILL)))
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("trained", flush=True)
"""
#: Instead of a GPU, a hub id and days of training.
INSTEAD = {
    '"cuda:nccl,cpu:gloo"': '"gloo"',
    '"cuda"': '"cpu"',
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "",
    '"Qwen/Qwen3-0.6B"': '"base"',
    "total_steps = 10_000": "total_steps = 7",
    "save_every=100": "save_every=2",
    "save_every=500": "save_every=2",
    "lr=1e-5": "lr=1e-2",
}
#: Makes what the loops of these pages take for granted, from README's program.
LOOPS = ("docs/howto/preemption.md", "docs/howto/running-for-weeks.md")
STORE = re.compile(r'    mirror="s3://[^\n]*\n')


def readme() -> str:
    (found,) = (
        block.text for block in blocks(ROOT / "README.md") if "while step < total_steps" in block.text
    )
    return found


def program(page: str) -> str:
    """The page's program, made to run here."""
    text = whole = readme()
    if page != "README.md":
        (loop,) = (block.text for block in blocks(ROOT / page) if "while step < total_steps" in block.text)
        loop = (
            STORE.sub("", loop)
            .replace('"/shared/runs/a"', '"runs/a"')
            .replace('"/shared2/runs/a"', '"other/a"')
        )
        text = whole[: whole.index("with sw.Checkpointer")] + loop + whole[whole.index("sw.export_hf") :]
    for old, new in INSTEAD.items():
        assert old in text or old in ("save_every=100", "save_every=500"), f"{page} has no {old}"
        text = text.replace(old, new)
    return BEFORE + text


def run(folder: Path, kill_in_step: int = 0) -> tuple[int, int]:
    """The exit status of the program in a folder, and how many steps its ranks have taken."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "KILL_IN_STEP": str(kill_in_step),
        "OMP_NUM_THREADS": "1",
    }
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    if done.returncode and not kill_in_step:
        pytest.fail(f"{done.stdout}\n{done.stderr[-6000:]}")
    return done.returncode, done.stdout.count("trained")


def test_the_plan_that_the_readme_names_is_of_its_program(tmp_path: Path) -> None:
    """No dtype, optimizer or number of kept steps has to be guessed."""
    text, whole = readme(), " ".join((ROOT / "README.md").read_text().split())
    (words,) = re.findall(r"`shardwise (plan [^`]+ --param-dtype [^`]+)`", whole)
    base(tmp_path)
    _, path, *options = words.split()
    done = runner().invoke(main, ["plan", str(tmp_path / "base"), *options, "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)["run"]
    dtypes = re.search(r"param_dtype=torch\.(\w+), reduce_dtype=torch\.(\w+)", text)
    loaded = re.search(r'load_pretrained\("([^"]+)", mesh, dtype=torch\.(\w+)', text)
    kept = re.search(r"keep_last=(\d+)", text)
    assert dtypes is not None
    assert loaded is not None
    assert kept is not None
    assert "torch.optim.AdamW(" in text
    setup = planned["setup"]
    assert (path, *setup["parameters"]) == loaded.groups()
    assert (setup["compute"], setup["reductions"]) == dtypes.groups()
    assert (setup["optimizer"], setup["optimizer_states"]) == ("adamw", setup["parameters"])
    assert planned["checkpoint"]["kept"] == int(kept[1])


def base(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder / "base")


def tree(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns for path in (folder / "runs").rglob("step-*")
    }


@pytest.mark.parametrize("page", ["README.md", "docs/howto/preemption.md"])
def test_values_in_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """Of the exit status, by a signal in the second step: on one rank, in this process."""
    base(tmp_path)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (given | {"KILL_IN_STEP": 2, "SIGNAL": int(signal.SIGTERM)}).items():
        monkeypatch.setenv(name, str(value))
    code = program(page)
    assert values(code), "what is compared"
    try:
        with pytest.raises(SystemExit) as end:
            run_and_check(page, code, {"__name__": "__main__"})
    finally:
        dist.destroy_process_group()
    assert end.value.code == 75


@pytest.mark.timeout(480)  # four launches, each with its own imports
@pytest.mark.parametrize("page", nightly_but(["README.md", *LOOPS], "README.md", "docs/howto/preemption.md"))
def test_run_again_and_after_a_kill(tmp_path: Path, page: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "train.py").write_text(program(page))
    base(whole)
    (killed / "base").symlink_to(whole / "base")
    assert run(whole) == (0, 14), "seven steps on two ranks"
    steps = tree(whole)
    assert steps
    assert run(whole) == (0, 0), "a finished job trains no more"
    assert tree(whole) == steps, "and saves no more"
    status, taken = run(killed, kill_in_step=4)
    assert status != 0
    assert 4 <= taken <= 6, "killed in the fourth step"
    assert run(killed)[0] == 0
    ours, theirs = (load_file(folder / "exports" / "a" / "model.safetensors") for folder in (whole, killed))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), "bit for bit as the run that was not killed"
