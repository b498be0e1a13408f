"""``export_hf``: writes a live model or a stored checkpoint as a hub directory; and ``iter_full_tensors``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..catalog.records import PIPELINE_NAME
from ..digests import added_sums
from ..dtypes import code_of, named_dtype, torch_dtype
from ..errors import CheckpointError, StateError
from ..internals.peft import active_adapters, adapted_model, has_adapters
from ..models.classes import import_code, in_turn
from ..models.homes import with_dtype
from ..models.layers import blocks_in, kept_in
from ..objects import frozen, gc_paused
from ..operations.operation import announced, this_operation
from ..operations.printed import Printed
from ..planning.plan import IOOptions
from ..planning.proof import Cast, casts_of, rounded_between
from ..ranks.ranks import Ranks, device_where_ranks_sum
from ..storage import absolute, is_file, join
from ..storage.records import is_url
from ..tensors.live import LiveModel, describe, is_declared
from ..tensors.tiles import Tile
from .again import AsSource, AsSourceJob, QuantizedSource, place_of_source
from .live import FullTensors, LiveJob, MergedJob, buckets, device_of, gathered, planned
from .pipelines import models_of, stored_models, write_pipeline
from .stored import StoredJob
from .write import HubFiles, HubTensors, Job, ToDirectory, ToStore, adapter_in_file, as_named

# ----------------------------------------------------------------------------------------------------
# ``export_hf``: a live model or a stored checkpoint as a hub-format directory, written by all ranks in place.
#
# It uses the transfers of a load in reverse: every rank computes the places of its boxes in the final files and writes
# them there. No rank gathers or holds a whole model.


@frozen
class ExportReport(Printed):
    """The result of an export on this rank."""

    path: str
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    """Payload bytes in all files."""
    bytes_written: int
    """Payload bytes that this rank wrote."""
    seconds: float
    as_source: AsSource | None = None
    """With ``quantize="as-source"``: how many tensors were copied and how many were quantized again."""
    casts: tuple[Cast, ...] = ()
    """With ``dtype=``: the tensors whose values it can't represent exactly."""


@announced("export", "out")
@gc_paused()
def export_hf(
    model_or_path: Any,
    out: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    pipeline: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    variant: str | None = None,
    adapters: str | Sequence[str] | None = None,
    merge: bool = False,
    quantize: Literal["as-source"] | None = None,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    io: IOOptions | None = None,
) -> ExportReport:
    """Write a model as a Hugging Face directory: hub names, index, config, and tokenizer and custom code if known.

    A diffusers model is written as its ``save_pretrained`` writes it. With adapters inside (``add_adapter``), it is written as its adapters, each in
    a ``pytorch_lora_weights.safetensors`` that a pipeline's ``load_lora_weights`` reads.

    Tied tensors are written once. A live ``PeftModel`` is written as its adapters, with the names, configs and folders of
    ``PeftModel.save_pretrained``, so that ``PeftModel.from_pretrained(base, out)`` can read them: ``default`` in ``out`` itself, every other
    adapter in a folder with its name, one file each. So are the adapters of a checkpoint. Base embeddings are included if they are adapted or resized.

    Args:
        model_or_path: a live (sharded) model, a checkpoint directory, or any other source that ``load`` accepts. Also a live diffusers
            pipeline, or a dict of models of one: each model is written into the folder of its name. A ``SentenceTransformer`` is written whole.
        out: a directory or a URL that must not exist or must be empty, unless ``overwrite`` is set. It appears complete or not at all. In a
            store, each rank writes complete files, the config and the index come last, and a failure deletes what was written.
        model_name: the model to export from a checkpoint with several, or from a pipeline's folder. With ``pipeline``, None exports all of them,
            and the only model of a checkpoint needs the name of its component here: ``"transformer"``, or ``"transformer=ema"`` for an extra
            with sharded tensors.
        pipeline: for stored models, a dict of models, or a live pipeline: the pipeline whose components they are, a directory or Hub ID. Everything
            that isn't one of these models is copied from there.
        config: directory with the config.json (and tokenizer and custom code), for a source without one, such as a DCP checkpoint. Without a
            config, the tensors keep their names.
        dtype: dtype of floating-point tensors in the output. Default: unchanged.
        variant: part of the names of the weight files, as in ``save_pretrained(variant="bf16")``. It changes no dtype.
        adapters: one or several adapters of a ``PeftModel`` or diffusers model, live or in a checkpoint. Default: all.
        merge: for a live ``PeftModel`` or diffusers model with adapters, write the base with the active adapters merged into it, as PEFT does, instead of the adapters. Each
            rank merges its own shards; only the adapters are gathered.
        quantize: ``"as-source"`` writes the model in the format of the quantized source from which it was loaded: the same codes, scales,
            names and ``quantization_config``. A tensor that still equals the source's dequantized tensor, bit for bit, is copied from
            there byte for byte; any other is quantized again by the format's own rule, which the report names (GPTQ and AWQ have none: their
            scales come from calibration data). Default: plain weights.
        source: with ``quantize``, the quantized source, a directory or a URL. Default: the source of the live model's last load, which must not
            have changed since; required for a stored model.
        max_shard_bytes: payload per file, unless a single tensor is larger.
        overwrite: replace an earlier export in a local directory. The new files are written first, then the two directories are swapped
            atomically, and the old files are deleted. Until then, both need disk space. A directory that doesn't look like an
            export is refused.
        trust_remote_code: run the Python files of a checkpoint's model, which define its hub names. Only models with custom code need it.

    Every rank of the default process group must call it. Each writes its own bytes at precomputed offsets in the final files. For a store, the
    ranks first gather a live model's tensors over the default process group. Tensors read from a checkpoint are checked against its
    recorded digests before any output appears. All files of a checkpoint are opened at the start, so it doesn't matter if a run deletes it during
    the export (:class:`CheckpointError` if the process may not open that many files). Memory: staging and 24 MiB; for a store, staging,
    two windows of 32 MiB, and four parts of 8 MiB. Raises :class:`CheckpointError`, :class:`SourceError`
    (:class:`IntegrityError` if content differs) or :class:`RankError` on every rank.
    """
    started = time.perf_counter()
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    final = absolute(out)
    models: Mapping[str, Any] | None = models_of(model_or_path)
    is_stored = models is None and pipeline is not None and not isinstance(model_or_path, nn.Module)
    if models is not None or is_stored:
        options: dict[str, Any] = {
            "dtype": dtype,
            "variant": variant,
            "max_shard_bytes": max_shard_bytes,
            "trust_remote_code": trust_remote_code,
            "io": io,
        }
        given = {
            "config": config,
            "adapters": adapters,
            "quantize": quantize,
            "source": source,
            **({"merge": merge} if is_stored else {"model_name": model_name}),
        }
        if refused := [name for name, value in given.items() if value]:
            raise ValueError(f"{refused[0]}= doesn't apply to a pipeline; export its models one by one")
        if is_stored:
            with ranks.agree("list the models"):
                models = stored_models(model_or_path, model_name)

        def write(model: Any, folder: str) -> ExportReport:
            if is_stored:
                return export_hf(model_or_path, folder, model_name=model, **options)
            return export_hf(model, folder, merge=merge, **options)

        with ranks.agree("check adapters"):
            for name, model in (models or {}).items():
                if isinstance(model, nn.Module) and has_adapters(model) and not merge:
                    raise ValueError(
                        f"{name!r} has adapters, and a pipeline needs the whole model: pass merge=True, or export the adapters alone, from the model"
                    )
        found = write_pipeline(
            model_or_path, models or {}, final, pipeline, write, ranks, overwrite=overwrite
        )
        return _joined(found, final, time.perf_counter() - started)
    counted = this_operation(final)
    if isinstance(model_or_path, nn.Module) and is_declared(model_or_path):
        _refuse_adapters_of_parts(model_or_path, ranks)
    with ranks.agree("open source"):
        if pipeline is not None:
            raise ValueError("pipeline= applies to stored models, or to a dict of models by component")
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
        if overwrite and is_url(final):
            raise ValueError(
                f"overwrite= replaces a local directory, and a store can't exchange two prefixes at once; export {final} to another one"
            )
        if isinstance(model_or_path, nn.Module) and (model_name, config) != (None, None):
            raise ValueError("model_name= and config= apply to stored models, not to a live one")
        if adapters is not None and isinstance(model_or_path, nn.Module) and not has_adapters(model_or_path):
            raise ValueError("adapters= needs a model with PEFT adapters; this one has none")
        if model_name is not None and is_file(join(str(model_or_path), PIPELINE_NAME)):
            model_or_path, model_name = join(str(model_or_path), model_name), None
        code = dtype_code(dtype)
        job: Job
        if quantize is not None or source is not None:
            if merge:
                raise ValueError("merge= and quantize= can't be combined; give one of them")
            _check_as_source(model_or_path, quantize, code)
            if isinstance(model_or_path, nn.Module):
                job = _live_as_source(describe(model_or_path), source, ranks, io)
            else:
                stored = StoredJob(model_or_path, model_name, config, trust_remote_code, ranks.tick, io)
                job = _stored_as_source(stored, source, ranks, io)
        elif isinstance(model_or_path, nn.Module):
            job = _live_job(describe(model_or_path), io, adapters, merge, code)
        elif merge:
            raise ValueError(
                "merge= needs a live PeftModel; this one is stored: load it with load_pretrained(base, adapter=…) and restore the step"
            )
        else:
            job = StoredJob(model_or_path, model_name, config, trust_remote_code, ranks.tick, io, adapters)
    with closing(job):
        if trust_remote_code and job.home is not None:
            in_turn(ranks, partial(import_code, job.home))
        job.prepare(ranks)
        with ranks.agree("plan export"):
            contents, output = job.lay_out(code, max_shard_bytes, variant)
            assets = _with_dtype(job.assets(), code) if ranks.rank == 0 else {}
        place: ToDirectory | ToStore = (
            ToStore(final, output, ranks, counted)
            if is_url(final)
            else ToDirectory(final, output, ranks, counted, overwrite=overwrite)
        )
        written = _write_out(job, contents, output, assets, place, ranks)
        return ExportReport(
            path=final,
            files=tuple(output.headers),
            tensors=len(output.tensors),
            total_bytes=output.total_bytes,
            bytes_written=written,
            seconds=time.perf_counter() - started,
            as_source=job.report(),
            casts=casts_of(rounded_between(contents.hub, output.tensors)),
        )


def _refuse_adapters_of_parts(model: nn.Module, ranks: Ranks) -> None:
    """Raises :class:`StateError` on every rank if any has adapters. Collective."""
    if ranks.combine("look for adapters", lambda: has_adapters(model), any):
        raise StateError(
            "a model that is declared in parts has adapters, which export_hf doesn't support. Save a checkpoint, restore it into the whole "
            "model on each rank, and export that"
        )


def _joined(reports: Mapping[str, ExportReport], final: str, seconds: float) -> ExportReport:
    """One report for the models of a pipeline."""
    each = reports.values()
    return ExportReport(
        path=final,
        files=tuple([os.path.join(name, file) for name, one in reports.items() for file in one.files]),
        tensors=sum(one.tensors for one in each),
        total_bytes=sum(one.total_bytes for one in each),
        bytes_written=sum(one.bytes_written for one in each),
        seconds=seconds,
        casts=tuple([cast for one in each for cast in one.casts]),
    )


def _check_as_source(model: object, quantize: object, dtype: str | None) -> None:
    """Raises :class:`ValueError` for options that do not go together."""
    if quantize != "as-source":
        raise ValueError(
            f"quantize must be 'as-source' or None, got {quantize!r}; source= goes with 'as-source'"
        )
    if dtype is not None:
        raise ValueError(
            "dtype= and quantize= can't be combined, because the source determines the dtypes; give one of them"
        )
    if isinstance(model, nn.Module) and has_adapters(model):
        raise ValueError(
            "quantize='as-source' needs a model without adapters: merge them into the weights first (PEFT's merge_and_unload()), "
            "or leave quantize= out to write the adapters alone"
        )


def _live_as_source(
    live: LiveModel, source: str | os.PathLike[str] | None, ranks: Ranks, io: IOOptions
) -> AsSourceJob:
    """The export of a live model in its source's format. Raises :class:`ValueError` if its weights are not plain."""
    if kept_in(live.root):
        raise ValueError(
            "quantize='as-source' needs plain weights, and this model holds the source's own codes and scales: without quantize= they "
            "are exported as they are, in the source's format"
        )
    if blocks_in(live.root):
        raise ValueError(
            "quantize='as-source' needs plain weights, and this model holds 4-bit codes: without quantize= they are exported "
            "dequantized; a load with quantized='dequantize' can be exported as its source"
        )
    found = QuantizedSource(place_of_source(live, source), lambda: live.tensors, ranks.tick, io)
    return AsSourceJob(LiveJob(live, io), found, io)


def _stored_as_source(
    stored: StoredJob, source: str | os.PathLike[str] | None, ranks: Ranks, io: IOOptions
) -> AsSourceJob:
    """The export of a stored model in a source's format; takes over ``stored``.

    Raises :class:`ValueError` without a source, :class:`UnsupportedConversionError` if the model is quantized itself.
    """
    try:
        if source is None:
            raise ValueError(
                "quantize='as-source' of a stored model needs source=: the quantized source that it was loaded from"
            )
        stored.refuse_codes()
        place = absolute(source), None
        found = QuantizedSource(place, stored.named, ranks.tick, io)
    except BaseException:
        stored.close()
        raise
    return AsSourceJob(stored, found, io)


def _write_out(
    job: Job,
    contents: HubTensors,
    output: HubFiles,
    assets: Mapping[str, bytes],
    place: ToDirectory | ToStore,
    ranks: Ranks,
) -> int:
    """Write and publish: the files appear complete or not at all. Returns this rank's bytes."""
    place.prepare()
    try:
        written = place.write(job, contents)
        added: list[Any] = []  # on rank 0
        own = np.array([written, *job.sums()], dtype=np.uint64)
        ranks.reduce("bytes exported", lambda: own, added_sums, added.append)
        with ranks.agree("publish export"):
            for found in added:
                total, *sums = found.tolist()
                job.check(sums)
                if total != output.total_bytes:
                    raise CheckpointError(
                        f"{place.final}: ranks wrote {total} bytes, expected {output.total_bytes}"
                    )
                place.publish(assets)
    except BaseException:
        if ranks.rank == 0:
            with ranks.patience():
                place.discard()
        raise
    return written


def dtype_code(dtype: torch.dtype | str | None) -> str | None:
    """The stored dtype that ``dtype=`` of an export asks for; None keeps each tensor's own. Raises :class:`ValueError`."""
    if dtype is None:
        return None
    found = named_dtype(dtype)
    if found is None or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch dtype or its name, got {dtype!r}")
    return code_of(found)


def _live_job(
    live: LiveModel, io: IOOptions, adapters: str | Sequence[str] | None, merge: bool, dtype: str | None
) -> Job:
    """The export of a live model: as it is, its adapters, or the base with them merged."""
    is_peft = adapted_model(live.root) is not None
    if merge and (not is_peft or adapters is not None):
        raise ValueError(
            "merge=True merges the active adapters of a live PeftModel (model.set_adapter chooses them); "
            + ("leave adapters= out" if is_peft else "this model is none")
        )
    held = kept_in(live.root)
    if held and (dtype is not None or merge):  # a cast would change scales alone
        raise ValueError(
            f"{next(iter(held))!r} and {len(held) - 1} other layers hold a source's codes and scales, which are written as they are: "
            f"{'merge=True' if merge else 'dtype='} needs plain weights; load with quantized='dequantize'"
        )
    if not merge and (is_peft or not blocks_in(live.root)):
        return LiveJob(live, io, adapters)
    return MergedJob(live, io, merge=merge)


def _with_dtype(files: Mapping[str, bytes], dtype: str | None) -> dict[str, bytes]:
    """The files, with the dtype in config.json (a JSON object) set to the exported one."""
    found = dict(files)
    if dtype is not None and "config.json" in found:
        config = with_dtype(json.loads(found["config.json"]), str(torch_dtype(dtype)).removeprefix("torch."))
        found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found


# ----------------------------------------------------------------------------------------------------
# ``iter_full_tensors``: a sharded model's full tensors, one bucket at a time, for example for an inference engine.


def iter_full_tensors(
    model: nn.Module,
    *,
    naming: Literal["hub", "module", "adapter"] = "hub",
    bucket_bytes: int = 512 * 1024**2,
    dtype: torch.dtype | str | None = None,
    timeout_s: float = 300.0,
) -> FullTensors:
    """Iterate over ``(name, full tensor)`` for all stored tensors of ``model``, in the same order on every rank.

    Yields the tensors that :func:`export_hf` would write, bit for bit, without writing files: every parameter and persistent buffer, tied
    ones once, on the device of the model's mesh (without a mesh, on the model's own). Tensors are gathered as you iterate. They belong to the
    caller: shardwise neither keeps nor changes them.

    Args:
        model: a live model, sharded in any way or not at all.
        naming: ``"hub"``: names and shapes as in the files from which it was loaded (otherwise those of its class). ``"module"``:
            names and shapes as in ``state_dict``, without wrapper prefixes. ``"adapter"``: only the active adapter of a ``PeftModel``,
            with the names in its file.
        bucket_bytes: how many bytes to gather at a time: as many tensors as fit, at least one.
        dtype: cast floating-point tensors to this dtype. Default: no cast.
        timeout_s: as in :class:`IOOptions`; nothing is read or written here.

    Every rank of the default process group must call it, iterate in step, and stop at the same tensor (with ``break`` or ``close()``; nothing
    is in flight between tensors). If a rank can't provide its part of a bucket, all ranks raise. If only some ranks stop, the others
    raise an error that names them after ``timeout_s``. Don't change the model during the iteration.

    Memory in addition to the shards: ``bucket_bytes``, or the largest tensor if that is larger, plus the tensors of the last bucket that
    the caller still holds (one tensor in a plain ``for`` loop). If the process group can't reduce on the model's device (a CPU model
    with NCCL only), the bucket is on the group's device and each tensor is copied. Traffic: one all-reduce per tensor.

    Raises, on every rank, :class:`CheckpointError` (hub names of a model with adapters), :class:`FormatError` (a conversion that can't be
    inverted), :class:`StateError` (nothing loaded yet) or :class:`RankError`.
    """
    ranks = Ranks.current(timeout_s=timeout_s)
    with ranks.agree("plan full tensors") as claim:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        live = describe(model)
        full = planned(live, contents_named(live, naming), dtype_code(dtype), ranks.rank)
        claim.alike([bucket_bytes, [[f.stored.name, f.stored.dtype, list(f.stored.shape)] for f in full]])
        device = device_of(live)
        sums_on = device_where_ranks_sum(device) if ranks.world_size > 1 else device
    return gathered(live, buckets(full, bucket_bytes), (sums_on, device), ranks)


def contents_named(live: LiveModel, naming: str) -> HubTensors:
    """The full tensors to yield, by name, and the tiles that map the model's tensors to them."""
    if naming == "hub":
        if has_adapters(live.root):
            raise CheckpointError(
                "a model with PEFT adapters has no Hub names: naming='adapter' gives the active adapter, "
                "naming='module' all tensors under the model's own names"
            )
        if blocks_in(live.root):
            raise CheckpointError(
                "a model that holds 4-bit codes has no full weights under Hub names: naming='module' gives its blocks; export_hf "
                "dequantizes them"
            )
        return LiveJob(live, IOOptions()).contents()
    if naming == "module":
        return as_named({t.name: live.spec(t) for t in live.stored})
    if naming == "adapter":
        return _adapter_contents(live)
    raise ValueError(f"naming must be 'hub', 'module' or 'adapter', got {naming!r}")


def _adapter_contents(live: LiveModel) -> HubTensors:
    peft = adapted_model(live.root)
    if peft is None:
        raise TypeError(f"naming='adapter': {type(live.root).__name__} is not a PeftModel")
    held = adapter_in_file(live, active_adapters(peft)[0])
    hub = {stored: live.spec(t) for stored, t in held.items()}
    tiles: dict[str, tuple[Tile, ...]] = {}
    for stored, t in held.items():
        tiles[t.name] = tiles.get(t.name, ()) + as_named({stored: hub[stored]}).tiles[stored]
    return HubTensors(hub, tiles)
