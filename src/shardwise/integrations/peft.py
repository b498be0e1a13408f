"""PEFT: loads a base model and its LoRA adapters by one plan; saves the adapter alone, full-size, in PEFT's format.

Build the base on meta, let PEFT wrap it, shard, load, make the optimizer::

    with sw.meta_init():
        model = peft.get_peft_model(base, lora_config)
    sw.shard(model, mesh)
    shardwise.integrations.peft.load(model, "path/to/base")            # adapter initialised by PEFT's own rule
    shardwise.integrations.peft.save_adapter(model, "runs/a/adapter")  # for PeftModel.from_pretrained

or, in one call, ``sw.load_pretrained("path/to/base", mesh, adapter=lora_config)``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..adapters.files import CONFIG_NAME, WEIGHTS_NAME, combine, open_adapters
from ..adapters.names import adapter_tensors
from ..catalog import Catalog, Chunk, StoredTensor
from ..catalog.open import open_catalog
from ..dtypes import code_of
from ..export.files import HubFiles, header_of
from ..export.hub import ExportReport, HubTensors, LiveJob, write_out
from ..internals.peft import base_of, embeddings_to_save, peft_model, stored_config
from ..layout.boxes import whole
from ..loading.load import _init_rules, fill, hub_rules_of
from ..loading.report import LoadReport
from ..models.unquantized import refuse_source
from ..plan import IOOptions
from ..ranks.ranks import Ranks
from ..recipe.match import Rules, matches_any, same_names
from ..recipe.tiles import Tile, identity
from ..recipe.transformers import note_conversions

__all__ = ["load", "save_adapter"]


def load(
    model: nn.Module,
    base: str | os.PathLike[str] | Catalog,
    *,
    adapter: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    unused: Sequence[str] = (),
    init: Mapping[str, str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] | None = None,
    ignored: Sequence[str] = (),
) -> LoadReport:
    """Fill a sharded ``PeftModel`` in place: the base from ``base``, its adapters from their directories.

    One plan and one proof of cover for all files. Adapters without a directory get the values of PEFT's own rule
    (``init_lora_weights``; DoRA's magnitudes follow from the loaded weights), the same at every world size, and
    their ``modules_to_save`` copies those of the base. The report lists what was initialised.

    Args:
        model: a ``PeftModel``, sharded in any way, on meta or not.
        base: a source of :func:`shardwise.load` for the base model alone.
        adapter: a directory that PEFT or :func:`save_adapter` wrote, or a mapping of adapter names to such directories.
        seed: seed of initial values.
        unused, init, device, io, verify, ignored: as for :func:`shardwise.load`. Names are those of the wrapped
            model, or the base's. Stored names of an adapter begin with its own: ``default:base_model.model.…``.

    Every rank of the default process group must call it. Memory and errors as :func:`shardwise.load`;
    :class:`PlanError` also for adapters that have no sharded form (another method than LoRA, an initialisation that
    needs weights or data, a quantised base, settings other than the model's).
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    with ranks.agree("open base and adapters"):
        files = open_adapters(model, adapter)
        catalog = base if isinstance(base, Catalog) else open_catalog(base)
        refuse_source(catalog, model)
        declared = _init_rules(init)
        hub = hub_rules_of(model, catalog)
        rules = Rules(
            hub.resolve if hub else same_names,
            unused=lambda stored, _: "caller" if matches_any(stored, unused) else None,
            init=lambda name: "caller" if matches_any(name, declared) else None,
            caller_declares=True,
        )
        catalog, rules = combine(model, catalog, rules, files)
    report = fill(
        model,
        catalog,
        rules,
        device=device,
        io=io,
        ranks=ranks,
        verify=verify,
        seed=seed,
        ignored=tuple(ignored),
    )
    if hub is not None:
        note_conversions(base_of(model), hub.used())
    return report


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter_name: str | Sequence[str] | None = None,
    save_embedding_layers: bool | Literal["auto"] = "auto",
    io: IOOptions | None = None,
) -> ExportReport:
    """Write adapters of a sharded ``PeftModel`` as ``PeftModel.save_pretrained`` does: names, dtypes, config, folders.

    The adapter ``default`` lies in ``directory`` itself, every other one in a folder of its name. Tensors have
    their full size. ``PeftModel.from_pretrained(base, directory)`` opens it.

    Args:
        directory: must not exist, or be empty. It appears complete or not at all.
        adapter_name: one or several of the model's adapters. Default: all.
        save_embedding_layers: as for PEFT: base embeddings beside the adapter; "auto" if they are adapted or their
            size differs from the base's config.

    Every rank of the default process group must call it; each writes its own bytes at precomputed offsets. Memory:
    staging only. Raises :class:`CheckpointError`, or :class:`RankError` alike on every rank.
    """
    started = time.perf_counter()
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    final = os.path.abspath(directory)
    with ranks.agree("plan adapter"):
        peft = peft_model(model)
        if peft is None:
            raise TypeError(
                f"{type(model).__name__} is not a PeftModel; its weights are written by export_hf()"
            )
        job = LiveJob(model)  # reshards gathered parameters first
        chosen = _chosen(list(peft.peft_config), adapter_name)
        contents, output = _lay_out(peft, chosen, save_embedding_layers)
        assets = _configs(peft, chosen) if ranks.rank == 0 else {}
    written = write_out(job, contents, output, assets, final, ranks, io)
    return ExportReport(
        final,
        tuple(output.headers),
        len(output.tensors),
        output.total_bytes,
        written,
        time.perf_counter() - started,
    )


def _chosen(there: list[str], wanted: str | Sequence[str] | None) -> list[str]:
    names = there if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        raise ValueError(
            f"adapter_name={wanted!r}: the model has the adapters {', '.join(map(repr, there))}; give one or several"
        )
    return names


def _folder(adapter: str) -> str:
    """The folder of an adapter inside the directory, as in PEFT's ``save_pretrained``."""
    return "" if adapter == "default" else adapter


def _lay_out(
    peft: Any, adapters: Sequence[str], embeddings: bool | Literal["auto"]
) -> tuple[HubTensors, HubFiles]:
    """One file for each adapter, and the bytes in it of each tensor of the model."""
    hub: dict[str, tuple[str, tuple[int, ...]]] = {}
    tiles: dict[str, list[Tile]] = {}
    tensors, headers, sizes = {}, {}, {}
    for adapter in adapters:
        which = embeddings_to_save(peft, adapter) if embeddings == "auto" else embeddings
        held = {stored: t for stored, (_, t) in adapter_tensors(peft, adapter, embeddings=which).items()}
        kinds = {n: (code_of(t.tensor.dtype), tuple(t.tensor.shape)) for n, t in held.items()}
        file = os.path.join(_folder(adapter), WEIGHTS_NAME)
        header, offsets, end = header_of(kinds)
        headers[file], sizes[file] = header, len(header) + end
        for stored, (code, shape) in kinds.items():
            key = f"{adapter}:{stored}"
            hub[key] = (code, shape)
            chunk = Chunk(whole(shape), file, len(header) + offsets[stored])
            tensors[key] = StoredTensor(stored, code, shape, (chunk,))
            if math.prod(shape):
                tiles.setdefault(held[stored].name, []).append(identity(key, shape))
    return HubTensors(hub, {n: tuple(found) for n, found in tiles.items()}), HubFiles(
        tensors, headers, sizes, None
    )


def _configs(peft: Any, adapters: Sequence[str]) -> dict[str, bytes]:
    return {
        os.path.join(_folder(adapter), CONFIG_NAME): json.dumps(
            stored_config(peft, adapter), indent=2, sort_keys=True
        ).encode()
        for adapter in adapters
    }
