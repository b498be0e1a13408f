"""The checkpoint format on disk (docs/format.md), for writer and reader: manifest, documents, slice files, headers."""
