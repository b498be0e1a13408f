"""Locates what a call of ``load_pretrained`` names: a model, a model with an adapter in its directory, or an adapter alone."""

from __future__ import annotations

import os
from dataclasses import replace

from ..catalog.weights import ADAPTER_CONFIG, CONFIG_NAME, Choice
from ..errors import SourceError
from ..limits import read_shallow_json
from ..models.arguments import Arguments, Pretrained
from ..models.classes import config_and_class, home_of
from ..models.hub import Found, find_for_all
from ..objects import frozen
from ..ranks.ranks import Ranks

__all__ = ["Located", "choice_of", "holds_config", "locate"]


@frozen
class Located:
    """The directory of a base model on this rank, and the request for it."""

    request: Pretrained
    """With the adapter that ``from_pretrained`` would load, and with the path of the base model."""
    found: Found


def locate(request: Pretrained, asked: Arguments, ranks: Ranks) -> Located:
    """The base model and the adapter that ``from_pretrained`` would load from ``request.path``.

    An ``adapter_config.json`` there names an adapter: of the model in the same local directory if it has a
    ``config.json``, otherwise of the base model that the file names. ``request.adapter`` decides if it is given; an
    empty mapping takes the base alone.

    Every rank must call it. Raises as :func:`.find_for_all` does; :class:`SourceError` for a base that is not found.
    """
    found = find_for_all(request.path, asked.hub, ranks, with_code=request.trust_remote_code)
    if request.adapter is not None:
        return Located(request, found)
    with ranks.agree("look for an adapter"):
        if not os.path.isfile(os.path.join(found.directory, ADAPTER_CONFIG)) or _is_checkpoint(found):
            return Located(request, found)
        base = _base_named(request, found)
    request = replace(request, adapter=found.directory)
    if base is None:
        return Located(request, found)
    try:
        of_base = find_for_all(base, asked.hub, ranks, with_code=request.trust_remote_code)
    except SourceError as error:
        raise _no_base(found.directory, base, str(error)) from error
    with ranks.agree("look for the adapter's base"):
        if of_base.lent is None and not os.path.isdir(of_base.directory):
            raise _no_base(found.directory, base, "no such directory here")
    return Located(replace(request, path=base), of_base)


def choice_of(request: Pretrained, asked: Arguments, directory: str) -> Choice:
    """Which of several models in ``directory`` a load takes, by its arguments and the config of its class."""
    given = request.config, request.auto_class
    if request.config is None and not holds_config(directory):
        return asked.hub.choice  # whoever opens the weights says whether there is anything at all
    config, _ = config_and_class(directory, *given, trust_remote_code=request.trust_remote_code)
    return replace(asked.hub.choice, config=config)


def holds_config(directory: str) -> bool:
    """Whether a local directory, or the model's directory in a checkpoint, has a ``config.json``."""
    return os.path.isfile(os.path.join(home_of(directory), CONFIG_NAME))


def _is_checkpoint(found: Found) -> bool:
    return os.path.isfile(os.path.join(found.directory, "manifest.json"))


def _base_named(request: Pretrained, found: Found) -> str | None:
    """The base model that an adapter's config names; None if it is the model in the adapter's directory."""
    directory = found.directory
    if found.lent is not None:
        raise SourceError(
            "has an adapter in it, and adapters are read from local directories that every rank has; copy it, or load the "
            "base alone by adapter={}",
            path=found.lent,
        )
    # By transformers' rule a model of the hub with an adapter in it is the adapter alone.
    is_local = os.path.exists(request.path)
    if is_local and os.path.isfile(os.path.join(directory, CONFIG_NAME)):
        return None
    file = os.path.join(directory, ADAPTER_CONFIG)
    document = read_shallow_json(file)
    base = document.get("base_model_name_or_path") if isinstance(document, dict) else None
    if not isinstance(base, str) or not base:
        raise SourceError(
            f"is an adapter alone, and its {ADAPTER_CONFIG} names no base model; give the base: load_pretrained(BASE, "
            f"adapter={os.fspath(request.path)!r})",
            path=directory,
        )
    return base


def _no_base(directory: str, base: str, why: str) -> SourceError:
    return SourceError(
        f"is an adapter alone, of the base model {base!r} ({ADAPTER_CONFIG}), which can't be found: {why}; give the "
        f"base that you have: load_pretrained(BASE, adapter={directory!r})",
        path=directory,
    )
