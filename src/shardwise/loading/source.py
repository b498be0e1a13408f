"""Opens a source on every rank, also where only some ranks see its files."""

from __future__ import annotations

import os

from ..catalog import Catalog
from ..catalog.open import open_catalog
from ..catalog.weights import Choice
from ..ranks.ranks import Ranks
from ..storage import is_url

__all__ = ["open_for_all"]

_ANY = Choice()


def open_for_all(source: str | os.PathLike[str] | Catalog, ranks: Ranks, *, choice: Choice = _ANY) -> Catalog:
    """The catalog of a source. A rank on which the path does not exist gets it from the first rank that has the path; a
    URL is opened by rank 0 alone.

    Every rank must call it; one agreement if every rank has the path. Raises :class:`SourceError`, or :class:`RankError`.
    """
    opened: list[Catalog] = []

    def look() -> bool:
        if not isinstance(source, Catalog) and ranks.world_size > 1 and not _is_here(source, ranks):
            return False
        opened.append(source if isinstance(source, Catalog) else open_catalog(source, choice=choice))
        return True

    seen = ranks.combine("open source", look, list)
    if not any(seen):
        with ranks.agree("open source"):
            assert not isinstance(source, Catalog)
            opened.append(open_catalog(source, choice=choice))  # raises: the path exists on no rank
    elif not all(seen):
        from ..catalog.message import packed_catalog, unpacked_catalog

        first = seen.index(True)
        content = ranks.combine(
            "send the catalog",
            lambda: packed_catalog(opened[0]) if ranks.rank == first else b"",
            lambda contents: contents[first],
        )
        opened.append(unpacked_catalog(content))
    return opened[0]


def _is_here(source: str | os.PathLike[str], ranks: Ranks) -> bool:
    """Whether this rank opens a source."""
    return ranks.rank == 0 if is_url(os.fspath(source)) else os.path.lexists(source)
