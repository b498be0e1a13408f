"""Configs without their quantization, and refusals of quantized sources where only plain ones are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..catalog.quantized import NAMES_IN_CONFIG, method_of_config, quantized, way_out
from ..catalog.records import Catalog
from ..errors import UnsupportedConversionError
from ..names import NamedTensor
from ..quantized.open import has_family


def refuse_source(catalog: Catalog, own: Callable[[], Iterable[NamedTensor]] | None = None) -> None:
    """Raise :class:`UnsupportedConversionError`, in one line, if a source holds codes that a model has no tensors for.

    Float8 tensors without scales are no codes. Rank-local; looks at names only. ``own`` gives the tensors of the model; it
    is called only where the source looks quantized, which the model may be, too.
    """
    found = quantized(catalog.tensors)
    if found is not None and own is not None:
        found = quantized(catalog.tensors, [name for t in own() for name in t.names])
    if found is not None:
        advice = way_out(found.method)
        if has_family(found.method):
            advice = f"load it with load_pretrained, which dequantizes it, and export the model; or {advice}"
        raise UnsupportedConversionError(
            f"{catalog.root}: quantized ({found.method}: {found.codes!r} goes with {found.beside!r}), which isn't "
            f"accepted here; {advice}"
        )


def plain_config(config: Any, catalog: Catalog | None, path: str, *, given: bool) -> Any:
    """The config of a load (the source's or a given one), without the quantization of a source that is loaded dequantized.

    A training checkpoint holds the trained tensors, even if its config still names a quantization. Rank-local. Raises
    :class:`UnsupportedConversionError` for a quantization of which the source has no codes.
    """
    method = method_of_config(config)
    if not method or (catalog is not None and catalog.has_module_names and not given):
        return config
    found = quantized(catalog.tensors) if catalog is not None else None
    if found is not None:
        return _without_quantization(config)
    if given:
        refuse_request(config, "config=")
    if catalog is not None and catalog.tensors:
        raise UnsupportedConversionError(
            f"{path}: config.json says that it is quantized ({method}), but its tensors are plain: none has scales. To load them "
            f"as they are, give a config without that setting: config = AutoConfig.from_pretrained(…); del config.quantization_config"
        )
    raise UnsupportedConversionError(
        f"{path}: quantized ({method}, says the config), which can't be loaded yet; {way_out(method)}"
    )


def _without_quantization(config: Any) -> Any:
    """A copy of a config in which neither it nor a part of it names a quantization."""
    config = copy.deepcopy(config)
    forget_quantization(config)
    return config


def forget_quantization(config: Any) -> None:
    """Take what names a quantization out of a config and its parts: its model holds plain weights."""
    waiting = [config]
    while waiting:
        section = waiting.pop()
        if isinstance(section, dict):  # of diffusers, which has no parts
            for name in NAMES_IN_CONFIG:
                section.pop(name, None)
            continue
        for name in NAMES_IN_CONFIG:
            if name in vars(section):
                delattr(section, name)
        waiting += [part for part in vars(section).values() if hasattr(part, "to_diff_dict")]


def refuse_request(wanted: Any, where: str) -> NoReturn:
    """Raise :class:`UnsupportedConversionError` for a quantization requested in ``where``."""
    method = (
        method_of_config(wanted) or method_of_config({"quantization_config": wanted}) or "of no named method"
    )
    raise UnsupportedConversionError(
        f"{where} asks for a quantized model ({method}), and is not how a load is asked for one: give load_pretrained "
        f"quantized=BitsAndBytesConfig(load_in_4bit=True, …), or leave it out for plain weights. Other methods: quantize with "
        f"transformers' from_pretrained, in one process without sharding"
    )
