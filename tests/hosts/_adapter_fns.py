"""What ranks on hosts run with Accelerate and with the HF Trainer: a training on the hosts' own disks, killed and resumed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.errors import ShardwiseError


def train(adapter: str, source: str, path: str, last: int, dies_after: int = 0) -> dict[str, Any]:
    """Train to step ``last`` from the newest step, with a save at each third one; or die like a host without power, after a step."""
    try:
        return {"accelerate": _accelerate, "trainer": _trainer}[adapter](source, path, last, dies_after)
    except ShardwiseError as error:
        return {"type": type(error).__name__, "text": str(error)}


def _accelerate(source: str, path: str, last: int, dies_after: int) -> dict[str, Any]:
    from tests.integrations._accelerate_fns import launched
    from tests.integrations._failing_saves_fns import _Script

    losses: dict[int, str] = {}
    with launched():
        script = _Script(path, local=True)
        newest = script.accelerator.newest_checkpoint(path)
        report = None if newest is None else script.accelerator.load_state(newest)
        script.step = 0 if report is None else report.step
        while script.step < last:
            loss = script.train()
            losses[script.step] = loss
            if script.step % 3 == 0:
                script.save()
            _die(script.step, dies_after)
        return _found(report, losses, script.model, path)


def _trainer(source: str, path: str, last: int, dies_after: int) -> dict[str, Any]:
    from transformers import TrainerCallback

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained
    from tests.integrations._trainer_fns import config_of, history
    from tests.integrations._trainer_parts import Rows, arguments

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _die(state.global_step, dies_after)

    with arguments(path, max_steps=last, save_total_limit=3) as args:
        model = load_pretrained(args, source, config=config_of(source, 0.2))
        trainer = ShardwiseTrainer(model, args, train_dataset=Rows(), callbacks=[Die()], local=True)
        trainer.train(resume_from_checkpoint=trainer.has_checkpoint() or None)
        losses = {step: float(loss).hex() for step, loss, _ in history(trainer)}
        return _found(trainer.resume_report, losses, trainer.model, path)


def _die(step: int, dies_after: int) -> None:
    if step == dies_after:
        os.kill(os.getpid(), signal.SIGKILL)


def _found(report: Any, losses: dict[int, str], model: Any, path: str) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "from": 0 if report is None else report.step,
        "exact": report is None or report.exact,
        "losses": losses,
        "digest": str(sw.digest(model)),
        "files": sorted(str(p.relative_to(path)) for p in Path(path).glob("*-[0-9]*/*/*")),
    }


def write_model(path: str) -> None:
    """A small model in the hub's format."""
    from tests.harness.models import build_reference

    build_reference("qwen3-tied").save_pretrained(path)
