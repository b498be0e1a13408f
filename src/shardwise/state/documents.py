"""Checks the form of every document of a checkpoint, before any document is used.

A document with the wrong form is damaged: :class:`FormatError`. A document with the right form may still not fit the
live objects, which is another error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..dtypes import torch_dtype
from ..errors import FormatError
from ..format.documents import Document, document_named
from ..format.manifest import Manifest, TensorEntry
from ..limits import MAX_COUNT, MAX_TEXT_CHARS, brief, cause
from .loader_parts import equal, takes
from .low_bit import PARTS, Form, part_name

__all__ = ["check_form", "check_position", "check_rng"]


def check_form(documents: Mapping[str, Any], manifest: Manifest, path: str) -> None:
    """Raise :class:`FormatError` naming the first decoded document with a wrong form, and the place in it.

    ``path`` is the checkpoint's.
    """
    for name, value in documents.items():
        meaning = document_named(name, manifest)
        assert meaning is not None, "unknown names are refused where they are read"
        form = _FORMS.get(meaning.kind)
        if form is None:
            continue
        try:
            form(name, value, meaning, manifest)
        except FormatError as error:
            raise FormatError(f"document {name!r}: {error}", path=path) from error


def _step(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    if type(value) is not int or value != manifest.step:
        raise FormatError(f"{where} is {brief(value)}, but the manifest's is {manifest.step}")


def _rng(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    check_rng(value, where)


def _classes(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for of, named in _mapping(value, where).items():
        if of != "scheduler" and not of.startswith("extra."):
            raise FormatError(f"{where}: expected the classes of schedulers only, got {brief(of)}")
        _check_texts(named, f"{where}.{of}")


def _check_texts(value: Any, where: str) -> None:
    if not _is_class(value):
        for key, one in _mapping(value, where, of_text=False).items():
            _check_texts(one, f"{where}.{brief(key)}")


def _is_class(value: Any) -> bool:
    """Whether a value may be the name of a class. Errors repeat it."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS


def _optimizer(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    found = _mapping(value, where)
    unknown = found.keys() - {"class", "model", "groups", "values", "unseen_gradients"}
    if unknown or "class" not in found or not (found["class"] is None or _is_class(found["class"])):
        raise FormatError(f"{where}: expected a class, groups and values, got {brief(found)}")
    if found.get("model", next(iter(manifest.models))) not in list(manifest.models):
        raise FormatError(f"{where}: the model {brief(found['model'])} is not in the checkpoint")
    groups = found.get("groups")
    if not isinstance(groups, list) or not groups:
        raise FormatError(f"{where}.groups: expected a list of groups, got {brief(groups)}")
    for k, group in enumerate(groups):
        _group(group, f"{where}.groups[{k}]")
    for name, states in _mapping(found.get("values"), f"{where}.values").items():
        _mapping(states, f"{where}.values[{brief(name)}]", of_text=False)


def _group(group: Any, where: str) -> None:
    names = _mapping(group, where).get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{where}.names: expected a list of text, got {brief(names)}")
    options = _mapping(group.get("options"), f"{where}.options")
    if "params" in options:  # a group keeps its parameters under this key
        raise FormatError(f"{where}.options: 'params' is not an option")


def _opaque(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for name, states in _mapping(value, where).items():
        for key, state in _mapping(states, f"{where}[{brief(name)}]", of_text=False).items():
            if not isinstance(state, torch.Tensor):
                raise FormatError(
                    f"{where}[{brief(name)}].{brief(key)}: expected a tensor, got {brief(state)}"
                )


def _low_bit(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    found = _mapping(value, where)
    if found.keys() != {"books", "states", "by_rank"}:
        raise FormatError(f"{where}: expected books, states and by_rank, got {brief(found)}")
    books = _mapping(found["books"], f"{where}.books")
    for name, states in _mapping(found["by_rank"], f"{where}.by_rank").items():
        for state, one in _mapping(states, f"{where}.by_rank[{brief(name)}]").items():
            at = f"{where}.by_rank[{brief(name)}].{brief(state)}"
            _book(at, Form.of_json(one, at), books)
    entries = {
        n: t for tensors in manifest.models.values() for n, t in tensors.items() if meaning.owner in t.states
    }
    for name, states in _mapping(found["states"], f"{where}.states").items():
        for state, one in _mapping(states, f"{where}[{brief(name)}]").items():
            at = f"{where}[{brief(name)}].{brief(state)}"
            form = Form.of_json(one, at)
            if name not in entries:
                raise FormatError(f"{at}: {brief(name)} has no state in the manifest")
            _parts(at, state, form, entries[name], meaning.owner)
            _book(at, form, books)


def _book(where: str, form: Form, books: Mapping[str, Any]) -> None:
    if not form.book:
        return
    held, length = books.get(form.book), form.book_length
    if not isinstance(held, torch.Tensor) or (held.dtype, tuple(held.shape)) != (torch.float32, (length,)):
        raise FormatError(f"{where}: expected a code book {form.book} of {length} numbers, got {brief(held)}")


def _parts(where: str, state: str, form: Form, entry: TensorEntry, optimizer: str) -> None:
    """The stored parts of a state of few bits: their dtypes and shapes follow from its form."""
    grid = form.grid(entry.shape)
    if grid is None:
        raise FormatError(f"{where}: shape {brief(entry.shape)} has no blocks of {form.block} elements")
    for part in PARTS:
        held = entry.states[optimizer].get(part_name(state, part))
        expected = form.dtype_of(part), grid.part_shape(form.elements(part))
        if held is None or held.packed is not None or (held.dtype, entry.shape_of(held)) != expected:
            raise FormatError(f"{where}: its {part} is not in the manifest as {brief(expected)}")


def _buffers(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    entries = manifest.models[meaning.owner]
    for name, content in _mapping(value, where).items():
        if not isinstance(content, torch.Tensor) or not _is_of(content, entries.get(name)):
            raise FormatError(
                f"{where}: {brief(name)} is not a tensor of the model, or has another dtype or shape"
            )


def _is_of(content: torch.Tensor, entry: TensorEntry | None) -> bool:
    return entry is not None and (content.dtype, tuple(content.shape)) == (
        torch_dtype(entry.dtype),
        entry.shape,
    )


def _modules(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    _mapping(value, where)


def _own(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for pair in value if isinstance(value, list) else [None]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], tuple) and pair[0]):
            raise FormatError(f"{where}: expected pairs of a path and a value, got {brief(pair)}")
        try:
            hash(pair[0])
        except TypeError as error:
            raise FormatError(f"{where}: {brief(pair[0])} is not a path: {cause(error)}") from error


def _not_stored(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for document, lines in _mapping(value, where).items():
        for key, line in _mapping(lines, f"{where}[{brief(document)}]").items():
            if not isinstance(line, str):
                raise FormatError(
                    f"{where}[{brief(document)}][{brief(key)}]: expected text, got {brief(line)}"
                )


def _settings(where: str, value: Any, meaning: Document, manifest: Manifest) -> None:
    for path, text in _mapping(value, where).items():
        if not isinstance(text, str):
            raise FormatError(f"{where}[{brief(path)}]: expected text, got {brief(text)}")


_FORMS: dict[str, Callable[[str, Any, Document, Manifest], None]] = {
    "step": _step,
    "rng": _rng,
    "classes": _classes,
    "optimizer": _optimizer,
    "opaque": _opaque,
    "low_bit": _low_bit,
    "buffers": _buffers,
    "modules": _modules,
    "own": _own,
    "not_stored": _not_stored,
    "settings": _settings,
    "data_settings": _settings,
}


#: Number of words in a Mersenne twister's state.
_TWISTER_WORDS = 624


def check_rng(value: Any, where: str) -> None:
    """Raise :class:`FormatError` unless ``value`` has the form of a capture of random generators.

    Tries the host's states on new generators. Whether a device takes an accelerator's states is checked elsewhere.
    """
    state = _mapping(value, where)
    python, numpy = (
        _mapping(state.get("python"), f"{where}.python"),
        _mapping(state.get("numpy"), f"{where}.numpy"),
    )
    for name in ("position", "has_gauss"):
        if (
            type(numpy.get(name)) is not int or not 0 <= numpy[name] <= _TWISTER_WORDS
        ):  # numpy would read from this position unchecked
            raise FormatError(
                f"{where}.numpy.{name} is {brief(numpy.get(name))}, expected 0 to {_TWISTER_WORDS}"
            )
    words = (python.get("words"), numpy.get("words"))
    states = _states_of_devices(state.get("accelerator"), f"{where}.accelerator")
    for content in (*words, state.get("torch"), *states):
        if not isinstance(content, torch.Tensor) or content.dtype is not torch.uint8 or content.dim() != 1:
            raise FormatError(f"{where}: expected the bytes of a generator, got {brief(content)}")
    if python.get("gauss_next") is not None and not isinstance(python["gauss_next"], float):
        raise FormatError(f"{where}.python.gauss_next is {brief(python['gauss_next'])}, expected a number")
    try:
        own, keys = (np.frombuffer(w.numpy().tobytes(), "<u4") for w in words)  # type: ignore[union-attr]
        random.Random().setstate((python.get("version"), tuple(own.tolist()), python.get("gauss_next")))
        if len(keys) != _TWISTER_WORDS:
            raise ValueError(f"{len(keys)} words, expected {_TWISTER_WORDS}")
        np.random.RandomState().set_state(
            ("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy.get("cached_gauss"))  # type: ignore[arg-type]
        )
        torch.Generator().set_state(state["torch"])
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{where}: random generators reject it ({cause(error)})") from error


def _states_of_devices(accelerator: Any, where: str) -> list[Any]:
    if accelerator is None:
        return []
    found = _mapping(accelerator, where)
    states = found.get("own", found.get("devices"))
    if not isinstance(found.get("type"), str) or not isinstance(states, list):
        raise FormatError(f"{where}: expected a type of device and states, got {brief(found)}")
    return states


def check_position(value: Any, where: str) -> None:
    """Raise :class:`FormatError` unless ``value`` has the form of a :class:`ResumableLoader`'s state, of any version."""
    position = _mapping(value, where)
    if not equal(position.get("version"), 1):
        return  # the loader itself refuses it
    if "sampler" in position:
        _mapping(position["sampler"], f"{where}.sampler")
        return
    _mapping(position.get("loader"), f"{where}.loader")
    for name in ("epoch", "consumed"):
        if type(position.get(name)) is not int or not 0 <= position[name] <= MAX_COUNT:
            raise FormatError(f"{where}.{name} is {brief(position.get(name))}, expected a number from 0")
    paths = _check_parts(position.get("now"), f"{where}.now")
    start = position.get("start")
    if start is not None:
        if _check_parts(start, f"{where}.start") != paths:
            raise FormatError(f"{where}: the loader's parts are not those with which the epoch began")
        check_rng(start.get("rng"), f"{where}.start.rng")
    for holder in (position, start or {"workers_kept": False}):
        if not isinstance(holder.get("workers_kept"), bool):
            raise FormatError(
                f"{where}.workers_kept is {brief(holder.get('workers_kept'))}, expected true or false"
            )


def _check_parts(value: Any, where: str) -> tuple[list[str], list[str]]:
    """In the states of a loader's parts: the paths of parts with generators, and of parts with epochs."""
    generators = _mapping(_mapping(value, where).get("generators"), f"{where}.generators")
    epochs = _mapping(value.get("epochs"), f"{where}.epochs")
    if not all(takes(torch.Generator(), state) for state in generators.values()):
        raise FormatError(f"{where}.generators: expected states of generators")
    if not all(type(epoch) is int for epoch in epochs.values()):
        raise FormatError(f"{where}.epochs: expected numbers")
    return sorted(generators), sorted(epochs)


def _mapping(value: Any, where: str, *, of_text: bool = True) -> dict[Any, Any]:
    if not isinstance(value, dict) or (of_text and not all(isinstance(key, str) for key in value)):
        raise FormatError(f"{where}: expected a mapping{' with text as keys' * of_text}, got {brief(value)}")
    return value
