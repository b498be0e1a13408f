"""What other programs leave behind: one table of kinds, each with its marks, what works with it, and the line to write.

A kind is told by names in a directory, by a file's name, or by its first bytes; nothing is opened further. What is
recognized and can't be read is refused by its name, by every reader of a path. What isn't recognized isn't guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import SourceError
from ..format.steps import describe_steps
from ..limits import read_shallow_json
from ..objects import frozen
from ..storage import is_directory, is_file, is_url, join, names_in

__all__ = [
    "FULL_STATE_STEM",
    "KINDS",
    "METADATA_NAME",
    "Kind",
    "is_torch_file",
    "kind_below",
    "kind_in",
    "kind_of",
    "refuse_below",
    "refuse_config",
    "refuse_foreign",
    "refuse_named",
    "refuse_other",
]

#: The file by which a directory is a checkpoint of DCP.
METADATA_NAME = ".metadata"
#: Accelerate's and the HF Trainer's file name for a model in FSDP's full state dict, which has module names.
FULL_STATE_STEM = "pytorch_model_fsdp"
#: Weights of a model or an adapter that is published in several forms; they are read, whatever is stored next to them.
_WEIGHTS = (
    r".*\.safetensors(\.index\.json)?|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|adapter_model\.bin"
)
#: Those under the names that transformers and PEFT look for.
_NAMED_WEIGHTS = r"(model(-\d+-of-\d+)?|adapter_model)\.safetensors(\.index\.json)?|(pytorch_model(-\d+-of-\d+)?|adapter_model)\.bin(\.index\.json)?"


@frozen(kw_only=True)
class Kind:
    """A kind of directory or file that another program writes."""

    name: str
    """What it is, with its article."""
    marks: tuple[str, ...] = ()
    """Patterns: in a directory of this kind each one matches some name."""
    file: str = ""
    """A pattern of the name of a single file of this kind."""
    first: bytes = b""
    """The first bytes of a single file of this kind."""
    works: str = ""
    """What can be done with it; empty for a kind that is refused."""
    instead: str
    """The line to write instead. ``{path}`` is the path that was given."""
    unless: str = _WEIGHTS
    """A pattern: a directory that has such a name, too, isn't of this kind, if the kind is refused: that file can be read."""

    def refusal(self, path: str) -> str:
        """The text of the error that refuses ``path``, without the path."""
        return f"is {self.name}, which can't be read. {self.line(path)}"

    def line(self, path: str) -> str:
        """What to write instead."""
        folder = (
            path
            if not self.file or not re.fullmatch(self.file, _base(path))
            else os.path.dirname(path) or "."
        )
        return self.instead.format(path=path, folder=folder)


_RESTORED = "load, inspect, diff, export, convert, restore"
_LOADED = "load, inspect, diff, export, convert"
_CONVERT = "It records no digests. Convert it first: shardwise convert {path} OUT --to checkpoint"

_MEGATRON = (
    "Export it with Megatron Bridge: AutoBridge.from_hf_pretrained(HUB_ID).export_ckpt('{folder}', OUT), or with "
    "Megatron-LM's tools/checkpoint/convert.py; then give OUT"
)

#: In this order: the first whose marks are all there.
KINDS: tuple[Kind, ...] = (
    Kind(
        name="a checkpoint of NeMo (Megatron's parallel layout)",
        marks=(r"context", r"weights"),
        file=r".*\.nemo",
        instead="Export it with NeMo: nemo.collections.llm.export_ckpt(path='{path}', target='hf', output_path=OUT); then give OUT",
    ),
    Kind(
        name="a run of verl (global_step_N)",  # verl's file has the same name as Megatron-LM's
        marks=(r"latest_checkpointed_iteration\.txt", r"global_step_\d+"),
        instead="Merge one of its steps with verl's own tool: python -m verl.model_merger merge --backend fsdp --local_dir "
        "{path}/global_step_N/actor --target_dir OUT; then give OUT",
    ),
    Kind(
        name="a checkpoint of Megatron-LM",
        marks=(r"latest_checkpointed_iteration\.txt|mp_rank_\d+(_\d+)*|iter_\d{7}",),
        file=r"model_optim_rng\.pt|distrib_optim\.pt",
        instead=_MEGATRON,
    ),
    Kind(
        name="a checkpoint of Megatron-LM (torch_dist)",
        marks=(r"common\.pt", r"metadata\.json"),
        file=r"common\.pt",
        instead=_MEGATRON,
    ),
    Kind(
        name="a checkpoint of DeepSpeed (ZeRO)",
        marks=(
            r"zero_to_fp32\.py|global_step\d+|(.*_)?mp_rank_\d+_(model|optim)_states\.pt|.*_optim_states\.pt",
        ),
        file=r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt",
        instead="Merge it with DeepSpeed's own script, in the directory that has the file 'latest': python zero_to_fp32.py . "
        "OUT --safe_serialization; then give OUT. With ZeRO-1 or 2 and no model parallelism, mp_rank_00_model_states.pt "
        "has the whole model: give the path of that file",
    ),
    Kind(
        name="a checkpoint of verl, SkyRL or another RL engine (parts of single ranks)",
        marks=(r"(model|optim)_world_size_\d+_rank_\d+\.pt",),
        file=r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt",
        instead="Merge them with the engine's own tool: python -m verl.model_merger merge --backend fsdp --local_dir {folder} "
        "--target_dir OUT; then give OUT",
    ),
    Kind(
        name="a checkpoint of Accelerate in parts of single ranks (use_dcp=False or LOCAL_STATE_DICT)",
        marks=(r"(pytorch_model_fsdp|pytorch_model|optimizer)(_\d+)?_rank\d+\.bin",),
        file=r"(pytorch_model_fsdp|pytorch_model|optimizer)(_\d+)?_rank\d+\.bin",
        instead="The place of each part in its tensor isn't stored. Resume it once with Accelerate at the same number of ranks, and save "
        "there with SHARDED_STATE_DICT (use_dcp=True) or FULL_STATE_DICT",
    ),
    Kind(
        name="a pipeline of diffusers (model_index.json)",
        marks=(r"model_index\.json",),
        unless=_NAMED_WEIGHTS,  # a pipeline often has its weights for other programs, too: flux1-dev.safetensors
        instead="Give the directory of one of its models, e.g. {path}/transformer, {path}/unet or {path}/vae",
    ),
    Kind(
        name="a sharded checkpoint of Lightning",
        marks=(r"\.metadata", r"meta\.pt"),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a checkpoint of torch.distributed.checkpoint (DCP)",
        marks=(r"\.metadata",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a checkpoint of the HF Trainer",
        marks=(r"trainer_state\.json",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a checkpoint of Accelerate (save_state)",
        marks=(
            r"pytorch_model_fsdp(_\d+)?(\.bin)?|optimizer_\d+|optimizer(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|scheduler(_\d+)?\.bin",
        ),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a distributed checkpoint of transformers (slices)",
        marks=(r"shard-\d+-model-\d+-of-\d+\.safetensors",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a checkpoint of Orbax (JAX)",
        marks=(r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_\d+",),
        instead="Restore it in JAX (orbax.checkpoint.StandardCheckpointer().restore(path)) and write the tensors with "
        "safetensors.flax.save_file(…, 'model.safetensors'); then give that file",
    ),
    Kind(
        name="a model in GGUF (llama.cpp)",
        marks=(r".*\.gguf",),
        file=r".*\.gguf",
        first=b"GGUF",
        instead="Use the model's safetensors. If there are none, convert it with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="a model of Flax (msgpack)",
        marks=(r"flax_model.*\.msgpack.*|.*\.msgpack",),
        file=r".*\.msgpack",
        instead="Use the model's safetensors, or convert it with transformers 4: "
        "AutoModel.from_pretrained(DIR, from_flax=True).save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="a model of TensorFlow",
        marks=(r"tf_model.*\.h5.*|saved_model\.pb|.*\.data-\d{5}-of-\d{5}",),
        file=r".*\.(h5|pb|keras)|.*\.data-\d{5}-of-\d{5}|.*ckpt.*\.(index|meta)",
        first=b"\x89HDF\r\n\x1a\n",
        instead="Use the model's safetensors, or convert it with transformers 4: "
        "AutoModel.from_pretrained(DIR, from_tf=True).save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="a model in ONNX",
        marks=(r".*\.onnx",),
        file=r".*\.onnx|.*\.onnx_data",
        instead="It is a graph for inference: use the safetensors of the model that it was exported from",
    ),
    Kind(
        name="one file of a checkpoint of torch.distributed.checkpoint (DCP)",
        file=r".*\.distcp|\.metadata",
        instead="Give its directory: {folder}",
    ),
    Kind(
        name="a file of torch.save",
        file=r".*\.(bin|pt|pth|ckpt)",
        first=b"PK\x03\x04",
        works=_LOADED,
        instead="You can read its weights with sw.load(model, '{path}'); convert it first if you need a checkpoint: shardwise convert {path} OUT "
        "--to checkpoint",
    ),
    Kind(
        name="a directory of weights",
        marks=(r".*\.safetensors|pytorch_model.*\.bin(\.index\.json)?",),
        works=_LOADED,
        instead="It contains no training state. You can read its weights with sw.load(model, '{path}'); convert it first if you need a checkpoint: "
        "shardwise convert {path} OUT --to checkpoint",
    ),
)
#: The folders directories below a given one that are looked for.
_MOST_FOLDERS = 64
_FIRST_BYTES = 8


def kind_in(names: Iterable[str]) -> Kind | None:
    """The kind of a directory that has these names; None if no mark is there. Pure."""
    known = list(names)

    def has(pattern: str) -> bool:
        return any(map(re.compile(pattern).fullmatch, known))

    return next(
        (
            kind
            for kind in KINDS
            if kind.marks and all(map(has, kind.marks)) and (kind.works or not has(kind.unless))
        ),
        None,
    )


def kind_of(path: str) -> Kind | None:
    """The kind of a directory or file that another program wrote; None for a checkpoint of ours, and for what isn't recognized.

    Rank-local: lists the directory, or reads eight bytes of a local file. Of a URL that names an object only the name counts.
    """
    # Of a store the listing is wanted anyway; a look at an object of this name would be one request more.
    names = _names(path) if is_url(path) or is_directory(path) else []
    if names:
        return None if "manifest.json" in names else kind_in(names)
    kind = _kind_of_file(_base(path), _first_bytes(path))
    return kind if kind is not None and is_file(path) else None


def _kind_of_file(name: str, first: bytes) -> Kind | None:
    by_content = next((k for k in KINDS if k.first and first.startswith(k.first)), None)
    by_name = next((k for k in KINDS if k.file and re.fullmatch(k.file, name)), None)
    # A name says more than the container: parts of single ranks are files of torch.save, too.
    return by_name if by_name is not None and not by_name.works else by_content or by_name


def _first_bytes(path: str) -> bytes:
    """The first bytes of a local file; none of a URL, and of what can't be read or isn't a regular file."""
    if is_url(path) or not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(_FIRST_BYTES)
    except OSError:  # its reader says why
        return b""


def is_torch_file(path: str) -> bool:
    """Whether a path ends as files of ``torch.save`` do, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt``, or a local file begins as they do."""
    is_named = path.endswith((".bin", ".pt", ".pth", ".ckpt")) and is_file(path)
    return is_named or _first_bytes(path).startswith(b"PK\x03\x04")


def refuse_foreign(path: str) -> None:
    """Refuse a directory or file of a kind that can't be read, by its name. Rank-local; see :func:`kind_of`.

    Raises :class:`SourceError`.
    """
    kind = kind_of(path)
    if kind is not None and not kind.works:
        raise SourceError(kind.refusal(path), path=path)


def kind_below(path: str) -> tuple[str, Kind] | None:
    """The first folder below a local directory that is of a kind that can't be read, and this kind. Lists at most 64 folders."""
    if is_url(path) or not os.path.isdir(path):
        return None
    for name in sorted(_names(path))[:_MOST_FOLDERS]:
        folder = join(path, name)
        kind = kind_in(_names(folder)) if os.path.isdir(folder) else None
        if kind is not None and not kind.works:
            return name, kind
    return None


def refuse_named(path: str) -> None:
    """Refuse one object of a store by its name alone: its folder may not be listed. Raises :class:`SourceError`."""
    kind = _kind_of_file(_base(path), b"")
    if kind is not None and not kind.works:
        raise SourceError(kind.refusal(path), path=path)


def refuse_below(path: str) -> None:
    """Refuse a directory in which nothing was recognized, if one of its folders is of a kind that can't be read.

    Rank-local. Raises :class:`SourceError`.
    """
    if found := kind_below(path):
        name, kind = found
        raise SourceError(f"its folder {name} {kind.refusal(join(path, name))}", path=path)


def refuse_other(path: str, done: str) -> None:
    """Refuse what another program wrote, where only a checkpoint of ours can be ``done``. Rank-local.

    Raises :class:`SourceError`. Does nothing for what isn't recognized.
    """
    refuse_foreign(path)
    kind = kind_of(path)
    if kind is not None:
        raise SourceError(
            f"is {kind.name}, not a shardwise checkpoint, and can't be {done}. {kind.line(path)}",
            path=path,
        )
    if describe_steps(path) is None:
        refuse_below(path)


def _names(path: str) -> list[str]:
    try:
        return names_in(path)
    except (OSError, SourceError):  # its reader says why
        return []


def _base(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


# ----------------------------------------------------------------------------------------------------
# Configs of other libraries: their weights are ordinary, and only their classes aren't known


@frozen(kw_only=True)
class _ConfigKind:
    """A library that writes a config.json of its own."""

    keys: frozenset[str]
    name: str
    instead: str


_CONFIGS = (
    _ConfigKind(
        keys=frozenset({"_class_name", "_diffusers_version"}),
        name="a model of diffusers ({_class_name})",
        instead="Build it with its own class and fill it: with sw.meta_init(): model = "
        "diffusers.{_class_name}.from_config(diffusers.{_class_name}.load_config('{path}')); then sw.load(model, '{path}')",
    ),
    _ConfigKind(
        keys=frozenset({"architecture", "pretrained_cfg"}),
        name="a model of timm ({architecture})",
        instead="Build it with timm and fill it: with sw.meta_init(): model = timm.create_model('{architecture}'); then "
        "sw.load(model, '{path}')",
    ),
)


def _config_kind(document: Mapping[str, Any]) -> _ConfigKind | None:
    """The library whose config this is; None if it may be one of transformers. Pure."""
    return (
        None if "model_type" in document else next((k for k in _CONFIGS if k.keys <= document.keys()), None)
    )


def refuse_config(directory: str) -> None:
    """Refuse a directory whose config.json is another library's than transformers, by its name. Raises :class:`SourceError`."""
    file = join(directory, "config.json")
    if not is_file(file):
        return
    document = read_shallow_json(file, "config")
    kind = _config_kind(document) if isinstance(document, dict) else None
    if kind is not None:
        said = {key: str(document[key])[:80] for key in kind.keys if isinstance(document[key], str)}
        said = {**dict.fromkeys(kind.keys, "…"), **said, "path": directory}
        raise SourceError(
            f"is {_filled(kind.name, said)}, not of transformers, so its class isn't known. {_filled(kind.instead, said)}",
            path=directory,
        )


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text
