"""Rules over what the ranks told each other: they name the odd one out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .facts import Facts, Meeting, Seen
from .rule import Bite, Rule

__all__ = ["RANKS"]

_MOST_APART_S = 5.0


def _odd(ranks: tuple[Seen, ...], value: Callable[[Seen], object]) -> tuple[object, list[Seen]]:
    """What most ranks have (of equally many, what the first rank has), and the ranks that have something else."""
    values = [value(one) for one in ranks]
    usual = max(values, key=lambda one: (values.count(one), one == values[0]))
    return usual, [one for one, has in zip(ranks, values, strict=True) if has != usual]


def _named(odd: list[Seen]) -> str:
    names = ", ".join(f"{one.rank} ({one.host})" for one in odd[:8])
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return f"rank{'s' if len(odd) > 1 else ''} {names}{more}"


def _meetings(facts: Facts) -> Iterator[Meeting]:
    if facts.meeting is not None and facts.meeting.ranks:
        yield facts.meeting


def _missing(facts: Facts) -> Iterator[Bite]:
    if facts.meeting is not None and facts.meeting.missing:
        names = ", ".join(map(str, facts.meeting.missing[:16]))
        yield Bite(
            f"rank {names}",
            f"A run would hang at its start: rank {names} of {facts.meeting.world_size} did not come in "
            f"{facts.meeting.waited_s:.0f} s.",
            "Its process did not start, died, hangs on its storage, or can't reach MASTER_ADDR.",
            "Check that rank's log and host, or leave the host out.",
        )


def _no_store(facts: Facts) -> Iterator[Bite]:
    if facts.meeting is not None and facts.meeting.problem is not None:
        yield Bite(
            "MASTER_ADDR, MASTER_PORT",
            f"A run would not start: rank 0 can't listen for the other ranks ({facts.meeting.problem}).",
            "Another program, often an earlier launch, has the port, or the address is not one of this host's.",
            "Stop it, or choose a free MASTER_PORT.",
        )


def _versions(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for name in sorted({n for one in meeting.ranks for n in one.versions}):
            usual, odd = _odd(meeting.ranks, lambda one, name=name: one.versions.get(name))  # type: ignore[misc]
            if odd:
                yield Bite(
                    _named(odd),
                    f"Ranks may compute and save different things: {name} is {odd[0].versions.get(name)} on "
                    f"{_named(odd)} and {usual} on the other ranks.",
                    "The hosts have different environments or images.",
                    "Install the same versions, or start from one image.",
                )


def _limits(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for name in sorted({n for one in meeting.ranks for n in one.limits}):
            values = [one.limits.get(name, 0.0) for one in meeting.ranks]
            usual = sorted(values)[len(values) // 2]
            odd = [one for one in meeting.ranks if one.limits.get(name, 0.0) < 0.9 * usual]
            if odd:
                yield Bite(
                    _named(odd),
                    f"The run fails where the limit is lowest: {name} is {odd[0].limits.get(name, 0.0):g} on {_named(odd)}, and "
                    f"{usual:g} on most.",
                    "Another job shares that host, or its container was started with other limits.",
                    "Give all hosts the same limits, or leave that host out.",
                )


def _clocks(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        middle = sorted(one.clock_s for one in meeting.ranks)[len(meeting.ranks) // 2]
        odd = [one for one in meeting.ranks if abs(one.clock_s - middle) > _MOST_APART_S]
        if odd:
            apart_s = odd[0].clock_s - middle
            yield Bite(
                _named(odd),
                f"Times of logs and files can't be compared: the clock of {_named(odd)} is {abs(apart_s):.0f} s "
                f"{'ahead' if apart_s > 0 else 'behind'}.",
                "Signatures of requests to stores expire after 15 minutes of difference.",
                "Start the time service on that host (chronyd).",
            )


def _files(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        hosts = tuple(one for one in meeting.ranks if one.files is not None)
        found = []
        for name in sorted({n for one in hosts for n in one.files or {}}):
            usual, odd = _odd(hosts, lambda one, name=name: (one.files or {}).get(name))  # type: ignore[misc]
            if odd:
                found.append((name, usual, odd))
        if found:
            name, usual, odd = found[0]
            size = (odd[0].files or {}).get(name)
            what = "is not there" if size is None else f"has {size} bytes"
            most = "it is not there" if usual is None else f"it has {usual}"
            more = f" ({len(found) - 1} more files differ)" if len(found) > 1 else ""
            yield Bite(
                _named(odd),
                f"Ranks would load different files: {name} {what} on {_named(odd)}, and on the other hosts {most}{more}.",
                "The directory isn't shared, a copy was interrupted, or the file system shows it late.",
                "Copy it again on that host (shardwise copy), or give a directory that all hosts share.",
            )


def _not_shared(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for path in sorted({p for one in meeting.ranks for p in one.unseen}):
            blind = [one for one in meeting.ranks if one.unseen.get(path)]
            hidden = blind[0].unseen[path]
            yield Bite(
                path,
                f"A save fails or is split up: {_named(blind)} did not see the file that rank {hidden[0]} wrote there.",
                "The directory is local to each host, or the file system shows other hosts' files late.",
                "Give a directory that all hosts share, or the URL of an object store.",
            )


RANKS = (
    Rule("ranks.missing", "a rank that didn't arrive in time", "case 19", _missing),
    Rule(
        "ranks.no-store", "rank 0 can't listen at MASTER_ADDR and MASTER_PORT", "torch.distributed", _no_store
    ),
    Rule("ranks.versions", "package versions that differ across ranks", "case 4", _versions),
    Rule("ranks.limits", "less memory, fewer cores or lower limits on some ranks", "case 2", _limits),
    Rule(
        "ranks.clocks",
        "a clock that is more than 5 s off from the other ranks'",
        "S3's RequestTimeTooSkewed",
        _clocks,
    ),
    Rule("ranks.files", "files you passed that differ in size across ranks", "case 18", _files),
    Rule(
        "ranks.not-shared",
        "a rank that can't see other ranks' files in an output directory",
        "case 18; verl#7641",
        _not_shared,
    ),
)
