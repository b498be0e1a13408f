"""What the two ranks of test_smoke.py run: each entry point once, on a tiny model, in one launch."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.harness.models import Mixed, state_of, write_hub_directory, write_state
from tests.harness.versions import is_open

#: Every check by the name of what it uses, in the order in which they run: later ones read what earlier ones wrote.
CHECKS: dict[str, Callable[[Path, DeviceMesh], None]] = {}


def check(function: Callable[[Path, DeviceMesh], None]) -> Callable[[Path, DeviceMesh], None]:
    CHECKS[function.__name__] = function
    return function


def smoke(root: str, port: int) -> dict[str, str | None]:
    """Run all checks on every rank. Gives each one's traceback, or None where it passed.

    At the end the process group is gone: the commands that run last make one of their own, at ``port`` of this machine.
    """
    torch.manual_seed(0)
    place, mesh = Path(root), init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        write_hub_directory("qwen3", place / "hub", torch.float32, max_shard_size="20KB")
        torch.manual_seed(1)
        write_state(state_of(Mixed()), place / "mixed")
    dist.barrier()
    found: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        if name == "convert":
            dist.destroy_process_group()
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            os.environ["MASTER_PORT"] = str(port)
        try:
            with warnings.catch_warnings():
                # What other packages warn each other about depends on their versions; what we do must not warn.
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", module=r"shardwise\b")
                function(place, mesh)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def reference(directory: Path) -> dict[str, torch.Tensor]:
    """The state dict that transformers alone loads."""
    return dict(transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict())


def tokens(step: int) -> torch.Tensor:
    """Every rank its own rows."""
    return torch.randint(3, 101, (2, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(input_ids=tokens(step), labels=tokens(step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ----------------------------------------------------------------------------------------------------
# The package


@check
def load_pretrained(place: Path, mesh: DeviceMesh) -> None:
    model, report = sw.load_pretrained(place / "hub", mesh, return_report=True)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    assert report.tensors > 0
    assert_same(whole(model), reference(place / "hub"))


@check
def load(place: Path, mesh: DeviceMesh) -> None:
    with sw.meta_init():
        model = Mixed()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sw.load(model, place / "mixed")
    torch.manual_seed(1)
    assert_same(whole(model), dict(Mixed().state_dict()))


@check
def save_and_resume(place: Path, mesh: DeviceMesh) -> None:
    """The step after a resume is bitwise the step that the first life took."""

    def state() -> sw.TrainState:
        model = sw.load_pretrained(place / "hub", mesh)
        return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    first, second = state(), state()
    with sw.Checkpointer(place / "steps") as checkpoints:
        assert checkpoints.resume(first) is None
        train(first.model, first.optimizer, 1)
        checkpoints.save(first, 1)
        expected = train(first.model, first.optimizer, 2)
        resumed = checkpoints.resume(second)
        assert resumed is not None
        assert (resumed.step, resumed.exact) == (1, True)
        assert train(second.model, second.optimizer, 2) == expected
    assert_same(whole(first.model), whole(second.model))
    with sw.Checkpointer(place / "steps", mode="async") as checkpoints:
        checkpoints.resume(second)
        checkpoints.save(second, 2)
        assert checkpoints.wait() is not None


@check
def verify(place: Path, mesh: DeviceMesh) -> None:
    assert sw.verify(place / "steps" / "step-00000001").ok


@check
def export_hf(place: Path, mesh: DeviceMesh) -> None:
    model = sw.load_pretrained(place / "hub", mesh)
    sw.export_hf(model, place / "export")
    assert_same(reference(place / "export"), reference(place / "hub"))


@check
def clone_digest_and_full_tensors(place: Path, mesh: DeviceMesh) -> None:
    model = sw.load_pretrained(place / "hub", mesh)
    copy = sw.clone(model)
    assert sw.digest(copy) == sw.digest(model)
    assert_same(dict(sw.iter_full_tensors(copy)), reference(place / "hub"))


# ----------------------------------------------------------------------------------------------------
# Integrations


@check
def accelerate(place: Path, mesh: DeviceMesh) -> None:
    from shardwise.integrations import accelerate as swa
    from tests.integrations._accelerate_fns import accelerator_with

    def life(folder: Path, *, resumed: bool) -> float:
        plugin = {"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}
        with accelerator_with(plugin=plugin) as accelerator:
            model = swa.load_pretrained(accelerator, place / "hub")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = swa.prepare(accelerator, model, optimizer)
            if resumed:
                report = swa.load_state(accelerator, folder)
                assert report.exact, report
            else:
                train(model, optimizer, 1)
                swa.save_state(accelerator, folder, step=1)
            return train(model, optimizer, 2)

    assert life(place / "accelerate", resumed=False) == life(place / "accelerate", resumed=True)


@check
def trainer(place: Path, mesh: DeviceMesh) -> None:
    from shardwise.integrations.trainer import ShardwiseTrainer
    from shardwise.integrations.trainer import load_pretrained as load_for
    from tests.integrations._trainer_parts import Rows, arguments

    def life(steps: int, resume: bool) -> list[float]:
        with arguments(
            str(place / "trainer"), save_steps=1, max_steps=steps, lr_scheduler_type="constant"
        ) as args:
            model = load_for(args, place / "hub")
            made = ShardwiseTrainer(model, args, train_dataset=Rows())
            made.train(resume_from_checkpoint=resume)
            return [row["loss"] for row in made.state.log_history if "loss" in row]

    first = life(2, resume=False)
    assert len(first) == 2
    both = life(3, resume=True)
    assert both[:2] == first
    assert len(both) == 3
    written = place / "trainer" / "checkpoint-3"
    if not is_open("model-directory"):
        written = place / "trainer" / "exported"
        sw.export_hf(place / "trainer" / "checkpoint-3", written)
    opened = transformers.AutoModelForCausalLM.from_pretrained(written)
    assert opened.state_dict().keys() == reference(place / "hub").keys()


@check
def peft(place: Path, mesh: DeviceMesh) -> None:
    from peft import LoraConfig, PeftModel

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = sw.load_pretrained(place / "hub", mesh, adapter=config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, 1)
    sw.export_hf(model, place / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "hub")
    assert_same(dict(PeftModel.from_pretrained(base, place / "adapter").state_dict()), whole(model))


# ----------------------------------------------------------------------------------------------------
# Commands


def command(*words: object) -> Any:
    """The one document that a command prints on rank 0; None on the others. It must end well."""
    from shardwise.cli import main

    out = Path(str(words[-1]) + f".{os.environ['RANK']}.out")
    with out.open("w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit) as ended:
        main([*map(str, words), "--json"])
    text = out.read_text()
    assert ended.value.code == 0, (words, text)
    return json.loads(text) if text else None


@check
def dcp_for_convert(place: Path, mesh: DeviceMesh) -> None:
    """What torch alone saves of a sharded model; the last check with a process group."""
    model = sw.load_pretrained(place / "hub", mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=place / "dcp")
    dist.barrier()


@check
def convert(place: Path, mesh: DeviceMesh) -> None:
    """Both ranks share the work, as under torchrun."""
    command("convert", place / "dcp", place / "converted", "--to", "hf", "--config", place / "hub")
    if os.environ["RANK"] == "0":
        assert_same(reference(place / "converted"), reference(place / "hub"))


@check
def plan(place: Path, mesh: DeviceMesh) -> None:
    if os.environ["RANK"] == "0":
        assert len(command("plan", "--ranks", "8", place / "hub")["per_rank"]) == 8


@check
def verify_inspect_and_diff(place: Path, mesh: DeviceMesh) -> None:
    if os.environ["RANK"] == "0":
        assert command("verify", place / "steps")["ok"]
        assert [step["step"] for step in command("inspect", place / "steps")["steps"]] == [2, 1]
        assert command("diff", place / "hub", place / "export")["ok"]
