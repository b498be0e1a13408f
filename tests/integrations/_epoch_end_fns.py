"""What the ranks of test_epoch_end.py run: a Trainer that is stopped where an epoch ends with an evaluation."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from shardwise.integrations.accelerate import ShardwiseAccelerator
from shardwise.ranks.stop import PreemptionPolicy
from tests.checkpoint._checkpointer_fns import failure
from tests.harness.versions import lacking
from tests.integrations._accelerate_fns import launched
from tests.integrations._trainer_fns import checkpoints, config_of, history
from tests.integrations._trainer_parts import Rows, arguments

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


def _life(
    path: str, args: Any, resume: Any = None, ask: str = "", **options: Any
) -> tuple[ShardwiseTrainer, list[Any], list[int]]:
    """One life of a run of two epochs of six steps; the steps of its evaluations that came to an end."""
    from transformers import TrainerCallback

    evaluated: list[int] = []

    class Ask(TrainerCallback):
        """Sends the signal in step 6, or in the evaluation after it; long steps, so that the ranks stop at that call."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if ask and state.global_step in (4, 5):
                time.sleep(0.6)
            if ask == "step" and state.global_step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
            if ask == "request" and state.global_step == 5 and dist.get_rank() == 1:
                trainer.request_stop()

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if ask == "evaluation" and state.global_step == 6:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.6)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluated.append(state.global_step)

    model = load_pretrained(args, path, config=config_of(path, 0.2))
    trainer = ShardwiseTrainer(
        model,
        args,
        train_dataset=Rows(),
        eval_dataset=torch.utils.data.Subset(Rows(), range(16)),
        callbacks=[Ask()],
        preemption=PreemptionPolicy(stop_on=("SIGUSR1",)),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, history(trainer), evaluated


def stopped_at_the_end_of_an_epoch(path: str, root: str) -> dict[str, Any]:
    """By moment of the signal: the losses of both lives, the evaluations, what is stored; and those of a run that never stops."""
    found: dict[str, Any] = {}
    evaluation = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    with arguments(f"{root}/whole", **evaluation) as args:
        _, found["whole"], found["whole evaluated"] = _life(path, args)
    for ask, options in {
        "step": {"save_steps": 3},
        "evaluation": {"save_steps": 3},
        "evaluation, no save due": {"save_steps": 5},
    }.items():
        place = f"{root}/{ask}"
        with arguments(place, **evaluation, **options) as args:
            trainer, _, first = _life(path, args, ask=ask.partition(",")[0])
            stopped = trainer.exit_code, trainer.state.global_step, checkpoints(place)
        dist.barrier()
        with arguments(place, **evaluation, **options) as args:
            trainer, losses, second = _life(path, args, resume=True)
            report = trainer.resume_report
            assert report is not None
        found[ask] = {
            "stopped": stopped,
            "losses": losses,
            "evaluated": (first, second),
            "resumed": (report.step, report.exact, report.differences),
        }
    return found


def stopped_beside_the_best(path: str, root: str) -> tuple[int, list[str]]:
    """With ``save_total_limit=1``: the best, which is the first, and the newest are there after a stop."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}
    with arguments(root, **steps, **best) as args:
        trainer, _, _ = _life(path, args, ask="step")
    return trainer.exit_code, checkpoints(root)


def stopped_by_request(path: str, root: str) -> dict[str, Any]:
    """Rank 1 asks, without a signal: a Trainer's run, and a loop with Accelerate."""
    with arguments(f"{root}/trainer") as args:
        trainer, _, _ = _life(path, args, ask="request")
        found: dict[str, Any] = {"trainer": (trainer.exit_code, trainer.state.global_step)}
        found["saved"] = checkpoints(f"{root}/trainer")[-1]
        trainer._preemption = None
        found["without a policy"] = failure(trainer.request_stop)
    with launched():
        accelerator = ShardwiseAccelerator(cpu=True)
        step = 0
        while not accelerator.should_stop(step):
            step += 1
            time.sleep(0.6)
            if step == 2 and dist.get_rank() == 1:
                accelerator.request_stop()
        found["accelerate"] = accelerator.exit_code, step < 20
        accelerator.end_training()
    return found
