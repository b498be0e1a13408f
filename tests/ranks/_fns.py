"""What ranks run in test_preemption.py: a small training with AdamW, dropout and a DataLoader, which signals stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardwise as sw

STEPS, BATCHES, WARM_UP = 24, 6, 4


class Samples(Dataset[torch.Tensor]):
    """Items draw random numbers: an inexact resume shows."""

    def __init__(self, seconds: float, *, draws: bool = True) -> None:
        self._seconds, self._draws = seconds, draws

    def __len__(self) -> int:
        return 4 * BATCHES * dist.get_world_size()

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((16,), float(index)) + (torch.rand(16) if self._draws else 0.5)


class Training:
    """The objects of one life of a run."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        width = options.get("width", 16)
        layers = [nn.Linear(16, width), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 1)]
        self.model = nn.Sequential(*layers)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.pause_s = options.get("pause_s", 0.01)
        data = Samples(self.pause_s / 4)
        workers = options.get("workers", 0)
        context = "fork" if workers else None
        loader = DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data, shuffle=True),
            num_workers=workers,
            multiprocessing_context=context,
        )
        self.loader = sw.ResumableLoader(loader)
        self.state = sw.TrainState(model=self.model, optimizer=self.optimizer, dataloader=self.loader)

    def step(self, batch: torch.Tensor) -> str:
        loss = self.model(batch / 100).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.pause_s)
        return float(loss.detach()).hex()

    @torch.no_grad()
    def evaluate_one(self) -> None:
        self.model.eval()
        self.model(torch.ones(4, 16))
        self.model.train()
        time.sleep(self.pause_s)


def _slow_disk(seconds: float) -> None:
    """Each fsync of this process takes so much longer."""
    fsync = os.fsync

    def slow(file: int) -> None:
        time.sleep(seconds)
        fsync(file)

    if seconds:
        os.fsync = slow


def _long_step(event: Any, step: int, options: dict[str, Any]) -> None:
    """The step after the first save takes longer, if that is asked for."""
    if step == 6 and options.get("long_s"):
        event("long", step=step)
        time.sleep(options["long_s"])


def _log(root: Path, life: int) -> Any:
    """Appends an event to this rank's file."""
    path = root / f"log-{life}-{dist.get_rank()}"

    def event(kind: str, **facts: Any) -> None:
        with path.open("a") as log:
            log.write(json.dumps({"kind": kind, "time": time.monotonic(), **facts}) + "\n")

    return event


def train(root: Path, options: dict[str, Any]) -> None:
    """Resume, warm up, train with an evaluation every 4 steps and a save every 5; stop where it is asked to, and exit so."""
    training = Training(options)
    event = _log(root, options["life"])
    _slow_disk(options.get("fsync_s", 0.0))
    checkpoints = sw.Checkpointer(
        root / "run",
        keep_last=2,
        mode=options.get("mode", "sync"),
        preemption=sw.PreemptionPolicy(deadline_s=options.get("deadline_s", 30.0)),
        io=sw.IOOptions(timeout_s=60.0),
    )

    def end(step: int) -> None:
        event("stopping", step=step)
        event("stopped", step=step, newest=checkpoints.stop(training.state, step))
        sys.stdout.flush()
        os._exit(checkpoints.exit_code)  # without atexit, so that the time is the library's own

    resumed = checkpoints.resume(training.state)
    step = resumed.step if resumed else 0
    event("resumed", step=step, exact=resumed is None or resumed.exact, pid=os.getpid())
    for _ in range(WARM_UP):
        event("warm-up", step=step)
        training.evaluate_one()
        if checkpoints.should_stop(step):
            end(step)
    while step < STEPS:
        for batch in training.loader:
            loss = training.step(batch)
            step += 1
            event("step", step=step, loss=loss)
            _long_step(event, step, options)
            if step % 5 == 0:
                event("saving", step=step)
                checkpoints.save(training.state, step)
                event("saved", step=step)
            if checkpoints.should_stop(step):
                end(step)
            if step % 4 == 0:
                for _ in range(3):
                    event("evaluation", step=step)
                    training.evaluate_one()
                    if checkpoints.should_stop(step):
                        end(step)
            if step >= STEPS:
                break
    checkpoints.stop(training.state, step)
    event("done", step=step)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    dist.barrier()


def train_accelerate(root: Path, options: dict[str, Any]) -> None:
    """The same with Accelerate: ``save_state`` into folders, ``load_state`` of the newest."""
    from accelerate import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from shardwise.integrations.accelerate import ShardwiseAccelerator as Accelerator
    from tests.integrations._accelerate_fns import launched

    event = _log(root, options["life"])
    torch.manual_seed(0)
    with launched():
        os.environ["FSDP_VERSION"] = "2"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        loading = DataLoaderConfiguration(use_stateful_dataloader=True)  # else an epoch begins again
        _slow_disk(options.get("fsync_s", 0.0))
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            dataloader_config=loading,
            preemption=sw.PreemptionPolicy(deadline_s=options.get("deadline_s", 30.0)),
        )
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = Samples(
            0.0, draws=False
        )  # of items that draw numbers the report says that a resume is not exact
        workers = options.get("workers", 0)
        context = "fork" if workers else None
        batches: Any = DataLoader(
            data, batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches)
        folders = sorted((root / "run").glob("step-*"), key=lambda path: path.name)
        step, differences = 0, ()
        if folders:
            report = accelerator.load_state(folders[-1])
            step, differences = report.step, report.differences
        event(
            "resumed",
            step=step,
            exact=not folders or report.exact,
            differences=[*differences, *(report.caveats if folders else ())],
            pid=os.getpid(),
        )

        resumed_step = saved = step

        def end() -> None:
            event("stopping", step=step)
            newest = step
            if (
                step not in (resumed_step, 0) or not folders
            ):  # a folder of the run before can't be saved again
                report = accelerator.save_state(root / f"run/step-{step:08d}", step=step)
                newest = step if report.failure is None else saved
            event("stopped", step=step, newest=newest)
            os._exit(accelerator.exit_code)

        for _ in range(WARM_UP):
            event("warm-up", step=step)
            time.sleep(0.01)
            if accelerator.should_stop(step):
                end()
        while step < STEPS:
            for batch in loader:
                loss = model(batch / 100).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
                step += 1
                event("step", step=step, loss=float(loss.detach()).hex())
                _long_step(event, step, options)
                if step % 5 == 0:
                    event("saving", step=step)
                    accelerator.save_state(root / f"run/step-{step:08d}", step=step)
                    event("saved", step=step)
                    saved = step
                if accelerator.should_stop(step):
                    end()
                for _ in range(3 if step % 4 == 0 else 0):
                    event("evaluation", step=step)
                    model.eval()  # without dropout: what it draws a resume would lack
                    with torch.no_grad():
                        model(torch.ones(4, 16))
                    model.train()
                    time.sleep(0.01)
                    if accelerator.should_stop(step):
                        end()
                if step >= STEPS:
                    break
        event("done", step=step)
        dist.barrier()


def train_trainer(root: Path, options: dict[str, Any]) -> None:
    """The same with the HF Trainer."""
    from transformers import TrainerCallback

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained
    from tests.integrations._trainer_fns import config_of
    from tests.integrations._trainer_parts import Rows, arguments, tokenizer

    event = _log(root, options["life"])

    class Trainer(ShardwiseTrainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            event("saving", step=self.state.global_step)
            super()._save_checkpoint(*args, **kwargs)
            event("saved", step=self.state.global_step)

    class Events(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                event("step", step=state.global_step, loss=float(logs["loss"]).hex())
                _long_step(event, state.global_step, options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            event("warm-up", step=state.global_step)
            time.sleep(0.05)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(0.02)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            event("evaluation", step=state.global_step)
            time.sleep(0.02)

    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    workers = {"dataloader_num_workers": options.get("workers", 0)}
    with arguments(str(root / "run"), save_steps=3, **evaluation, **workers) as args:
        model = load_pretrained(args, options["path"], config=config_of(options["path"], 0.2))
        _slow_disk(options.get("fsync_s", 0.0))
        trainer = Trainer(
            model,
            args,
            train_dataset=Rows(),
            eval_dataset=Rows(),
            processing_class=tokenizer(),
            callbacks=[Events()],
            preemption=sw.PreemptionPolicy(deadline_s=options.get("deadline_s", 30.0)),
        )
        resumes = trainer.has_checkpoint()
        event("resumed", step=-1, exact=True, pid=os.getpid())
        trainer.train(resume_from_checkpoint=resumes or None)
        report = trainer.resume_report
        assert report is None or report.exact, report.differences
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        step = trainer.state.global_step
        if report is not None:
            event("resumed from", step=report.step)
        names = [path.name for path in (root / "run").glob("checkpoint-*")]
        newest = max(int(name.rpartition("-")[2]) for name in names)
        event("stopped" if trainer.exit_code else "done", step=step, newest=newest)
        os._exit(trainer.exit_code)
