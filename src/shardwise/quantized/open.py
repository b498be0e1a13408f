"""A source whose quantized tensors are seen as what their codes stand for, and the families that say so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ..catalog.quantized import (
    Found,
    Quantized,
    Source,
    method_of_config,
    quantized,
    stands_beside,
    way_out,
)
from ..catalog.records import Catalog, Coded
from ..errors import FormatError, PlanError, SourceError, UnsupportedConversionError
from ..names import Named
from ..objects import frozen

#: Finds every tensor that is stored in one library's codes. Pure, but for ``content``; raises nothing.
Family = Callable[[Source], Found]


# ----------------------------------------------------------------------------------------------------
# A source whose quantized tensors are seen as what their codes stand for.

#: Methods that names and dtypes tell, for methods that a config names otherwise.
_LOOKS_LIKE: Mapping[str, Collection[str]] = {
    "fbgemm_fp8": ("fp8",),
    "compressed-tensors": ("fp8", "int8", "4 bits", "compressed-tensors"),
    "gptq": ("gptq", "awq"),  # without an index of groups
    "bitsandbytes": ("bitsandbytes", "4 bits", "int8"),
}


@frozen
class Dequantized:
    """The tensors that a source stores in one format, for reports."""

    format: str
    """In words: "FP8 (E4M3) in blocks of 128 x 128"."""
    tensors: int
    stored_bytes: int
    """Of codes, scales and all that goes with them."""
    nbytes: int
    """Of the same tensors in the dtype that is computed from the codes, before a load casts it; of codes that are kept, as they are
    held."""


def described(coded: Iterable[Coded], kept: Iterable[Coded] = ()) -> tuple[Dequantized, ...]:
    """The formats, those with the most stored bytes first. ``kept``: those whose parts the model holds as they are stored."""
    found = [
        Dequantized(words, len(all_), sum(o.stored_bytes for o in all_), sum(o.tensor.nbytes for o in all_))
        for words, all_ in _by_format(coded).items()
    ]
    for words, all_ in _by_format(kept).items():
        nbytes = sum(one.stored_bytes for one in all_)
        found.append(Dequantized(f"{words}, kept", len(all_), nbytes, nbytes))
    return tuple(sorted(found, key=lambda one: -one.stored_bytes))


def _by_format(coded: Iterable[Coded]) -> dict[str, list[Coded]]:
    found: dict[str, list[Coded]] = {}
    for one in coded:
        found.setdefault(one.rule.format, []).append(one)
    return found


def _method_of(catalog: Catalog, looks: Quantized | None) -> str:
    """The method of a source: what its config says, else what its tensors look like. "" for none.

    Raises :class:`PlanError` if the two contradict each other.
    """
    said = method_of_config({"quantization_config": catalog.quantization.settings})
    if catalog.quantization.settings and (not said or said == "dict"):
        raise PlanError(f"{catalog.root}: quantization_config in its config.json has no quant_method")
    if looks is None or not said:
        return said or (looks.method if looks else "")
    if looks.method != said and looks.method not in _LOOKS_LIKE.get(said, ()):
        raise PlanError(
            f"{catalog.root}: its config says that it's quantized with {said!r}, but its tensors are stored as {looks.method!r} "
            f"({looks.codes!r} goes with {looks.beside!r})"
        )
    return said


def dequantized(catalog: Catalog, own: Callable[[], Iterable[Named]] | None = None) -> Catalog:
    """The source, with each quantized tensor as one of the dtype that its codes stand for. The same catalog if none is.

    ``own`` gives the model's tensors; it is called only where the source looks quantized. A model that has scales of such a name itself
    is filled with the stored tensors. Pure; the same on every rank. Raises :class:`PlanError` with every part that is missing, surplus, of the wrong shape, or contradicts the config;
    :class:`UnsupportedConversionError` for a method that can't be dequantized.
    """
    looks = quantized(catalog.tensors)
    if catalog.coded or (looks is None and not catalog.quantization.settings):
        return catalog  # done already, or plain
    names = [name for t in own() for name in t.names] if own is not None else []
    if looks is not None and (looks := quantized(catalog.tensors, names)) is None:
        return catalog  # the model's own codes
    if looks is not None and catalog.kind == "checkpoint":
        raise PlanError(
            f"{catalog.root}: a checkpoint that holds the codes and scales of its source ({looks.codes!r} goes with "
            f"{looks.beside!r}), and the model has plain weights: load_pretrained({catalog.root!r}, quantized='keep')"
        )
    method = _method_of(catalog, looks)
    if not method or (looks is None and catalog.has_module_names):
        return catalog
    family = _families().get(method)
    if family is None:
        how = f"{looks.codes!r} goes with {looks.beside!r}" if looks else "says its config"
        raise UnsupportedConversionError(
            f"{catalog.root}: quantized ({method}: {how}), which can't be loaded yet; {way_out(method)}"
        )
    found = _found(catalog, family, method, {name.rpartition(".")[2] for name in names})
    gone = {*found.parts(), *found.unused}
    plain = {name: tensor for name, tensor in catalog.tensors.items() if name not in gone}
    coded = {one.path: one for one in found.coded.values()}
    return replace(
        catalog,
        tensors={**plain, **{name: one.tensor for name, one in found.coded.items()}},
        coded=coded,
    )


def _found(catalog: Catalog, family: Family, method: str, held: Collection[str]) -> Found:
    """The parts of a source. ``held``: last names of the model's own tensors. Raises :class:`PlanError` unless all fit together."""

    def content(name: str) -> bytes:
        if name not in catalog.quantization.content:
            raise FormatError("is too large, or in parts, for a tensor that describes others", path=name)
        return catalog.quantization.content[name]

    source = Source(catalog.tensors, catalog.quantization.settings, content)
    try:
        found = family(source)
    except SourceError as error:  # of a small tensor that describes others
        found = Found(problems=[str(error)])
    if not found.coded and not found.problems:
        found.problems.append(
            f"its config says that it's quantized with {method!r}, but no stored tensor is: remove quantization_config from "
            f"config.json"
            if source.settings
            else f"its tensors are those of {method!r}, and config.json has no quantization_config that says how they are stored"
        )
    found.unused = {name for name in found.unused if name.rpartition(".")[2] not in held}
    if not found.problems:
        found.problems += _surplus(catalog, found, held)
    if found.problems:
        raise PlanError(
            f"{catalog.root}: quantized ({method}), but incomplete: {len(found.problems)} problems",
            tuple(found.problems),
        )
    return found


def _surplus(catalog: Catalog, found: Found, held: Collection[str]) -> Iterator[str]:
    """Scales and the like that are left over beside a stored tensor: the tensor would be taken without them."""
    for name in catalog.tensors.keys() - set(found.parts()) - found.unused:
        beside = stands_beside(name, catalog.tensors)
        if beside is not None and name.rpartition(".")[2] not in held:
            yield f"surplus: {name!r} goes with {beside!r}, which is stored in another way, or with other scales"


def has_family(method: str) -> bool:
    """Whether a load dequantizes sources of this method."""
    return method in _families()


def _families() -> Mapping[str, Family]:
    """What finds the tensors of each ``quant_method``. Imports all of them, which a plain source doesn't need."""
    from . import bitsandbytes, compressed_tensors, formats

    return {
        "awq": formats.find_awq,
        "bitsandbytes": bitsandbytes.find_bitsandbytes,
        "compressed-tensors": compressed_tensors.find_compressed_tensors,
        "fbgemm_fp8": formats.find_fp8,
        "fp8": formats.find_fp8,
        "gptq": formats.find_gptq,
        "mxfp4": formats.find_mxfp4,
        "quanto": formats.find_quanto,
        "torchao": formats.find_torchao,
    }
