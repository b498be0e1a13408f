"""Bytes that the ranks of a run read from the storage of models and checkpoints, and write to it, by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..planning import IOOptions
from .held import Held
from .records import Amount, Files, Phase
from .variant import Variant

__all__ = ["files_of", "with_cached_reads"]


def files_of(held: Held, variant: Variant, read_bytes: Sequence[int]) -> tuple[Files, ...]:
    """The files of each phase. ``read_bytes``: what each rank reads in a load, or the first and the last of many."""
    ranks, per_host = variant.ranks, min(variant.ranks_per_host, variant.ranks)
    is_all = len(read_bytes) == ranks
    hosts = [sum(read_bytes[k : k + per_host]) for k in range(0, ranks, per_host)] if is_all else []
    resumed = held.parameters + held.optimizer
    stored = held.stored_model + held.stored_optimizer

    def files(phase: str, verb: str, rank: int, node: int, total: int) -> Files:
        return Files(phase, verb, rank, node, total, total / variant.training.bytes_per_s)  # type: ignore[arg-type]

    def written(phase: str, nbytes: int) -> Files:
        each = -(-nbytes // ranks)
        return files(phase, "writes", each, each * per_host, nbytes)

    most = max(read_bytes)
    return (
        files(
            "load",
            "reads",
            most,
            max(hosts) if is_all else most * per_host,
            sum(hosts) if is_all else most * ranks,
        ),
        written("save", stored),
        files("resume", "reads", resumed, resumed * per_host, resumed * ranks),
        written("export", held.stored_model),
    )


def with_cached_reads(
    phases: Iterable[Phase], files: Iterable[Files], variant: Variant, io: IOOptions
) -> tuple[Phase, ...]:
    """The phases, with what reads leave in the page cache where ``io.page_cache`` lets it stay."""
    keeps = io.page_cache == "keep" or (io.page_cache == "auto" and variant.training.device != "unified")
    if not keeps:
        return tuple(phases)
    read = {
        f.phase: f.node_bytes // min(variant.ranks_per_host, variant.ranks)
        for f in files
        if f.verb == "reads"
    }
    text = "what the rank reads, at most; the system can reclaim it"

    def cached(phase: Phase) -> Phase:
        nbytes = read.get(phase.name, 0)
        if not nbytes:
            return phase
        return replace(phase, amounts=(*phase.amounts, Amount("files", "page cache", nbytes, nbytes, text)))

    return tuple(map(cached, phases))
