"""Tensor and expert parallelism in a run on tensors without memory: the memory of collectives, and the bytes that they send.

The model has the parts of one rank. Each module that a plan of transformers (5.21-5.23) hooks gets a forward that takes the memory of
the plan's collectives, in forward and backward, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..objects import frozen
from .activations import FORMULA_ERROR, Step

__all__ = ["Exchange", "Sent"]

_Forward = Callable[..., Any]


@frozen
class Sent:
    """A collective of a step."""

    path: str
    """The module around which it is."""
    kind: str
    """``all-reduce``, ``all-gather`` or ``all-to-all``."""
    axis: str
    """``tp`` or ``ep``."""
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

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count anew with each forward of the model: a run may be tried twice."""
        handle = self.model.register_forward_pre_hook(lambda *_: self.sent.clear())
        try:
            yield
        finally:
            handle.remove()

    def counted(self, step: Step, *, is_wrapped: bool) -> Step:
        """``step``, with what it assumes of the collectives; without any of them if the model did not run to its end.

        ``is_wrapped``: whether FSDP2 wraps the model.
        """
        if self.tp == self.ep == 1:
            return step
        more = ["no FSDP2, because tensor parallelism takes all ranks"]
        if is_wrapped:
            more = ["FSDP2's groups are those of shardwise.shard, not of transformers' fsdp_plan"]
        if self.ep > 1:
            more.append("each expert gets the same number of tokens")
        if step.error == FORMULA_ERROR:
            self.sent.clear()
            more.append("traffic of tensor and expert parallelism is not counted")
        return replace(step, assumptions=(*step.assumptions, *more))

    def note(self, path: str, kind: str, axis: str, tensor: torch.Tensor) -> None:
        self.sent.append(Sent(path, kind, axis, tensor.numel(), tensor.dtype))

    def stand_in(self, path: str, style: str, forward: _Forward) -> _Forward:
        """The forward of the module at ``path`` for a style of a plan. Of an unknown style, it raises."""
        if style == "ep_dispatch_experts":
            return self._dispatched(path, forward)
        before, after = _STYLES.get(style, (_unknown(style), _same))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            module = self.model.get_submodule(path)
            if args:  # attention gets names alone, and has nothing to be done before it
                rest = (
                    (self._summed_later(path, a) for a in args[1:]) if style == "moe_tp_experts" else args[1:]
                )
                args = (before(self, path, module, args[0]), *rest)
            return after(self, path, module, forward(*args, **kwargs))

        return stand_in

    def _summed_later(self, path: str, value: Any) -> Any:
        """The routing weights of experts: their gradients are summed."""
        is_weight = isinstance(value, torch.Tensor) and value.is_floating_point()
        return _run(_SummedLater, value, self, path) if is_weight else value

    def _dispatched(self, path: str, experts: _Forward) -> _Forward:
        """Experts that other ranks send tokens to, as transformers' ``AllToAllEP``: each rank gets as many as it sends."""

        def forward(
            hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            tokens, dtype = hidden.size(0), hidden.dtype
            if self.tp > 1:  # the ranks of tp have the same tokens: each takes its part
                hidden, top_k_weights = (
                    _run(_OwnRows, t, self, path, self.tp) for t in (hidden, top_k_weights)
                )
                top_k_index = top_k_index[: hidden.size(0)]
            order = torch.argsort(top_k_index.reshape(-1))
            sent = hidden[order // top_k_index.size(-1)]
            got = _run(_SentAround, sent, self, path)
            index = torch.zeros(got.size(0), 1, dtype=top_k_index.dtype, device=got.device)
            result = _run(
                _SentAround, experts(got, index, torch.ones_like(index, dtype=got.dtype)), self, path
            )
            own = torch.empty_like(result)
            own[order] = result
            own = own.view(*top_k_weights.shape, result.size(-1))
            output = (own * top_k_weights.unsqueeze(-1)).sum(dim=1)
            if self.tp > 1:
                output = _run(_AllRows, output, self, path, tokens)
            return output.to(dtype)

        return forward


# ----------------------------------------------------------------------------------------------------
# Collectives that only take memory


def _run(collective: type[torch.autograd.Function], *args: Any) -> Any:
    return collective.apply(*args)


class _SummedLater(torch.autograd.Function):
    """The tensor itself; its gradient is summed over tp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str) -> torch.Tensor:
        ctx.exchange, ctx.path = exchange, path
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        ctx.exchange.note(ctx.path, "all-reduce", "tp", gradient)
        return torch.empty_like(gradient), None, None


class _SummedNow(torch.autograd.Function):
    """The sum over tp; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str) -> torch.Tensor:
        exchange.note(path, "all-reduce", "tp", x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None, None


class _Gathered(torch.autograd.Function):
    """The last dim, whole, of parts on tp; the gradient is cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str, size: int) -> torch.Tensor:
        ctx.own = x.size(-1)
        whole = x.new_empty(*x.shape[:-1], size)
        exchange.note(path, "all-gather", "tp", whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][..., : ctx.own].contiguous(), None, None, None


class _OwnPart(torch.autograd.Function):
    """This rank's part of the last dim; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str, size: int) -> torch.Tensor:
        ctx.exchange, ctx.path, ctx.size = exchange, path, x.size(-1)
        return x[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        whole = gradient.new_empty(*gradient.shape[:-1], ctx.size)
        ctx.exchange.note(ctx.path, "all-gather", "tp", whole)
        return whole, None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's part of the tokens; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str, ranks: int) -> torch.Tensor:
        ctx.exchange, ctx.path, ctx.rows = exchange, path, x.size(0)
        return x[: -(-x.size(0) // ranks)].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        whole = gradient.new_empty(ctx.rows, *gradient.shape[1:])
        ctx.exchange.note(ctx.path, "all-gather", "tp", whole)
        return whole, None, None, None


class _AllRows(torch.autograd.Function):
    """All tokens, of parts on tp; the gradient is cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str, rows: int) -> torch.Tensor:
        ctx.own = x.size(0)
        whole = x.new_empty(rows, *x.shape[1:])
        exchange.note(path, "all-gather", "tp", whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][: ctx.own].contiguous(), None, None, None


class _SentAround(torch.autograd.Function):
    """Rows that go to the ranks of their experts, or come back; the gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, path: str) -> torch.Tensor:
        ctx.exchange, ctx.path = exchange, path
        exchange.note(path, "all-to-all", "ep", x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        ctx.exchange.note(ctx.path, "all-to-all", "ep", gradient)
        return torch.empty_like(gradient), None, None


# ----------------------------------------------------------------------------------------------------
# Styles of transformers' plans: what is done before a module's own forward, and after it

_Part = Callable[[Exchange, str, Any, Any], Any]


def _same(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    return x


def _summed_later(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    return _run(_SummedLater, x, exchange, path)


def _summed_now(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    return None if x is None else _run(_SummedNow, x, exchange, path)


def _summed_in_place(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    exchange.note(path, "all-reduce", "tp", x)
    return x


def _gathered(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    size = module.out_features if hasattr(module, "out_features") else module.embedding_dim
    return _run(_Gathered, x, exchange, path, size)


def _own_part(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    return _run(_OwnPart, x, exchange, path, module.weight.size(-1))


def _rope_summed_later(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    rope = module.config.qk_rope_head_dim
    passed, turned = x.split([x.size(-1) - rope, rope], dim=-1)
    return torch.cat([passed, _run(_SummedLater, turned, exchange, path)], dim=-1)


def _divided(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    return x / exchange.tp


def _weights_summed(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            exchange.note(path, "all-reduce", "tp", parameter)
    return x


def _unknown(style: str) -> _Part:
    def refuse(exchange: Exchange, path: str, module: Any, x: Any) -> Any:
        raise NotImplementedError(f"the style {style!r} of a plan, at {path}, is not known here")

    return refuse


_STYLES: dict[str, tuple[_Part, _Part]] = {
    "colwise": (_summed_later, _same),
    "packed_colwise": (_summed_later, _same),
    "colwise_gather_output": (_summed_later, _gathered),
    "colwise_rep": (_summed_later, _gathered),
    "rowwise": (_same, _summed_now),
    "rowwise_rep": (_same, _summed_now),
    "rowwise_split_input": (_own_part, _summed_now),
    "embedding_rowwise": (_same, _summed_now),
    "embedding_colwise": (_same, _gathered),
    "all_reduce": (_same, _summed_now),
    "moe_tp_experts": (_summed_later, _summed_in_place),
    "moe_identity_expert": (_divided, _same),
    "mla_kv_a_proj": (_same, _rope_summed_later),
    "replicated_with_grad_allreduce": (_weights_summed, _same),
    "local_params": (_same, _same),
    "replicate": (_same, _same),
}
