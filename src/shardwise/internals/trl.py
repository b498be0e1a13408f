"""What shardwise reads and writes of TRL's trainers that TRL keeps private. trl 0.29-1.16.

Importing this does not import TRL. Without it, a checkpoint between the steps of one round of generation would resume
with other completions than the round had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "completions",
    "copied_by",
    "counters",
    "counts_as_grpo",
    "keeps_completions",
    "put_completions",
    "put_counters",
    "steps",
]

_BUFFER = "_buffered_inputs"
_COUNTERS = ("_step", "_total_train_tokens")


@contextmanager
def copied_by(model: Any, copy: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``copy.deepcopy`` of this model use ``copy``, for the block.

    trl before 1.2: KTO's trainer copies the policy to have a reference, where later releases load it. Without this function, that
    fails, because FSDP2 models can't be copied.
    """
    model.__deepcopy__ = lambda memo: copy(model)
    try:
        yield
    finally:
        del model.__deepcopy__


def keeps_completions(trainer: Any) -> bool:
    """Whether a trainer keeps generated completions for later steps.

    Without it, the report of a resume would be silent about completions that no checkpoint holds.
    """
    return hasattr(trainer, _BUFFER)


def counts_as_grpo(trainer: Any) -> bool:
    """Whether it keeps completions, and counts rounds, as GRPO's and RLOO's trainers do. Others count in other ways.

    Without it, a save would ask other trainers for attributes that they don't have.
    """
    has_all = all(hasattr(trainer, name) for name in (_BUFFER, "num_iterations", *_COUNTERS))
    return has_all and hasattr(trainer.args, "steps_per_generation")


def steps(trainer: Any) -> int:
    """Steps of accumulation so far: every so many of them a trainer generates.

    Without it, a checkpoint would hold completions that are used up, too.
    """
    count: int = trainer._step
    return count


def counters(trainer: Any) -> dict[str, Any]:
    """Where in a round of generation a trainer is, and how many tokens it counted; by the names of its attributes.

    Without it, a resumed trainer would begin a round of generation anew, and count tokens from zero.
    """
    return {name: getattr(trainer, name) for name in _COUNTERS}


def put_counters(trainer: Any, stored: dict[str, Any]) -> None:
    """Give :func:`counters` back.

    Without it, a resumed trainer would begin a round of generation anew, and count tokens from zero.
    """
    for name, value in stored.items():
        setattr(trainer, name, value)


def completions(trainer: Any) -> Any:
    """What was generated and scored, and is not used up; None before the first round.

    Without it, a resumed trainer would generate again, and go on with other completions.
    """
    return getattr(trainer, _BUFFER)


def put_completions(trainer: Any, inputs: Any) -> None:
    """Give :func:`completions` back, on the trainer's device.

    Without it, a resumed trainer would generate again, and go on with other completions.
    """
    setattr(trainer, _BUFFER, inputs)
