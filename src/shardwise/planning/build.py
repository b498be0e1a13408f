"""Builds the plan of one rank from catalog, layout and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..catalog.records import Catalog
from ..layout.wanted import Layout
from ..recipe.match import Matched
from .casts import rounded_in
from .cover import prove_cover
from .cuts import merge_loops, transfers_of
from .records import LEAST_STAGING_BYTES, IOOptions, Plan, Transfer
from .transfers import Collector

__all__ = ["build_plan", "merge_loops", "transfers_of", "with_results"]


def build_plan(catalog: Catalog, layout: Layout, matched: Matched, io: IOOptions) -> Plan:
    """The reads that fill one rank's boxes. Pure and rank-local.

    Raises :class:`PlanError` with every problem at once (missing, unused, of the wrong shape, not castable,
    duplicated, not covered) before anything is read; the text is the same on every rank.
    """
    catalog, source_bytes = with_results(catalog, matched), catalog.nbytes
    matched.problems += _oversized(matched, io)
    prove_cover(catalog, layout, matched)
    reads, copies = Collector(catalog.tensors), Collector(catalog.tensors)
    for wanted in layout.wanted:
        recipe = matched.recipes.get(wanted.name)
        if recipe is None:
            continue
        for tile in recipe.tiles:
            reads.add(tile, wanted)
        for tile in (t for copy in recipe.copies for t in copy):
            copies.add(tile, wanted)
    (transfers, kinds), (checks, kinds_of_checks) = reads.in_order(), copies.in_order()
    return Plan(
        wanted=layout.wanted,
        recipes=dict(matched.recipes),
        transfers=transfers,
        checks=checks,
        unused=tuple(matched.unused),
        initialized=tuple(matched.initialized),
        ignored_files=catalog.ignored_files,
        staging_bytes=_staging(kinds, kinds_of_checks, matched, io),
        source_bytes=source_bytes,
        conversions=dict(matched.conversions),
        coded=catalog.coded,
        kept=catalog.kept,
        rounded=rounded_in(catalog.tensors, layout.wanted, matched.recipes),
    )


def with_results(catalog: Catalog, matched: Matched) -> Catalog:
    """The catalog, plus the results of host conversions as if they were stored."""
    if not matched.conversions:
        return catalog
    results = {t.name: t for host in matched.conversions.values() for t in host.outputs.values()}
    return replace(catalog, tensors={**catalog.tensors, **results})


def _oversized(matched: Matched, io: IOOptions) -> Iterator[str]:
    """Host conversions that don't fit into the staging budget beside the minimum for copying."""
    room = io.staging_bytes - LEAST_STAGING_BYTES
    for host in dict.fromkeys(matched.conversions.values()):
        if host.staging_bytes > room:
            yield (
                f"too large: {host.name} can't be compiled to byte ranges ({host.reason}) and must be converted in full, "
                f"which takes {host.staging_bytes} bytes of staging; {room} are left of io.staging_bytes. "
                f"Give io=IOOptions(staging_bytes={host.staging_bytes + LEAST_STAGING_BYTES}) or more"
            )


def _staging(
    transfers: Sequence[Transfer], checks: Sequence[Transfer], matched: Matched, io: IOOptions
) -> int:
    """Staging for the reads of a CPU target: the largest indirect read, up to the limit, plus the largest host
    conversion."""
    largest = max((t.bytes_to_read for t in transfers if not t.is_direct), default=0)
    largest = max(largest, max((t.bytes_to_read for t in checks), default=0))
    converted = max((host.staging_bytes for host in matched.conversions.values()), default=0)
    return min(largest + converted, io.staging_bytes)
