"""Writes a step in parts, one for each host's own directory. The steps of :class:`.PartTarget`, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

from ..format.manifest import Manifest
from ..ranks.ranks import Ranks
from ..store.part_target import PartTarget, SealedPart, digest_of_step, sealed_parts, settle
from ..store.publish import sweep_leftovers
from .local_places import LocalPlaces

__all__ = ["begin_parts", "publish_parts", "settle_parts"]


def begin_parts(target: PartTarget, first: str, folders: Sequence[str], ranks: Ranks) -> str:
    """Make the temporary directory of each part. Collective. Returns the path that this rank writes below."""
    with ranks.agree("make temporary directories"):
        if ranks.rank == target.leader:
            target.follow(first, folders)
    return target.beside(first)


def publish_parts(target: PartTarget, manifest: Callable[[], Manifest], ranks: Ranks) -> None:
    """Publish the parts, when all of them are sealed. ``manifest`` is called on rank 0. Collective.

    On failure nothing is published, unless it came when parts appeared: then the next start publishes what is left (:func:`settle_parts`).
    """
    text = ranks.on_first("make the manifest", lambda: target.text_of(manifest()))
    try:
        with ranks.agree("seal the parts"):
            if ranks.rank == target.leader:
                target.seal(text)
    except Exception as error:
        if ranks.is_settled(error):
            target.unseal()
        raise
    with ranks.agree("publish the parts"):
        if ranks.rank == target.leader:
            target.appear()


def settle_parts(root: str, places: LocalPlaces, ranks: Ranks) -> None:
    """Publish the sealed parts of steps of which another place has published its part; delete what else killed saves left. Collective.

    A part stays as it is while a place that has another one of its step is away: that one may be published. Raises
    :class:`CheckpointError`.
    """

    def look() -> list[object]:
        parts = sealed_parts(root)
        sweep_leftovers(root, {part.name for part in parts})
        return [list(astuple(part)) for part in parts]

    sealed = [[SealedPart(*one) for one in of] for of in places.on_each("look for parts", look, ranks)]  # type: ignore[misc]
    steps = sorted({part.step for of in sealed for part in of})
    if not steps:
        return
    published = places.on_each(
        "look for their steps", lambda: [digest_of_step(root, s) for s in steps], ranks
    )
    present = {place.id for place in places.places}

    def finish() -> None:
        for part in sealed[places.own]:
            appears = any(digests[steps.index(part.step)] == part.digest for digests in published)
            if appears or present.issuperset(part.places):
                settle(root, part, appears=appears)

    places.on_each("publish the parts that are left", finish, ranks)
