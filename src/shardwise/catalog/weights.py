"""Chooses the files of a directory that are its model, by the rule of its library's ``from_pretrained``: transformers or diffusers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Any

from ..errors import FormatError, SourceError
from ..internals.diffusers import STEM, is_diffusers_config, weights_names
from ..limits import brief, check_name, inside, is_inside, read_json, read_shallow_json
from ..objects import frozen
from ..storage import is_directory, is_file, names_in

# ----------------------------------------------------------------------------------------------------
# The index of a model in several files (``*.index.json``): which file holds each tensor.


def read_weight_map(path: str) -> dict[str, str]:
    """File by tensor name, from the index at ``path``. Rank-local.

    Raises :class:`SourceError` if it can't be read, :class:`FormatError` if it is not an index, or maps a tensor to
    anything but the name of a file in its own directory.
    """
    document = read_json(path, "index with a weight_map")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("not an index: its weight_map is lost, empty or not an object", path=path)
    plain: set[str] = set()
    for name, file in weight_map.items():
        check_name(name, "tensor", path)
        if type(file) is not str or (file not in plain and not _is_plain(file)):
            raise FormatError(
                f"{brief(name)} is mapped to {brief(file)}, which is not a plain file name; such a name would lead "
                f"outside its directory",
                path=path,
            )
        plain.add(file)
    return weight_map


def _is_plain(file: str) -> bool:
    try:
        return inside("", check_name(file, "file")) == os.path.basename(file)
    except FormatError:
        return False


# ----------------------------------------------------------------------------------------------------
# Chooses the files of a directory that are its model, by the rule of its library's ``from_pretrained``. The config says which library
# it is.
#
# Every entry point asks here: loads, plans, ``inspect``, ``convert``, exports, and downloads from the hub.

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE_NAME, TORCH_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONFIG_NAME, ADAPTER_CONFIG = "config.json", "adapter_config.json"
#: An adapter's weights; PEFT takes the first that exists.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: Names of transformers' slices (``save_pretrained`` of a distributed model), which it takes before any other file.
_SLICE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
#: Files that may hold weights.
_PAYLOAD = re.compile(r".*\.safetensors|(diffusion_pytorch|pytorch|adapter)_model.*\.bin")
#: An index of files of ``torch.save``.
_PICKLED_INDEX = re.compile(r".*\.bin(\.[^.]+)?\.index\..*")


@frozen(kw_only=True)
class Choice:
    """Which of several models in a directory is meant, as by arguments of ``from_pretrained``."""

    variant: str | None = None
    """``"fp16"`` takes ``model.fp16.safetensors`` and the like, and nothing else."""
    use_safetensors: bool | None = None
    """True: safetensors only. False: ``pytorch_model.bin`` only. None: safetensors first."""
    config: Any = None
    """The config that the model is built from. None: the directory's ``config.json`` is read."""
    with_modules: bool = False
    """The other modules of a sentence-transformers model are loaded, too, each from its folder."""

    @property
    def is_asked(self) -> bool:
        """Whether the caller chose: then nothing else is taken."""
        return self.variant is not None or self.use_safetensors is not None

    @property
    def candidates(self) -> list[str]:
        """All names that may be the model or its index, the preferred one first. ``config`` says which library's."""
        if is_diffusers_config(self.config):
            return weights_names(self.variant, self.use_safetensors)
        names = (SINGLE_NAME, INDEX_NAME, TORCH_SINGLE_NAME, TORCH_INDEX_NAME)
        return [with_variant(name, self.variant) for name in names]

    def __str__(self) -> str:
        found = [f"variant={self.variant!r}"] if self.variant is not None else []
        if self.use_safetensors is not None:
            found.append(f"use_safetensors={self.use_safetensors}")
        return ", ".join(found)


@frozen
class Weights:
    """The file of a model or the index of its files, and the candidates that were not taken."""

    name: str
    others: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    """More files of this model, by the class of its config; those that exist are taken."""

    @property
    def is_index(self) -> bool:
        """Whether it lists the files of the model."""
        return self.name.endswith(".json")

    @property
    def is_pickled(self) -> bool:
        """Whether its files are those of ``torch.save``."""
        return self.name.endswith(".bin") or _PICKLED_INDEX.fullmatch(self.name) is not None


@frozen
class Listed:
    """The files of a model, as names relative to its directory."""

    names: tuple[str, ...]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """File by tensor, as the index says; empty without one."""
    ignored: tuple[str, ...] = ()
    """Files that look like weights and are not of this model."""
    passed_over: tuple[str, ...] = ()
    """Candidates that were not taken, and that hold a model, too."""

    def unheld(self, held: Collection[str]) -> dict[str, str]:
        """The entries of the index, tensor and file, that none of the files holds."""
        return {name: file for name, file in self.weight_map.items() if name not in held}


def with_variant(name: str, variant: str | None) -> str:
    """The name of a weights file or its index in a variant, as in transformers: ``model.fp16.safetensors``."""
    if variant is None:
        return name
    stem, _, end = name.rpartition(".")
    return f"{stem}.{variant}.{end}"


@frozen(kw_only=True)
class WrittenNames:
    """The names of a model's files, as its library's ``save_pretrained`` writes them."""

    stem: str = "model"
    variant: str | None = None

    @property
    def index(self) -> str:
        """The index of several files."""
        return with_variant(f"{self.stem}.safetensors.index.json", self.variant)

    def files(self, count: int) -> list[str]:
        """The files of a model in so many parts."""
        name = with_variant(f"{self.stem}.safetensors", self.variant).removesuffix(".safetensors")
        if count == 1:
            return [f"{name}.safetensors"]
        return [f"{name}-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]


def stem_of(config: Any) -> str:
    """The first part of the names of a model's files, by the content of its config: diffusers' or transformers'."""
    return STEM if is_diffusers_config(config) else "model"


def chosen(names: Collection[str], choice: Choice, where: str) -> Weights | None:
    """The model among the file names of a directory; None if ``from_pretrained`` would find none. Pure.

    ``choice`` includes the config, and ``where`` is its path. The file that it names is taken whether or not it exists. Raises as
    :func:`named_by` does.
    """
    named, extra = named_by(choice.config, where)
    present = [name for name in choice.candidates if name in names]
    taken = named
    if taken is None:
        pickled = {False: (True,), None: (False, True), True: (False,)}[choice.use_safetensors]
        taken = next((name for name in present if Weights(name).is_pickled in pickled), None)
    if taken is None:
        return None
    return Weights(taken, tuple(name for name in present if name != taken), extra)


def named_by(config: Any, where: str) -> tuple[str | None, tuple[str, ...]]:
    """The file that a config names (``transformers_weights``), and the files that its class adds (``extra_files``).

    ``config``: an object of transformers, or the content of ``config.json``. Raises :class:`FormatError` naming
    ``where`` for what transformers refuses, and for a path that leaves the directory.
    """
    if isinstance(config, Mapping):
        name, extra = config.get("transformers_weights"), ()
    else:
        name = getattr(config, "transformers_weights", None)
        extra = getattr(type(config), "extra_files", ())
    if name is None:
        return None, tuple(extra)
    ends = (".safetensors", ".safetensors.index.json")
    if not isinstance(name, str) or not (name.endswith(ends) or name == "adapter_model.bin"):
        raise FormatError(
            f"its transformers_weights is {brief(name)}; expected the name of a .safetensors file or of a "
            f".safetensors.index.json",
            path=where,
        )
    if not is_inside(name):
        raise FormatError(
            f"its transformers_weights is {brief(name)}, which is not a path inside its directory", path=where
        )
    return name, tuple(extra)


def weights_in(root: str, choice: Choice) -> Weights | None:
    """The model of a directory or URL; None if ``from_pretrained`` would find none there, or would read all slices of it.

    Rank-local; reads ``config.json`` unless ``choice`` has the config. Raises :class:`SourceError`, :class:`FormatError`.
    """
    names = names_of(root)
    if any(_SLICE.fullmatch(name) for name in names):
        return None
    choice = with_config(root, choice, names)
    present = [n for n in choice.candidates if n in names and is_file(os.path.join(root, n))]
    return chosen(present, choice, os.path.join(root, CONFIG_NAME))


def with_config(root: str, choice: Choice, names: Collection[str]) -> Choice:
    """The choice with the config of a directory that has these names, unless it has one already."""
    if choice.config is not None:
        return choice
    return replace(choice, config=config_in(root) if CONFIG_NAME in names else {})


def listed(root: str, weights: Weights, *, is_asked: bool) -> Listed:
    """The files of a model in a directory: those that its index lists, else the one file.

    ``is_asked``: the caller chose it, so other candidates are no surprise. Rank-local. Raises as
    :func:`.read_weight_map` does.
    """
    weight_map: dict[str, str] = {}
    files = [weights.name]
    if weights.is_index:
        weight_map = read_weight_map(inside(root, weights.name))
        files = sorted(set(weight_map.values()))
    files += [n for n in weights.extra if n not in files and is_file(inside(root, n))]
    names = set(names_of(root))
    payload = {name for name in names if _PAYLOAD.fullmatch(name)}
    passed_over = () if is_asked else tuple(n for n in weights.others if _differs(root, n, names, files))
    ignored = sorted((payload | set(weights.others)) - set(files))
    return Listed(tuple(files), weight_map, tuple(ignored), passed_over)


def names_of(root: str) -> list[str]:
    """The names in a directory or URL. Raises :class:`SourceError` if there is none."""
    try:
        return names_in(root)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=root) from error


def _differs(root: str, other: str, names: Collection[str], taken: Collection[str]) -> bool:
    """Whether a candidate gives another model: an index of files that are not here gives none."""
    if not Weights(other).is_index:
        return True
    try:
        files = set(read_weight_map(os.path.join(root, other)).values())
    except SourceError:
        return False
    return files != set(taken) and not files.isdisjoint(names)


def config_in(root: str) -> Mapping[str, Any]:
    """The content of ``config.json`` in a directory or URL. One that can't be read names nothing: whoever builds a
    model from it refuses it."""
    file = os.path.join(root, CONFIG_NAME)
    try:
        found = read_shallow_json(file) if is_file(file) else {}
    except FormatError:
        return {}
    return found if isinstance(found, dict) else {}


# ----------------------------------------------------------------------------------------------------
# Reads ``modules.json``, by which sentence-transformers finds the modules of a model: transformers' and further ones.

MODULES_NAME = "modules.json"
_MOST = 100


@frozen
class Module:
    """One module of a sentence-transformers model."""

    folder: str
    """Relative to the model's directory; empty for the directory itself."""
    type: str
    """The name of its class, with the Python module."""


def modules_in(root: str) -> tuple[Module, ...]:
    """The modules that ``modules.json`` of a directory lists, in order; empty without a file of this form. Rank-local."""
    file = os.path.join(root, MODULES_NAME)
    try:
        document = read_shallow_json(file, "list of modules") if is_file(file) else []
    except SourceError:
        return ()
    found = []
    for entry in document[:_MOST] if isinstance(document, list) else []:
        folder, kind = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        if isinstance(kind, str) and (folder == "" or is_inside(folder)):
            found.append(Module(str(folder), kind))
    return tuple(found)


def weights_of_modules(root: str) -> tuple[str, ...]:
    """The weights of modules in folders of their own (``2_Dense/model.safetensors``), relative to ``root``. Rank-local."""
    found = []
    for module in modules_in(root):
        folder = os.path.join(root, module.folder)
        if module.folder and is_directory(folder) and (weights := weights_in(folder, Choice())) is not None:
            found.append(f"{module.folder}/{weights.name}")
    return tuple(found)
