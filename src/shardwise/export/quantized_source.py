"""The quantized source whose format an export writes: found, checked to be what the model was loaded from, and held open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..catalog import Catalog
from ..catalog.open import open_catalog
from ..catalog.quantized import NAMES_IN_CONFIG
from ..errors import CheckpointError, SourceError
from ..layout.live import LiveModel
from ..limits import read_shallow_json
from ..models.homes import home_of, source_of, versions_of
from ..names import Named
from ..planning import IOOptions
from ..quantized.dequantized import dequantized
from ..storage import absolute, is_file, join
from ..transfer import SourceReader
from ..transfer.decoded import DecodingReader

__all__ = ["QuantizedSource", "place_of_source"]

#: Files of a source, with what tells versions apart.
Versions = Mapping[str, tuple[int, object]]


class QuantizedSource:
    """A quantized source: its stored tensors, the tensors that they stand for, and readers of both. Rank-local.

    Opens its files, as many as the process may have open, so a source that is deleted meanwhile does no harm. Raises
    :class:`CheckpointError` if there is none, if it is not what the model was loaded from, or if it is plain.
    """

    def __init__(
        self,
        place: tuple[str, Versions | None],
        own: Callable[[], Iterable[Named]],
        on_progress: Callable[[int], None],
        io: IOOptions,
    ) -> None:
        """``place``: where it lies, and its files as they were, if that is known. ``own`` gives the model's tensors."""
        self.root, loaded = place
        try:
            self.stored: Catalog = open_catalog(self.root)
            self.meant: Catalog = dequantized(self.stored, own)
            if loaded is not None and versions_of(self.stored) != loaded:
                raise CheckpointError(
                    f"{self.root}: has changed since the model was loaded from it: its files, their sizes or their times differ. "
                    f"Give source= to write the format of the files that are there now"
                )
            if not self.meant.coded:
                raise CheckpointError(
                    f"{self.root}: is not quantized, and quantize='as-source' writes the format of a quantized source; leave "
                    f"quantize= out, or give source="
                )
            self.config: Mapping[str, Any] = _config(self.stored)
            self.files = SourceReader(on_progress, files=self.stored.files, io=io)
            self.files.hold(file.path for file in self.stored.files)
        except (SourceError, OSError) as error:
            raise CheckpointError(
                f"{self.root}: can't be read as the source of quantize='as-source': {error}; give source=, the quantized "
                f"source that the model was loaded from"
            ) from error
        self.decoded = DecodingReader(self.files, self.meant.coded, io)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its ``quantization_config``."""
        return self.stored.quantization.settings

    def as_quantized(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config of the plain model, with what the source's config says of quantization and dtype, where it says it."""
        return _with_quantization(config, self.config)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def place_of_source(live: LiveModel, given: str | os.PathLike[str] | None) -> tuple[str, Versions | None]:
    """Where the source of a live model lies, and its files as they were, if that is known."""
    if given is not None:
        return absolute(given), None
    loaded = source_of(live.root) or source_of(live.base)
    if loaded is not None:
        return loaded.root, loaded.versions
    home = home_of(live.root) or home_of(live.base)
    if home is None:
        raise CheckpointError(
            "quantize='as-source': can't tell which quantized source this model was loaded from; give source="
        )
    return home, None


def _config(stored: Catalog) -> Mapping[str, Any]:
    file = join(stored.root, "config.json")
    found = read_shallow_json(file) if is_file(file) else {}
    return found if isinstance(found, dict) else {}


def _with_quantization(config: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name in (*NAMES_IN_CONFIG, "dtype", "torch_dtype"):
        found.pop(name, None)
        if name in source:
            found[name] = source[name]
    for name, part in source.items():
        if name.endswith("_config") and name not in NAMES_IN_CONFIG and isinstance(part, dict):
            own = found.get(name)
            if isinstance(own, dict):
                found[name] = _with_quantization(own, part)
    return found
