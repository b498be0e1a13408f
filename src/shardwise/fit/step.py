"""The memory of one training step, measured on tensors without storage."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ..internals.diffusers import is_diffusers_model
from ..internals.torch import (
    TorchDispatchMode,
    fake_device_or_view,
    fake_tensors,
    fused_attention,
    storage_key,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from ..internals.transformers import one_sequence_a_sample
from ..names import canonical_name
from ..objects import frozen
from .groups import COMPILED_BYTES, Event, Product, Products, StepGroup, product_of
from .records import TrainingSpec

# ----------------------------------------------------------------------------------------------------
# The memory of one training step: events of a forward and backward, with what FSDP2 holds at each of them.
#
# FSDP2 (torch 2.12-2.14) gathers a group into a buffer and copies the parameters out of it. In the forward it keeps the buffer
# until the next group is gathered; in the backward it frees it, and gathers the next group ahead. Gradients of a group are
# copied into the input of a reduce-scatter, which is kept until the next group has its gradients. ``foreach_reduce`` keeps the last
# gradient of the group until it returns: its loop's variable still names it. With replicas, each group keeps what it reduced until
# the backward is over (``FSDPParamGroup._all_reduce_state``), which counts where it is not the gradient itself. What gloo does on
# the CPU comes on top: it makes a copy of the buffers of a collective.


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
                # Groups that wait for a gradient which does not come are over when a group outside of them begins.
                for index in list(waiting):
                    path = groups[index].path
                    if path and not f"{groups[event.group].path}.".startswith(f"{path}."):
                        state.finish(index, event.live)
                        del waiting[index]
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


# ----------------------------------------------------------------------------------------------------
# One forward and backward on tensors without memory, which shows how much memory activations take, and when.
#
# Only one of the blocks that are alike runs; :mod:`.groups` puts its events where the other ones would run. The model is the
# unsharded one on meta. Storages are followed from their first operation until they are freed, as torch's ``MemTracker`` does.


@frozen
class Measured:
    """What one forward and backward did."""

    events: tuple[Event, ...]
    reached: frozenset[str]
    """Names of the parameters that got a gradient."""
    products: tuple[Product, ...]
    """The different matrix products in the order in which they run first, those of experts apart."""
    widened: bool
    """Whether what ran in two bytes an element stands for fp32."""
    first: Mapping[int, int]
    """For each block, the one that ran for it."""


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages, and the most there were since the last event."""

    def __init__(self, known: Iterator[torch.Tensor], *, widen: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.events: list[Event] = []
        self.is_backward = False
        self.products: dict[Product, None] = {}
        self._narrow = 0
        self._widen = widen
        self._sizes = {storage_key(tensor): 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = fake_device_or_view(func, args, kwargs or {})
        if result is None:
            result = func(*args, **(kwargs or {}))
        if (product := product_of(func, args)) is not None and product not in self.products:
            self.products[product] = None
            self._narrow += product.itemsize == 2 and not self._widen
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._sizes:
            return
        self._sizes[key] = self.size_of(tensor)
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def size_of(self, tensor: torch.Tensor) -> int:
        """Bytes of a storage, as if what is in bfloat16 were in float32."""
        return tensor.untyped_storage().nbytes() * (
            2 if self._widen and tensor.dtype == torch.bfloat16 else 1
        )

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def note(self, kind: str, group: int, nbytes: int = 0) -> None:
        self.events.append(Event(kind, group, nbytes, self.live, self.peak, self._narrow))
        self.peak = self.live


def alike(groups: Sequence[StepGroup]) -> dict[int, int]:
    """For each block, the first block of the same class, shapes and settings; itself, if it is the first."""
    first: dict[Any, int] = {}
    blocks = [g for g in groups if g.kind == "block"]
    outer = [g for g in blocks if not any(g.path.startswith(f"{o.path}.") for o in blocks)]
    return {g.index: first.setdefault(_signature(g.module), g.index) for g in outer}


def _signature(module: nn.Module) -> Any:
    settings = tuple(
        (key, value)
        for key, value in sorted(vars(module).items())
        if isinstance(value, str | int | float | bool) and "idx" not in key and not key.startswith("_")
    )
    parts = tuple(
        (
            type(m),
            getattr(m, "sliding_window", None),
            m.training,
            type(m).__module__.startswith("torch.nn.") and m.extra_repr(),
        )
        for m in module.modules()
    )
    shapes = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return settings, parts, shapes


def measure(
    model: nn.Module,
    groups: Sequence[StepGroup],
    training: TrainingSpec,
    compute: torch.dtype | None,
    first: Mapping[int, int],
    *,
    casts: bool = False,
    widen: bool = False,
    whole_gradients: Mapping[str, int] | None = None,
) -> Measured:
    """One forward and backward of ``model`` (unsharded, on meta), with the memory of its activations.

    ``groups``: those that FSDP2 would make. ``first``: for each block, the one that runs for it, as :func:`alike`.
    ``casts``: what goes into a group is cast to ``compute``. ``widen``: count what is in bfloat16 as float32. ``whole_gradients``: how many times as large the
    gradients of some parameters are as these, by name. Raises whatever the model's own code raises where it looks at values. Leaves
    the model as it was; takes the memory of its buffers.
    """
    passed_over = {i: rep for i, rep in first.items() if i != rep}
    times = {id(model.get_parameter(name)): whole for name, whole in (whole_gradients or {}).items()}
    skipped = {id(m) for i in passed_over for m in groups[i].module.modules()}
    with ExitStack() as stack:
        stack.enter_context(_as_training(model, training.checkpointing))
        stack.enter_context(fake_tensors())
        stack.enter_context(one_sequence_a_sample())
        if training.device != "cpu":
            stack.enter_context(fused_attention())
        parameters = stack.enter_context(_fake_parameters(model, skipped, compute))
        outputs: dict[int, Any] = {}
        reached: set[int] = set()
        for index, rep in passed_over.items():
            stack.enter_context(_passing_on(groups[index].module, rep, outputs))
        tracker = LiveBytes(iter(parameters.values()), widen=widen)
        if casts:
            stack.enter_context(_cast_inputs(groups, compute))
        _hook(stack, groups, tracker, outputs, set(passed_over.values()), parameters, reached, times)
        loss_of = training.loss or _loss_of_text(training.sequence_length, training.batch_size)
        with tracker:
            loss = loss_of(model, training.batch_size)
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise TypeError(
                    f"it returned {_described(loss)}; expected a loss: one number that has a gradient"
                )
            tracker.note("loss", -1)
            tracker.is_backward = True
            loss.backward()
            del loss
            tracker.note("end", -1)
    reached_names = _named(model, reached, groups, passed_over)
    return Measured(tuple(tracker.events), reached_names, tuple(tracker.products), widen, first)


def _named(
    model: nn.Module, reached: set[int], groups: Sequence[StepGroup], passed_over: dict[int, int]
) -> frozenset[str]:
    """Names of the parameters that were reached, with those of the blocks that were passed over."""
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in reached}
    begins = {rep: f"{groups[rep].path}." for rep in passed_over.values()}
    inside = {rep: [n[len(b) :] for n in names if n.startswith(b)] for rep, b in begins.items()}
    for index, rep in passed_over.items():
        names.update(f"{groups[index].path}.{name}" for name in inside[rep])
    return frozenset(map(canonical_name, names))


@contextmanager
def _as_training(model: Any, checkpointing: bool) -> Iterator[None]:
    """The model in training mode, with or without activation checkpointing, and as it was afterwards."""
    was_training = {m: m.training for m in model.modules()}
    is_frozen = not all(p.requires_grad for p in model.parameters())
    asked_inputs = checkpointing and is_frozen and hasattr(model, "enable_input_require_grads")
    model.train()
    if checkpointing:
        if asked_inputs:
            model.enable_input_require_grads()  # as trainers do where the embedding is frozen
        _switch_checkpointing(model, True)
    try:
        yield
    finally:
        if checkpointing:
            _switch_checkpointing(model, False)
            if asked_inputs:
                model.disable_input_require_grads()
        for module, mode in was_training.items():
            module.training = mode


def _switch_checkpointing(model: Any, on: bool) -> None:
    """By the model's own methods: transformers', whose names changed in 5.23, or diffusers'."""
    if is_diffusers_model(model):
        (model.enable_gradient_checkpointing if on else model.disable_gradient_checkpointing)()
        return
    named = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not hasattr(model, f"{named}_checkpointing_enable"):
        raise TypeError(
            f"{type(model).__name__} has no method that turns on checkpointing; leave checkpointing out"
        )
    if on:
        options = {f"{named}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(model, f"{named}_checkpointing_enable")(**options)
    else:
        getattr(model, f"{named}_checkpointing_disable")()


@contextmanager
def _fake_parameters(
    model: nn.Module, skipped: set[int], compute: torch.dtype | None
) -> Iterator[dict[int, nn.Parameter]]:
    """Parameters on the CPU, without memory, in the dtype of the forward, in the modules that run. By id of the own one."""
    own: list[tuple[nn.Module, str, nn.Parameter]] = [
        (module, name, parameter)
        for module in model.modules()
        if id(module) not in skipped
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    fake: dict[int, nn.Parameter] = {}
    for _, _, p in own:
        if id(p) not in fake:
            dtype = compute if compute is not None and p.is_floating_point() else p.dtype
            fake[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cpu"), p.requires_grad)
    try:
        for module, name, p in own:
            module.register_parameter(name, fake[id(p)])
        yield fake
    finally:
        for module, name, p in own:
            module.register_parameter(name, p)


@contextmanager
def _cast_inputs(groups: Sequence[StepGroup], compute: torch.dtype | None) -> Iterator[None]:
    """What goes into each group but experts is cast, as FSDP2's mixed precision does with the groups of ``shard``."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t.to(compute) if t.is_floating_point() else t, (args, kwargs)
        )

    handles = [
        g.module.register_forward_pre_hook(hook, with_kwargs=True) for g in groups if g.kind != "experts"
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class NotAlike(Exception):
    """A block can't stand for those that look alike."""


#: Shape and dtype of a tensor.
_Form = tuple[torch.Size, torch.dtype]


@frozen
class _HandedOn:
    """A tensor that a block returns in the form of one of its inputs."""

    form: _Form
    is_trained: bool


def _by_form(values: Any) -> dict[_Form, list[torch.Tensor]]:
    """The tensors in ``values`` by their form, in their order."""
    found: dict[_Form, list[torch.Tensor]] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    return found


def _form_of(output: Any, inputs: dict[_Form, list[torch.Tensor]]) -> Any:
    """What a block returned, without the tensors that have the form of an input. Raises :class:`NotAlike` if there are none."""
    is_handed_on = False

    def of(leaf: Any) -> Any:
        nonlocal is_handed_on
        form = (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
        if form is None or not inputs.get(form):
            return leaf
        inputs[form].pop()
        is_handed_on = True
        return _HandedOn(form, leaf.requires_grad)

    found = tree_map(of, output)
    if not is_handed_on:
        raise NotAlike
    return found


@contextmanager
def _passing_on(module: nn.Module, rep: int, outputs: dict[int, Any]) -> Iterator[None]:
    """A block that hands its inputs on, in the form in which the block alike returns its outputs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = _by_form((args, kwargs))

        def output(like: Any) -> Any:
            if not isinstance(like, _HandedOn):
                return like
            if not (left := inputs.get(like.form)):
                raise NotAlike
            tensor = next((t for t in left if t.requires_grad == like.is_trained), left[0])
            inputs[like.form] = [t for t in left if t is not tensor]
            return tensor.view_as(tensor)

        if rep not in outputs:
            raise NotAlike
        return tree_map(output, outputs[rep])

    module.forward = forward  # on the object, for this run
    try:
        yield
    finally:
        del module.forward


def _hook(
    stack: ExitStack,
    groups: Sequence[StepGroup],
    tracker: LiveBytes,
    outputs: dict[int, Any],
    copied: set[int],
    parameters: dict[int, nn.Parameter],
    reached: set[int],
    times: Mapping[int, int],
) -> None:
    """Note when each group's forward begins and ends, when its backward begins and is done, and when a gradient is there."""

    def enter(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tracker.note("enter", index)
            # A block that is recomputed gets its input a second time.
            if not tracker.is_backward and (leaves := _trained((args, kwargs))):
                register_multi_grad_hook(leaves, lambda _: tracker.note("done", index), mode="any")

        return hook

    def leave(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tracker.note("exit", index)
            if index in copied and index not in outputs:  # the first time; checkpointing runs it again
                outputs[index] = _form_of(output, _by_form((args, kwargs)))
            if leaves := _trained(output):
                register_multi_grad_hook(leaves, lambda _: tracker.note("back", index), mode="any")

        return hook

    def gradient(index: int, original: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            reached.add(original)
            nbytes, whole = tracker.size_of(parameter.grad), times.get(original, 1)
            tracker.peak = max(tracker.peak, tracker.live + (whole - 1) * nbytes)
            parameter.grad = None
            tracker.note("grad", index, nbytes * whole)

        return hook

    for group in groups:
        for handle in (
            group.module.register_forward_pre_hook(enter(group.index), with_kwargs=True),
            group.module.register_forward_hook(leave(group.index), with_kwargs=True),
        ):
            stack.callback(handle.remove)
        for original in group.parameters:
            fake = parameters.get(id(original))
            if fake is not None and fake.requires_grad:
                fake.register_post_accumulate_grad_hook(gradient(group.index, id(original)))


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor {list(value.shape)}" + " without a gradient" * (not value.requires_grad)


def _trained(values: Any) -> list[torch.Tensor]:
    """The tensors that get a gradient."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def without_adapters(model: Any) -> Any:
    """The model that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _loss_of_text(tokens: int, batch_size: int) -> Callable[[Any, int], torch.Tensor]:
    """A loss as trainers compute it: the model's own where it takes labels of the input's shape, else a mean."""
    ids = torch.zeros(batch_size, tokens, dtype=torch.int64)

    def loss_of(model: Any, _: int) -> torch.Tensor:
        base = without_adapters(model)
        accepts = inspect.signature(base.forward).parameters
        given: dict[str, Any] = {"input_ids": ids}
        if "use_cache" in accepts:
            given["use_cache"] = False
        if "labels" in accepts and base.get_output_embeddings() is not None:
            loss: torch.Tensor = model(**given, labels=ids).loss
            return loss
        found = [t for t in tree_leaves(model(**given)) if isinstance(t, torch.Tensor) and t.requires_grad]
        return found[0].float().mean()

    return loss_of
