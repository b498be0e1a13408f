"""What the ranks of test_progress.py run: each operation with a hook that records, on every rank."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.harness.object_store import use_store
from tests.planning import _fallback_fns

Found = list[sw.reports.Progress]


def trained(*, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model (plain without a process group) that has made a step. Shards are uneven."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(501, 303), nn.Linear(303, 7), nn.LayerNorm(7))
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 501)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def recorded(call: Callable[[], Any]) -> tuple[Any, list[Found]]:
    """The result of ``call``, and what a hook heard, by operation."""
    heard: dict[int, Found] = defaultdict(list)
    with sw.progress(lambda found: heard[found.number].append(found)):
        result = call()
    return result, list(heard.values())


def checked(call: Callable[[], Any], name: str, nbytes: Callable[[Any], int]) -> Any:
    """Run one operation, and compare what the hook heard with the bytes of its report."""
    report, operations = recorded(call)
    (found,) = operations  # a resume is one, with the loads in it
    check(found, name, nbytes(report))
    assert any(found[-1].report is one for one in (report if isinstance(report, tuple) else (report,)))
    assert all(one.report is None for one in found[:-1])
    return report


def check(found: Found, name: str, nbytes: int) -> None:
    """From 0 up to the bytes of the report, and one end."""
    assert {one.operation for one in found} == {name}
    assert [one.state for one in found[:-1]] == ["running"] * (len(found) - 1), found
    assert (found[0].done_bytes, found[0].state, found[-1].state) == (0, "running", "done")
    done = [one.done_bytes for one in found]
    assert done == sorted(done)
    assert (found[-1].done_bytes, found[-1].total_bytes) == (nbytes, nbytes), found[-1]
    assert all(one.done_bytes <= one.total_bytes for one in found)
    if name in ("load", "verify", "diff", "copy", "export"):
        assert {one.total_bytes for one in found} == {nbytes}, "known at the start"
    else:
        assert found[0].total_bytes > 0.9 * nbytes, "about known at the start"
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds)
    assert found[-1].remaining_s == 0


def each_operation(root: str) -> None:
    """Save, restore, resume, load, export, convert, and on rank 0 verify, diff and copy."""
    model, optimizer = trained()
    state = sw.TrainState(model=model, optimizer=optimizer, extra={"table": Table()})
    step, run = Path(root, "step-00000003"), Path(root, "run")
    saved = checked(lambda: sw.save(state, step, step=3), "save", lambda r: r.bytes_written)
    other, other_optimizer = trained(seed=1)
    again = sw.TrainState(model=other, optimizer=other_optimizer, extra={"table": Table()})
    restored = checked(lambda: sw.restore(again, step), "restore", lambda r: r.bytes_read)
    assert restored.bytes_read > sum(p.numel() for p in model.parameters())
    for strategy in ("own", "node", "once"):
        io = sw.IOOptions(strategy=strategy, staging_bytes=2**20)  # type: ignore[arg-type]
        checked(lambda io=io: sw.load(other, step, io=io), "load", lambda r: r.bytes_read)  # type: ignore[misc]
    with sw.Checkpointer(run) as checkpoints:
        checkpoints.save(state, 1)
        checked(lambda: checkpoints.resume(again), "resume", lambda r: r.bytes_read)
    out, exported = str(Path(root, "out")), str(Path(root, "exported"))
    checked(lambda: sw.export_hf(model, out), "export", lambda r: r.bytes_written)
    checked(lambda: sw.export_hf(step, exported), "export", lambda r: r.bytes_written)
    made = str(Path(root, "made"))
    checked(lambda: sw.convert(out, made), "convert", lambda r: r.bytes_written)
    if not dist.is_initialized() or dist.get_rank() == 0:
        verified = checked(lambda: sw.verify(step), "verify", lambda r: r.bytes_read)
        assert verified.bytes_read >= saved.bytes_written
        copied = str(Path(root, "copied"))
        checked(lambda: sw.copy_checkpoint(step, copied), "copy", lambda r: 2 * r.nbytes)
        held = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + 6 * 4
        checked(lambda: sw.diff(step, copied), "diff", lambda r: held)


class Table:
    """An extra whose document holds a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.arange(1000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["values"], torch.arange(1000))


def a_rank_fails(source: str) -> tuple[str, str, str, str]:
    """A load from a file that loses the end of rank 1's last shard after it was planned. What the hook heard, and the error."""
    model, _ = trained()
    heard: Found = []

    def hook(found: sw.reports.Progress) -> None:
        heard.append(found)
        if dist.get_rank() == 1 and len(heard) == 1:
            os.truncate(source, os.path.getsize(source) - 4)

    try:
        with sw.progress(hook):
            sw.load(model, source)
    except sw.errors.RankError as error:
        states = [one.state for one in heard]
        return states[0], states[-1], heard[-1].error.partition(":")[0], str(sorted(error.causes))
    raise AssertionError("the load must fail")


def a_hook_that_fails(source: str) -> tuple[int, bytes]:
    """A hook that fails on rank 1: all ranks load, and it is called once."""
    model, _ = trained(seed=2)
    calls = 0

    def hook(found: sw.reports.Progress) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1:
            raise OSError("no room for a log line")

    with sw.progress(hook):
        sw.load(model, source)
        sw.load(model, source)
    return calls, model[0].weight.full_tensor().detach().numpy().tobytes()  # type: ignore[index,union-attr,operator]


def ties_stored_twice(source: str) -> list[int]:
    """Loads of a tied model whose file holds both copies, which are compared. Returns the bytes read by each strategy."""
    model = nn.Sequential(nn.Embedding(301, 64), nn.Linear(64, 301, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found = []
    for strategy in ("own", "node", "once"):
        io = sw.IOOptions(strategy=strategy)  # type: ignore[arg-type]
        report = checked(
            lambda io=io: sw.load(model, source, io=io),  # type: ignore[misc]
            "load",
            lambda r: r.bytes_read,
        )
        found.append(report.bytes_read)
    return found


def converted_and_dequantized(no_map: str, fp8: str) -> list[str]:
    """Loads of a source whose conversions have no map, and of one in FP8, by each strategy. Returns what the reports name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named: list[str] = []
    for strategy in ("own", "node", "once"):
        io = sw.IOOptions(strategy=strategy, staging_bytes=2**20)  # type: ignore[arg-type]
        with _fallback_fns.registered():
            many = replace(io, staging_bytes=2**25)
            _, report = checked(
                lambda many=many: sw.load_pretrained(no_map, mesh, io=many, return_report=True),  # type: ignore[misc]
                "load",
                lambda r: r[1].bytes_read,
            )
        _, other = checked(
            lambda io=io: sw.load_pretrained(fp8, mesh, io=io, return_report=True),  # type: ignore[misc]
            "load",
            lambda r: r[1].bytes_read,
        )
        named += [f"{len(report.converted)} {len(other.dequantized)} {report.strategy.partition(':')[0]}"]
    return named


def there_and_back(root: str, folder: str, endpoint: str | None = None) -> None:
    """Save, restore, load, resume, export and, on rank 0, verify and copy, with stores on one side."""
    if endpoint is not None:
        use_store(endpoint)
    model, optimizer = trained()
    state = sw.TrainState(model=model, optimizer=optimizer)
    checked(lambda: sw.save(state, f"{root}/step", step=3), "save", lambda r: r.bytes_written)
    planned = local_bytes(model)
    for strategy in ("own", "node"):  # gaps between ranges, which a request also fetches, do not count
        io = sw.IOOptions(strategy=strategy, staging_bytes=2**20)  # type: ignore[arg-type]
        _, (found,) = recorded(lambda io=io: sw.load(model, f"{root}/step", io=io))  # type: ignore[misc]
        check(found, "load", planned if strategy == "own" else found[0].total_bytes)
    _, (found,) = recorded(lambda: sw.restore(state, f"{root}/step"))
    check(found, "restore", found[-1].total_bytes)
    with sw.Checkpointer(f"{root}/run", mode="async") as checkpoints:
        saved, (found,) = recorded(lambda: (checkpoints.save(state, 1), checkpoints.wait())[1])
        check(found, "save", saved.bytes_written)
        assert found[-1].report is saved
    checked(lambda: sw.export_hf(model, f"{root}/out"), "export", lambda r: r.bytes_written)
    checked(lambda: sw.export_hf(f"{root}/step", f"{root}/out2"), "export", lambda r: r.bytes_written)
    if not dist.is_initialized() or dist.get_rank() == 0:
        checked(lambda: sw.verify(f"{root}/step"), "verify", lambda r: r.bytes_read)
        copied = str(Path(folder, "copied"))
        checked(lambda: sw.copy_checkpoint(f"{root}/step", copied), "copy", lambda r: 2 * r.nbytes)


def local_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(t.numel() * t.element_size() for t in tensors)
