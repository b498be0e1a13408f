"""From a path to a catalog: which kind of source is it?"""

from __future__ import annotations

import os

from ..errors import SourceError
from .checkpoint import catalog_of_checkpoint
from .dcp import METADATA_NAME, catalog_of_dcp
from .records import Catalog
from .safetensors import catalog_of_safetensors, has_safetensors
from .torchfile import catalog_of_torch_file, catalog_of_torch_files, has_torch_files, is_torch_file

__all__ = ["open_catalog"]


def open_catalog(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of whatever lies at ``path``: a shardwise checkpoint, a DCP checkpoint, safetensors, or a
    file of ``torch.save``. Headers only.

    Sources describe themselves: a directory with ``manifest.json`` is a checkpoint, one with ``.metadata`` torch's
    (DCP). Raises :class:`SourceError`.
    """
    root = os.fspath(path)
    if "://" in root:
        raise SourceError("URLs are not supported yet; copy the files to a local path", path=root)
    if os.path.isfile(os.path.join(root, "manifest.json")):
        return catalog_of_checkpoint(root)
    if os.path.isfile(os.path.join(root, METADATA_NAME)):
        return catalog_of_dcp(root)
    if is_torch_file(root):
        return catalog_of_torch_file(root)
    if has_torch_files(root) and not has_safetensors(root):
        return catalog_of_torch_files(root)
    return catalog_of_safetensors(root)
