"""Finds quantized weights in a source: its config, its tensors' names and dtypes, and small reads where those don't suffice."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeVar

from ..errors import FormatError, SourceError
from ..limits import read_shallow_json
from ..objects import frozen
from ..ranks.ranks import patiently
from ..storage import is_file, read_range, stat_of
from ..storage.records import is_url, join
from .records import Catalog, Coded, Quantization, StoredFile, StoredTensor

# ----------------------------------------------------------------------------------------------------
# Finds quantized weights in a source, by names and dtypes of its tensors, and tells how to dequantize them.
#
# Stored codes are not weights without their scales. A load that took them as weights would be wrong.

#: Where a config says how its model is quantized.
NAMES_IN_CONFIG = ("quantization_config", "compression_config")


_CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8", "I32"})
#: Suffix of a tensor beside codes → suffixes of the codes' names instead of it, and the method.
#: compressed-tensors, GPTQ and AWQ, OpenAI's MXFP4, DeepSeek's FP8, bitsandbytes; as written in 2024-2026.
_BESIDE: Sequence[tuple[str, Sequence[str], str]] = (
    ("_scales", ("_blocks",), "mxfp4"),
    (".g_idx", (".qweight",), "gptq"),
    (".qzeros", (".qweight",), "awq"),
    (".scales", (".qweight",), "awq"),
    (".weight_scale", (".weight_packed",), "compressed-tensors"),
    (".weight_shape", (".weight_packed",), "compressed-tensors"),
    ("_scale_inv", ("",), "fp8"),
    (".quant_map", ("",), "bitsandbytes"),
    (".absmax", ("",), "bitsandbytes"),
    (".SCB", (".weight",), "bitsandbytes"),
    ("._weight_scale", ("._weight_qdata",), "torchao"),
    ("._weight_zero_point", ("._weight_qdata",), "torchao"),
    ("._scale", ("._data", "._data._data"), "quanto"),
    ("_scale", ("",), "fp8"),
    (".scale", (".weight",), "fp8"),
)
_ENDS = tuple(end for end, _, _ in _BESIDE)
_CODE_ENDS = ("_blocks", "_packed", ".qweight", ".W_q", "._data")


@frozen
class Quantized:
    """The method by which a source is quantized, and stored tensors that show it."""

    method: str
    codes: str
    beside: str
    """The tensor beside the codes: scales, zero points, an index of groups."""


def quantized(tensors: Mapping[str, StoredTensor], own: Collection[str] = ()) -> Quantized | None:
    """How a source is quantized, if it holds codes with their scales; otherwise None, also for float8 without scales.

    ``own``: names of the model's tensors. A model that itself has scales of such a name is loaded as stored. Pure;
    looks at each name once.
    """
    held = {name.rpartition(".")[2] for name in own}
    for name in tensors:
        if f".{name}".endswith(_ENDS) and name.rpartition(".")[2] not in held:
            for codes, method in _codes_beside(name, tensors):
                return Quantized(_finer(method, codes, tensors), codes, name)
    return None


def _codes_beside(name: str, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """The codes beside which a tensor of this name stands, with the method."""
    return (
        (codes, method)
        for codes, method in _beside(name)
        if codes in tensors and tensors[codes].dtype in _CODES
    )


def stands_beside(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """The stored tensor, of any dtype, that a tensor of this name scales or completes; None if there is none."""
    return next((codes for codes, _ in _beside(name) if codes in tensors and codes != name), None)


def _beside(name: str) -> Iterator[tuple[str, str]]:
    """The names of codes beside which a tensor of this name may stand, with the method."""
    dotted = f".{name}"  # a tensor of the root module has no dot before its name
    for end, code_ends, method in _BESIDE:
        if dotted.endswith(end):
            stem = dotted.removesuffix(end)
            yield from (((stem + e).removeprefix("."), method) for e in code_ends)


def _finer(method: str, codes: str, tensors: Mapping[str, StoredTensor]) -> str:
    """The method, told by dtype where names alone don't tell it."""
    if method == "awq" and f"{codes.removesuffix('.qweight')}.g_idx" in tensors:
        return "gptq"
    if method == "fp8" and not tensors[codes].dtype.startswith("F8"):
        return {"I8": "int8"}.get(tensors[codes].dtype, "4 bits")
    return method


def code_of_weight(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """The stored codes of the weight that a model wants under this name, if there are any."""
    stem = name.removesuffix(".weight")
    for codes in (*(name + end for end in _CODE_ENDS), *(stem + end for end in _CODE_ENDS)):
        if codes in tensors and tensors[codes].dtype in _CODES:
            return codes
    return name if name in tensors and is_part(name, tensors) else None


def is_part(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a stored tensor is codes with scales beside them, or stands beside codes."""
    if any(True for _ in _codes_beside(name, tensors)):
        return True
    if name not in tensors or tensors[name].dtype not in _CODES:
        return False
    dotted = f".{name}"
    return any(
        dotted.endswith(code_end) and (dotted.removesuffix(code_end) + end).removeprefix(".") in tensors
        for end, code_ends, _ in _BESIDE
        for code_end in code_ends
    )


# ----------------------------------------------------------------------------------------------------
# Configs


def method_of_config(config: Any) -> str:
    """The method that a model's config (a dict or an object), or a part of it, names; "" for none."""
    found = _found_in(config)
    return _method(found) if found else ""


def settings_of_config(config: Any) -> Mapping[str, Any]:
    """The settings of the quantization that a stored config, or a part of it, names; empty for none."""
    found = _found_in(config)
    return found if isinstance(found, Mapping) else {}


def _found_in(config: Any) -> Any:
    for section in _sections(config, 4):
        for name in NAMES_IN_CONFIG:
            if found := section.get(name):
                return found
    return None


def _sections(config: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(fields, Mapping) or not depth:
        return
    yield fields
    for name, value in fields.items():
        if str(name).endswith("_config") and "quantization" not in str(name):
            yield from _sections(value, depth - 1)


def _method(found: Any) -> str:
    """``fp8``, ``bitsandbytes``, …: the name in the config, otherwise its class."""
    fields = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    method = fields.get("quant_method")
    if method is None and any(str(name).startswith("load_in_") for name in fields):
        method = "bitsandbytes"
    return str(getattr(method, "value", method) or type(found).__name__)


# ----------------------------------------------------------------------------------------------------
# The next step for the user


def way_out(method: str) -> str:
    """How to get plain weights, in one sentence, if transformers 5.23 can dequantize the method."""
    kind = {
        "mxfp4": "Mxfp4Config",
        "fp8": "FineGrainedFP8Config",
        "compressed-tensors": "CompressedTensorsConfig",
    }.get(method)
    load = "AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.bfloat16"
    # Without save_original_format=False transformers 5.23 gives the plain weights the names of the codes.
    save = "save_pretrained(OUT, save_original_format=False)"
    if kind is not None:
        undo = f"{load}, quantization_config=transformers.{kind}(dequantize=True)).{save}"
    elif method == "bitsandbytes":
        undo = f"{load}).dequantize().{save}"
    else:
        return "transformers can't dequantize this method: load the model from which it was quantized"
    return f"dequantize it first, in one process, and load OUT: {undo}"


# ----------------------------------------------------------------------------------------------------
# Small reads anywhere in a file or an object: the directory of an archive, a description, a short value.

#: Of an object, so many bytes come at a time, and so many such blocks are kept: parts of one archive lie close together.
_BLOCK_BYTES, _BLOCKS = 16 * 1024, 64
#: Items whose places are looked up in a store at a time.
_AT_ONCE = 16
T = TypeVar("T")
R = TypeVar("R")


class OpenFile:
    """A file or an object that is open for small reads; leaving a block of it closes it."""

    stored: StoredFile
    """Its path, its size, and the version that is read."""

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes from ``at`` on; fewer at the end. Raises :class:`SourceError`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_file(path: str, known: StoredFile | None = None) -> OpenFile:
    """Open a regular file or an object. ``known``: the object when it was first looked at, of which no other version is read.

    Never blocks on a pipe. Raises :class:`SourceError` (from ``FileNotFoundError`` if there is none), :class:`FormatError`.
    """
    return _Object(path, known) if is_url(path) else _Local(path)


def each(path: str, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``work`` of every item; several at a time if the bytes come from a store, where each request takes milliseconds."""
    if not is_url(path):
        return list(map(work, items))
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-looks") as pool:
        coming = [
            pool.submit(copy_context().run, work, item) for item in items
        ]  # with what was listed already
        try:
            return [one.result() for one in coming]
        finally:
            pool.shutdown(cancel_futures=True)


class _Local(OpenFile):
    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: NUL in the caller's path
            raise SourceError(f"can't be opened: {getattr(error, 'strerror', error)}", path=path) from error
        status = os.fstat(self._fd)
        self.stored = StoredFile(path, status.st_size)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatError("can't be read: not a regular file", path=path)

    def read(self, at: int, nbytes: int) -> bytes:
        try:
            return patiently(os.pread, self._fd, nbytes, at)
        except OSError as error:
            raise SourceError(f"can't be read: {error.strerror}", path=self.stored.path) from error

    def close(self) -> None:
        os.close(self._fd)


class _Object(OpenFile):
    """As :class:`OpenFile`. Thread-safe. Memory: a MiB."""

    def __init__(self, url: str, known: StoredFile | None) -> None:
        if known is None:
            found = stat_of(url)
            if found is None:
                raise SourceError("can't be opened: no such object", path=url) from FileNotFoundError(url)
            known = StoredFile(url, found.nbytes, found.version)
        self.stored = known
        self._blocks: dict[int, bytes] = {}
        self._lock = Lock()

    def read(self, at: int, nbytes: int) -> bytes:
        stop = min(at + nbytes, self.stored.nbytes)
        if stop <= at:
            return b""
        if stop - at > _BLOCK_BYTES:
            return self._fetch(at, stop)
        first = at // _BLOCK_BYTES
        content = b"".join(self._block(k) for k in range(first, (stop - 1) // _BLOCK_BYTES + 1))
        return content[at - first * _BLOCK_BYTES : stop - first * _BLOCK_BYTES]

    def _block(self, k: int) -> bytes:
        with self._lock:
            found = self._blocks.pop(k, None)
        if found is None:
            found = self._fetch(k * _BLOCK_BYTES, min((k + 1) * _BLOCK_BYTES, self.stored.nbytes))
        with self._lock:
            self._blocks[k] = found  # the last that would be dropped
            while len(self._blocks) > _BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
        return found

    def _fetch(self, start: int, stop: int) -> bytes:
        return read_range(self.stored.path, start, stop, version=self.stored.version)

    def close(self) -> None:
        self._blocks.clear()


# ----------------------------------------------------------------------------------------------------
# What a source says of its own quantization: the config beside it, and the small tensors that describe others.

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
#: All suffixes of tensors whose content is read.
DESCRIBING = (*_DESCRIBE, _SHAPE)
_MOST_BYTES = 1024**2
#: In what torchao writes about a tensor into a file's metadata, under the tensor's name.
_OF_TORCHAO = '"_tensor_data_names"'


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
    content = _content(catalog, _describing(settings))
    content |= {name: text.encode() for name, text in catalog.metadata.items() if _OF_TORCHAO in text}
    return replace(catalog, quantization=Quantization(settings, content))


def _describing(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The suffixes of the tensors that are read."""
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    in_groups = [isinstance(w, dict) and w.get("strategy") == "group" for w in weights]
    return _DESCRIBE if in_groups and all(in_groups) else DESCRIBING


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


# ----------------------------------------------------------------------------------------------------
# What a family of formats gets to see of a source, and what it must find there.


@frozen
class Source:
    """A source, as a family looks at it."""

    tensors: Mapping[str, StoredTensor]
    settings: Mapping[str, Any]
    """``quantization_config`` of the model's config; empty if there is none."""
    content: Callable[[str], bytes]
    """Reads what describes others, by name: bitsandbytes' ``quant_state``, compressed-tensors' ``weight_shape``, torchao's metadata."""


@dataclass(slots=True)
class Found:
    """What a family found: the tensors that are stored as codes, by name, and everything that is wrong."""

    coded: dict[str, Coded] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One sentence each, which names the stored tensor: missing, surplus, of a wrong shape or dtype, contradicting settings."""
    unused: set[str] = field(default_factory=set)
    """Stored tensors that say how to run the model in codes, and not what its weights are (input scales)."""

    def add(self, one: Coded) -> None:
        self.coded[one.tensor.name] = one

    def take(self, make: Callable[[], Coded]) -> None:
        """Add what ``make`` gives, or the error that it raises as a problem."""
        try:
            self.add(make())
        except SourceError as error:
            self.problems.append(str(error))

    def parts(self) -> Iterable[str]:
        """Names of the stored tensors that are parts."""
        return (part.name for one in self.coded.values() for part in one.parts.values())
