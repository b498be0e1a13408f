"""What a training step keeps and sends: activations, bytes over the network, and tokens between experts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ShardError
from ..internals.fsdp import lazy_chunks
from ..internals.torch import reads_values
from ..internals.trainers import ep_by_plan, own_parts, parallel_plans, put_parameter, tp_by_plan
from ..internals.transformers import is_transformers_model
from ..objects import frozen
from ..sharding.fsdp import ShardPolicy, shard, shard_with_experts
from .groups import Products, StepGroup, groups_of, products_of, text_config, whole_step, workspaces_of
from .records import Flow, TrainingSpec, Variant
from .step import Measured, NotAlike, StepPeak, alike, measure, peak_of, without_adapters

# ----------------------------------------------------------------------------------------------------
# The peak of a training step: measured on tensors without memory, or, where the model's code can't run so, by a formula.

#: Forwards and backwards of one model, by what they depend on, and how each was made.
Measurements = dict[tuple[object, ...], tuple[Measured, str]]

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Step:
    """The groups of a model, and what a step with them takes beside parameters and optimizer state."""

    groups: tuple[StepGroup, ...]
    peak: StepPeak
    first_peak: StepPeak
    """Of the first step, in which matrix products are compiled on the way."""
    error: float
    """Of the activations."""
    formula: str
    products: Products | None
    """The matrix products in two bytes an element; None if there are none."""
    workspace_bytes: int | None
    """What MKL keeps after the products in fp32, on the CPU. None: not known."""
    called: frozenset[int]
    """The groups whose forward runs."""
    reached: frozenset[str] | None
    """Names of the parameters that get a gradient. None: not known."""
    activation_bytes: int | None
    """The most bytes of activations at one instant, whatever FSDP2 holds then. None: not known."""
    assumptions: tuple[str, ...]


def step_of(
    model: nn.Module,
    policy: ShardPolicy,
    shards: int,
    training: TrainingSpec,
    expert_shards: int | None = None,
    *,
    replicas: int = 1,
    is_wrapped: bool = True,
    whole_gradients: Mapping[str, int] | None = None,
    known: Measurements | None = None,
) -> Step:
    """The step of ``model``, unsharded and on meta, as FSDP2 runs it over ``shards`` ranks and ``replicas`` replicas.

    ``expert_shards``: the ranks over which FSDP2 cuts experts; None: ``shards``.

    ``is_wrapped``: whether FSDP2 wraps it. ``whole_gradients``: see :func:`.measure`. ``known``: measurements of this model, with
    other numbers of ranks or another optimizer; a new one is added. Takes the memory of the model's buffers; 0.1 to 1 s, or more if blocks aren't alike.
    """
    groups = groups_of(model, policy, shards, expert_shards)
    mixed = policy.mixed_precision
    compute = mixed.param_dtype if mixed is not None else None
    what = f"{training.batch_size} x {training.sequence_length} tokens"
    if training.loss is not None:
        what = f"TrainingSpec.loss with a batch of {training.batch_size}"
    # neither ranks nor optimizer: every rank computes the same
    asked = (
        *(id(training.loss), training.batch_size, training.sequence_length, training.checkpointing),
        *(training.device, compute),
    )
    known = {} if known is None else known
    try:
        if asked not in known:
            casts = mixed is not None and compute is not None and mixed.cast_forward_inputs
            casts = casts and training.loss is not None
            known[asked] = _measured(model, groups, training, compute, casts, whole_gradients)
        measured, how = known[asked]
    except MemoryError:
        raise
    except Exception as error:  # a model's own code, which looks at values, may raise anything
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
        if training.loss is not None:
            hint = ""
            if reads_values(error):
                hint = ". Neither it nor the model may look at values, as .item() does"
            elif "on device" in reason or "same device" in reason:
                hint = ". Make all inputs on the CPU"
            raise ShardError(
                f"TrainingSpec.loss failed with tensors that have shapes but no data: {type(error).__name__}: {reason}{hint}"
            ) from error
        _log.info("the model can't run with fake tensors: %s: %s", type(error).__name__, reason)
        return _by_formula(model, groups, compute, training, f"{type(error).__name__}: {reason}")
    narrow = [] if measured.widened else [p for p in measured.products if p.itemsize == 2]
    wide = [p for p in measured.products if p.itemsize == 4 or measured.widened]
    first = measured.first
    events = list(whole_step(measured.events, groups, first))
    called = frozenset(e.group for e in events if e.kind == "enter")
    products = products_of(model, groups, compute, training, len(narrow))
    on_cpu = training.device == "cpu"
    peak = partial(
        peak_of,
        events,
        groups,
        shards=shards,
        keeps_gathered=policy.reshard_after_forward is False,
        copies=on_cpu,
        has_replicas=replicas > 1,
        is_wrapped=is_wrapped,
    )
    left = [g for g in groups if g.index not in called and g.kind == "block"]
    assumptions = [f"{what} per rank, one forward and backward pass per optimizer step"]
    if training.loss is None:
        assumptions.append(
            "no padding and one sequence per sample (otherwise, attention also needs a mask and per-head copies of keys and values)"
        )
    if left and training.loss is not None:
        assumptions.append(f"{len(left)} blocks don't run ({left[0].path}, …)")
    elif left:
        assumptions.append(
            f"text only: {len(left)} blocks don't run ({left[0].path}, …), and images would need more memory"
        )
    return Step(
        groups=groups,
        peak=peak(),
        first_peak=peak(compiles=products if on_cpu else None),
        error=0.15,
        formula=f"measured with fake tensors{how}, {what}, {len(set(first.values()))} of {len(first)} blocks run",
        products=products,
        workspace_bytes=workspaces_of(wide),
        called=called,
        reached=measured.reached,
        activation_bytes=max(e.peak for e in events),
        assumptions=tuple(assumptions),
    )


def _measured(
    model: nn.Module,
    groups: Sequence[StepGroup],
    training: TrainingSpec,
    compute: torch.dtype | None,
    casts: bool,
    whole_gradients: Mapping[str, int] | None,
) -> tuple[Measured, str]:
    """A run on tensors without memory, and how it was made: in bf16 where there are no rules for fp32 (grouped products)."""
    first = alike(groups)
    run = partial(measure, model, groups, training, whole_gradients=whole_gradients)

    def tried(compute: torch.dtype | None, casts: bool, widen: bool = False) -> Measured:
        try:
            return run(compute, first, casts=casts, widen=widen)
        except NotAlike:
            return run(compute, {index: index for index in first}, casts=casts, widen=widen)

    try:
        return tried(compute, casts), ""
    except RuntimeError as error:
        if compute is not None or next(model.parameters()).dtype != torch.float32:
            raise
        try:
            measured = tried(torch.bfloat16, training.loss is not None, widen=True)
        except Exception:  # no kernels were missing
            raise error from None
    return measured, " in bfloat16, whose tensors count double"


#: The error bar of activations that are counted by a formula.
FORMULA_ERROR = 1.0
#: Bytes kept for each token, element of the hidden state and block, in 2 bytes each, without attention's matrix: Korthikanti
#: et al. 2022 (arXiv 2205.05198) count 34 for a block with an MLP of four times the width; gated MLPs and norms in fp32 more.
_BYTES_PER_ELEMENT = 64


def _by_formula(
    model: nn.Module,
    groups: tuple[StepGroup, ...],
    compute: torch.dtype | None,
    training: TrainingSpec,
    reason: str,
) -> Step:
    """A step whose activations are counted by block, with a wide error bar."""
    settings = text_config(model)
    hidden = int(getattr(settings, "hidden_size", 0) or getattr(settings, "d_model", 0) or 1024)
    if "input_ids" not in inspect.signature(without_adapters(model).forward).parameters:
        raise ShardError(
            f"plan doesn't know the inputs of {type(model).__name__} ({reason}). Pass its forward pass: "
            "training=TrainingSpec(loss=lambda model, batch_size: …); or plan the load alone, without training"
        )
    vocabulary = int(getattr(settings, "vocab_size", 0) or 0)
    blocks = sum(g.kind == "block" for g in groups)
    tokens = training.batch_size * training.sequence_length
    kept = 2 if training.checkpointing else _BYTES_PER_ELEMENT
    activations = tokens * (hidden * (blocks * kept + _BYTES_PER_ELEMENT) + 3 * 4 * vocabulary)
    largest = max((g.gathered_bytes for g in groups), default=0)
    reduced = max((g.reduced_bytes for g in groups), default=0)
    gradients = sum(g.gradient_bytes for g in groups)
    products = products_of(model, groups, compute, training)
    compiled = 0 if products is None or training.device != "cpu" else products.after_one_step()
    peak = StepPeak(3 * largest, 3 * reduced, gradients, activations, "all at once")
    return Step(
        groups=groups,
        peak=peak,
        first_peak=replace(peak, compiled=compiled),
        error=FORMULA_ERROR,
        formula=f"tokens x (hidden x (blocks x {kept} + {_BYTES_PER_ELEMENT}) + 12 x vocabulary) = {tokens} x ({hidden} x "
        f"({blocks} x {kept} + {_BYTES_PER_ELEMENT}) + 12 x {vocabulary})",
        products=products,
        workspace_bytes=None,
        called=frozenset(range(len(groups))),
        reached=None,
        activation_bytes=None,
        assumptions=(
            f"activations estimated with a formula, because the model can't run with fake tensors ({reason})",
            "attention never builds a tokens x tokens matrix",
        ),
    )


# ----------------------------------------------------------------------------------------------------
# Tensor and expert parallelism in a run on tensors without memory: the memory of collectives, and the bytes that they send.
#
# The model has the parts of one rank. Each module that a plan of transformers (5.21-5.23) hooks gets a forward that takes the memory of
# the plan's collectives, in forward and backward, and sends nothing.

_Forward = Callable[..., Any]


@frozen
class Sent:
    """A collective of a step."""

    path: str
    """The module around which it is."""
    kind: str
    """``all-reduce`` or ``all-gather`` over tp, ``all-to-all`` over ep."""
    elements: int
    """Of the whole tensor that each rank has before it or after it."""
    dtype: torch.dtype


@dataclass(slots=True)
class Exchange:
    """The collectives of tensor and expert parallelism in a forward and backward of ``model``."""

    model: nn.Module
    tp: int
    ep: int
    sent: list[Sent] = field(default_factory=list)

    def counted(self, step: Step, *, is_wrapped: bool) -> Step:
        """``step``, with what it assumes of the collectives; without any of them if the model did not run to its end.

        ``is_wrapped``: whether FSDP2 wraps the model.
        """
        if self.tp == self.ep == 1:
            return step
        more = ["no FSDP2, because tensor parallelism uses all ranks"]
        if is_wrapped:
            more = ["FSDP2 groups come from shardwise.shard, not from transformers' fsdp_plan"]
        if self.ep > 1:
            more.append("each expert gets the same number of tokens")
        if step.error == FORMULA_ERROR:
            self.sent.clear()
            more.append("traffic from tensor and expert parallelism isn't counted")
        return replace(step, assumptions=(*step.assumptions, *more))

    def note(self, path: str, kind: str, tensor: torch.Tensor) -> None:
        self.sent.append(Sent(path, kind, tensor.numel(), tensor.dtype))

    def stand_in(self, path: str, style: str, forward: _Forward) -> _Forward:
        """The forward of the module at ``path`` for a style of a plan. Of an unknown style, it raises."""
        if style == "ep_dispatch_experts":
            return self._dispatched(path, forward)
        before, after = _STYLES.get(style, (_unknown(style), _same))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            module = self.model.get_submodule(path)
            if args:  # attention gets names alone, and has nothing to be done before it
                rest: list[Any] = list(args[1:])
                for k, value in enumerate(rest if style == "moe_tp_experts" else ()):
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        rest[k] = self.summed_later(path, value)  # the routing weights of experts
                args = (before(self, path, args[0], module), *rest)
            return after(self, path, forward(*args, **kwargs), module)

        return stand_in

    # -- collectives that only take memory: what they make of a tensor, and of its gradient ---------------------

    def summed_later(self, path: str, x: torch.Tensor, module: Any = None) -> Any:
        """The tensor itself; its gradient is summed over tp."""
        return _run(x, lambda t: t.view_as(t), self._alike(path, "all-reduce"))

    def summed_now(self, path: str, x: torch.Tensor | None, module: Any = None) -> Any:
        """The sum over tp; the gradient passes."""
        return None if x is None else _run(x, self._alike(path, "all-reduce"), lambda gradient: gradient)

    def gathered(self, path: str, x: torch.Tensor, dim: int, size: int) -> Any:
        """The whole of parts on tp along a dim; the gradient is cut."""
        own = x.size(dim)
        return _run(x, self._whole(path, dim, size), lambda whole: whole.narrow(dim, 0, own).contiguous())

    def own_part(self, path: str, x: torch.Tensor, dim: int, size: int) -> Any:
        """This rank's part along a dim, as a copy; the gradient is gathered."""
        cut = torch.clone if dim == 0 else torch.Tensor.contiguous  # rows are contiguous as they are
        return _run(x, lambda t: cut(t.narrow(dim, 0, size)), self._whole(path, dim, x.size(dim)))

    def sent_around(self, path: str, x: torch.Tensor) -> Any:
        """Rows that go to the ranks of their experts, or come back; the gradients go the other way."""
        return _run(x, *[self._alike(path, "all-to-all")] * 2)

    def _alike(self, path: str, kind: str) -> _Move:
        """A collective whose result has the shape of what it gets."""

        def move(x: torch.Tensor) -> torch.Tensor:
            self.note(path, kind, x)
            return torch.empty_like(x)

        return move

    def _whole(self, path: str, dim: int, size: int) -> _Move:
        """An all-gather along a dim, which then has this size."""

        def move(x: torch.Tensor) -> torch.Tensor:
            shape = list(x.shape)
            shape[dim] = size
            whole = x.new_empty(shape)
            self.note(path, "all-gather", whole)
            return whole

        return move

    def _dispatched(self, path: str, experts: _Forward) -> _Forward:
        """Experts that other ranks send tokens to, as transformers' ``AllToAllEP``: each rank gets as many as it sends."""

        def forward(
            hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            tokens, dtype = hidden.size(0), hidden.dtype
            if self.tp > 1:  # the ranks of tp have the same tokens: each takes its part
                own = -(-tokens // self.tp)
                hidden, top_k_weights = (self.own_part(path, t, 0, own) for t in (hidden, top_k_weights))
                top_k_index = top_k_index[: hidden.size(0)]
            order = torch.argsort(top_k_index.reshape(-1))
            sent = hidden[order // top_k_index.size(-1)]
            got = self.sent_around(path, sent)
            index = torch.zeros(got.size(0), 1, dtype=top_k_index.dtype, device=got.device)
            result = self.sent_around(path, experts(got, index, torch.ones_like(index, dtype=got.dtype)))
            ordered = torch.empty_like(result)
            ordered[order] = result
            ordered = ordered.view(*top_k_weights.shape, result.size(-1))
            output = (ordered * top_k_weights.unsqueeze(-1)).sum(dim=1)
            if self.tp > 1:
                output = self.gathered(path, output, 0, tokens)
            return output.to(dtype)

        return forward


_Move = Callable[[torch.Tensor], torch.Tensor]


class _Moved(torch.autograd.Function):
    """What ``there`` makes of a tensor, and ``back`` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Move, back: _Move) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def _run(x: torch.Tensor, there: _Move, back: _Move) -> Any:
    return _Moved.apply(x, there, back)  # type: ignore[no-untyped-call]


# ----------------------------------------------------------------------------------------------------
# Styles of transformers' plans: what is done before a module's own forward, and after it

_Part = Callable[[Exchange, str, Any, Any], Any]


def _same(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    return x


def _summed_in_place(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    exchange.note(path, "all-reduce", x)
    return x


def _gathered(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    size = module.out_features if hasattr(module, "out_features") else module.embedding_dim
    return exchange.gathered(path, x, -1, size)


def _own_part(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    return exchange.own_part(path, x, -1, module.weight.size(-1))


def _rope_summed_later(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    rope = module.config.qk_rope_head_dim
    passed, turned = x.split([x.size(-1) - rope, rope], dim=-1)
    return torch.cat([passed, exchange.summed_later(path, turned)], dim=-1)


def _divided(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    return x / exchange.tp


def _weights_summed(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            exchange.note(path, "all-reduce", parameter)
    return x


def _unknown(style: str) -> _Part:
    def refuse(exchange: Exchange, path: str, x: Any, module: Any) -> Any:
        raise NotImplementedError(f"the plan's style {style!r} at {path} isn't supported")

    return refuse


_STYLES: dict[str, tuple[_Part, _Part]] = {
    "colwise": (Exchange.summed_later, _same),
    "packed_colwise": (Exchange.summed_later, _same),
    "colwise_gather_output": (Exchange.summed_later, _gathered),
    "colwise_rep": (Exchange.summed_later, _gathered),
    "rowwise": (_same, Exchange.summed_now),
    "rowwise_rep": (_same, Exchange.summed_now),
    "rowwise_split_input": (_own_part, Exchange.summed_now),
    "embedding_rowwise": (_same, Exchange.summed_now),
    "embedding_colwise": (_same, _gathered),
    "all_reduce": (_same, Exchange.summed_now),
    "moe_tp_experts": (Exchange.summed_later, _summed_in_place),
    "moe_identity_expert": (_divided, _same),
    "mla_kv_a_proj": (_same, _rope_summed_later),
    "replicated_with_grad_allreduce": (_weights_summed, _same),
    "local_params": (_same, _same),
    "replicate": (_same, _same),
}


# ----------------------------------------------------------------------------------------------------
# Bytes that a training step sends over the network: what each rank receives, and what each host receives from other hosts.
#
# Collectives over ranks are taken to be rings: of a tensor that ``n`` ranks gather or reduce, each rank receives ``(n - 1) / n``, and so
# does each host that has a part of the ring, for each ring that leaves it. An all-reduce is both, one after the other.


@frozen
class _Axis:
    """Groups of ``size`` ranks, ``stride`` ranks apart, on hosts of ``per_host`` ranks."""

    size: int
    stride: int
    per_host: int

    @property
    def rings_leaving(self) -> int:
        """Rings that a host is a part of, and that leave it."""
        if self.size * self.stride <= self.per_host and self.per_host % (self.size * self.stride) == 0:
            return 0  # each group lies on one host
        on_host = max(1, -(-self.per_host // self.stride))
        return -(-self.per_host // min(on_host, self.size)) if self.size > 1 else 0

    def around(self, nbytes: float) -> tuple[float, float]:
        """What a rank and a host receive when tensors of so many bytes go around the ring once."""
        each = nbytes * (self.size - 1) / self.size
        return each, each * self.rings_leaving

    def exchanged(self, nbytes: float) -> tuple[float, float]:
        """The same for an all-to-all, in which a rank receives so many bytes, evenly from all, itself included."""
        near = self.size if not self.rings_leaving else min(self.size, max(1, self.per_host // self.stride))
        return nbytes * (self.size - 1) / self.size, nbytes * (self.size - near) / self.size * self.per_host


def flows_of(step: Step, variant: Variant, sent: Sequence[Sent], itemsize: int) -> tuple[Flow, ...]:
    """The bytes of a step, by purpose. ``sent``: of the run; ``itemsize``: bytes of an element of its activations."""
    per_host, replicas = min(variant.ranks_per_host, variant.ranks), variant.replicas
    dense = _Axis(variant.shards, variant.tp, per_host)
    experts = _Axis(variant.expert_shards, variant.ep, per_host) if variant.ep > 1 else dense
    copies = _Axis(replicas, variant.ranks // replicas, per_host)
    found: dict[str, tuple[float, float]] = {}

    def add(what: str, flow: tuple[float, float]) -> None:
        before = found.get(what, (0.0, 0.0))
        found[what] = before[0] + flow[0], before[1] + flow[1]

    for group in (g for g in step.groups if g.index in step.called):
        axis = experts if group.own_shards is not None else dense
        add(_GATHER, axis.around(group.gathered_bytes * (2 if group.path else 1)))
        add(_REDUCE, axis.around(group.reduced_bytes))
        add(_COPIES, copies.around(2 * group.reduced_bytes / axis.size))
    times = _times(step.groups)
    for one in sent:
        nbytes = one.elements * max(itemsize, one.dtype.itemsize) * times(one.path)
        if one.kind == "all-to-all":
            add(_TOKENS, _Axis(variant.ep, 1, per_host).exchanged(nbytes))
        else:
            add(_TP, _Axis(variant.tp, 1, per_host).around(nbytes * (2 if one.kind == "all-reduce" else 1)))
    return tuple(
        Flow(what, round(rank), round(host), _FORMULAS[what]) for what, (rank, host) in found.items() if rank
    )


_GATHER, _REDUCE, _COPIES, _TP, _TOKENS = (
    "FSDP all-gathers",
    "FSDP reduce-scatters",
    "all-reduces across replicas",
    "tensor parallelism",
    "tokens to experts",
)
_FORMULAS: Mapping[str, str] = {
    _GATHER: "gathered bytes of each group, in forward and backward (the root once), x (shards - 1) / shards",
    _REDUCE: "gradients of each group in the dtype of the reduction, x (shards - 1) / shards",
    _COPIES: "a rank's part of the gradients x 2 x (replicas - 1) / replicas",
    _TP: "all-reduces (twice) and all-gathers of activations and their gradients, as the model's plan has them, x (tp - 1) / tp",
    _TOKENS: "tokens x experts of each, there and back, in forward and backward, x (ep - 1) / ep; experts get equally many",
}


def _times(groups: Sequence[StepGroup]) -> Callable[[str], int]:
    """How many blocks a module's block stands for: of blocks that are alike, one ran."""
    first = alike(groups)
    paths = {f"{groups[rep].path}.": sum(r == rep for r in first.values()) for rep in set(first.values())}
    return lambda path: next((n for start, n in paths.items() if path.startswith(start)), 1)


# ----------------------------------------------------------------------------------------------------
# Cuts a model on meta as a run's ranks would hold it: tensor and expert parallelism by the model's own plans, then FSDP2.


@dataclass(slots=True)
class Spread:
    """The model of a run on meta, while it is cut: first by :meth:`cut`, then by :meth:`shard`. Needs the run's process group."""

    model: nn.Module
    variant: Variant
    tp_plan: dict[str, str]
    ep_plan: dict[str, str]
    forwards: dict[str, Callable[..., Any]]
    """The forward of each module that a plan changes, as it was before."""

    @classmethod
    def cut(cls, model: nn.Module, variant: Variant) -> Spread:
        """Apply tensor and expert parallelism, if the run has any. Raises :class:`ShardError` where that is impossible."""
        if not variant.is_parallel:
            return cls(model, variant, {}, {}, {})
        tp_plan, ep_plan = _plans(model, variant)
        modules = dict(model.named_modules())
        changed = [name for name in (*tp_plan, *ep_plan) if name in modules]
        found = cls(model, variant, tp_plan, ep_plan, {name: modules[name].forward for name in changed})
        dense, experts = _meshes(variant)
        try:
            if tp_plan:
                tp_by_plan(model, dense["tp"], tp_plan)
            if ep_plan:
                ep_by_plan(model, experts["ep"], dense["tp"], ep_plan)
        except (ValueError, RuntimeError) as error:
            raise ShardError(f"{type(model).__name__} can't be cut by its own plan: {error}") from error
        return found

    @contextmanager
    def as_one_rank(self) -> Iterator[Exchange]:
        """The model as rank 0 computes with it: plain parts of parameters; collectives take memory, and are counted."""
        exchange = Exchange(self.model, tp=self.variant.tp, ep=self.variant.ep)
        if not self.variant.is_parallel:
            yield exchange
            return
        before = [
            (module, name, put_parameter(module, name, part)) for module, name, part in own_parts(self.model)
        ]
        installed = {}
        for path, forward in self.forwards.items():
            module = self.model.get_submodule(path)
            installed[path] = module.forward
            style = self.ep_plan.get(path) or self.tp_plan[path]
            module.forward = exchange.stand_in(path, style, forward)
        # Counted again with each forward of the model: a run may be tried twice.
        handle = self.model.register_forward_pre_hook(lambda *_: exchange.sent.clear())
        try:
            yield exchange
        finally:
            handle.remove()
            for path, forward in installed.items():
                self.model.get_submodule(path).forward = forward
            for module, name, parameter in before:
                put_parameter(module, name, parameter)

    def whole_gradients(self) -> dict[str, int]:
        """How many times as large as a rank's part of a parameter its gradient is, by name, where it is larger.

        torch (2.12-2.13) gives the gradient of an embedding whose rows are cut whole on each rank, where its output was summed
        (``embedding_dense_backward_strategy``); FSDP2 cuts it afterwards. Of a tied one autograd adds a cut gradient, which cuts
        the sum.
        """
        names = [name for name, _ in self.model.named_parameters()]
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}.difference(names)
        parameters = {id(self.model.get_parameter(name)) for name in tied}
        rows = [f"{path}.weight" for path, style in self.tp_plan.items() if style == "embedding_rowwise"]
        return {
            name: self.variant.tp
            for name in rows
            if name in names and id(self.model.get_parameter(name)) not in parameters
        }

    def shard(self) -> None:
        """Apply FSDP2 over the ranks that are left, if any are."""
        if not self.variant.is_wrapped:
            return
        variant = self.variant
        axes = ("shard",) if variant.replicas == 1 else ("replicate", "shard")
        with lazy_chunks():
            if not variant.is_parallel:
                # Boxes depend only on the sizes of the axes: a CPU mesh gives the same ones as GPUs.
                sizes = (variant.ranks,) if variant.replicas == 1 else (variant.replicas, variant.shards)
                shard(self.model, init_device_mesh("cpu", sizes, mesh_dim_names=axes), variant.policy)
                return
            dense, experts = _meshes(variant)
            over = dense[axes], experts[axes] if variant.ep > 1 else dense[axes]
            shard_with_experts(self.model, *over, variant.policy)


def _meshes(variant: Variant) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks as dense parameters see them, and as experts do."""
    dense = (variant.replicas, variant.shards, variant.tp)
    experts = (variant.replicas, variant.expert_shards, variant.ep)
    return (
        init_device_mesh("cpu", dense, mesh_dim_names=("replicate", "shard", "tp")),
        init_device_mesh("cpu", experts, mesh_dim_names=("replicate", "shard", "ep")),
    )


def _plans(model: Any, variant: Variant) -> tuple[dict[str, str], dict[str, str]]:
    """The model's own plans for tensor and expert parallelism. Raises :class:`ShardError` if it can't be cut by them."""
    if variant.adapter is not None:
        raise ShardError("tp and ep can't be planned together with adapter=; leave one of them out")
    name = type(model).__name__
    if not is_transformers_model(model):
        raise ShardError(
            f"tp and ep need a transformers model, because its class says how to split it; got {name}"
        )
    tp_plan, ep_plan = parallel_plans(model, tp=variant.tp > 1, ep=variant.ep > 1)
    for kind, size, plan in (("tp", variant.tp, tp_plan), ("ep", variant.ep, ep_plan)):
        if size > 1 and not plan:
            raise ShardError(
                f"{name} has no plan for {kind}={size} ({kind}_plan of transformers); set {kind} to 1"
            )
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    cuts_heads = any(path.endswith(".k_proj") and style == "colwise" for path, style in tp_plan.items())
    if cuts_heads and isinstance(heads, int) and heads % variant.tp:
        raise ShardError(
            f"tp={variant.tp} doesn't divide the {heads} KV heads of {name}, and a head can't be split; choose a divisor"
        )
    return tp_plan, ep_plan
