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


LOGS = (
    *map(_rule, KNOWN),
    Rule(
        "log.random-loss",
        "a first loss as of random weights, for a given model",
        "case 9; case 10",
        _random_loss,
    ),
)
