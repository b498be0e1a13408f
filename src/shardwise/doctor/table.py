"""The table of all rules, and what they find. Pure: the facts are given."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .rule import Bite, Finding, Rule
from .rules_accelerate import ACCELERATE
from .rules_checkpoints import CHECKPOINTS
from .rules_launch import LAUNCH, SOFTWARE
from .rules_logs import LOGS
from .rules_machine import MACHINE
from .rules_models import MODELS
from .rules_ranks import RANKS
from .rules_storage import STORAGE
from .rules_trainer import TRAINER

__all__ = ["RULES", "findings_of"]


def _unknown(facts: Facts) -> Iterator[Bite]:
    for path in facts.unknown:
        yield Bite(
            path,
            "Nothing was checked here: doctor doesn't recognize it as a configuration, model, checkpoint, log or directory.",
            "A YAML needs the names of accelerate config, a JSON those of TrainingArguments.",
            "Give the directory of the weights, or the file that the launcher reads.",
        )


def _absent(facts: Facts) -> Iterator[Bite]:
    for path in facts.absent:
        yield Bite(
            path,
            "Nothing was checked here: there is no such file or directory.",
            "The path is misspelled, or its storage is not mounted on this host.",
            "Correct it, or use --run for a directory that the run will create.",
        )


def _foreign(facts: Facts) -> Iterator[Bite]:
    for one in facts.foreign:
        yield Bite(
            one.path,
            f"No command of shardwise reads it: it is {one.name}.",
            "Its names or first bytes say so; its contents can't be sharded from there.",
            one.instead,
        )


RULES: tuple[Rule, ...] = (
    *MACHINE,
    *STORAGE,
    *LAUNCH,
    *SOFTWARE,
    *ACCELERATE,
    *TRAINER,
    *MODELS,
    *CHECKPOINTS,
    *LOGS,
    *RANKS,
    Rule(
        "path.foreign",
        "another program's files, which shardwise can't read",
        "docs/howto/sources.md",
        _foreign,
    ),
    Rule("path.absent", "a path you passed that doesn't exist", "docs/howto/doctor.md", _absent),
    Rule("path.unknown", "a file of unknown type", "docs/howto/doctor.md", _unknown),
)


def findings_of(facts: Facts) -> list[Finding]:
    """What the rules find, problems before notes, and in the order of the table. Pure; takes milliseconds."""
    found = [finding for rule in RULES for finding in rule.findings(facts)]
    return sorted(found, key=lambda finding: finding.kind == "note")
