"""What a source says of its own quantization: the config beside it, and the small tensors that describe others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..limits import read_shallow_json
from ..storage import is_file, join
from .quantized import method_of_config, quantized, settings_of_config
from .records import Catalog, Quantization
from .small_reads import each, open_file

__all__ = ["with_quantization"]

#: Suffixes of tensors that describe others, and the most bytes of one.
_DESCRIBE = (
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
    ".weight_format",
    ".weight_g_idx",
)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Of packed integers: said by the scales, too, where these are for groups of columns. A model of many experts has 70,000.
_SHAPE = ".weight_shape"
_MOST_BYTES = 1024**2


def with_quantization(catalog: Catalog) -> Catalog:
    """The catalog, with :attr:`.Catalog.quantization` if its tensors look quantized. Rank-local; reads ``config.json``, and a few
    bytes of each tensor that describes others.

    Raises :class:`SourceError`, :class:`FormatError`.
    """
    if quantized(catalog.tensors) is None and not any(t.dtype in _FLOAT8 for t in catalog.tensors.values()):
        return catalog
    file = join(catalog.root, "config.json")
    config = read_shallow_json(file) if is_file(file) else {}
    settings = settings_of_config(config) if method_of_config(config) else {}
    return replace(catalog, quantization=Quantization(settings, _content(catalog, _describing(settings))))


def _describing(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The suffixes of the tensors that are read."""
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    in_groups = [isinstance(w, dict) and w.get("strategy") == "group" for w in weights]
    return _DESCRIBE if in_groups and all(in_groups) else (*_DESCRIBE, _SHAPE)


def _content(catalog: Catalog, describing: tuple[str, ...]) -> dict[str, bytes]:
    by_file = defaultdict(list)
    for name, tensor in catalog.tensors.items():
        if name.endswith(describing) and tensor.nbytes <= _MOST_BYTES and len(tensor.chunks) == 1:
            by_file[tensor.chunks[0].path].append(tensor)
    known = {file.path: file for file in catalog.files}
    found: dict[str, bytes] = {}
    for path, tensors in by_file.items():
        with open_file(path, known.get(path)) as file:
            read = each(path, lambda t: file.read(t.chunks[0].offset_bytes, t.nbytes), tensors)
        found.update(zip((t.name for t in tensors), read, strict=True))
    return found
