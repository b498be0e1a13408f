"""A checkpoint on disk (docs/format.md), for its writer and its reader: manifest, documents, slice files, headers."""
