"""The index of a model in several files (``*.index.json``): which file holds each tensor."""

from __future__ import annotations

import os

from ..errors import FormatError
from ..limits import brief, check_name, inside, read_json

__all__ = ["read_weight_map"]


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
