"""Every architecture of transformers and every model class of diffusers, with some thousand parameters: no hub, no network.

A default config, or the defaults of a constructor, is shrunk by rules on the names of its fields, in its sub-configs too,
until a model of it is small; short tables hold what rules can't know. The model's every parameter and persistent buffer
gets values of its own, and ``save_pretrained`` writes it as its checkpoints on the hub are.

    python -m benchmarks.architectures mixtral        # the shrunk config and its size
    python -m benchmarks.architectures FluxTransformer2DModel
"""

from __future__ import annotations

import copy
import fnmatch
import importlib
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from benchmarks.sweeping.overrides import ARGUMENTS, CLASSES, COMPOSED, override
from benchmarks.sweeping.shrink import numbers, set_number, shrunk
from benchmarks.sweeping.signatures import ways

__all__ = [
    "Architecture",
    "Tiny",
    "architectures",
    "diffusion_models",
    "fill_distinct",
    "tiny",
    "write_checkpoint",
]

#: Auto mappings, best class first: whole models before their text part, heads before the bare model.
_TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "TEXT_TO_WAVEFORM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "TEXT_TO_SPECTROGRAM",
    "CTC",
    "RNNT",
    "TDT",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_SEGMENTATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "NORMAL_ESTIMATION",
    "POINTMAP_ESTIMATION",
    "POSE_ESTIMATION",
    "MASK_GENERATION",
    "IMAGE_MATTING",
    "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "RETRIEVAL",
    "TABLE_RECOGNITION",
    "TEXT_RECOGNITION",
    "VIDEO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "AUDIO_XVECTOR",
    "TIME_SERIES_PREDICTION",
    "QUESTION_ANSWERING",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "DECISION",
    "PRETRAINING",
    "TEXT_ENCODING",
    "IMAGE",
    "BACKBONE",
    "",
)

#: A model of more parameters is not tiny; above this the architecture counts as one that can't be built small.
LIMIT = 6_500_000


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model type, and the class of it that is built. A class of diffusers has the name of its module as its model type."""

    model_type: str
    class_name: str
    saved_as: str = ""
    """The class whose checkpoint it is, if that is another one: a bare model, from that of a model with a head."""
    library: str = "transformers"

    @property
    def model_class(self) -> Any:
        """The class itself; imports its module."""
        return getattr(importlib.import_module(self.library), self.class_name)


@dataclass(frozen=True, slots=True)
class Tiny:
    """A config that makes a small model, and that model's size."""

    config: Any
    parameters: int
    way: str
    """Which of the ways to shrink it was."""


def architectures(pattern: str = "*", *, bare: bool = False) -> list[Architecture]:
    """All model types that an Auto class knows, with their best class, and with ``bare`` the one without a head too.

    ``pattern``: of model types or class names, several separated by commas. In the order of the names.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for task in _TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for model_type, classes in getattr(modeling_auto, name, {}).items():
            names = found.setdefault(model_type, [])
            class_name = classes if isinstance(classes, str) else classes[0]
            class_name = CLASSES.get(model_type, class_name)
            if not names or (bare and not task and class_name not in names):
                names.append(class_name)
    return [
        Architecture(model_type, class_name, names[0] if k else "")
        for model_type, names in sorted(found.items())
        for k, class_name in enumerate(names)
        if _is_asked(pattern, model_type, class_name)
    ]


def diffusion_models(pattern: str = "*") -> list[Architecture]:
    """All model classes that diffusers exports. ``pattern``: of class names or modules, several separated by commas."""
    import diffusers

    from shardwise.internals.diffusers import class_of

    found = []
    for name in sorted(dir(diffusers)):
        kind = class_of({"_class_name": name})
        if kind is not None and kind is not diffusers.ModelMixin:
            module = kind.__module__.rpartition(".")[2]
            if _is_asked(pattern, module, name):
                found.append(Architecture(module, name, library="diffusers"))
    return found


def _is_asked(pattern: str, *names: str) -> bool:
    return any(fnmatch.fnmatchcase(n, p) for p in pattern.split(",") for n in names)


# ----------------------------------------------------------------------------------------------------
# Shrinking configs


def tiny(architecture: Architecture) -> Tiny:
    """A small config for it: the first way to shrink that builds a model below the limit.

    Raises the error of the last way that was tried for it, or ValueError if every model is too large.
    """
    model_class = architecture.model_class
    if architecture.library == "diffusers":
        return _smallest(ways(model_class), lambda fields: _size(model_class, fields))
    if architecture.model_type in COMPOSED:
        config = COMPOSED[architecture.model_type]()
        return Tiny(config, _size(model_class, config), "composed")
    error: Exception | None = None
    for config_class in _config_classes(architecture):
        try:
            return _shrink(architecture, config_class)
        except Exception as problem:  # whatever a config or a constructor raises on sizes that don't fit
            error = error or problem
    assert error is not None
    raise error


def _shrink(architecture: Architecture, config_class: Any) -> Tiny:
    base = _default(config_class, architecture.model_type)

    def attempts() -> Iterator[tuple[str, dict[str, Any]]]:
        for way in ("fixed", "scaled 16", "scaled 8", "scaled 4", "scaled 2", "scaled 1"):
            fields = shrunk(base, way)
            override(fields, architecture.model_type)
            yield way, fields

    def size_of(fields: dict[str, Any]) -> int:
        return _size(architecture.model_class, config_class.from_dict(copy.deepcopy(fields)))

    found = _smallest(attempts(), size_of)
    return Tiny(config_class.from_dict(found.config), found.parameters, found.way)


def _smallest(
    attempts: Iterable[tuple[str, dict[str, Any]]], size_of: Callable[[dict[str, Any]], int]
) -> Tiny:
    """The smallest of the attempts, or the first that is small enough; smaller still, number by number, if none is."""
    error: Exception | None = None
    best: Tiny | None = None
    for way, fields in attempts:
        try:
            size = size_of(fields)
        except Exception as problem:  # as above
            error = problem
            continue
        if best is None or size < best.parameters:
            best = Tiny(fields, size, way)
        if size <= LIMIT // 4:
            break
    if best is None:
        assert error is not None
        raise error
    return best if best.parameters <= LIMIT else _greedy(best, size_of)


def _config_classes(architecture: Architecture) -> list[Any]:
    """The model type's config, and that of the class, which may be for a part of the model only."""
    from transformers import CONFIG_MAPPING

    whole, own = CONFIG_MAPPING[architecture.model_type], architecture.model_class.config_class
    return [whole] if own in (None, whole) else [whole, own]


def _default(config_class: Any, model_type: str) -> dict[str, Any]:
    """The default config as nested plain values, sub-configs included."""
    fields: dict[str, Any] = config_class(**ARGUMENTS.get(model_type, {})).to_dict()
    # The version stays: without it, a config class may take the values for those of an original checkpoint, and add its quantization.
    for gone in ("architectures", "dtype", "_name_or_path"):
        fields.pop(gone, None)
    return fields


def _size(model_class: Any, config: Any) -> int:
    """Parameters of the model that a config makes: of diffusers, the arguments of its class. Allocates buffers only."""
    config = copy.deepcopy(config)
    if isinstance(config, dict):
        with torch.device("meta"):
            return sum(p.numel() for p in model_class(**config).parameters())
    try:
        with sw.meta_init():
            model = model_class._from_config(config)
    except Exception:
        # Whether the ordinary way builds it: then it is ours to report, when it comes to loading.
        with torch.device("meta"):
            model = model_class(config)
    return sum(p.numel() for p in model.parameters())


def _greedy(start: Tiny, size_of: Callable[[dict[str, Any]], int]) -> Tiny:
    """Shrink one number after the other, as long as a model can be built and gets smaller."""
    fields, size = start.config, start.parameters
    for divisor in (8, 4, 2):
        for path, value in list(numbers(fields)):
            if value < 32 or size <= LIMIT:
                continue
            attempt = copy.deepcopy(fields)
            set_number(attempt, path, value // divisor)
            try:
                found = size_of(attempt)
            except Exception:  # as above
                continue
            if found < size:
                size, fields = found, attempt
    if size > LIMIT:
        raise ValueError(f"the smallest model has {size:,} parameters")
    return Tiny(fields, size, f"{start.way}, then one by one")


# ----------------------------------------------------------------------------------------------------
# Values and files


def fill_distinct(model: nn.Module, seed: int) -> None:
    """Random values for every parameter and persistent buffer, so that every wrong map shows."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if id(tensor) in done or tensor.is_meta:
                continue
            done.add(id(tensor))
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).abs() * 0.1 + 0.01)
            elif tensor.is_complex():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.complex64))
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
            else:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def write_checkpoint(
    architecture: Architecture, directory: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, Tiny]:
    """An ordinary model of it, filled and saved to ``directory`` by the library itself. Returns both."""
    if architecture.saved_as:
        architecture = Architecture(architecture.model_type, architecture.saved_as)
    found = tiny(architecture)
    assert math.isfinite(found.parameters)
    several = {}
    if architecture.library == "diffusers":
        model = architecture.model_class(**copy.deepcopy(found.config)).to(dtype)
        several = {"max_shard_size": max(1, found.parameters * dtype.itemsize // 3)}
    else:
        model = architecture.model_class._from_config(copy.deepcopy(found.config), dtype=dtype)
    fill_distinct(model, zlib.crc32(architecture.class_name.encode()))
    model.eval()
    model.save_pretrained(directory, **several)
    return model, found


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "*"
    for each in [*architectures(asked), *diffusion_models(asked)]:
        small = tiny(each)
        print(f"{each.model_type} {each.class_name}: {small.parameters:,} parameters ({small.way})")
        if len(sys.argv) > 1:
            print(small.config)
