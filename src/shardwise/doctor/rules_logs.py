"""One rule for each known line of a log."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .logs import KNOWN, Known
from .rule import Bite, Rule

__all__ = ["LOGS"]


def _rule(known: Known) -> Rule:
    def check(facts: Facts) -> Iterator[Bite]:
        for log in facts.logs:
            if line := log.lines.get(known.name):
                yield Bite(f"{log.path}: {line}", known.bites, known.why, known.do)

    return Rule(id=f"log.{known.name}", about=f"{known.bites[:-1]}", source=known.source, check=check)


LOGS = tuple(map(_rule, KNOWN))
