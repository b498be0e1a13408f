"""Adapters of a live ``PeftModel``, full-size, in the files that ``PeftModel.save_pretrained`` writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from ..adapters.files import CONFIG_NAME, WEIGHTS_NAME
from ..adapters.names import adapter_tensors
from ..catalog import Chunk, StoredTensor
from ..internals.peft import embeddings_to_save, peft_model, stored_config
from ..layout.boxes import whole
from ..layout.live import LiveModel
from ..layout.spec import TensorSpec
from ..recipe.tiles import Tile, identity
from .files import HubFiles, header_of, specs_in
from .tensors import HubTensors

__all__ = ["adapter_assets", "chosen_adapters", "lay_out_adapters"]


def chosen_adapters(peft: Any, wanted: str | Sequence[str] | None) -> list[str]:
    """The names that the caller gave, or all of the model's. Raises :class:`ValueError` for one it does not have."""
    there = list(peft.peft_config)
    names = there if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        raise ValueError(
            f"adapters={wanted!r}: the model has the adapters {', '.join(map(repr, there))}; give one or several"
        )
    return names


def _folder(adapter: str) -> str:
    """Where PEFT's ``save_pretrained`` puts an adapter, inside the directory."""
    return "" if adapter == "default" else adapter


def lay_out_adapters(
    live: LiveModel, adapters: Sequence[str], dtype: str | None
) -> tuple[HubTensors, HubFiles]:
    """One file for each adapter: which bytes of it each tensor of the model is. Rank-local, pure.

    ``dtype`` is the stored dtype of floating-point tensors; None: as they are. Base embeddings lie beside an adapter as
    with PEFT's ``save_embedding_layers="auto"``.
    """
    peft = peft_model(live.root)
    hub: dict[str, TensorSpec] = {}
    tiles: dict[str, list[Tile]] = {}
    tensors, headers, sizes = {}, {}, {}
    for adapter in adapters:
        named = adapter_tensors(live, adapter, embeddings=embeddings_to_save(peft, adapter))
        held = {stored: t for stored, (_, t) in named.items()}
        own = {n: TensorSpec.of(t.tensor) for n, t in held.items()}
        specs = specs_in(own, dtype)
        file = os.path.join(_folder(adapter), WEIGHTS_NAME)
        header, offsets, end = header_of(specs)
        headers[file], sizes[file] = header, len(header) + end
        for stored, (code, shape) in specs.items():
            key = f"{adapter}:{stored}"
            hub[key] = own[stored]
            chunk = Chunk(whole(shape), file, len(header) + offsets[stored])
            tensors[key] = StoredTensor(stored, code, shape, (chunk,))
            if math.prod(shape):
                tiles.setdefault(held[stored].name, []).append(identity(key, shape))
    return HubTensors(hub, {n: tuple(found) for n, found in tiles.items()}), HubFiles(
        tensors, headers, sizes, None
    )


def adapter_assets(peft: Any, adapters: Sequence[str]) -> dict[str, bytes]:
    """The config of each adapter, by file name."""
    return {
        os.path.join(_folder(adapter), CONFIG_NAME): json.dumps(
            stored_config(peft, adapter), indent=2, sort_keys=True
        ).encode()
        for adapter in adapters
    }
