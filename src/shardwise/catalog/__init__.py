"""Catalogs: what a source holds, made from headers or a manifest alone. No payload is read here."""

from .records import Catalog, Chunk, StoredFile, StoredTensor
from .safetensors import catalog_of_safetensors

__all__ = ["Catalog", "Chunk", "StoredFile", "StoredTensor", "catalog_of_safetensors"]
