"""One rule for each known line of a log, and one for the first loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .facts import Facts
from .logs import KNOWN, Known
from .rule import Bite, Rule, number

__all__ = ["LOGS"]


def _rule(known: Known) -> Rule:
    def check(facts: Facts) -> Iterator[Bite]:
        for log in facts.logs:
            if line := log.lines.get(known.name):
                yield Bite(f"{log.path}: {line}", known.bites, known.why, known.do)

    return Rule(f"log.{known.name}", known.bites[:-1], known.source, check)


def _random_loss(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        for model in facts.models:
            words = number(model.text_config.get("vocab_size"))
            if log.first_loss is not None and words and log.first_loss > 0.95 * math.log(words):
                yield Bite(
                    f"{log.path}: loss {log.first_loss:g}",
                    f"The model trained from random weights, or from damaged ones: its first loss was {log.first_loss:g}, and "
                    f"guessing among {words} tokens costs {math.log(words):.1f}.",
                    "Weights were not loaded, or buffers that are not stored (RoPE's inv_freq) were emptied with to_empty.",
                    f"Load {model.path} with sw.load_pretrained, and build with sw.meta_init, which keeps such buffers.",
                )


def _jump(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.jump is not None:
            line, before, after = log.jump
            at = "at a resume" if log.jump_is_certain else f"after {line}, from which a run may have resumed"
            yield Bite(
                f"{log.path}: {line}",
                f"The loss jumped {at}: {before:.4g} before, {after:.4g} after.",
                "Part of the training state wasn't restored: the optimizer's moments, the scheduler, the data position, or weights "
                "that were saved in another dtype.",
                "Compare what was stored with what was restored: trainer.resume_report of a ShardwiseTrainer lists every difference, and so "
                "does print(checkpoints.resume(state)) (docs/cases/5-loss-spike.md). shardwise diff A B compares two checkpoints.",
            )


def _rate_jump(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.rate_jump is not None:
            line, before, after = log.rate_jump
            at = "at a resume" if log.jump_is_certain else f"after {line}"
            yield Bite(
                f"{log.path}: {line}",
                f"The learning rate jumped back {at}: {before:.4g} before, {after:.4g} after.",
                "The scheduler wasn't restored: the schedule started again, or the run was resumed with other arguments.",
                "Resume from a checkpoint that has scheduler.pt and the optimizer (the HF Trainer restores neither without both), and "
                "keep learning_rate and max_steps as they were.",
            )


def _not_a_number(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.not_a_number is not None:
            yield Bite(
                f"{log.path}: {log.not_a_number}",
                "The loss is NaN or infinite.",
                "A step overflowed, or weights are damaged. Every checkpoint that was saved since then holds such values.",
                "Resume from a step before it: checkpoints.resume(state, step=N). shardwise verify tells damaged files from a training "
                "that diverged.",
            )


def _rise(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.rise is not None:
            low, last = log.rise
            yield Bite(
                log.path,
                f"The loss has risen: from {low:g} to {last:g} at the end of the log.",
                "The training diverges: a learning rate that is too high, weights in bf16 that a plain optimizer updates, or data that changed.",
                "Resume from a step before the rise, with a lower learning rate or fp32 weights (dtype=torch.float32 and mixed precision).",
            )


LOGS = (
    *map(_rule, KNOWN),
    Rule(
        "log.loss-jump",
        "a loss that jumps after a resume, or after a Trainer checkpoint",
        "case 5",
        _jump,
    ),
    Rule("log.lr-jump", "a learning rate that jumps back after a resume", "case 5", _rate_jump),
    Rule("log.nan-loss", "a loss that is NaN or infinite", "case 5", _not_a_number),
    Rule("log.rising-loss", "a loss that rises throughout the log", "case 5", _rise, kind="note"),
    Rule(
        "log.random-loss",
        "an initial loss as high as the model would have with random weights",
        "case 9; case 10",
        _random_loss,
    ),
)
