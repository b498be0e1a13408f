"""What a plan is made of: a model directory with its weights, the outline of one on the hub, or a config alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..catalog import Catalog
from ..catalog.quantized import method_of_config
from ..catalog.records import Chunk, StoredFile, StoredTensor
from ..dtypes import code_of
from ..errors import FormatError
from ..layout.boxes import whole
from ..layout.live import describe
from ..limits import MAX_MODULES
from ..loading.located import choice_of, locate
from ..loading.pretrained import Prepared, build_meta, prepare
from ..loading.source import open_for_all
from ..models.arguments import Arguments, Pretrained
from ..models.classes import config_and_class
from ..models.meta_init import at_most
from ..models.unquantized import forget_quantization
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..storage import Requests, counting, is_url

__all__ = ["Source", "source_of"]

#: Files that may hold weights, by their ends.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".index.json")
#: Modules, parameters and buffers that a config alone may ask for.
_MOST_PARTS = 50 * MAX_MODULES


@frozen
class Source:
    """The model of a plan. :meth:`prepared` builds it on meta, each time anew."""

    request: Pretrained
    asked: Arguments
    directory: str
    catalog: Catalog
    is_config_alone: bool
    looks: Requests
    """What looking at the source asked of an object store."""
    shown: str
    """The path in a report."""

    def prepared(self, adapter: Any) -> Prepared:
        """The model on meta, unsharded, with ``adapter``, its source and the rules of its load."""
        request = replace(self.request, adapter=adapter)
        if not self.is_config_alone:
            return prepare(request, self.asked, self.directory, catalog=self.catalog)
        base = _from_config(request, self.asked, self.directory, self.shown, self.asked.dtype)
        return prepare(request, self.asked, self.directory, (base.config, type(base)), self.catalog, base)


@contextmanager
def source_of(request: Pretrained) -> Iterator[Source]:
    """The source of a request, while the context lasts: a config file gets a directory. Raises :class:`SourceError` if there is none."""
    path, asked = os.fspath(request.path), request.understood()
    if not is_url(path) and _is_config_alone(path):
        with _directory_of(path) as directory:
            catalog = _as_saved(_from_config(request, asked, directory, path, "auto"), path)
            yield Source(request, asked, directory, catalog, True, Requests(), path)
        return
    with ExitStack() as stack:
        made: list[str] = []

        def outlines() -> str:  # of a model on the hub: other plans write nothing
            if not made:
                made.append(stack.enter_context(TemporaryDirectory(prefix="shardwise-plan-")))
            return made[0]

        asked = replace(asked, hub=replace(asked.hub, outlines=outlines))
        with counting() as looks:  # those of rank 0 of a load
            located = locate(request, asked, Ranks())
            request, directory = located.request, located.found.directory
            is_alone = located.found.lent is None and _is_config_alone(directory)
            if is_alone:
                catalog = _as_saved(_from_config(request, asked, directory, path, "auto"), path)
            else:
                choice = choice_of(request, asked, directory)
                catalog = open_for_all(located.found.lent or directory, Ranks(), choice=choice)
        shown = path if any(map(directory.startswith, made)) else catalog.root
        yield Source(request, asked, directory, catalog, is_alone, looks, shown)


@contextmanager
def _directory_of(path: str) -> Iterator[str]:
    """The directory of a config: its own, or a temporary one for a file of any name."""
    if not os.path.isfile(path):
        yield path
        return
    with TemporaryDirectory(prefix="shardwise-plan-") as folder:
        shutil.copyfile(path, os.path.join(folder, "config.json"))
        yield folder


def _is_config_alone(path: str) -> bool:
    """Whether a path is a JSON file, or a directory with config.json and no weights."""
    if os.path.isfile(path):
        return path.endswith(".json")
    if not os.path.isfile(os.path.join(path, "config.json")):
        return False
    return not any(name.endswith(_WEIGHTS) for name in os.listdir(path))


def _from_config(request: Pretrained, asked: Arguments, directory: str, shown: str, dtype: Any) -> Any:
    """The model of a config on meta, in ``dtype``; ``"auto"``: that of its files, which the config names."""
    given, trusted = (request.config, request.auto_class), request.trust_remote_code
    config, model_class = config_and_class(directory, *given, trust_remote_code=trusted)
    dtype = _dtype_of(config) if dtype == "auto" else dtype
    forget_quantization(config)
    for field, value in asked.implementations.items():
        setattr(config, field, value)
    refusal = FormatError(
        f"asks for a model of more than {_MOST_PARTS} modules, parameters and buffers; check the numbers of layers",
        path=shown,
    )
    with at_most(_MOST_PARTS, refusal):
        return build_meta(directory, dtype=dtype, auto_class=model_class, config=config)


def _dtype_of(config: Any) -> Any:
    """The dtype that a config declares, or its text part; codes are dequantized to bfloat16; else transformers' default."""
    for part in (config, config.get_text_config()):
        if getattr(part, "dtype", None) is not None:
            return part.dtype
    return torch.bfloat16 if method_of_config(config) else torch.float32


def _as_saved(model: Any, path: str) -> Catalog:
    """A catalog as if ``model`` were saved under its own names and dtypes, in one file that does not exist."""
    tensors, end = {}, 0
    for entry in describe(model).stored:
        shape = tuple(entry.tensor.shape)
        chunk = Chunk(whole(shape), path, end)
        tensors[entry.name] = StoredTensor(entry.name, code_of(entry.tensor.dtype), shape, (chunk,))
        end += tensors[entry.name].nbytes
    return Catalog("slices", path, tensors, (StoredFile(path, end),))
