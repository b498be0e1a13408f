"""The components of a diffusers pipeline, and in which variants each has weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import FormatError, SourceError
from ..limits import brief, is_inside, read_shallow_json
from ..objects import frozen
from ..storage import is_directory
from ..storage.records import join
from .records import PIPELINE, PIPELINE_NAME, kind_of
from .weights import Choice, names_of

_SERIES = re.compile(r"-\d{5}-of-\d{5}")
#: Configs by which the candidates of both libraries are known.
_LIBRARIES: tuple[Mapping[str, Any], ...] = ({}, {"_class_name": ""})


@frozen(kw_only=True)
class Component:
    """A component of a pipeline: a model, a tokenizer, a scheduler."""

    name: str
    library: str
    class_name: str
    folder: str
    """Next to ``model_index.json``, or in a repository of the hub."""
    is_here: bool
    """Whether its folder is there."""
    variants: tuple[str | None, ...]
    """The variants of its weights, with None for the plain ones. Empty for a component without weights."""

    def variant(self, asked: str | None) -> str | None:
        """The variant to load. As in diffusers, a component that lacks the variant is loaded without one.

        Raises :class:`SourceError` if its weights are there in other variants only.
        """
        if asked in self.variants:
            return asked
        if self.variants and None not in self.variants:
            there = " and ".join(f"variant={one!r}" for one in self.variants)
            raise SourceError(f"its weights are only there as {there}; pass that", path=self.folder)
        return None


@frozen
class Pipeline:
    """The components that ``model_index.json`` lists, and which of them are present."""

    class_name: str
    components: Mapping[str, Component]
    without: frozenset[str] = frozenset()
    """Components that it was saved without."""


def pipeline_at(path: str) -> Pipeline | None:
    """The pipeline in a directory or at a URL; None for anything else, such as a model with a ``model_index.json`` next to it.

    Rank-local. Raises as :func:`pipeline_of` does.
    """
    return pipeline_in(path) if kind_of(path) is PIPELINE else None


def pipeline_in(root: str) -> Pipeline:
    """The pipeline in a directory or at a URL, whatever else is there. Rank-local. Raises as :func:`pipeline_of` does."""
    document = read_shallow_json(join(root, PIPELINE_NAME), "list of components")
    folders = {
        name: names_of(join(root, name))
        for name in (document if isinstance(document, dict) else ())
        if is_inside(name) and is_directory(join(root, name))
    }
    return pipeline_of(document, folders, root)


def pipeline_of(document: Any, folders: Mapping[str, Collection[str]], where: str) -> Pipeline:
    """The pipeline that ``model_index.json`` describes. ``folders``: the names in each folder next to it. Pure.

    Components that the pipeline leaves out aren't listed. Raises :class:`FormatError` for a document of another form.
    """
    pairs = document.items() if isinstance(document, dict) else ()
    components = {
        name: Component(
            name=name,
            library=value[0],
            class_name=value[1],
            folder=join(where, name),
            is_here=name in folders,
            variants=variants_of(folders.get(name, ())),
        )
        for name, value in pairs
        if isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
        and is_inside(name)
    }
    if not components:
        raise FormatError(
            f"is a diffusers pipeline ({PIPELINE_NAME}), but not a list of components: {brief(document)}",
            path=where,
        )
    without = frozenset(name for name, value in pairs if value == [None, None])
    return Pipeline(str(document.get("_class_name", "")), components, without)


def variants_of(names: Collection[str]) -> tuple[str | None, ...]:
    """The variants in which a directory with these names has a model's weights, by the names that both libraries look for. Pure."""
    words = {word for name in names for word in _SERIES.sub("", name).split(".")[1:]}
    choices = [
        Choice(variant=variant, config=config) for variant in (None, *sorted(words)) for config in _LIBRARIES
    ]
    found = [choice.variant for choice in choices if not set(names).isdisjoint(choice.candidates)]
    return tuple(dict.fromkeys(found))
