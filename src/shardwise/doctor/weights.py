"""Looks at a directory of weights: its index, sizes and headers of its files. Opens no pickle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..catalog.safetensors import catalog_of_safetensors
from ..catalog.torchfile import catalog_of_torch_file
from ..catalog.weights import INDEX_NAME, Choice, weights_in
from ..errors import ShardwiseError
from ..format.header import read_header
from ..limits import brief, is_inside, is_text, read_json, read_shallow_json
from ..storage import is_url, join
from .facts import Model
from .software import classes_of

__all__ = ["PICKLES", "holds_weights", "look_at_model", "look_at_stored_model"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ADAPTER = "adapter_config.json"
#: Names that torch.compile, DDP, FSDP1 and PEFT put before a model's own.
_WRAPPED = re.compile(r"_orig_mod\.|module\.|_fsdp_wrapped_module\.|base_model\.model\.")
_LORA = re.compile(r"\.lora_(A|B)\b")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
#: What from_pretrained reads; pytorch_model_fsdp.bin is the training state of FSDP.
_READ_PICKLE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_POINTER = b"version https://git-lfs"


def holds_weights(names: Iterable[str]) -> bool:
    """Whether a directory with these names holds a model as the hub has it."""
    return any(n == "config.json" or n.endswith(".safetensors") or n == INDEX_NAME for n in names) or any(
        n.startswith(("pytorch_model", "model")) and n.endswith(PICKLES) for n in names
    )


def look_at_model(path: str) -> Model:
    """Facts of the local directory ``path``. Rank-local; reads headers only."""
    names = sorted(os.listdir(path))
    problem, outside, listed = _index(path) if _takes_index(path) else (None, (), ())
    files = [n for n in names if n.endswith(".safetensors")]
    damaged: dict[str, str] = {}
    pointers, shapes = [], dict[str, tuple[int, ...]]()
    for name in files:
        file = os.path.join(path, name)
        if _is_pointer(file):
            pointers.append(name)
            continue
        try:
            shapes |= {n: entry.shape for n, entry in read_header(file).entries.items()}
        except ShardwiseError as error:
            damaged[name] = _without(str(error), file)
    lost = tuple(n for n in listed if n not in names)
    pickles = [n for n in names if n.endswith(PICKLES) and n.startswith(("pytorch_model", "model"))]
    read = [n for n in pickles if _READ_PICKLE.fullmatch(n)]
    if files and not (problem or outside or lost or damaged or pointers):
        problem = _problem(path)
    config = _config(os.path.join(path, "config.json")) if "config.json" in names else {}
    return Model(
        path=path,
        config=config,
        nbytes=sum(os.path.getsize(os.path.join(path, n)) for n in files or pickles),
        lost=lost,
        damaged=damaged,
        outside=outside,
        pointers=tuple(pointers),
        pickles=() if files else tuple(pickles),
        problem=problem,
        wrapped=tuple(sorted(filter(_WRAPPED.match, shapes)))
        if "config.json" in names and _ADAPTER not in names
        else (),
        slices=_slices(_config(os.path.join(path, _ADAPTER)), shapes) if _ADAPTER in names else (),
        only_pickled=_only_pickled(path, read, shapes) if shapes else (),
        base=_lost_base(_config(os.path.join(path, _ADAPTER))) if _ADAPTER in names else None,
        classes=classes_of(config),
    )


def _only_pickled(path: str, pickles: Iterable[str], shapes: Mapping[str, object]) -> tuple[str, ...]:
    """Tensors of pickles, if those and the safetensors files hold parts of one model: no name is in both.

    The same model in both formats, also under names of an earlier release, has names in common, or one is the end of
    another. Reads what the pickles say with :mod:`..catalog.pickles`, which runs nothing.
    """
    found = set[str]()
    for name in pickles:
        try:
            found |= catalog_of_torch_file(os.path.join(path, name)).tensors.keys()
        except ShardwiseError:
            return ()
    ends = {name.partition(".")[2] for name in (*found, *shapes)} - {""}
    is_apart = found.isdisjoint(shapes) and ends.isdisjoint(found) and ends.isdisjoint(shapes)
    return tuple(sorted(found)) if is_apart else ()


def _lost_base(config: Mapping[str, Any]) -> str | None:
    """The base that an adapter names, if it is a path that is not there, or one of the hub that is not here and can't be fetched."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not is_text(name) or "\0" in name or os.path.isdir(name):
        return None
    if not _HUB_ID.fullmatch(name):
        return name or None
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    return None if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str) else name


def _slices(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """LoRA matrices whose rank is not that of the adapter's config: A has one row for each, B one column."""
    if (
        not isinstance(rank := config.get("r"), int)
        or config.get("rank_pattern")
        or config.get("target_parameters")
    ):
        return ()  # no rank, or several
    found = []
    for name, shape in sorted(shapes.items()):
        matrix = _LORA.search(name)
        has = None if matrix is None or len(shape) != 2 else shape[0 if matrix[1] == "A" else 1]
        if has is not None and has != rank:
            found.append(f"{name} has rank {has}, and {_ADAPTER} says {rank}")
    return tuple(found)


def look_at_stored_model(url: str, names: Iterable[str]) -> Model:
    """Facts of a model below a URL: a few requests for each file."""
    known, problem, nbytes = list(names), None, 0
    pickles = tuple(n for n in known if n.endswith(PICKLES))
    files = any(n.endswith(".safetensors") for n in known)
    if files:
        try:
            nbytes = sum(f.nbytes for f in catalog_of_safetensors(url).files)
        except ShardwiseError as error:
            problem = _without(str(error), url)
    config = _config(join(url, "config.json")) if "config.json" in known else {}
    return Model(path=url, config=config, nbytes=nbytes, pickles=() if files else pickles, problem=problem)


def _takes_index(path: str) -> bool:
    """Whether a load goes by the index: a whole file goes before it."""
    try:
        weights = weights_in(path, Choice(use_safetensors=True))
    except ShardwiseError:
        return False
    return weights is not None and weights.name == INDEX_NAME


def _index(path: str) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Why the index can't be read, its names that lead outside, and the files that it names."""
    try:
        document = read_json(os.path.join(path, INDEX_NAME), "index")
    except ShardwiseError as error:
        return _without(str(error), path), (), ()
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        return f"{INDEX_NAME}: its weight_map is lost, empty or not an object", (), ()
    files = list(dict.fromkeys(brief(f) if not isinstance(f, str) else f for f in found.values()))
    outside = tuple(f for f in files if not is_inside(f) or "/" in f)
    return None, outside, tuple(f for f in files if f not in outside)


def _problem(path: str) -> str | None:
    """What else may stop a load: tensors that an index lists and no file holds, or that are stored twice."""
    try:
        unheld = catalog_of_safetensors(path).unheld
    except ShardwiseError as error:
        return _without(str(error), path)
    if not unheld:
        return None
    more = f" and {len(unheld) - 5} more" if len(unheld) > 5 else ""
    lost = ", ".join(f"{name} (in {file})" for name, file in list(unheld.items())[:5])
    return f"{INDEX_NAME}: lists tensors that their files do not hold: {lost}{more}"


def _config(path: str) -> dict[str, Any]:
    try:
        found = read_shallow_json(path)
    except ShardwiseError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_pointer(file: str) -> bool:
    if not os.path.isfile(file):
        return False  # a pipe would be waited for
    try:
        with open(file, "rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _without(text: str, path: str) -> str:
    """An error's text without the path that a finding names anyway."""
    return text.removeprefix(f"{path}: ") if is_url(path) or path in text else text
