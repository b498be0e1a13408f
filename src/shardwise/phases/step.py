"""The memory of one training step: events of a forward and backward, with what FSDP2 holds at each of them.

FSDP2 (torch 2.12-2.14) gathers a group into a buffer and copies the parameters out of it. In the forward it keeps the buffer
until the next group is gathered; in the backward it frees it, and gathers the next group ahead. Gradients of a group are
copied into the input of a reduce-scatter, which is kept until the next group has its gradients. ``foreach_reduce`` keeps the last
gradient of the group until it returns: its loop's variable still names it. With replicas, each group keeps what it reduced until
the backward is over (``FSDPParamGroup._all_reduce_state``), which counts where it is not the gradient itself. What gloo does on
the CPU comes on top: it makes a copy of the buffers of a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..objects import frozen
from .groups import Event, StepGroup
from .products import COMPILED_BYTES, Products

__all__ = ["StepPeak", "peak_of"]


@frozen
class StepPeak:
    """What a step holds beside parameters and optimizer state, at the instant at which that is most."""

    gathered_bytes: int
    """Gathered parameters, and buffers of all-gathers."""
    reduced_bytes: int
    """Whole gradients, and buffers of reduce-scatters."""
    gradient_bytes: int
    """This rank's part of the gradients, so far."""
    activation_bytes: int
    when: str
    """The event, and the group at which it is."""
    compiled: int = 0
    """In a first step, the matrix products that oneDNN has compiled so far."""

    @property
    def total_bytes(self) -> int:
        held = self.gathered_bytes + self.reduced_bytes + self.gradient_bytes + self.activation_bytes
        return held + self.compiled * COMPILED_BYTES


@dataclass(slots=True)
class _Compiled:
    """The products that are compiled in a first step, as it goes on. They stay."""

    groups: Sequence[StepGroup]
    products: Products | None
    now: int = 0
    dense: int = 0
    forwards: set[int] = field(default_factory=set)
    """Groups of experts whose forward ran."""
    backwards: set[int] = field(default_factory=set)

    def see(self, event: Event) -> None:
        if self.products is None:
            return
        before = self.dense, len(self.forwards), len(self.backwards)
        self.dense = max(self.dense, event.products)
        if event.group >= 0 and self.groups[event.group].kind == "experts":
            if event.kind == "exit":
                self.forwards.add(event.group)
            elif event.kind in ("back", "grad"):
                self.backwards.add(event.group)
        if (self.dense, len(self.forwards), len(self.backwards)) != before:
            self.now = self.products.so_far(self.dense, len(self.forwards), len(self.backwards))


@dataclass(slots=True)
class _Fsdp2:
    """What FSDP2 holds now."""

    groups: Sequence[StepGroup]
    shards: int
    copies: bool
    """Collectives copy their buffers (gloo)."""
    has_replicas: bool
    compiled: _Compiled
    best: StepPeak = field(default_factory=lambda: StepPeak(0, 0, 0, 0, ""))
    is_backward: bool = False
    gathered: set[int] = field(default_factory=set)
    buffer: int = 0
    """Bytes of the buffer that is kept in the forward."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Buffers of groups that are gathered ahead."""
    order: list[int] = field(default_factory=list)
    whole: dict[int, int] = field(default_factory=dict)
    """Whole gradients of each group."""
    reducing: int = 0
    """Bytes of the input of the last reduce-scatter."""
    all_reduced: int = 0
    """Bytes that groups keep of what was reduced over replicas."""
    gradients: int = 0
    finished: set[int] = field(default_factory=set)

    def shards_of(self, group: StepGroup) -> int:
        return group.own_shards or self.shards

    def look(self, activations: int, when: str, more_gathered: int = 0, more_reduced: int = 0) -> None:
        held = sum(self.groups[i].gathered_bytes for i in self.gathered)
        now = StepPeak(
            held + self.buffer + sum(self.ahead.values()) + more_gathered,
            sum(self.whole.values()) + self.reducing + self.all_reduced + more_reduced,
            self.gradients,
            activations,
            when,
            self.compiled.now,
        )
        if now.total_bytes > self.best.total_bytes:
            self.best = now

    # -- gathering ---------------------------------------------------------------------------------------

    def gather(self, index: int, activations: int) -> None:
        if index in self.gathered:
            return
        group, name = self.groups[index], self._name(index)
        size = group.gathered_bytes if self.shards_of(group) > 1 else 0
        ahead = self.ahead.pop(index, None)
        if ahead is None:
            self.look(activations, f"gather {name}", size * (1 + self.copies) + group.cast_bytes)
        self.buffer = 0
        self.look(activations, f"copy out {name}", size + group.gathered_bytes)
        self.gathered.add(index)
        if not self.is_backward:
            self.buffer = size

    def gather_ahead(self, index: int, activations: int) -> None:
        at = self.order.index(index) if index in self.order else 0
        if at == 0 or self.shards_of(self.groups[self.order[at - 1]]) == 1:
            return
        before = self.order[at - 1]
        if before not in self.gathered and before not in self.ahead and before not in self.finished:
            size = self.groups[before].gathered_bytes
            more = size * self.copies + self.groups[before].cast_bytes
            self.ahead[before] = size
            self.look(activations, f"gather {self._name(before)} ahead", more)

    # -- reducing ----------------------------------------------------------------------------------------

    def finish(self, index: int, activations: int) -> None:
        """A group's gradients are whole: reduce them, and free the group's parameters."""
        group, name = self.groups[index], self._name(index)
        self.gathered.discard(index)
        self.ahead.pop(index, None)
        self.finished.add(index)
        if not self.whole.get(index):
            return
        self.reducing = 0
        part = group.reduced_bytes // self.shards_of(group)
        self.look(activations, f"reduce {name}", more_reduced=group.reduced_bytes)
        del self.whole[index]
        is_spread = self.shards_of(group) > 1
        copied = group.reduced_bytes if self.copies and is_spread else 0
        kept = group.last_gradient_bytes if is_spread else 0
        self.look(activations, f"reduce {name}", more_reduced=group.reduced_bytes + copied + part + kept)
        self.reducing = group.reduced_bytes
        own = group.gradient_bytes
        self.look(activations, f"reduce {name}", more_reduced=part + own * group.is_reduced_apart + kept)
        self.gradients += own
        if self.has_replicas and group.is_reduced_apart:
            self.all_reduced += part

    def _name(self, index: int) -> str:
        return self.groups[index].path or "root"


def peak_of(
    events: Iterable[Event],
    groups: Sequence[StepGroup],
    *,
    shards: int,
    keeps_gathered: bool = False,
    copies: bool = False,
    has_replicas: bool = False,
    is_wrapped: bool = True,
    compiles: Products | None = None,
) -> StepPeak:
    """The instant of a step at which it needs most, beside parameters and optimizer state. ``events``: of the whole step.

    ``is_wrapped``: whether FSDP2 is there at all. ``compiles``: products that the step compiles, because it is the first.
    """
    compiled = _Compiled(groups, compiles)
    if not is_wrapped:
        return _peak_without_fsdp(events, groups, compiled)
    state, root = _Fsdp2(groups, shards, copies, has_replicas, compiled), len(groups) - 1
    waiting: dict[int, int] = {}
    for event in events:
        compiled.see(event)
        state.look(event.peak, f"{event.kind} {groups[event.group].path if event.group >= 0 else ''}".strip())
        if waiting and event.kind in ("back", "end", "grad"):
            for index in [i for i in waiting if waiting[i] == 0 and i != event.group]:
                state.finish(index, event.live)
                del waiting[index]
        match event.kind:
            case "enter":
                state.gather(event.group, event.live)
            case "exit" if not state.is_backward:
                state.order.append(event.group)
                if event.group != root and not keeps_gathered:
                    state.gathered.discard(event.group)
            case "loss":
                state.is_backward, state.buffer = True, 0
            case "back":
                _finish_frozen(state, event, waiting)
                state.gather(event.group, event.live)
                state.gather_ahead(event.group, event.live)
                waiting[event.group] = sum(p.requires_grad for p in groups[event.group].parameters)
            case "done" if event.group in waiting:
                state.finish(event.group, event.live)
                del waiting[event.group]
            case "grad":
                state.whole[event.group] = state.whole.get(event.group, 0) + event.nbytes
                if event.group in waiting:
                    waiting[event.group] = max(0, waiting[event.group] - 1)
            case "end":
                for index in sorted(state.whole):
                    state.finish(index, event.live)
    return state.best


def _peak_without_fsdp(events: Iterable[Event], groups: Sequence[StepGroup], compiled: _Compiled) -> StepPeak:
    """The same of a model whose parameters are there all the time: each gradient stays as it comes."""
    best, gradients = StepPeak(0, 0, 0, 0, ""), 0
    for event in events:
        compiled.see(event)
        name = groups[event.group].path if event.group >= 0 else ""
        now = StepPeak(0, 0, gradients, event.peak, f"{event.kind} {name}".strip(), compiled.now)
        best = max(best, now, key=lambda peak: peak.total_bytes)
        gradients += event.nbytes
    return best


def _finish_frozen(state: _Fsdp2, event: Event, waiting: dict[int, int]) -> None:
    """Groups that wait for a gradient which does not come are over when a group outside of them begins."""
    here = state.groups[event.group].path
    for index in list(waiting):
        path = state.groups[index].path
        if path and not here.startswith(f"{path}.") and here != path:
            state.finish(index, event.live)
            del waiting[index]
