"""``examine``: collect the facts, meet the other ranks if there are any, and apply the rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from ..objects import frozen
from ..storage import absolute
from .collect import collect, sizes_of
from .facts import Facts, Meeting
from .meet import assembly_of
from .rule import Finding
from .software import launch_variables
from .table import RULES, findings_of

__all__ = ["Diagnosis", "examine"]


@frozen(kw_only=True)
class Diagnosis:
    """What was seen, and what the rules say of it."""

    facts: Facts
    findings: tuple[Finding, ...]
    speaks: bool
    """Whether this rank reports: rank 0, one without a launcher, or one that does not hear of rank 0."""

    @property
    def bites(self) -> bool:
        """Whether a finding is more than a note."""
        return any(finding.kind == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "ok": not self.bites,
            "rules": len(RULES),
            "findings": [finding.to_json() for finding in self.findings],
            "facts": _plain(asdict(self.facts)),
        }


def examine(paths: Sequence[str] = (), *, outputs: Sequence[str] = (), ranks: int | None = None) -> Diagnosis:
    """Look at this machine and these paths, and say what will bite. Takes at most about 30 s.

    Under a launcher every rank calls it with the same paths; the ranks compare what they see. ``outputs``: where the
    run will write, also directories that it will make. ``ranks``: how many are to run
    on this host. Installs and changes nothing; a probe of a directory writes at most 64 MiB, and deletes them. Raises
    :class:`SourceError` for a path that can't be read.
    """
    assembly = assembly_of(launch_variables())
    facts = collect(paths, outputs=outputs, ranks=ranks)
    findings = findings_of(facts)
    if assembly is None:
        return Diagnosis(facts=facts, findings=tuple(findings), speaks=True)
    answering = [path for path in (*paths, *outputs) if absolute(path) not in facts.silent]
    meeting = assembly.exchange(facts, findings, sizes_of(answering))
    if meeting is None:
        return Diagnosis(facts=facts, findings=tuple(findings), speaks=False)
    facts = replace(facts, meeting=meeting)
    findings = findings_of(facts)
    return Diagnosis(facts=facts, findings=(*findings, *_of_other_hosts(meeting, findings)), speaks=True)


def _of_other_hosts(meeting: Meeting, own: Iterable[Finding]) -> list[Finding]:
    """What the first ranks of other hosts found and this one did not."""
    known = {(f.rule, f.bites) for f in own}
    found = []
    for seen in meeting.ranks:
        for raw in seen.findings:
            one = Finding(**cast(Any, raw))
            if (one.rule, one.bites) not in known:
                known.add((one.rule, one.bites))
                found.append(replace(one, where=f"rank {seen.rank} ({seen.host}): {one.where}"))
    return found


def _plain(value: Any) -> Any:
    """What a YAML may hold beside JSON's values (dates, sets), as text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
