"""What a test needs of other packages: a gate of the library's table, or a release that differs for a reason of its own."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from shardwise.gates import GATES

__all__ = ["is_open", "lacking"]


def is_open(gate: str) -> bool:
    """Whether a gate of :data:`GATES` is open here, for what a test does differently where it is closed."""
    row = GATES[gate]
    return row.is_open(metadata.version(row.package))


def lacking(needs: str, why: str = "") -> str | None:
    """Why a test can't run here; None where it can.

    ``needs`` is a name of :data:`GATES`, or a requirement such as ``"transformers>=5.4"``, whose reason is ``why``: what the other
    package lacks, for tests of something that shardwise doesn't take part in.
    """
    if gate := GATES.get(needs):
        requirement, text = Requirement(f"{gate.package}{gate.needs}"), f"gate {needs}"
    else:
        requirement, text = Requirement(needs), f"upstream: {why}"
        assert why, f"say why the test needs {needs}"
    installed = metadata.version(requirement.name)
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{text}; needs {requirement}, and {installed} is installed"
