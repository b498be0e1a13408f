"""Faults of an object store at every request of a save, a resume, retention and a copy; and SIGKILL there."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.faults.forks import Scenario
from tests.faults.objects import KINDS, Fault, Place, fresh_place, injected, proxy_of, use_proxy
from tests.faults.rows import Case, Context, Row, rows_of
from tests.faults.store_operations import OPERATIONS, Before, Begun, Heard, remembered
from tests.faults.tiny import outcome_of
from tests.harness.object_store import Asked, Proxy, S3Server

__all__ = ["store_rows"]

#: Faults tried by one process.
_BATCH = 4


@dataclass(frozen=True, slots=True)
class _Item:
    operation: str
    fault: Fault
    place: Place
    folder: Path

    def label(self, hit: str = "") -> str:
        return f"{self.fault.kind}: {self.operation}, request {self.fault.number}, {hit}"


def store_rows(context: Context) -> Iterator[Row]:
    before: Before = context.forks.run(1, lambda: remembered(context.servers()[0]))[0]
    for name in context.sample(list(OPERATIONS), 3):
        started = time.monotonic()
        items = _items(context, name, before)
        killed = [item for item in items if item.fault.kind.startswith("SIGKILL")]
        others = [item for item in items if not item.fault.kind.startswith("SIGKILL")]
        found = context.batches(others, lambda item: _try(before, item), world_size=1, size=_BATCH)
        cases = [_case_of(item, by_rank) for item, by_rank in zip(others, found, strict=True)]
        cases += _kill_all(context, before, killed)
        yield from rows_of(f"store: {name}", cases, time.monotonic() - started)


def _items(context: Context, name: str, before: Before) -> list[_Item]:
    servers = context.servers()
    counted = _new_item(context, name, Fault("503 once", 0), servers[0])
    log = context.forks.run(1, lambda: _requests(before, counted))[0]
    assert log, name
    faults = [
        Fault(kind.name, number)
        for kind in KINDS.values()
        for number in range(sum(kind.takes(asked) for asked in log))
    ]
    return [
        _new_item(context, name, fault, servers[k % len(servers)])
        for k, fault in enumerate(context.sample(faults, 4))
    ]


def _new_item(context: Context, name: str, fault: Fault, server: S3Server) -> _Item:
    return _Item(name, fault, fresh_place(server), context.fresh())


def _requests(before: Before, item: _Item) -> list[Asked]:
    """The requests of an operation without a fault. On one rank."""
    proxy, begun = _begin(before, item)
    with injected(proxy, None, item.place):
        begun.act()
        log = list(proxy.log)
    _forget(item)
    return log


def _begin(before: Before, item: _Item) -> tuple[Proxy, Begun]:
    if dist.is_initialized():
        dist.destroy_process_group()
    operation = OPERATIONS[item.operation]
    item.folder.mkdir(parents=True, exist_ok=True)
    item.place.clear()  # where ranks of a busy machine were given up, others try again
    if operation.steps is not None:
        item.place.put(before.runs[operation.steps])
    proxy = proxy_of(item.place.server)
    use_proxy(proxy)
    return proxy, operation.begin(before, item.place, item.folder)


def _try(before: Before, item: _Item) -> Case:
    """One fault that the process outlives. On one rank."""
    proxy, begun = _begin(before, item)
    with injected(proxy, item.fault, item.place) as hit:
        attempt = outcome_of(begun.act)
    wrong = [] if hit else ["the request never came"]
    if attempt.outcome.startswith("raw"):
        wrong.append(f"an error that is not ours: {attempt.text}")
    wrong += begun.said() if attempt.is_done else []
    spoiled = _spoiled(before, item)
    went_on = bool(item.fault.number % 2) and not spoiled
    if went_on:
        wrong += begun.go_on()
    heard = Heard(attempt, spoiled, went_on)
    result, problems = OPERATIONS[item.operation].look(before, item.place, item.folder, heard)
    _forget(item)
    wrong += problems
    told = "done" if attempt.is_done else "error"
    label = item.label("".join(hit))
    if wrong:
        return Case(label, "wrong", told, f"{'; '.join(wrong)} (it said: {attempt.outcome} {attempt.text})")
    return Case(label, "new" if result == "new" else "previous", told)


def _spoiled(before: Before, item: _Item) -> frozenset[str]:
    """The directories that a fault changed."""
    if item.fault.kind != "changed underneath":
        return frozenset()
    steps = OPERATIONS[item.operation].steps
    known = before.runs[steps] if steps is not None else {}
    if steps is None:
        return frozenset({"step-00000001"})
    there = item.place.objects()
    changed = {name for name, content in there.items() if name in known and known[name] != content}
    new = {name.partition("/")[0] for name in there if name not in known}
    folders = {name.partition("/")[0] for name in changed if name != "head.json"}
    return frozenset(folders | ({n for n in new if n.startswith("step-")} if not folders else set()))


def _forget(item: _Item) -> None:
    item.place.clear()
    shutil.rmtree(item.folder, ignore_errors=True)


def _case_of(item: _Item, found: list[Case] | str) -> Case:
    if isinstance(found, str):
        return Case(item.label(), "wrong", "", found, hung="ranks hung" in found)
    return found[0]


def _kill_all(context: Context, before: Before, items: Sequence[_Item]) -> list[Case]:
    """SIGKILL of the process that asks, before or after the request is carried out."""

    def victim(item: _Item) -> None:
        proxy, begun = _begin(before, item)
        with injected(proxy, item.fault, item.place):
            begun.act()

    def one(item: _Item) -> Scenario[str]:
        launch = context.forks.start(1, victim, item)
        yield launch.ended
        if launch.statuses[0] == -signal.SIGKILL and not launch.hung:
            launch.forget()
            return ""
        return f"{'ranks hung' if launch.hung else 'never killed'}: {launch.output(0)}"

    def look(item: _Item) -> tuple[str, list[str]]:
        if dist.is_initialized():
            dist.destroy_process_group()
        found = OPERATIONS[item.operation].look(before, item.place, item.folder, Heard(None))
        _forget(item)
        return found

    ended = context.all([lambda item=item: one(item) for item in items])
    found = context.batches(items, look, world_size=1, size=_BATCH)
    cases = []
    for item, problem, by_rank in zip(items, ended, found, strict=True):
        if isinstance(by_rank, str):
            cases.append(Case(item.label(), "wrong", "", by_rank, hung="ranks hung" in by_rank))
            continue
        result, problems = by_rank[0]
        wrong = [*([problem] if problem else []), *problems]
        if wrong:
            cases.append(Case(item.label(), "wrong", "", "; ".join(wrong), hung="ranks hung" in problem))
        else:
            cases.append(Case(item.label(), "new" if result == "new" else "previous"))
    return cases
