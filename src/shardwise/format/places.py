"""Steps in parts: each host's own directory holds the manifest, and the files of its ranks; those of no rank lie with rank 0's.

The parts under one directory, as ``rsync`` or ``cp`` puts them there, are an ordinary checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from ..errors import CheckpointError
from ..limits import inside
from ..storage import is_url
from .manifest import Manifest, Place

__all__ = [
    "absent_places",
    "describe_absent",
    "describe_part",
    "files_by_place",
    "rank_of_file",
    "ranks_text",
    "refuse_part",
]

#: Hosts that a text names.
_SHOWN = 5
_OF_RANK = re.compile(r"rank/([0-9]{5,})\.(json|safetensors)")
_SLICES = re.compile(
    r"(models?|optimizers?)/(.*/)?shard-([0-9]{5,})-(model|optimizer)-[0-9]+-of-[0-9]+\.safetensors"
)


def rank_of_file(name: str) -> int:
    """The rank that writes a file of a checkpoint. Rank 0 writes the files whose names hold no rank."""
    if found := _OF_RANK.fullmatch(name):
        return int(found[1])
    found = _SLICES.fullmatch(name)
    return int(found[3]) - 1 if found else 0


def files_by_place(manifest: Manifest) -> list[list[str]]:
    """The names of the files that each of the manifest's places holds; one list of all files if it has no places."""
    if not manifest.places:
        return [list(manifest.files)]
    place_of = {rank: number for number, place in enumerate(manifest.places) for rank in place.ranks}
    found: list[list[str]] = [[] for _ in manifest.places]
    for name in manifest.files:
        found[place_of.get(rank_of_file(name), 0)].append(name)
    return found


def absent_places(path: str, manifest: Manifest) -> list[int]:
    """The numbers of the manifest's places none of whose files is at ``path``: parts that lie elsewhere. Rank-local."""
    if not manifest.places or is_url(path):
        return []
    return [
        number
        for number, names in enumerate(files_by_place(manifest))
        if not any(os.path.lexists(inside(path, name)) for name in names)
    ]


def refuse_part(path: str, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` if parts of a step lie elsewhere: it is not damaged. Rank-local."""
    if part := describe_part(path, manifest):
        raise CheckpointError(f"{path}: {part}")


def describe_part(path: str, manifest: Manifest) -> str | None:
    """What :func:`describe_absent` says of the directory of a step; None if no part of it lies elsewhere. Rank-local."""
    absent = absent_places(path, manifest)
    return describe_absent(path, manifest.places, absent) if absent else None


def describe_absent(
    path: str, places: Sequence[Place], absent: Collection[int], *, holder: str = "holds"
) -> str:
    """Which parts of a step are at ``path`` and which hosts have the others, with the lines that merge them.

    ``holder``: the words before what is there.
    """
    step = os.path.basename(os.path.abspath(path))
    lost = [places[number] for number in sorted(absent)]
    here = [number for number in range(len(places)) if number not in absent]
    numbers = f"part{'s' * (len(here) > 1)} {ranks_text([n + 1 for n in here])}" if here else "none"
    of = f" ({', '.join([f'host {places[n].host}' for n in here[:_SHOWN]])}{_more(here)})" if here else ""
    hosts = ", ".join(
        [f"host {p.host} (place {p.id}) has the files of ranks {ranks_text(p.ranks)}" for p in lost[:_SHOWN]]
    )
    merge = " && ".join(f"rsync -a {p.host}:DIRECTORY/{step}/ {path}/" for p in lost[:_SHOWN])
    return (
        f"{holder} {numbers} of {len(places)} of the step{of}; {hosts}{_more(lost)}. Start with local=True on all hosts that saved "
        f"it, or merge the parts into one directory: {merge}{_more(lost)}"
    )


def _more(hosts: Sequence[object]) -> str:
    return f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Numbers as people write them: ``0 to 7``, or ``0, 2, 5``."""
    whole = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if whole else ", ".join(map(str, ranks))
