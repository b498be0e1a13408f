"""Outlines of hub models, for a plan: config, index, code, and safetensors files that have the header and no payload.

An outline's weights are files with holes: as long as the real ones, and almost nothing of them is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..catalog.quantization import DESCRIBING
from ..catalog.weights import ADAPTER_CONFIG, CONFIG_NAME
from ..errors import SourceError
from ..limits import inside
from .documents import MODULES_NAME

__all__ = ["documents_of_outline", "outline", "outline_of_cache"]

#: Headers that are asked for at a time.
_AT_ONCE = 8


def documents_of_outline(names: Iterable[str]) -> list[str]:
    """Of the files that a load needs, those other than weights that a plan reads. Pure."""
    known = (CONFIG_NAME, ADAPTER_CONFIG, MODULES_NAME)
    return [n for n in names if os.path.basename(n) in known or n.endswith((".py", ".index.json"))]


def outline(
    folder: str, model: str, revision: str | None, commit: str, names: Collection[str], common: dict[str, Any]
) -> str:
    """Make the outline of a hub model in ``folder``; returns its directory, whose name is the commit.

    ``names``: the files of the repository that a load needs. ``common``: arguments of ``hf_hub_download``. A source whose
    description is in its tensors, or in pickles, gets no weights: its config alone is planned. Raises :class:`SourceError` if
    ``revision`` is no longer that commit.
    """
    from huggingface_hub import HfApi, hf_hub_download

    here = _directory(folder, model, commit)
    for name in documents_of_outline(names):
        file = hf_hub_download(model, name, revision=revision, **common)  # the cache notes its commit
        if not file.endswith(os.path.join(commit, name)):
            raise SourceError(
                f"{revision or 'the main branch'} moved while it was downloaded; run again", path=model
            )
        _put(here, name, file)
    api = HfApi(token=common["token"], library_name=common["library_name"])
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-headers") as pool:
        headers = list(
            pool.map(
                lambda name: api.parse_safetensors_file_metadata(
                    model, name, revision=commit, token=common["token"]
                ),
                weights,
            )
        )
    if any(name.endswith(DESCRIBING) for header in headers for name in header.tensors):
        return here
    for name, header in zip(weights, headers, strict=True):
        _write_header(inside(here, name), header, model)
    return here


def outline_of_cache(folder: str, model: str, snapshot: str, subfolder: str) -> str | None:
    """The outline of what the cache has of a model without its weights; None if that lacks a config."""
    if not os.path.isfile(os.path.join(snapshot, subfolder, CONFIG_NAME)):
        return None
    here = _directory(folder, model, os.path.basename(snapshot))
    files = [os.path.relpath(os.path.join(at, n), snapshot) for at, _, ns in os.walk(snapshot) for n in ns]
    for name in documents_of_outline(files):
        if not name.endswith(".index.json"):
            _put(here, name, os.path.join(snapshot, name))
    return here


def _directory(folder: str, model: str, commit: str) -> str:
    here = os.path.join(folder, model.replace("/", "--"), commit)
    os.makedirs(here, exist_ok=True)
    return here


def _put(here: str, name: str, file: str) -> None:
    target = inside(here, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(file, target)


def _write_header(path: str, header: Any, model: str) -> None:
    """Write a safetensors file of a header that the hub sent; its payload is a hole."""
    entries: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in header.tensors.items()
    }
    metadata = {"__metadata__": header.metadata} if header.metadata else {}
    text = json.dumps({**metadata, **entries}).encode()
    end = max((t.data_offsets[1] for t in header.tensors.values()), default=0)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"its {os.path.basename(path)} would have {end} bytes, and such a file can't be made: {error}",
            path=model,
        ) from error
