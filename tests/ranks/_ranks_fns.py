"""What the rank processes of test_ranks.py run. Started with SCENARIO RANK WORLD PORT DIR.

PORT is that of a TCPStore in the test's process, or "first" when rank 0 is to host one.
Each rank writes what it saw to DIR/<rank>.json: per step a value, or the error's type, text and cause.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend "fake"

from shardwise.errors import LockedError, PlanError, RankError
from shardwise.ranks.ranks import Ranks

LARGE = 9 * 1024**2 + 17  # three parts, and more than a TCPStore takes in one value


class Notes:
    """Runs steps and keeps what came of them."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.seen: dict[str, dict[str, Any]] = {}

    def step(self, name: str, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            note = {"value": work()}
        except BaseException as error:
            cause = error.__cause__
            note = {
                "error": type(error).__name__,
                "text": str(error),
                "cause": cause and type(cause).__name__,
            }
            if isinstance(error, RankError):
                note |= {"causes": sorted(error.causes), "missing": list(error.missing)}
        self.seen[name] = note | {"took_s": time.monotonic() - began}
        (self.folder / f"{name}.{self.rank}").touch()

    def write(self) -> None:
        temporary = self.folder / f"{self.rank}.json.part"
        temporary.write_text(json.dumps(self.seen))
        temporary.rename(self.folder / f"{self.rank}.json")


def all_equal(ranks: Ranks, label: str, value: Any, describe: Callable[[], str] | None) -> None:
    with ranks.agree(label) as claim:
        claim.alike(value, describe)


def agree(ranks: Ranks, label: str, work: Callable[[], object]) -> str:
    with ranks.agree(label):
        work()
    return "fine"


def on(ranks: Ranks, failing: int, error: BaseException) -> Callable[[], None]:
    """Work that raises on one rank only."""

    def work() -> None:
        if ranks.rank == failing:
            raise error

    return work


def fail(error: BaseException) -> NoReturn:
    raise error


def tick_for(ranks: Ranks, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ranks.tick()
        time.sleep(0.01)


def store_keys() -> int:
    return sum("shardwise" in key for key in dist.distributed_c10d._get_default_store().list_keys())


def calm(notes: Notes, store: Any) -> None:
    """Everything that needs no signal."""
    ranks = Ranks.current(timeout_s=20.0)
    last, rank = ranks.world_size - 1, ranks.rank
    step = notes.step
    step("ok", lambda: agree(ranks, "ok", lambda: None))
    step("one", lambda: agree(ranks, "write", on(ranks, last, OSError("disk is full"))))
    step("first", lambda: agree(ranks, "write", on(ranks, 0, OSError("disk is full"))))
    step("alike", lambda: agree(ranks, "plan", lambda: fail(PlanError("no cover", ("a", "b")))))
    step("unlike", lambda: agree(ranks, "plan", lambda: fail(PlanError(f"rank {rank}"))))
    step("mute", lambda: agree(ranks, "write", on(ranks, last, KeyError())))
    step("long", lambda: agree(ranks, "write", on(ranks, last, OSError("x" * 9_000))))
    step("ctrl-c", lambda: agree(ranks, "write", on(ranks, last, KeyboardInterrupt())))
    step("exit-first", lambda: agree(ranks, "write", on(ranks, 0, SystemExit(3))))

    def nested() -> None:
        if rank == 0:
            raise ValueError("before the inner one")
        agree(ranks, "inner", lambda: None)

    step("nested-skipped", lambda: agree(ranks, "outer", nested))
    inner = on(ranks, last, OSError("inside"))
    step("nested", lambda: agree(ranks, "outer", lambda: agree(ranks, "inner", inner)))

    # Each raises its own error, however late one of them is.
    def late_alike() -> None:
        if rank == last:
            tick_for(ranks, 3.0)
        raise PlanError("no cover", ("a", "b"))

    step("alike-late", lambda: agree(ranks, "plan", late_alike))

    # A verdict is due at once when rank 0 is well; one who fails later raises it too, from its own error.
    def late() -> None:
        if rank == last:
            tick_for(ranks, 3.0)
            raise OSError("too late")
        on(ranks, 1 if last > 1 else 0, ValueError("early"))()

    step("late", lambda: agree(ranks, "write", late))
    step("after", lambda: agree(ranks, "after", lambda: None))

    mine = bytes([rank]) * (rank * 10)
    large = bytes([rank + 1]) * LARGE
    step("gather", lambda: [p.hex() for p in ranks.gather("gather", mine) or []])
    whole = [bytes([r + 1]) * LARGE for r in range(ranks.world_size)]
    step("gather-large", lambda: ranks.gather("gather", large) == (whole if rank == 0 else None))
    step(
        "on-first",
        lambda: ranks.on_first("first", lambda: b"\x00\n\xff" if rank == 0 else fail(OSError())).hex(),
    )
    step("first-large", lambda: ranks.on_first("first", lambda: large) == bytes([1]) * LARGE)
    step("first-empty", lambda: ranks.on_first("first", lambda: b"").hex())
    step("first-refuses", lambda: ranks.on_first("first", lambda: fail(LockedError("held"))))
    step("combine", lambda: ranks.combine("combine", lambda: mine[:1], lambda found: b"-".join(found)).hex())
    step(
        "combine-values",
        lambda: ranks.combine("combine", lambda: [rank, None], lambda found: {"all": found, "text": "ü"}),
    )
    files = [{"a": bytes([r]) * (r * 10), "b": b""} for r in range(ranks.world_size)]
    step("gather-files", lambda: ranks.gather("gather", files[rank]) == (files if rank == 0 else None))
    step("first-tuple", lambda: ranks.on_first("first", lambda: (1, 2)))
    failing = on(ranks, last, OSError("disk is full"))
    step("combine-fails", lambda: ranks.combine("combine", lambda: failing() or b"", lambda _: b""))
    step("combine-undecided", lambda: ranks.combine("combine", lambda: b"", lambda _: fail(ValueError("no"))))
    text = "adam" if rank != last else "sgd"
    step("equal", lambda: all_equal(ranks, "optimizer", "adam", lambda: "adam"))
    step("equal-large", lambda: all_equal(ranks, "optimizer", bytes(LARGE), None))
    step("different", lambda: all_equal(ranks, "optimizer", text, lambda: text))
    step("different-hash", lambda: all_equal(ranks, "optimizer", text, None))
    step("different-mute", lambda: all_equal(ranks, "optimizer", text, lambda: str(1 / 0)))

    step("labels", lambda: agree(ranks, "x" if rank == last else "y", lambda: None))
    step("kinds", lambda: ranks.gather("z", b"") if rank == last else agree(ranks, "z", lambda: None))
    step("two", lambda: agree(Ranks.current(), "same group, other object", lambda: None))

    before = store_keys()
    for _ in range(20):
        agree(ranks, "again", lambda: None)
        ranks.on_first("again", lambda: large)
        ranks.gather("again", large)
    agree(ranks, "last", lambda: None)
    step("growth", lambda: store_keys() - before if rank == 0 else 0)
    step("gate", lambda: agree(ranks, "gate", lambda: None))

    # The very same store for a group made anew, as under torchrun: old verdicts must not be read again.
    # Its backend does not matter; gloo itself is not safe to make anew on the same keys.
    dist.destroy_process_group()
    step("destroyed", lambda: agree(ranks, "no group", lambda: None))

    def leave_early() -> None:  # so that the keys of this round are not deleted
        if rank == 0:
            raise KeyboardInterrupt
        time.sleep(0.5)

    for name, work in (("anew-left", leave_early), ("anew", lambda: on(ranks, 1, OSError("anew"))())):
        dist.init_process_group("fake", store=store, rank=rank, world_size=ranks.world_size)
        anew = Ranks.current(timeout_s=20.0)
        step(name, lambda r=anew, n=name, w=work: agree(r, n, w))
        dist.destroy_process_group()


def slow(notes: Notes, store: Any) -> None:
    """Work that takes longer than the timeout but ticks, on any rank; then one rank that does not tick."""
    ranks = Ranks.current(timeout_s=1.5)
    last = ranks.world_size - 1
    for name, working in (("slow-last", last), ("slow-first", 0)):
        long_s = 4.0 if ranks.rank == working else 0.0
        notes.step(name, lambda s=long_s: agree(ranks, "read", lambda: tick_for(ranks, s)))
    silent_s = 5.0 if ranks.rank == last else 0.0
    notes.step("silent", lambda: agree(ranks, "read", lambda: time.sleep(silent_s)))
    notes.step("after", lambda: agree(Ranks.current(timeout_s=20), "after", lambda: None))


def signaled(notes: Notes, store: Any) -> None:
    """Ranks that stop in the middle of their work (the test continues them), and one that is killed."""
    patient = Ranks.current(timeout_s=30.0)
    ranks = Ranks.current(timeout_s=3.0)
    last = ranks.world_size - 1
    for name, stopping in (("stop-last", last), ("stop-first", 0)):
        work = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if ranks.rank == stopping else (lambda: None)
        notes.step(name, lambda w=work: agree(ranks, "write", w))
        notes.step(f"after-{name}", lambda: agree(patient, "after", lambda: None))
    notes.write()
    work = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if ranks.rank == last else (lambda: None)
    notes.step("kill-last", lambda: agree(ranks, "write", work))
    # The others still can tell each other what they found; the dead one is missed again.
    notes.step("after-kill-last", lambda: agree(ranks, "after", lambda: None))


def first_killed(notes: Notes, store: Any) -> None:
    ranks = Ranks.current(timeout_s=3.0)
    notes.step("before", lambda: agree(ranks, "before", lambda: None))
    work = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if ranks.rank == 0 else (lambda: None)
    notes.step("kill", lambda: agree(ranks, "write", work))
    ranks.tick()  # never fails, even without a store


def last_word(notes: Notes, store: Any) -> None:
    """Rank 0 hosts the store and ends as soon as it may: the others must have heard the verdict."""
    ranks = Ranks.current(timeout_s=20.0)

    def work() -> None:
        if ranks.rank == 0:
            time.sleep(0.5)  # the others poll at their longest pause by now
            raise OSError("disk is full")

    notes.step("ok", lambda: agree(ranks, "ok", lambda: time.sleep(0.5 * (ranks.rank == 0))))
    notes.step("last", lambda: agree(ranks, "write", work))
    if ranks.rank == 0:
        notes.write()
        os._exit(0)


def connect(port: str) -> Any:
    return dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)


def hosted_by_first(rank: int, address: Path) -> Any:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = address.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(address)
        return store
    while not address.exists():  # the test ends us if it never does
        time.sleep(0.02)
    return connect(address.read_text())


def main(scenario: str, rank: str, world_size: str, port: str, folder: str) -> None:
    faulthandler.dump_traceback_later(75, exit=True)
    own, place = int(rank), Path(folder)
    store = hosted_by_first(own, place / "port") if port == "first" else connect(port)
    dist.init_process_group("gloo", store=store, rank=own, world_size=int(world_size))
    notes = Notes(own, place)
    {f.__name__: f for f in (calm, slow, signaled, first_killed, last_word)}[scenario](notes, store)
    notes.write()
