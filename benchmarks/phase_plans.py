"""What plans say of the configurations of ``benchmarks/phases.py``."""

from __future__ import annotations

import warnings
from typing import Any

import shardwise as sw
from benchmarks.phase_cases import Case
from benchmarks.phase_layouts import planned_step
from benchmarks.phase_summary import ACTIVATIONS
from shardwise.fit.plan import source_of
from shardwise.models.hub import Pretrained

__all__ = ["planned_phases"]

_MIB = 2**20


def planned_phases(path: str, case: Case) -> dict[str, dict[str, Any]]:
    """For each phase the bytes of anonymous memory of a rank that are planned, their upper end, and their parts."""
    warnings.simplefilter("ignore")
    report = sw.plan(
        path,
        ranks=case.ranks,
        replicas=case.replicas,
        tp=case.tp,
        ep=case.ep,
        dtype=case.dtype,
        policy=case.sharding(),
        training=case.training(),
        adapter=case.adapter(),
    )
    assert report.run is not None
    found = {}
    for phase in report.run.phases:
        amounts = [a for a in phase.amounts if a.where == "host" and a.what != "process"]
        found[phase.name] = {
            "planned": sum(a.nbytes for a in amounts),
            "upper": sum(a.upper_bytes for a in amounts),
            "parts": {a.what: a.nbytes for a in amounts},
        }
    found[ACTIVATIONS] = _planned_activations(path, case)
    return found


def _planned_activations(path: str, case: Case) -> dict[str, Any]:
    """The most bytes of activations at one instant: a plan says them only for the instant at which a step needs most."""
    nothing: dict[str, Any] = dict.fromkeys(("auto_class", "config", "key_mapping"))
    request = Pretrained(
        path=path,
        dtype=case.dtype,
        trust_remote_code=False,
        allow_unused=(),
        allow_missing=(),
        adapter=None,
        quantized="dequantize",
        options={},
        **nothing,
    )
    with source_of(request, may_lack_weights=True) as source:
        model = source.prepared(case.adapter()).model
        step = planned_step(model, case)
    assert step.activation_bytes is not None
    most = int(step.activation_bytes * (1 + step.error)) + 16 * _MIB  # small objects
    return {"planned": step.activation_bytes, "upper": most, "parts": {}}
