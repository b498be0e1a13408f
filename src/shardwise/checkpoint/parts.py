"""Writes a step in parts, one for each host's own directory. The steps of :class:`.PartTarget`, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..format.manifest import Manifest
from ..ranks.ranks import Ranks
from ..store.part_target import PartTarget

__all__ = ["begin_parts", "publish_parts"]


def begin_parts(target: PartTarget, first: str, folders: Sequence[str], ranks: Ranks) -> str:
    """Make the temporary directory of each part. Collective. Returns the path that this rank writes below."""
    with ranks.agree("make temporary directories"):
        if ranks.rank == target.leader:
            target.follow(first, folders)
    return target.beside(first)


def publish_parts(target: PartTarget, manifest: Callable[[], Manifest], ranks: Ranks) -> None:
    """Publish the parts, when all of them are sealed. ``manifest`` is called on rank 0. Collective.

    On failure nothing is published, unless it came when parts appeared: then the step is whole or not, which a resume finds out.
    """
    text = ranks.on_first("make the manifest", lambda: target.text_of(manifest()))
    with ranks.agree("seal the parts"):
        if ranks.rank == target.leader:
            target.seal(text)
    with ranks.agree("publish the parts"):
        if ranks.rank == target.leader:
            target.appear()
