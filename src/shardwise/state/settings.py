"""The settings that the next steps depend on and that no state has: how models, optimizers and loaders were made, torch's flags.

A save records them, and a resume compares them with this run's once every object has its state. Values that a state brings back
are equal by then. The others are differences: this run goes on with its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..devices import to_host
from ..internals.fsdp import precision_of
from ..internals.torch import compiled_by, original_class
from ..layout.live import LiveModel
from ..names import NamedTensor, canonical_name
from .arguments import Described, argument_names, content_text, is_plain, path_text, plain_text
from .schedulers import callables_in, inner_schedulers, unwrapped
from .several import is_several
from .train_state import TrainState

__all__ = ["changed_settings", "data_settings_of", "given_settings_of", "replaced_settings", "settings_of"]

_PACKAGE = __name__.partition(".")[0]
#: How a buffer and a path are described: :func:`_of_buffers`, :func:`~shardwise.state.arguments.path_text`.
_BUFFER = re.compile(r"\[([\d, ]*)\](?:: tensor (\w+) .*)?")
_FILES = re.compile(r"(.*) \(((?:files|rows) #\w+)\)", re.DOTALL)
#: A report has at most so many lines of changed settings.
_MAX_LINES = 40
#: Elements of a non-persistent buffer that are compared.
_SAMPLES = 256
#: Environment variables by which libraries choose kernels and their precision.
_ENVIRONMENT = (
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO"),
    *("MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)


def _chosen(precision: str) -> str:
    """``none`` leaves the choice to a more general setting, and in the end to ``ieee``."""
    return "ieee" if precision == "none" else precision


_FLAGS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "opt_einsum": lambda: torch.backends.opt_einsum.enabled,
    "opt_einsum strategy": lambda: torch.backends.opt_einsum.strategy,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "fp32_precision": lambda: _chosen(torch.backends.fp32_precision),  # type: ignore[attr-defined]
    "mkldnn matmul fp32_precision": lambda: _chosen(torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
    "cudnn": lambda: torch.backends.cudnn.enabled,
    "cudnn benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn conv fp32_precision": lambda: _chosen(torch.backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
    "cuda matmul fp32_precision": lambda: _chosen(torch.backends.cuda.matmul.fp32_precision),
    "cuda matmul allow_fp16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda matmul allow_bf16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
}


def settings_of(state: TrainState, lives: Mapping[str, LiveModel]) -> dict[str, str]:
    """The settings of everything but the data, as lines of text by path. Draws nothing. Rank-local."""
    found = dict(_of_torch(lives))
    for name, live in lives.items():
        found |= _of_model("model" if name == "model" else f"model.{name}", live)
    described = Described(_known(state))
    for name, optimizer in state.given_optimizers.items():
        inside = Described({})
        inside.add(_path("optimizer", name), optimizer)
        described.lines |= inside.lines
    for path, called in callables_in(state.scheduler):  # first: a scheduler keeps them under other names, too
        described.add(path, called)
    _add_each(described, "scheduler", state.scheduler)
    for name, extra in state.extra.items():
        if hasattr(extra, "state_dict") and not type(extra).__module__.startswith(f"{_PACKAGE}."):
            described.add(f"extra.{name}", extra)
    return found | described.lines


def data_settings_of(state: TrainState) -> dict[str, str]:
    """The settings of the data loader, its dataset and its samplers. They differ between ranks where these know their rank."""
    described = Described(_known(state))
    _add_each(described, "dataloader", state.dataloader)
    return described.lines


def given_settings_of(state: TrainState) -> dict[str, str]:
    """Settings that this program gave and that a restore replaces: of parameter groups and schedulers.

    ``lr``, ``momentum`` and ``betas`` are left out where a scheduler sets them; ``initial_lr`` then is the program's.
    """
    described = Described(_known(state))
    _add_each(described, "scheduler", state.scheduler)
    found = described.lines
    left_out = {"params", *(("momentum", "betas") if _cycles(state.scheduler) else ())}
    for name, optimizer in state.optimizers.items():
        path, several = _path("optimizer", name), len(optimizer.param_groups) > 1
        for number, group in enumerate(optimizer.param_groups):
            at = f"{path}.param_groups[{number}]" if several else path
            for key, value in group.items():
                if key not in left_out and not (key == "lr" and "initial_lr" in group):
                    found |= _lines(f"{at}.{key}", value)
    return found


def _cycles(scheduler: Any) -> bool:
    """Whether a scheduler, or one in it, sets momentum as well (torch's OneCycleLR and CyclicLR)."""
    every = [unwrapped(one) for one in (scheduler.values() if is_several(scheduler) else [scheduler])]
    every += [inner for one in every for inner in inner_schedulers(one)]
    return any(getattr(one, "cycle_momentum", False) for one in every)


def replaced_settings(given: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each setting that had one value before a restore and has another one after it."""
    return tuple(
        f"{path}: this program's {was} was replaced by the checkpoint's {now[path]}"
        for path, was in given.items()
        if now.get(path, was) != was
    )


def changed_settings(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each setting that differs from the saved run's. Of objects of another class only the class."""
    found: list[str] = []
    other: list[str] = []
    stored, now = _spread(stored, now), _spread(now, stored)
    for path in {**stored, **now}:
        was, is_now = stored.get(path), now.get(path)
        if was == is_now or any(path.startswith(above) for above in other):
            continue
        if is_now == "None" and was is not None and was.startswith("torch."):
            continue  # a dtype that a module takes from its first input (bitsandbytes' layers do)
        if _is_a_cache(was, is_now) or _is_moved(was, is_now):
            continue
        if was is not None and is_now is not None:
            other += [f"{path}.", f"{path}["]
        found.append(f"{path}: {_said(was)} when saved, {_said(is_now)} now")
    more = len(found) - _MAX_LINES
    return found if more <= 0 else [*found[:_MAX_LINES], f"settings: {more} further ones differ"]


def _is_a_cache(was: str | None, now: str | None) -> bool:
    """Whether a non-persistent buffer is one that ``forward`` fills or lets grow, and has not done so yet in this run."""
    before, after = (_BUFFER.fullmatch(text or "") for text in (was, now))
    if (before is None and was is not None) or (after is None and now is not None):
        return False
    if after is None:
        return before is not None
    size = [int(n) for n in after[1].split(", ") if n]
    if before is None or 0 in size:
        return 0 in size
    filled = [int(n) for n in before[1].split(", ") if n]
    smaller = len(size) == len(filled) and all(n <= f for n, f in zip(size, filled, strict=True))
    return before[2] == after[2] and size != filled and smaller


def _is_moved(was: str | None, now: str | None) -> bool:
    """Whether two paths name the same files in two places, or two fingerprints the same rows."""
    before, after = (_FILES.fullmatch(text or "") for text in (was, now))
    if before is None or after is None:
        return (before is not None and before[1] == now) or (after is not None and after[1] == was)
    return before[1] == after[1] or before[2] == after[2]


def _said(text: str | None) -> str:
    return "not set" if text is None else text


def _of_torch(lives: Mapping[str, LiveModel]) -> Iterator[tuple[str, str]]:
    for name, get in _FLAGS.items():
        try:
            yield f"torch: {name}", plain_text(get())
        except (AttributeError, RuntimeError):  # not in this release; old and new flags for TF32 were mixed
            continue
    if all(t.tensor.device.type == "cpu" for live in lives.values() for t in live.tensors[:1]):
        yield "torch: instructions of the CPU", torch.backends.cpu.get_cpu_capability()
    for name in _ENVIRONMENT:
        if (value := os.environ.get(name)) is not None:
            yield f"environment: {name}", plain_text(value)


def _of_model(at: str, live: LiveModel) -> dict[str, str]:
    found: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    for path, module in live.modules:
        name = f"{at}.{path}" if path else at
        if (backend := compiled_by(module)) is not None:
            found[f"{canonical_name(name)}.compiled"] = backend
        found |= {f"{canonical_name(name)}.{key}": text for key, text in precision_of(module).items()}
        modules[canonical_name(name)] = module  # of wrappers the innermost
    described = Described({id(module): "" for _, module in live.modules})
    for name, module in modules.items():
        kind: Any = original_class(module)
        found[name] = kind.__qualname__
        held = vars(module)
        for argument in argument_names(kind):
            value = held.get(argument)
            if argument in held and is_plain(value):
                found[f"{name}.{argument}"] = path_text(value)
            elif isinstance(value, list | tuple | dict) or (
                callable(value) and not isinstance(value, nn.Module)
            ):
                described.add(f"{name}.{argument}", value)
    config = getattr(live.unwrapped, "config", None)
    if config is not None:
        described.add(f"{at}.config", config)
    found |= {f"{at}.{t.name}.requires_grad": repr(t.tensor.requires_grad) for t in live.parameters}
    found |= _of_buffers(at, live)
    return _collapsed(found | described.lines)


def _of_buffers(at: str, live: LiveModel) -> dict[str, str]:
    """Some elements of each buffer that construction makes again."""
    made = [t for t in live.tensors if not t.persistent and t.tensor.device.type != "meta"]
    parts = to_host([_part(t) for t in made if _is_dense(t)])
    texts = iter([content_text(part) for part in parts])
    return {
        f"{at}.{t.name}": f"{list(t.tensor.shape)}: {next(texts)}"
        if _is_dense(t)
        else f"{list(t.tensor.shape)}"
        for t in made
    }


def _is_dense(t: NamedTensor) -> bool:
    return type(t.tensor) is torch.Tensor and t.tensor.layout is torch.strided and not t.tensor.is_quantized


def _part(t: NamedTensor) -> torch.Tensor:
    tensor = t.tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor[(slice(0, 1),) * tensor.dim()]
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()


def _last_number(path: str) -> str | None:
    return next((part for part in reversed(path.split(".")) if part.isdecimal()), None)


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _spread(lines: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Undo :func:`_collapsed` for buffers that the other run has a line of for each block."""
    found = dict(lines)
    for path in other:
        text = lines.get(_pattern(path), "")
        if path not in lines and _BUFFER.fullmatch(text):
            found.pop(_pattern(path), None)
            found[path] = text
    return found


def _collapsed(lines: Mapping[str, str]) -> dict[str, str]:
    """One line for what all blocks of a model have alike: ``layers.*.dropout.p``."""
    groups: dict[str, list[str]] = {}
    for path in lines:
        groups.setdefault(_pattern(path), []).append(path)
    found = {}
    for pattern, paths in groups.items():
        if len(paths) > 1 and len({lines[path] for path in paths}) == 1:
            found[pattern] = lines[paths[0]]
        elif len(paths) > 1 and all(lines[path] == _last_number(path) for path in paths):
            found[pattern] = "the number of the block"
        else:
            found |= {path: lines[path] for path in paths}
    return found


def _add_each(described: Described, path: str, given: Any) -> None:
    if is_several(given):
        for name, one in given.items():
            _add_each(described, f"{path}.{name}", one)
    elif given is not None:
        described.add(path, given)


def _known(state: TrainState) -> dict[int, str]:
    found = {id(model): f"the model {name!r}" for name, model in state.models.items()}
    for optimizers in (state.given_optimizers, state.optimizers):
        found |= {id(optimizer): f"the optimizer {name!r}" for name, optimizer in optimizers.items()}
    return found


def _path(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind}.{name}"


def _lines(path: str, value: Any) -> dict[str, str]:
    if isinstance(value, torch.Tensor):
        return {path: plain_text(value.item() if value.numel() == 1 else value.tolist())}
    if isinstance(value, list | tuple) and all(map(is_plain, value)):
        return {path: repr(value)}
    return {path: plain_text(value)} if is_plain(value) else {}
