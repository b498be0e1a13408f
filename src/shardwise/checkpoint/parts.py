"""Writes a step in parts, one for each host's own directory. The steps of :class:`.PartTarget`, on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple

from ..format.manifest import Manifest
from ..ranks.ranks import Ranks
from ..store.part_target import PartTarget, SealedPart, digest_of, sealed_parts, settle
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

    On failure nothing is published, unless it came when parts appeared: :func:`settle_parts` publishes what is left, at the next start
    of a Checkpointer or a Trainer, and before the next load of Accelerate.
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


def settle_parts(root: str, places: LocalPlaces, ranks: Ranks, *, is_held: bool = True) -> None:
    """Publish the sealed parts of checkpoints of which another place has published its part; delete what else killed saves left. Collective.

    A part stays as it is while a place that has another one of its checkpoint is away: that one may be published. Of two checkpoints of
    one name, as a run leaves them whose hosts were away in turn, one is published. ``is_held``: whether this run holds the directories;
    if not, what no other place has published stays, for a save of another run may be under way. Raises :class:`CheckpointError`.
    """

    def look() -> list[object]:
        parts = sealed_parts(root)
        if is_held:
            sweep_leftovers(root, {part.name for part in parts})
        return [list(astuple(part)) for part in parts]

    sealed = [[SealedPart(*one) for one in of] for of in places.on_each("look for parts", look, ranks)]  # type: ignore[misc]
    finals = sorted({part.final for of in sealed for part in of})
    if not finals:
        return
    named = places.on_each(
        "look for their names", lambda: [digest_of(os.path.join(root, name)) for name in finals], ranks
    )
    ids = [place.id for place in places.places]
    appearing = {
        final: _appearing(final, sealed, [digests[number] for digests in named], ids)
        for number, final in enumerate(finals)
    }

    def finish() -> None:
        for part in sealed[places.own]:
            appears = part.digest in appearing[part.final]
            if appears or (is_held and set(ids).issuperset(part.places)):
                settle(root, part, appears=appears)

    places.on_each("publish the parts that are left", finish, ranks)


def _appearing(
    final: str, sealed: Sequence[Sequence[SealedPart]], named: Sequence[str], ids: Sequence[str]
) -> set[str]:
    """The digests of the manifests whose sealed parts get a name now.

    ``sealed``, ``named`` and ``ids``: by place, its sealed parts, the digest of what has the name already, and its id.
    """
    holders: dict[str, set[str]] = {digest: set() for digest in named if digest}
    parts = [(place, part) for place, of in enumerate(sealed) for part in of if part.final == final]
    for place, digest in [*enumerate(named), *[(place, part.digest) for place, part in parts]]:
        if digest in holders and named[place] in ("", digest):
            holders[digest].add(ids[place])
    of_digest = {part.digest: part.places for _, part in parts if part.digest in holders}
    whole = [digest for digest, of in of_digest.items() if holders[digest].issuperset(of)]
    if whole:
        return {max(whole)}  # ranks know of none of them: each was cut while its parts appeared
    # A resume says what is lost.
    return {digest for digest, of in of_digest.items() if set(ids).issuperset(of)}
