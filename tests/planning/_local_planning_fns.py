"""What the ranks of test_local_planning.py run: a resume that writes down what it opens, reads and sends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.catalog.checkpoint import catalog_of_checkpoint, catalog_of_slices, optimizer_tensors
from shardwise.format.manifest import read_manifest
from shardwise.loading.load import plan_load
from shardwise.planning.match import Rules
from shardwise.planning.plan import IOOptions
from shardwise.ranks.protocol import Agreement
from shardwise.tensors.live import describe
from tests.checkpoint import _reshard_fns
from tests.harness.payload_reads import before_each_read

#: Where opened files are noted while a test counts them; an audit hook stays until the process ends.
_opened: list[str] | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


@contextmanager
def opened_below(root: str) -> Iterator[list[str]]:
    """The files below a directory that this process opens, by any means, relative to it."""
    global _opened, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    found: list[str] = []
    _opened = []
    try:
        yield found
    finally:
        found += [os.path.relpath(p, root) for p in _opened if p.startswith(root + os.sep)]
        _opened = None


def save(path: str, mesh_kind: str) -> None:
    state = _reshard_fns.build(mesh_kind, "adamw")
    for parameter in state.models["model"].parameters():  # uneven tensor parallelism has no forward
        parameter.grad = torch.ones_like(parameter)
    state.optimizers["optimizer"].step()
    sw.save(state, path)


def plan_only(path: str) -> dict[str, Any]:
    """Plans what this rank would read of model and optimizer."""
    state = _reshard_fns.build("1d", "adamw")
    with opened_below(path) as opened:
        manifest = read_manifest(path)
        catalog = catalog_of_checkpoint(path, manifest=manifest)
        plan = plan_load(describe(state.models["model"]), catalog, Rules(), io=IOOptions()).plan
        slices = optimizer_tensors(manifest)
        states = catalog_of_slices(path, manifest, "optimizer", "optimizer", slices)
        chunks = sum(len(t.chunks) for t in states.tensors.values())
    return {"opened": opened, "from": len({t.path for t in plan.transfers}), "chunks": chunks}


def resume(path: str) -> dict[str, Any]:
    """A whole resume: files opened, reads as (file, offset, bytes), and what was sent as (label, bytes)."""
    state = _reshard_fns.build("1d", "adamw")
    reads: list[tuple[str, int, int]] = []
    sent: list[tuple[str, int]] = []
    agree = Agreement.agree

    def noted_read(file: str, offset_bytes: int, nbytes: int) -> None:
        reads.append((os.path.relpath(file, path), offset_bytes, nbytes))

    def noted_agree(self: Agreement, call: Any, **given: Any) -> bytes:
        sent.append((call.label, len(given.get("payload", b""))))
        return agree(self, call, **given)

    Agreement.agree = noted_agree  # type: ignore[method-assign, assignment]
    try:
        with before_each_read(noted_read), opened_below(path) as opened:
            report = sw.restore(state, path)
    finally:
        Agreement.agree = agree  # type: ignore[method-assign]
    return {
        "opened": opened,
        "reads": reads,
        "sent": sent,
        "tensors": max(report.tensors, report.optimizer_tensors),
        "rank": dist.get_rank(),
    }
