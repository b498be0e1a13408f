"""What loaders of transformers models are asked for: their common arguments, and those of ``from_pretrained``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypedDict

import torch

from ..names import patterns_of
from ..objects import frozen
from .hub import HubOptions
from .unquantized import refuse_request

__all__ = ["REFUSED", "Arguments", "FromPretrained", "Pretrained", "understand"]


class FromPretrained(TypedDict, total=False):
    """Keyword arguments of ``load_pretrained`` beside its own, with their meaning in transformers."""

    attn_implementation: str | dict[str, str] | None
    experts_implementation: str | dict[str, str] | None
    torch_dtype: torch.dtype | str | None
    """The former name of ``dtype``."""
    revision: str | None
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    subfolder: str
    variant: str | None
    use_safetensors: bool | None
    local_files_only: bool
    force_download: bool


_WHOLE = "every rank gets its shards and nothing else, on the mesh's device (device= chooses another one)"
_MESH = (
    "give mesh= for FSDP and HSDP; for tensor parallelism shard the model yourself, or through the Accelerate "
    "integration, and load into it"
)
_OFFLOAD = "policy=ShardPolicy(cpu_offload=True) keeps the shards in host memory"
_GONE = "transformers ignores it, too"
_KERNELS = "set model.use_kernels after the load"

#: Every other keyword argument of transformers' ``from_pretrained`` (5.17-5.23, and 4 where still in use), with its
#: replacement.
REFUSED: Mapping[str, str] = {
    "adapter_kwargs": "adapter= accepts the adapter's local directory",
    "adapter_name": "adapter={name: directory} names it",
    "allow_all_kernels": _KERNELS,
    "code_revision": "code is that of the same revision=",
    "device_map": _WHOLE,
    "device_mesh": _MESH,
    "disable_mmap": "files are read by position, and none is mapped",
    "distributed_config": _MESH,
    "from_flax": _GONE,
    "from_tf": _GONE,
    "fusion_config": "fusing changes stored tensors and is not supported",
    "generation_config": "set model.generation_config after the load",
    "gguf_file": "GGUF is not supported: use the model's safetensors",
    "ignore_mismatched_sizes": (
        "build the model in sw.meta_init(), and say which tensors are new: sw.load(model, path, names=lambda n: "
        "n.replace('score.', 'old_score.'), allow_unused=('score.*',), allow_missing=('score.*',))"
    ),
    "kernel_config": _KERNELS,
    "low_cpu_mem_usage": "no rank ever holds more than its shards and io.staging_bytes",
    "max_memory": _WHOLE,
    "mirror": "set HF_ENDPOINT in the environment",
    "offload_buffers": _OFFLOAD,
    "offload_folder": _OFFLOAD,
    "offload_state_dict": _OFFLOAD,
    "output_loading_info": "the report says it: pass return_report=True, or call shardwise.load_report(model)",
    "proxies": "set HTTPS_PROXY in the environment",
    "resume_download": _GONE,
    "state_dict": "save it as safetensors and load that: nothing else is proved complete",
    "tp_plan": _MESH,
    "tp_size": _MESH,
    "tqdm_class": "huggingface_hub shows the progress of a download (HF_HUB_DISABLE_PROGRESS_BARS=1 hides it)",
    "use_auth_token": "its name is token=",
    "use_kernels": _KERNELS,
    "weights_only": "only tensors are read from pickled files, and none of their code is run",
    "_commit_hash": "its name is revision=",
    "_fast_init": _GONE,
    "_from_auto": _GONE,
    "_from_pipeline": _GONE,
}


@frozen(kw_only=True)
class Arguments:
    """The caller's arguments, checked."""

    dtype: torch.dtype | str
    hub: HubOptions
    implementations: Mapping[str, Any]
    """Fields of the config: ``_attn_implementation``, ``_experts_implementation``."""


def understand(given: Mapping[str, Any], dtype: torch.dtype | str) -> Arguments:
    """Check keyword arguments of ``from_pretrained``. Rank-local.

    ``dtype`` is the call's own argument. Raises :class:`TypeError` naming the replacement of an argument that is not
    taken, :class:`ValueError` if ``torch_dtype`` contradicts ``dtype``, :class:`UnsupportedConversionError` for a
    request to quantize.
    """
    rest = dict(given)
    for name in ("quantization_config", "load_in_4bit", "load_in_8bit"):
        value = rest.pop(name, None)
        if value if name.startswith("load_in_") else value is not None:
            refuse_request({name: value} if name.startswith("load_in_") else value, f"{name}=")
    old_dtype = rest.pop("torch_dtype", None)
    if old_dtype is not None:
        if dtype != "auto" and _named(dtype) != _named(old_dtype):
            raise ValueError(
                f"dtype={dtype!r} and torch_dtype={old_dtype!r} differ; torch_dtype is the old name: pass only dtype"
            )
        dtype = old_dtype
    implementations = {
        f"_{name}": value
        for name in ("attn_implementation", "experts_implementation")
        if (value := rest.pop(name, None)) is not None
    }
    taken = HubOptions.__dataclass_fields__.keys() - {"config"}
    hub = {name: rest.pop(name) for name in taken if name in rest}
    if hub.get("subfolder", "") is None:
        hub["subfolder"] = ""
    for name in rest:
        raise TypeError(f"load_pretrained takes no {name}=; {_instead(name)}")
    return Arguments(dtype=dtype, hub=HubOptions(**hub), implementations=implementations)


def _named(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


#: Arguments of ``load_pretrained`` that have no place in :class:`Pretrained`.
_OF_THE_CALL = ("mesh", "policy", "seed", "device", "io", "verify")


def _instead(name: str) -> str:
    known = (*FromPretrained.__annotations__, *Pretrained.__dataclass_fields__, *_OF_THE_CALL)
    if name not in REFUSED and (close := get_close_matches(name, known, n=1, cutoff=0.75)):
        return f"did you mean {close[0]}=?"
    return "leave it out: " + (
        REFUSED.get(name)
        or f"put config settings into a config: config = AutoConfig.from_pretrained(path, {name}=…), and "
        f"load_pretrained(path, …, config=config)"
    )


@frozen(kw_only=True)
class Pretrained:
    """Which model is built, and from what it is filled: what every loader of transformers models takes alike.

    See :func:`shardwise.load_pretrained` for the fields.
    """

    path: str | os.PathLike[str]
    dtype: torch.dtype | str
    auto_class: Any
    config: Any
    trust_remote_code: bool
    key_mapping: Mapping[str, str] | None
    allow_unused: Sequence[str]
    allow_missing: Sequence[str]
    adapter: Any
    quantized: Any
    options: Mapping[str, Any]
    """The keyword arguments of ``from_pretrained`` among the caller's."""

    def understood(self) -> Arguments:
        """``options``, ``dtype`` and declarations, checked. Raises :class:`TypeError` or :class:`ValueError`."""
        found = understand(self.options, self.dtype)
        if self.config is not None and not isinstance(self.config, str | os.PathLike):
            found = replace(found, hub=replace(found.hub, config=self.config))
        patterns_of("allow_unused", self.allow_unused)
        patterns_of("allow_missing", self.allow_missing)
        return found
