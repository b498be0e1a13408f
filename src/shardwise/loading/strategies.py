"""Who reads a source: each rank its own ranges, one rank per host, or one rank for all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..catalog.records import Catalog, StoredTensor
from ..dtypes import itemsize
from ..engine.engine import Reader
from ..engine.shared import (
    NodeReader,
    OnceReader,
    SharedReader,
    boxes_of_spans,
    boxes_of_transfers,
    bucket_bytes,
    spans_in_turn,
)
from ..errors import RankError, SourceError
from ..objects import frozen
from ..planning.match import Matched
from ..planning.plan import IOOptions, Plan, Transfer, Transfers, build_plan, with_results
from ..planning.proof import Buckets, Span, cut_into_buckets, one_reader_each
from ..ranks.ranks import Ranks, device_of_group, different, host_key
from ..storage.records import is_url
from ..tensors.live import LiveModel

# ----------------------------------------------------------------------------------------------------
# Who reads a source: each rank its own ranges, one rank per host, or one rank of all.

Strategy = Literal["own", "node", "once"]
Asked = Literal["auto", "own", "node", "once"]

#: Ranks count as needing the same bytes if together they read the source this many times.
_TWICE = 1.25
#: In runs shorter than this, the calls take longer than the bytes.
_SHORT_BYTES = 16 * 1024
#: Reading fewer bytes than this in short runs takes milliseconds.
_MANY_SHORT_BYTES = 16 * 1024**2
#: The largest piece where hosts need different parts: small, so that a host reads little that none of its ranks needs.
_PIECE_BYTES = 256 * 1024
#: File systems whose servers all ranks share, as mountinfo names them (``proc(5)``): most of those that coreutils' ``stat`` calls remote, and newer ones.
_NETWORK = re.compile(
    r"9p|acfs|afs|beegfs|ceph|cifs|coda|fhgfs|fuse(?!blk|ctl)|gfs|glusterfs|gpfs|ibrix|lustre|ncp|nfs|ocfs2|orangefs|panfs|prl_fs|pvfs2|smb|snfs"
    r"|vboxsf|virtiofs|vmhgfs|wekafs"
)


@frozen(kw_only=True)
class Facts:
    """Facts that one rank sends to rank 0, which chooses the strategy for all ranks."""

    plan: str
    """Fingerprint of what must be equal on all ranks."""
    words: str
    """The same in words."""
    host: str
    """Equal on ranks that can share memory."""
    files: str | None
    """Fingerprint of the names and sizes of the files; None if this rank does not see one of them."""
    network: bool
    read_bytes: int
    """On a network file system: what this rank would read by itself."""
    short_bytes: int
    """What it would read in runs so short that the number of reads decides."""
    in_store: bool = False
    """Files are objects of a store."""


@frozen
class Choice:
    """A strategy for all ranks."""

    strategy: Strategy
    reason: str
    hosts: Sequence[str]
    """For ``node``: the host of each rank."""
    readers: Sequence[int]
    """For ``once``: the ranks that see the files."""
    asked: bool
    """Whether the caller named the strategy."""

    def peers_of(self, rank: int) -> list[int]:
        """For ``node``: the ranks on the host of ``rank``."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def describe(self) -> str:
        return f"{self.strategy}: {self.reason}"


def facts_of(planned: Planned, fingerprint: str, words: str) -> Facts:
    """The facts of this rank. Looks at the sizes of the files."""
    catalog = planned.catalog
    files: str | None = None
    with suppress(OSError):
        sizes = [
            (os.path.basename(f.path), f.nbytes if is_url(f.path) else os.stat(f.path).st_size, f.version)
            for f in catalog.files
        ]
        files = hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()
    in_store = _in_store(catalog)
    network = not in_store and bool(catalog.files) and on_network(catalog.files[0].path)
    return Facts(
        plan=fingerprint,
        words=words,
        host=hashlib.blake2b(host_key().encode(), digest_size=8).hexdigest(),
        files=files,
        network=network,
        in_store=in_store,
        read_bytes=planned.plan.bytes_to_read if network else 0,
        short_bytes=_in_short_runs(planned.plan.transfers) + _codes_in_short_runs(planned),
    )


def choose(label: str, asked: Asked, source_bytes: int, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A :class:`Choice` from the facts of all ranks. Raises :class:`RankError` if ranks planned different loads."""
    facts = [Facts(**one) for one in told]
    if unlike := [rank for rank, one in enumerate(facts) if one.plan != facts[0].plan]:
        raise different(label, unlike, [one.words for one in facts])
    readers = [rank for rank, one in enumerate(facts) if one.files is not None]
    blind = len(facts) - len(readers)
    if not readers:  # each rank raises when it opens a file
        readers, blind = list(range(len(facts))), 0
    if blind and asked in ("own", "node"):
        cause = f"can't see the source's files; strategy={asked!r} needs them on every rank, 'once' on one"
        raise RankError(label, {rank: cause for rank, one in enumerate(facts) if one.files is None})
    hosts = {one.host for one in facts}
    times = sum(one.read_bytes for one in facts) / max(1, source_bytes)
    short = sum(one.short_bytes for one in facts) >= max(source_bytes / 4, _MANY_SHORT_BYTES)
    strategy, reason = _chosen(asked, facts, len(hosts), blind, times, short=short)
    if strategy != "own":
        first = facts[readers[0]].files
        if others := [rank for rank in readers if facts[rank].files != first]:
            cause = f"its files have different names or sizes than rank {readers[0]}'s"
            raise RankError(label, dict.fromkeys(others, cause))
    choice = Choice(
        strategy,
        reason,
        hosts=[one.host for one in facts] if strategy == "node" else [],
        readers=readers if strategy == "once" else [],
        asked=asked == strategy,
    )
    return asdict(choice)


def _chosen(
    asked: Asked, facts: Sequence[Facts], hosts: int, blind: int, times: float, *, short: bool
) -> tuple[Strategy, str]:
    if len(facts) == 1:
        return "own", "one rank"
    if blind:
        return "once", f"{blind} of {len(facts)} ranks can't see the files"
    if asked != "auto":
        return asked, "asked for"
    if any(one.in_store for one in facts):
        who = "the ranks on a host" if hosts == 1 else "all ranks"
        return (
            "node" if hosts == 1 else "once"
        ), f"request latency outweighs transfer time, so {who} share reads"
    if short and len(facts) > hosts:
        return "node", "shards are stored in short runs"
    if not any(one.network for one in facts):
        return "own", "the files are on local disks"
    if times < _TWICE:
        return "own", "ranks need different bytes"
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    reason = f"ranks of {where} would read the source {times:.1f} times from a network file system"
    return "once" if hosts > 1 else "node", reason


def _in_short_runs(transfers: Sequence[Transfer]) -> int:
    """Bytes of strided transfers whose runs are short."""
    like = transfers.kinds if isinstance(transfers, Transfers) else transfers
    short = [
        k
        for k, t in enumerate(like)
        if len(t.loops) > 1
        and t.run_numel < t.numel
        and t.run_numel * itemsize(t.source_dtype) < _SHORT_BYTES
    ]
    if not short:
        return 0
    counts = transfers.counts() if isinstance(transfers, Transfers) else [1] * len(like)
    return sum(counts[k] * like[k].numel * itemsize(like[k].source_dtype) for k in short)


def _codes_in_short_runs(planned: Planned) -> int:
    """Bytes of what is decoded from codes that a rank would read in short runs: formats may store them transposed."""
    plan, found = planned.plan, 0
    for one, box in boxes_of_transfers(plan.transfers, plan.coded) if plan.coded else ():
        part, stored = one.rule.boxes(box).get("codes"), one.parts.get("codes")
        if part is None or stored is None:
            continue
        run = itemsize(stored.dtype)
        for n, of in zip(reversed(part.sizes), reversed(stored.shape), strict=True):
            run *= n
            if n != of:
                break
        if run < min(part.numel * itemsize(stored.dtype), _SHORT_BYTES):
            found += box.numel * itemsize(one.tensor.dtype)
    return found


def on_network(path: str) -> bool:
    """Whether a file lies on a network file system. False where the system does not say."""
    try:
        wanted = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(wanted)}:{os.minor(wanted)}"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            return _NETWORK.match(rest) is not None
    return False


@frozen
class Planned:
    """A plan, and what it was made from: enough to make it again for another rank, or for a source in buckets."""

    plan: Plan
    live: LiveModel
    catalog: Catalog
    matched: Matched
    io: IOOptions

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Stored tensors and results of host conversions, by name."""
        return with_results(self.catalog, self.matched).tensors

    def names(self, *, copies: bool) -> list[str]:
        """The stored tensors that transfers take; with ``copies`` those that checks take."""
        recipes = self.plan.recipes.values()
        if copies:
            return sorted({tile.source for r in recipes for copy in r.copies for tile in copy})
        return sorted({tile.source for r in recipes for tile in r.tiles})

    def spans(self, rank: int) -> Iterator[Span]:
        """What a rank reads."""
        for transfer in build_plan(
            self.catalog, self.live.layout(rank=rank), self.matched, self.io
        ).transfers:
            nbytes = transfer.span_numel * itemsize(transfer.source_dtype)
            yield transfer.path, transfer.offset_bytes, transfer.offset_bytes + nbytes

    def from_buckets(self, tensors: Mapping[str, StoredTensor]) -> Plan:
        """This rank's plan with these stored tensors. Results of host conversions lie in buckets, too."""
        catalog = replace(self.catalog, tensors={**self.stored, **tensors})
        return build_plan(catalog, self.live.layout(), replace(self.matched, conversions={}), self.io)


def buckets_for(planned: Planned, choice: Choice, rank: int, *, copies: bool) -> Buckets | None:
    """The buckets that a rank and those beside it read for each other; None without any. Pure."""
    names = planned.names(copies=copies)
    if not names:
        return None
    peers = choice.peers_of(rank)
    apart = 0 < len(peers) < len(choice.hosts)  # hosts need different parts
    wanted = _union(span for peer in peers for span in planned.spans(peer)) if apart else None
    coded = planned.catalog.coded
    found = cut_into_buckets(
        planned.stored,
        names,
        bucket_bytes_of(planned, choice),
        piece_bytes=_PIECE_BYTES if apart else None,
        wanted=wanted,
        of_one_file=bool(coded) or _in_store(planned.catalog),
    )
    # What a format stores transposed is read in large parts, of which ranks in turns would each read all.
    return one_reader_each(found, len(choice.readers or peers), coded) if coded else found


def shared_reader(
    planned: Planned, choice: Choice, files: Reader, ranks: Ranks, device: torch.device, *, copies: bool
) -> SharedReader | None:
    """The transfers of a plan, or with ``copies`` its checks, from what ranks read for each other; None without any.

    Every rank must call it.
    """
    buckets = buckets_for(planned, choice, ranks.rank, copies=copies)
    if buckets is None:
        return None
    nbytes = bucket_bytes_of(planned, choice)
    plan = planned.from_buckets(buckets.tensors)
    transfers = plan.checks if copies else plan.transfers
    if choice.strategy == "node":
        peers = choice.peers_of(ranks.rank)
        return NodeReader(transfers, buckets, files, ranks, peers=peers, nbytes=nbytes)
    on = device_of_group(device)
    if on is None:
        raise SourceError(
            "the process group has no backend for a device of this process", path=planned.catalog.root
        )
    return OnceReader(transfers, buckets, files, ranks, readers=choice.readers, device=on, nbytes=nbytes)


def bucket_bytes_of(planned: Planned, choice: Choice) -> int:
    """Bytes of a bucket of a load."""
    return bucket_bytes(choice.strategy, planned.io.staging_bytes, in_store=_in_store(planned.catalog))


def _in_store(catalog: Catalog) -> bool:
    """Whether files are objects of a store."""
    return any(is_url(file.path) for file in catalog.files)


def _union(spans: Iterator[Span]) -> list[Span]:
    """Sorted spans that are apart, with the same bytes."""
    union: list[Span] = []
    for path, start, stop in sorted(spans):
        if union and union[-1][0] == path and start <= union[-1][2]:
            union[-1] = path, union[-1][1], max(union[-1][2], stop)
        else:
            union.append((path, start, stop))
    return union


# ----------------------------------------------------------------------------------------------------
# The bytes that a rank will read of a source, by a plan and a strategy. Pure.


def payload_bytes(planned: Planned, choice: Choice, rank: int) -> int:
    """What :func:`.carry_out` reads on a rank, which has this plan."""
    plan = planned.plan
    if choice.strategy == "own":
        return plan.bytes_to_read
    shared = _bytes_of(planned, _spans(planned, choice, rank))
    return shared + (replace(plan, transfers=()).bytes_to_read if choice.strategy == "node" else 0)


def _spans(planned: Planned, choice: Choice, rank: int) -> Iterator[Span]:
    """What the rank reads for others and itself: for the fill, and for second copies where these are shared, too."""
    readers = choice.readers or choice.peers_of(rank)
    for copies in (False, True) if choice.strategy == "once" else (False,):
        buckets = buckets_for(planned, choice, rank, copies=copies)
        if buckets is not None:
            yield from spans_in_turn(buckets.buckets, readers, rank)


def _bytes_of(planned: Planned, spans: Iterator[Span]) -> int:
    """Bytes of files for spans of tensors, which may be results of conversions, or stored in parts."""
    conversions, coded = planned.plan.conversions, planned.plan.coded
    nbytes, last, in_parts = 0, None, list[Span]()
    for path, start, stop in spans:
        if (host := conversions.get(path)) is not None:
            nbytes += 0 if host is last else host.source_bytes  # the reader keeps the results of the last one
            last = host
        elif path in coded:
            in_parts.append((path, start, stop))
        else:
            nbytes += stop - start
    return nbytes + sum(
        one.bytes_of(box) for one, box in boxes_of_spans(in_parts, coded, planned.io.parts_bytes)
    )
