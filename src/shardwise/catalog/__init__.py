"""Catalogs: the tensors of a source and where they lie, from headers or a manifest alone. Reads no payload."""

from .records import Catalog, Chunk, StoredFile, StoredTensor
from .safetensors import catalog_of_safetensors

__all__ = ["Catalog", "Chunk", "StoredFile", "StoredTensor", "catalog_of_safetensors"]
