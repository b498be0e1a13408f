"""The events of a step of the whole model, from those of a run in which one of many blocks that are alike ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..objects import frozen
from .groups import Event, StepGroup

__all__ = ["whole_step"]


@frozen
class _Block:
    """What a block that ran did: its events, with memory relative to its beginning."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    kept_bytes: int
    """What its forward leaves for its backward."""


def whole_step(
    events: Sequence[Event], groups: Sequence[StepGroup], first: Mapping[int, int]
) -> Iterator[Event]:
    """``events`` with those of the blocks that were passed over. ``first``: see :func:`.measure.alike`."""
    inside = {g.index: _inside(g, groups) for g in groups if g.index in first}
    ran = {i: _block(events, i, inside[i]) for i, rep in first.items() if i == rep}
    by_path = {(g.path, g.kind): g.index for g in groups}

    def as_in(event: Event, rep: int, block: int, base: int) -> Event:
        group = event.group
        if group >= 0:
            path = groups[block].path + groups[group].path[len(groups[rep].path) :]
            group = by_path.get((path, groups[group].kind), block)
        return replace(event, group=group, live=event.live + base, peak=event.peak + base)

    kept, in_forward, passed = 0, True, set()
    for event in events:
        event = replace(event, live=event.live + kept, peak=event.peak + kept)
        block = event.group
        yield event
        in_forward = in_forward and event.kind != "loss"
        rep = first.get(block, block)
        if rep == block or rep not in ran or block < 0:
            continue
        if event.kind == "enter" and in_forward:
            yield from (as_in(e, rep, block, event.live) for e in ran[rep].forward)
            kept += ran[rep].kept_bytes
            passed.add(block)
        elif event.kind == "back" and block in passed:
            yield from (as_in(e, rep, block, event.live) for e in ran[rep].backward)
            kept -= ran[rep].kept_bytes


def _inside(block: StepGroup, groups: Sequence[StepGroup]) -> frozenset[int]:
    """The block, and the groups in it."""
    return frozenset(g.index for g in groups if g.path == block.path or g.path.startswith(f"{block.path}."))


def _block(events: Sequence[Event], block: int, inside: frozenset[int]) -> _Block:
    kinds = [(e.kind, e.group) for e in events]
    if ("enter", block) not in kinds or ("exit", block) not in kinds:
        return _Block((), (), 0)
    start, stop = kinds.index(("enter", block)), kinds.index(("exit", block))
    forward = _relative(events[start + 1 : stop], events[start].live)
    # The peak up to the exit belongs to the forward of the block: it comes as an event of no group.
    last = replace(events[stop], kind="inside", group=-1)
    kept = events[stop].live - events[start].live
    backward: tuple[Event, ...] = ()
    if ("back", block) in kinds:
        begin = kinds.index(("back", block))
        # What comes after the gradient of the block's input is none of the block's: the embedding's gradient, for one.
        end = next(
            i
            for i in range(begin + 1, len(events))
            if kinds[i] in (("end", -1), ("done", block))
            or (kinds[i][0] == "back" and kinds[i][1] not in inside)
        )
        until = replace(events[end], kind="inside", group=-1)
        # The block's output is the next one's input: its backward begins with that one's end, which is not its own.
        own = [
            e if e.group in inside else replace(e, kind="inside", group=-1) for e in events[begin + 1 : end]
        ]
        backward = _relative([*own, until], events[begin].live)
    return _Block((*forward, *_relative([last], events[start].live)), backward, kept)


def _relative(events: Sequence[Event], base: int) -> tuple[Event, ...]:
    return tuple(replace(e, live=e.live - base, peak=e.peak - base) for e in events)
