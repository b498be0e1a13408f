"""The records that describe every kind of source, and the table of kinds that other programs write."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..errors import FormatError, SourceError
from ..format.header import describe_steps
from ..limits import brief, inside, read_shallow_json, read_small
from ..objects import frozen
from ..storage import is_directory, is_file, names_in
from ..storage.records import is_url, join
from ..tensors.boxes import Box, find_overlap, whole

if TYPE_CHECKING:
    import torch

    from ..format.manifest import TensorEntry


# ----------------------------------------------------------------------------------------------------
# The records that describe every kind of source.


@frozen
class Chunk:
    """A box of a stored tensor: row-major bytes at ``offset_bytes`` of the file at ``path``."""

    box: Box
    path: str
    offset_bytes: int


@frozen
class SharedChunk:
    """The same chunk of many identically sharded tensors: one box, one file, and an offset per tensor by position."""

    box: Box
    path: str
    offsets_bytes: NDArray[np.int64]


class SharedCut(Protocol):
    """The cut that tensors of one shape share."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of these tensors."""

    def touching(self, box: Box) -> Sequence[SharedChunk]:
        """The chunks that share an element with a box."""


class Chunks(Sequence[Chunk]):
    """The chunks of a tensor with a shared cut, found by box. Iterating over it makes them all."""

    __slots__ = ("_all", "cut", "position")

    def __init__(self, cut: SharedCut, position: int) -> None:
        self.cut = cut
        self.position = position
        self._all: tuple[Chunk, ...] | None = None

    def touching(self, box: Box) -> list[Chunk]:
        """The chunks that share an element with a box."""
        found = self.cut.touching(box)
        return [Chunk(c.box, c.path, int(c.offsets_bytes[self.position])) for c in found]

    def every(self) -> tuple[Chunk, ...]:
        """All chunks, ordered by box."""
        if self._all is None:
            self._all = tuple(sorted(self.touching(whole(self.cut.shape)), key=lambda c: c.box))
        return self._all

    def __len__(self) -> int:
        return len(self.every())

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self.every()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.every())


@frozen
class StoredTensor:
    """A tensor of a source; its chunks cover it exactly once. A plan asks for :meth:`chunks_touching` a box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    def chunks_touching(self, box: Box) -> Sequence[Chunk]:
        """The chunks that share an element with ``box``."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.touching(box)
        if len(self.chunks) == 1:  # and it is the whole tensor
            return self.chunks
        return [chunk for chunk in self.chunks if chunk.box.intersect(box) is not None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@frozen
class StoredFile:
    """A file of a source, or an object of a store: its path and size in bytes."""

    path: str
    nbytes: int
    version: str | None = None
    """As :attr:`.Stat.version`, when the catalog was made: a load reads no other."""


#: Roles of the parts that say how codes are scaled: scales, and the group of each column.
_SCALING = ("scales", "global", "nested", "book", "groups")


class Rule:
    """How elements of one tensor are made from its parts. Pure, and the same for every element, however boxes are cut."""

    __slots__ = ()
    is_turned: bool = False
    """Whether parts are stored with their last two dims the other way round: :meth:`opened` transposes them once, in memory of its own."""
    columns_together: int = 0
    """Columns of a turned matrix that share words of codes and a group; a box should begin and end at a multiple of it. 0: no such matrix."""
    if TYPE_CHECKING:  # a property at run time would be the default of a record's field

        @property
        def format(self) -> str:
            """In words, for reports: "FP8 (E4M3) in blocks of 128 x 128"."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each part (by its role) that a box of the tensor is made from."""
        raise NotImplementedError

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The elements of ``box``, with its sizes, in the dtype of :attr:`Coded.tensor`, or in F32 if that dtype holds them exactly.

        ``parts``: the elements of :meth:`boxes`, each of its box's sizes and of its stored dtype. They may be overwritten by the
        next read. Memory: a few times the elements. Raises :class:`IntegrityError` for scales that are NaN or infinite.
        """
        raise NotImplementedError

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """A function that decodes any box within ``box``, as :meth:`decode` does.

        ``parts``: as for :meth:`decode`, of ``box``. The function may keep them, so they must not change while it is used.
        """
        outer = self.boxes(box)

        def decode(inner: Box) -> torch.Tensor:
            own = {role: parts[role][part.slices_in(outer[role])] for role, part in self.boxes(inner).items()}
            # reshape, for contiguous() keeps odd strides of dims of one
            return self.decode(inner, {role: part.reshape(-1).view(part.shape) for role, part in own.items()})

        return decode

    def scale_boxes(self, box: Box) -> Mapping[str, Box]:
        """The boxes of the parts that say how the codes of a box are scaled. Empty for a plain tensor that is quantized when it is read."""
        return {role: part for role, part in self.boxes(box).items() if role in _SCALING}

    def check_scales(self, box: Box, parts: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`IntegrityError`, which names the tensor, if a scale is NaN or infinite, or if a group doesn't exist.

        ``parts``: the elements of :meth:`scale_boxes`; ``box`` is not empty.
        """
        raise NotImplementedError


@frozen(eq=False)
class Coded:
    """A tensor that a source stores in parts: codes, scales, maybe zero points, an index of groups, a code book.

    A plan sees :attr:`tensor`, an ordinary stored tensor in a file that does not exist, so every recipe, mesh and strategy takes it
    as any other; a read of it reads boxes of its parts, and decodes them.
    """

    tensor: StoredTensor
    """The tensor that the parts stand for, as if it were stored: its one chunk names :attr:`path`."""
    parts: Mapping[str, StoredTensor]
    """The stored tensors by their roles: ``codes``, ``scales``, ``zeros``, …"""
    rule: Rule

    @property
    def path(self) -> str:
        """A file that does not exist, which orders like the file and place of the codes."""
        return self.tensor.chunks[0].path

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    def bytes_of(self, box: Box) -> int:
        """Bytes of the parts that a box is made from."""
        boxes = self.rule.boxes(box)
        return sum(part.numel * itemsize(self.parts[role].dtype) for role, part in boxes.items())


@frozen
class Quantization:
    """What a source says of its own quantization, beside the tensors."""

    settings: Mapping[str, Any]
    """``quantization_config`` of its config.json; empty if there is none."""
    content: Mapping[str, bytes]
    """What describes others, by name: bitsandbytes' ``quant_state``, compressed-tensors' ``weight_shape``, torchao's metadata."""


@frozen
class Catalog:
    """Everything that planning knows of a source.

    ``ignored_files`` look like payload but do not belong to the source (they are outside its index); ``ignored_entries`` are stored in
    its file next to the model.
    ``digests`` are content digests by stored name, if the source records them.
    """

    kind: str
    root: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    ignored_files: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)
    quantization: Quantization = field(default_factory=lambda: Quantization({}, {}))
    coded: Mapping[str, Coded] = field(default_factory=dict)
    """Tensors that the source stores in parts, by the path of their chunk."""
    kept: tuple[Coded, ...] = ()
    """Tensors that the source stores in parts, and whose parts the model holds as they are stored."""
    referred: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Tensors of which a checkpoint holds only digests; they are not among ``tensors``."""
    passed_over: tuple[str, ...] = ()
    """Files among ``ignored_files`` that are another model, or another part of this one."""
    unheld: Mapping[str, str] = field(default_factory=dict)
    """Entries of the index, tensor and file, that none of the files holds."""
    ignored_entries: tuple[str, ...] = ()

    @property
    def has_module_names(self) -> bool:
        """Whether tensors have module names, as in a training checkpoint, and not hub names."""
        return self.kind in ("checkpoint", "dcp", "full state", "slices")

    @property
    def nbytes(self) -> int:
        """Payload bytes of all stored tensors."""
        whole = sum(t.nbytes for t in self.tensors.values())
        return whole + sum(one.stored_bytes - one.tensor.nbytes for one in self.coded.values())


def assemble(name: str, dtype: str, chunks: Iterable[Chunk]) -> StoredTensor:
    """One stored tensor from its chunks. Raises :class:`FormatError` if two overlap or a part is missing."""
    found = tuple(sorted(chunks, key=lambda c: c.box))
    if len(found) == 1 and not any(found[0].box.start):
        return StoredTensor(name, dtype, found[0].box.stop, found)
    ndim = len(found[0].box.start)
    shape = tuple(max(c.box.stop[d] for c in found) for d in range(ndim))
    overlap = find_overlap(c.box for c in found)
    if overlap:
        first, second = (next(c.path for c in found if c.box == box) for box in overlap)
        if overlap[0] == overlap[1]:
            first, second = [c.path for c in found if c.box == overlap[0]][:2]
        raise FormatError(
            f"tensor {name!r} is stored twice: {_describe(overlap[0])} in {first} and {_describe(overlap[1])} "
            f"in {second}; remove one copy (or list the right file in the index)"
        )
    held = sum(c.box.numel for c in found)
    if held != whole(shape).numel:
        raise FormatError(
            f"tensor {name!r} is only partly stored: its chunks contain {held} of {whole(shape).numel} elements of "
            f"shape {shape}; a slice file is missing",
            path=found[0].path,
        )
    return StoredTensor(name, dtype, shape, found)


def _describe(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


# ----------------------------------------------------------------------------------------------------
# What other programs leave behind: one table of kinds, each with its marks, what works with it, and the line to write.
#
# A kind is told by names in a directory, by a file's name, or by its first bytes; nothing is opened further. What is
# recognized and can't be read is refused by its name, by every reader of a path. What isn't recognized isn't guessed.

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
    first: tuple[bytes, ...] = ()
    """The first bytes of a single file of this kind, one of these."""
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

#: The file by which a directory is one step of Megatron-core's distributed checkpoints.
MEGATRON_FILE = "metadata.json"
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
#: Key of a catalog's metadata: the vocabulary was padded to the next multiple of this.
VOCABULARY_MULTIPLE = "shardwise.vocabulary_multiple"

#: The file that lists a pipeline's components.
PIPELINE_NAME = "model_index.json"
PIPELINE = Kind(
    name=f"a diffusers pipeline ({PIPELINE_NAME})",
    marks=(re.escape(PIPELINE_NAME),),
    unless=_NAMED_WEIGHTS,  # a pipeline often has its weights for other programs, too: flux1-dev.safetensors
    instead="Load it with sw.load_pipeline('{path}', mesh, shard=('transformer',)); or give the directory of one of its models, "
    "such as {path}/transformer, {path}/unet or {path}/vae",
)

ZERO = Kind(
    name="a DeepSpeed checkpoint (ZeRO)",
    marks=(
        r"zero_to_fp32\.py|latest_universal|global_step\d+|(.*_)?mp_rank_\d+_(model|optim)_states\.pt|.*_optim_states\.pt",
    ),
    works=_RESTORED,
    instead=_CONVERT,
)

MEGATRON = Kind(
    name="a Megatron-LM checkpoint (torch_dist)",
    marks=(r"\.metadata", re.escape(MEGATRON_FILE)),
    works=_RESTORED,
    instead=_CONVERT,
)
MEGATRON_RUN = Kind(
    name="a run of Megatron-LM",
    marks=(rf"{re.escape(_MEGATRON_LATEST)}|latest_train_state\.pt|iter_\d{{7}}",),
    works=_RESTORED,
    instead=_CONVERT,
)

#: In this order: the first whose marks are all there.
KINDS: tuple[Kind, ...] = (
    Kind(
        name="a NeMo checkpoint (Megatron's parallel layout)",
        marks=(r"context", r"weights"),
        file=r".*\.nemo",
        instead="Export it with NeMo: nemo.collections.llm.export_ckpt(path='{path}', target='hf', output_path=OUT); then give OUT",
    ),
    Kind(
        name="a verl run (global_step_N)",  # verl's file has the same name as Megatron-LM's
        marks=(r"latest_checkpointed_iteration\.txt", r"global_step_\d+"),
        instead="Give the folder of one of its models, such as {path}/global_step_N/actor",
    ),
    Kind(
        name="a Megatron-LM checkpoint (a file for each rank)",
        marks=(r"mp_rank_\d+(_\d+)*",),
        file=r"model_optim_rng\.pt|distrib_optim\.pt",
        instead="Let Megatron-LM convert it: start the run once with --load RUN --ckpt-convert-format torch_dist --ckpt-convert-save OUT; then "
        "give OUT",
    ),
    MEGATRON_RUN,
    MEGATRON,
    Kind(
        name="what the ranks of a Megatron-LM checkpoint share",
        file=r"common\.pt",
        instead="Give its directory: {folder}",
    ),
    ZERO,
    Kind(
        name="one rank's file of a DeepSpeed checkpoint (ZeRO)",
        file=r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt",
        instead="Give its directory: {folder}",
    ),
    Kind(
        name="a checkpoint from verl, SkyRL or another RL engine (one file per rank)",
        marks=(r"(model|optim)_world_size_\d+_rank_\d+\.pt",),
        file=r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt",
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="an Accelerate checkpoint of FSDP1's flat parameters (LOCAL_STATE_DICT)",
        marks=(r"(pytorch_model_fsdp|pytorch_model)_rank\d+\.bin",),
        file=r"(pytorch_model_fsdp|pytorch_model)_rank\d+\.bin",
        instead="The place of each part in its tensor isn't stored. Resume it once with Accelerate at the same number of ranks, and save "
        "there with SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    Kind(
        name="an Accelerate checkpoint with one file per rank (use_dcp=False)",
        marks=(r"(pytorch_model_fsdp|optimizer)_\d+_rank\d+\.bin",),
        file=r"(pytorch_model_fsdp|optimizer)_\d+_rank\d+\.bin",
        works=_RESTORED,
        instead=_CONVERT,
    ),
    PIPELINE,
    Kind(
        name="a sharded Lightning checkpoint",
        marks=(r"\.metadata", r"meta\.pt"),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a DCP checkpoint (torch.distributed.checkpoint)",
        marks=(r"\.metadata",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="an HF Trainer checkpoint",
        marks=(r"trainer_state\.json",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="an Accelerate checkpoint (save_state)",
        marks=(
            r"pytorch_model_fsdp(_\d+)?(\.bin)?|optimizer_\d+|optimizer(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|scheduler(_\d+)?\.bin",
        ),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="a distributed transformers checkpoint (slices)",
        marks=(r"shard-\d+-model-\d+-of-\d+\.safetensors",),
        works=_RESTORED,
        instead=_CONVERT,
    ),
    Kind(
        name="an Orbax checkpoint (JAX)",
        marks=(r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_\d+",),
        instead="Restore it in JAX (orbax.checkpoint.StandardCheckpointer().restore(path)) and write the tensors with "
        "safetensors.flax.save_file(…, 'model.safetensors'); then give that file",
    ),
    Kind(
        name="a GGUF model (llama.cpp)",
        marks=(r".*\.gguf",),
        file=r".*\.gguf",
        first=(b"GGUF",),
        instead="Use the model's safetensors. If there are none, convert it with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(OUT), or with diffusers: model = "
        "CLASS.from_single_file(FILE, config=DIR, quantization_config=GGUFQuantizationConfig(compute_dtype=torch.bfloat16)); "
        "model.dequantize(); model.save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="a Flax model (msgpack)",
        marks=(r"flax_model.*\.msgpack.*|.*\.msgpack",),
        file=r".*\.msgpack",
        instead="Use the model's safetensors, or convert it with transformers 4: "
        "AutoModel.from_pretrained(DIR, from_flax=True).save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="a TensorFlow model",
        marks=(r"tf_model.*\.h5.*|saved_model\.pb|.*\.data-\d{5}-of-\d{5}",),
        file=r".*\.(h5|pb|keras)|.*\.data-\d{5}-of-\d{5}|.*ckpt.*\.(index|meta)",
        first=(b"\x89HDF\r\n\x1a\n",),
        instead="Use the model's safetensors, or convert it with transformers 4: "
        "AutoModel.from_pretrained(DIR, from_tf=True).save_pretrained(OUT); then give OUT",
    ),
    Kind(
        name="an ONNX model",
        marks=(r".*\.onnx",),
        file=r".*\.onnx|.*\.onnx_data",
        instead="It is a graph for inference: use the safetensors of the model that it was exported from",
    ),
    Kind(
        name="a Git LFS pointer, without the file's content",
        first=(b"version ",),
        instead="Run git lfs pull in its directory, or download the file again: hf download REPOSITORY",
    ),
    Kind(
        name="a web page",
        first=(b"<!DOCTYP", b"<!doctyp", b"<html"),
        instead="Download the file again; for a model of the Hub: hf download REPOSITORY",
    ),
    Kind(
        name="a single file of a DCP checkpoint (torch.distributed.checkpoint)",
        file=r".*\.distcp|\.metadata",
        instead="Give its directory: {folder}",
    ),
    Kind(
        name="a torch.save file",
        file=r".*\.(bin|pt|pth|ckpt)",
        first=(b"PK\x03\x04",),
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
#: Files of torch.save, one for each rank: verl's and SkyRL's, which name the number of ranks, and Accelerate's (use_dcp=False).
_RANK_FILE = re.compile(
    r"(?P<stem>(model|optim|extra_state)(?=_world)|(pytorch_model_fsdp|optimizer)_\d{1,3})"
    r"(_world_size_(?P<size>\d{1,6}))?_rank_?(?P<rank>\d{1,6})\.(pt|bin)"
)
#: Files of DeepSpeed ZeRO: of each rank, or, up to ZeRO 2, one for the model.
ZERO_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<model_rank>\d{1,6})_(?P<part>model|optim)_states\.pt"
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


def rank_files_in(folder: str, stem: str) -> tuple[str, ...]:
    """The paths of the files of all ranks, in their order; none if the folder has no such file. ``stem``: what their names begin with.

    Lists the folder. Raises :class:`SourceError` if a rank's file is missing, :class:`FormatError` if there are files of several numbers
    of ranks.
    """
    found = [m for m in map(_RANK_FILE.fullmatch, _names(folder)) if m and m["stem"] == stem]
    if not found:
        return ()
    by_rank = {int(m["rank"]): m[0] for m in found}
    sizes = sorted({int(m["size"]) if m["size"] else max(by_rank) + 1 for m in found})
    if len(sizes) > 1:
        raise FormatError(
            f"has files of runs on {' and '.join(map(str, sizes))} ranks ({stem}_*); move one run's files elsewhere",
            path=folder,
        )
    missing = [rank for rank in range(sizes[0]) if rank not in by_rank]
    if missing or len(by_rank) > sizes[0]:
        which = f"rank(s) {brief(missing)} of {sizes[0]}" if missing else f"{len(by_rank)} ranks"
        have = "has no file" if missing else "has files"
        raise SourceError(
            f"{have} of {which} ({stem}_*); copy the files of all hosts into one folder", path=folder
        )
    return tuple(join(folder, by_rank[rank]) for rank in range(sizes[0]))


def stem_of_ranks(path: str) -> str | None:
    """The stem of :func:`rank_files_in`, if a path has the name of one rank's file: it then stands for those of all ranks in its folder."""
    match = _RANK_FILE.fullmatch(os.path.basename(path))
    return match and match["stem"]


def zero_folder(path: str) -> str | None:
    """The folder of one step of DeepSpeed ZeRO: ``path``, or the one below it that its file ``latest`` (or ``latest_universal``) names; None if there is none.

    Lists the folders. Raises :class:`SourceError` if ``latest`` can't be read, or leads elsewhere.
    """
    names = _names(path)
    if kind_in(names) is not ZERO:  # others have a latest, too
        return None
    folder = path.rstrip("/")
    if latest := next((name for name in ("latest", "latest_universal") if name in names), None):
        tag = read_small(join(path, latest), f"DeepSpeed's {latest}", 1024).decode(errors="replace").strip()
        folder, names = inside(path, tag), _names(inside(path, tag))
    is_universal = "zero" in names and any(map(ZERO_FILE.fullmatch, names))
    return folder if is_universal or any(name.endswith("_optim_states.pt") for name in names) else None


def megatron_folder(path: str) -> str | None:
    """The folder of one step of Megatron-core: ``path``, or the one below it that Megatron saved last; None if there is none.

    Lists the folders. Raises :class:`SourceError` if that folder isn't there, or is of another kind.
    """
    names = _names(path)
    kind = kind_in(names)
    if kind not in (MEGATRON, MEGATRON_RUN):
        return None
    folder = path.rstrip("/")
    if kind is MEGATRON:
        return folder
    steps = [name for name in names if re.fullmatch(r"iter_\d{7}|release", name)]
    last = max(steps, default="", key=lambda name: (name != "release", name))
    if _MEGATRON_LATEST in names:
        said = read_small(join(path, _MEGATRON_LATEST), f"Megatron's {_MEGATRON_LATEST}", 1024)
        tag = said.decode(errors="replace").strip()
        last = f"iter_{tag:>07}" if re.fullmatch(r"\d{1,7}", tag) else tag
    folder = inside(path, last or "iter_0000000")
    refuse_foreign(folder)
    if kind_in(_names(folder)) is not MEGATRON:
        raise SourceError(f"has no {MEGATRON_FILE}, which the last step of {path} should have", path=folder)
    return folder


def refuse_foreign(path: str) -> None:
    """Refuse a directory or file of a kind that can't be read, by its name. Rank-local; see :func:`kind_of`.

    Raises :class:`SourceError`.
    """
    kind = kind_of(path)
    if kind is not None and not kind.works:
        raise SourceError(kind.refusal(path), path=path)


def kind_below(path: str) -> tuple[str, Kind] | None:
    """The first folder below a local directory that another program wrote, and its kind. Lists at most 64 folders."""
    if is_url(path) or not os.path.isdir(path):
        return None
    for name in sorted(_names(path))[:_MOST_FOLDERS]:
        folder = join(path, name)
        kind = kind_in(_names(folder)) if os.path.isdir(folder) else None
        if kind is not None:
            return name, kind
    return None


def refuse_content(error: FormatError) -> None:
    """Refuse a local file whose name promises weights, by the kind that its first bytes tell. Raises :class:`SourceError`."""
    path = error.path or ""
    kind = _kind_of_file("", _first_bytes(path))
    if kind is None or (kind.works and not path.endswith(".safetensors")):
        return
    what = (
        f"is {kind.name}, not safetensors: rename it so that it ends in .bin"
        if kind.works
        else kind.refusal(path)
    )
    raise SourceError(what, path=path) from error


def refuse_named(path: str) -> None:
    """Refuse one object of a store by its name alone: its folder may not be listed. Raises :class:`SourceError`."""
    kind = _kind_of_file(_base(path), b"")
    if kind is not None and not kind.works:
        raise SourceError(kind.refusal(path), path=path)


def refuse_below(path: str) -> None:
    """Refuse a directory in which nothing was recognized, if another program wrote one of its folders.

    Rank-local. Raises :class:`SourceError`.
    """
    if found := kind_below(path):
        name, kind = found
        folder = join(path, name)
        what = f"is {kind.name}; give {folder}" if kind.works else kind.refusal(folder)
        raise SourceError(f"its folder {name} {what}", path=path)


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
        keys=frozenset({"architecture", "pretrained_cfg"}),
        name="a timm model ({architecture})",
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
            f"is {_filled(kind.name, said)}, not a transformers model, so its class isn't known. {_filled(kind.instead, said)}",
            path=directory,
        )


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text


# ----------------------------------------------------------------------------------------------------
# A catalog as bytes, for a rank that does not see the files.


def packed_catalog(catalog: Catalog) -> bytes:
    """The catalog for :func:`unpacked_catalog`, as JSON."""
    paths = sorted({chunk.path for tensor in catalog.tensors.values() for chunk in tensor.chunks})
    number = {path: index for index, path in enumerate(paths)}
    tensors = [
        [
            tensor.name,
            tensor.dtype,
            tensor.shape,
            [[c.box.start, c.box.stop, number[c.path], c.offset_bytes] for c in tensor.chunks],
        ]
        for tensor in catalog.tensors.values()
    ]
    document = {
        "kind": catalog.kind,
        "root": catalog.root,
        "paths": paths,
        "tensors": tensors,
        "files": [asdict(file) for file in catalog.files],
        "ignored_files": catalog.ignored_files,
        "passed_over": catalog.passed_over,
        "unheld": dict(catalog.unheld),
        "ignored_entries": catalog.ignored_entries,
        "metadata": dict(catalog.metadata),
        "digests": dict(catalog.digests),
        "settings": dict(catalog.quantization.settings),
        "content": {name: content.hex() for name, content in catalog.quantization.content.items()},
    }
    return json.dumps(document).encode()


def unpacked_catalog(content: bytes) -> Catalog:
    """The catalog that another rank of this run packed."""
    document = json.loads(content)
    paths = document["paths"]
    tensors = {}
    for name, dtype, shape, chunks in document["tensors"]:
        parts = tuple(
            Chunk(Box(tuple(start), tuple(stop)), paths[path], offset) for start, stop, path, offset in chunks
        )
        tensors[name] = StoredTensor(name, dtype, tuple(shape), parts)
    return Catalog(
        kind=document["kind"],
        root=document["root"],
        tensors=tensors,
        files=tuple(StoredFile(**file) for file in document["files"]),
        ignored_files=tuple(document["ignored_files"]),
        passed_over=tuple(document["passed_over"]),
        unheld=document["unheld"],
        ignored_entries=tuple(document["ignored_entries"]),
        metadata=document["metadata"],
        digests=document["digests"],
        quantization=Quantization(
            document["settings"], {name: bytes.fromhex(text) for name, text in document["content"].items()}
        ),
    )
