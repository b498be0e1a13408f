"""What ranks run in test_failing_saves.py: Accelerate and the Trainer, on storage that fails on one rank, or is full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.harness.errors import error_of
from tests.harness.logged import warnings_logged
from tests.harness.small_files import small_files
from tests.integrations._accelerate_fns import launched
from tests.integrations._trainer_fns import checkpoints, config_of, history, stop_at
from tests.integrations._trainer_parts import Rows, arguments


@contextlib.contextmanager
def full(disk: str | None, *, when: bool = True) -> Iterator[None]:
    """Leave 100 kB free on the disk."""
    ballast = Path(disk or ".", "ballast")
    is_first = when and disk is not None and dist.get_rank() == 0
    if is_first:
        state = os.statvfs(str(disk))
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - 100_000)
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if is_first:
            ballast.unlink()


# ----------------------------------------------------------------------------------------------- Trainer


def trainer_life(
    path: str, root: str, bad: set[int], *, victim: int = 1, disk: str | None = None, **options: Any
) -> dict[str, Any]:
    """A life of 12 steps with a save each second one. Those of ``bad`` steps fail on the victim, or find the disk full."""
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained

    found: dict[str, Any] = {"failures": {}}

    class Trainer(ShardwiseTrainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            step = self.state.global_step
            fault = small_files(victim, when=step in bad) if disk is None else full(disk, when=step in bad)
            with fault:
                super()._save_checkpoint(*args, **kwargs)
            assert self.save_report is not None
            found["failures"][step] = self.save_report.failure

    resume, stop, more = options.pop("resume", None), options.pop("stop", 99), options.pop("arguments", {})
    with (
        arguments(root, **{"save_steps": 2, "save_total_limit": 4, **more}) as args,
        warnings_logged() as warned,
    ):
        model = load_pretrained(args, path, config=config_of(path, 0.2))
        trainer = Trainer(
            model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[stop_at(stop)], **options
        )
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Exception as error:
            found["raised"] = trainer.state.global_step, type(error).__name__, str(error)
        found["losses"], found["has"] = history(trainer), trainer.has_checkpoint()
        found["best"] = trainer.state.best_model_checkpoint
        found["resumed"] = trainer.resume_report and trainer.resume_report.step
    found["warned"] = [text for text in warned if "save" in text or "fallback" in text]
    found["names"] = checkpoints(root)
    dist.barrier()
    return found


def trainer(path: str, root: str) -> dict[str, Any]:
    """Steps 4, 8 and 10 fail on rank 1: training goes on, counts anew after a save, and ends at the second in a row."""
    found = {"whole": trainer_life(path, f"{root}/whole", set())}
    warn: dict[str, Any] = {"failures": sw.FailurePolicy(max_failures=2)}
    found["warn"] = trainer_life(path, f"{root}/run", {4, 8, 10}, **warn)
    found["again"] = trainer_life(path, f"{root}/run", set(), resume=True, **warn)
    found["raise"] = trainer_life(path, f"{root}/raise", {2})
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "max_steps": 4}
    found["beside"] = trainer_life(path, f"{root}/beside", {4}, victim=0, arguments=evaluated)
    return found


def trainer_with_fallback(path: str, disk: str, elsewhere: str) -> dict[str, Any]:
    """The disk is full at steps 8 and 10, and at the end of the run: the fall-back has the newest then."""
    options: dict[str, Any] = {"disk": disk, "failures": sw.FailurePolicy(fallback=elsewhere)}
    metric = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    found = {"whole": trainer_life(path, f"{elsewhere}-whole", set(), arguments=metric)}
    found["first"] = trainer_life(path, f"{disk}/run", {8, 10}, stop=10, arguments=metric, **options)
    found["again"] = trainer_life(path, f"{disk}/run", set(), resume=True, arguments=metric, **options)
    return found


# -------------------------------------------------------------------------------------------- Accelerate


class _Script:
    """A script with a loop of its own, that begins and resumes alike."""

    def __init__(self, root: str, *, automatic: bool = False, **options: Any) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils import ProjectConfiguration

        from shardwise.integrations.accelerate import ShardwiseAccelerator

        os.environ["FSDP_VERSION"] = "2"
        torch.manual_seed(0)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        if automatic:
            options["project_config"] = ProjectConfiguration(
                project_dir=root, automatic_checkpoint_naming=True, total_limit=2
            )
        self.root, self.automatic, self.step = root, automatic, 0
        self.accelerator = ShardwiseAccelerator(cpu=True, fsdp_plugin=plugin, **options)
        model = nn.Sequential(nn.Linear(16, 400), nn.Linear(400, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self) -> str:
        self.step += 1
        loss = self.model(torch.full((4, 16), float(self.step))).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()).hex()

    def save(self) -> Any:
        folder = None if self.automatic else f"{self.root}/step-{self.step}"
        return self.accelerator.save_state(folder, step=self.step)

    def resume(self) -> Any:
        newest = None if self.automatic else self.accelerator.newest_checkpoint(self.root)
        report = self.accelerator.load_state(newest)
        self.step = report.step
        return report


def accelerate(root: str) -> dict[str, Any]:
    """Saves 2, 4 and 5 of 5 fail on rank 1, the last one for good."""
    found: dict[str, Any] = {"failures": [], "losses": []}
    with launched(), warnings_logged() as warned:
        script = _Script(root, failures=sw.FailurePolicy(max_failures=2))
        assert script.accelerator.newest_checkpoint(root) is None
        for step in range(1, 5):
            found["losses"].append(script.train())
            with small_files(1, when=step in (2, 4)):
                found["failures"].append(script.save().failure)
        found["taken"] = error_of(lambda: script.accelerator.save_state(f"{root}/step-3"))
        found["losses"].append(script.train())
        with small_files(1):
            found["raised"] = error_of(script.save)
        found["warned"] = [text for text in warned if "was not saved" in text]
    with launched():
        script = _Script(root)
        found["resumed"] = script.resume().step
        found["after"] = [script.train(), script.train()]
    with launched():
        script = _Script(f"{root}-raise")
        script.train()
        with small_files(1):
            found["by default"] = error_of(script.save)
    return found


def accelerate_with_fallback(disk: str, elsewhere: str, automatic: bool) -> dict[str, Any]:
    """The disk is full at steps 3 and 4."""
    found: dict[str, Any] = {"paths": [], "losses": []}
    options: dict[str, Any] = {"automatic": automatic, "failures": sw.FailurePolicy(fallback=elsewhere)}
    root = f"{disk}/run"
    with launched():
        script = _Script(root, **options)
        for step in range(1, 7):
            found["losses"].append(script.train())
            if step > 4:
                continue
            with full(disk, when=step > 2):
                report = script.save()
            assert report.failure is None, report.failure
            found["paths"].append(report.path)
    with launched():
        script = _Script(root, **options)
        report = script.resume()
        found["resumed"] = report.step, report.path
        found["after"] = [script.train(), script.train()]
        found["next"] = script.save().path
    return found
