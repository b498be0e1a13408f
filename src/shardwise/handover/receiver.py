"""``WeightReceiver``: the engine's side. Each rank pulls its own slices of a version, proves them, and switches them on together."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import xxhash
from torch import nn

from ..catalog.records import Catalog, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..engine.engine import Destination
from ..errors import CheckpointError, IntegrityError, PlanError
from ..loading.load import Names, plan_load, resolve_names
from ..models.meta import default_device, materialize
from ..names import patterns_of
from ..objects import frozen
from ..operations.printed import Printed
from ..planning.hub_rules import automatic_rules, embedding_names
from ..planning.match import Rules, matches_any
from ..planning.plan import IOOptions, Transfer
from ..ranks.ranks import Ranks, host_key
from ..tensors.live import LiveModel, describe
from ..tensors.placements import geometry_of
from .changes import apply, words_of
from .layout import Snapshot, bytes_of, tensors_from
from .links import Address, Asker

#: Of a request, counted as if all came whole.
_BATCH_BYTES = 64 * 1024**2
#: Between two questions for a newer version.
_POLL_S = 0.05


@frozen
class PullReport(Printed):
    """A version that is switched on."""

    version: int
    tensors: int
    """Number of the model's tensors that were filled."""
    local_bytes: int
    """Bytes that this rank holds, in the sender's dtype."""
    bytes_moved: int
    """Bytes that this rank received, or copied from the memory of a sender on the same host."""
    changed: int
    """Number of reads that arrived as changes to the version before; the others arrived whole."""
    carry: str
    """How the bytes came, and why."""
    seconds: float


@frozen
class _Source:
    """What this rank takes from one rank of the sender."""

    rank: int
    at: Address
    plan: str
    reads: Sequence[Transfer]
    files: Sequence[str]
    """The sender's snapshots as files, if this rank can open them."""

    def described(self) -> list[Any]:
        """The reads as the sender wants them."""
        return [
            [t.source_dtype, t.offset_bytes, [[loop.size, loop.source_stride] for loop in t.loops]]
            for t in self.reads
        ]


@frozen
class _Taken:
    """The bytes of one source's reads, proved: one tensor for each."""

    source: _Source
    parts: Sequence[torch.Tensor]
    sums: Sequence[int]
    moved: int
    changed: int


class WeightReceiver:
    """Receive versions of a model's weights from a trainer's :class:`WeightSender`.

    Args:
        model: the engine's model, in any layout, or a mapping of tensors by hub name (plain tensors or DTensors). Every tensor
            must be in what the sender publishes, as in :func:`load`. Tensors on meta are allocated by the first :meth:`pull`.
        url: the sender's ``url``. It is contacted by the first :meth:`pull`.
        names, key_mapping, allow_unused: as in :func:`load`.
        device: where tensors on meta are allocated. Default: the mesh's device, otherwise the CPU.
        carry: ``"tcp"``: over the network. ``"memory"``: from the memory of a sender on the same host. ``"auto"``: from memory where this
            process can open it, otherwise over the network.
        timeout_s: limit for a rank, or the sender, that makes no progress.

    Every rank of the default process group must create it and call its methods. The sender's ranks are in another process group, or in
    the same one. Memory: while pulling, this rank's shards once more.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        url: str,
        *,
        names: Names | None = None,
        key_mapping: Mapping[str, str] | None = None,
        allow_unused: Sequence[str] = (),
        device: torch.device | str | None = None,
        carry: Literal["auto", "tcp", "memory"] = "auto",
        timeout_s: float = 300.0,
    ) -> None:
        if carry not in ("auto", "tcp", "memory"):
            raise ValueError(f"carry must be 'auto', 'tcp' or 'memory', got {carry!r}")
        self.version: int | None = None
        """The version that is switched on; None before the first."""
        self._model, self._address = model, Address.parse(url)
        self._names, self._key_mapping, self._device = names, key_mapping, device
        self._unused = patterns_of("allow_unused", allow_unused)
        self._carry, self._timeout_s = carry, timeout_s
        self._ranks = Ranks.current(timeout_s=timeout_s)
        self._run: str | None = None
        self._sources: Sequence[_Source] = ()
        self._live: LiveModel
        self._tensors = 0
        self._sums: Mapping[int, Sequence[int]] = {}
        self._is_doubted = False  # changes didn't make the version: the model may have been changed

    def pull(self, *, wait_s: float = 0.0) -> PullReport | None:
        """Pull the newest version, prove it, and switch it on: either all ranks have it afterwards, or none.

        Returns None if there is no version other than the one that is on, after waiting ``wait_s`` for one. Every rank must call it, and
        none may use the model meanwhile. Each read is compared with a checksum that the sender took of the same elements.

        Raises, on every rank, :class:`CheckpointError` if the sender can't be reached within ``wait_s``, :class:`IntegrityError` if bytes
        arrived damaged three times, and :class:`PlanError` if the sender's tensors don't fill the model. The model then has the version that it
        had.
        """
        started, until, damaged = time.perf_counter(), time.monotonic() + wait_s, 0
        while True:
            found = self._ranks.on_first("ask for the newest version", self._ask_newest)
            problem = found.get("away")
            if problem is None and found["run"] != self._run:
                problem = self._connect()
            is_new = problem is None and found["version"] not in (None, self.version)
            if is_new:
                taken = list[_Taken]()
                version = int(found["version"])
                said = self._ranks.combine("pull weights", partial(self._take_all, version, taken), list)
                kinds = {kind for kind, _ in said}
                if kinds == {"taken"}:
                    return self._switch_on(version, taken, started)
                problem = next(text for kind, text in said if kind != "taken")
                if "damaged" in kinds:
                    damaged, self._is_doubted = damaged + 1, True
                    if damaged == 3:
                        with self._ranks.agree("pull weights"):
                            raise IntegrityError(f"version {version} isn't switched on: {problem}")
                    continue
                if "gone" in kinds:
                    continue
            if time.monotonic() >= until:
                if problem is None:
                    return None
                with self._ranks.agree("pull weights"):
                    raise CheckpointError(f"no new version: {problem}")
            time.sleep(_POLL_S)

    def verify(self) -> None:
        """Prove that the model still has the version that is on: compare each read with the checksum that came with it. Collective.

        Raises :class:`IntegrityError` or :class:`RankError`, naming the first tensor that differs.
        """
        with self._ranks.agree("verify weights"):
            local = Destination(self._live.local_tensors())
            for source in self._sources:
                for read, expected in zip(source.reads, self._sums[source.rank], strict=True):
                    if read.source_dtype != read.target_dtype:
                        continue  # cast when it was switched on
                    if xxhash.xxh3_64_intdigest(bytes_of(local.strided(read).cpu()).numpy().data) != expected:
                        raise IntegrityError(
                            f"{read.wanted!r} was changed since version {self.version} was switched on (part of {read.stored!r} from "
                            f"rank {source.rank} of the sender)"
                        )

    # ------------------------------------------------------------------------------------------------

    def _ask_newest(self) -> dict[str, Any]:
        try:
            asker = Asker(0, self._address, self._timeout_s)
            try:
                return asker.ask({"ask": "newest"})[0]
            finally:
                asker.close()
        except (CheckpointError, IntegrityError) as error:
            return {"away": str(error)}

    def _connect(self) -> str | None:
        """Plan the reads from a sender that is new, or was restarted. Returns why that can't be done yet. Collective."""

        def fetch() -> dict[str, Any]:
            asker = Asker(0, self._address, self._timeout_s)
            try:
                return asker.ask({"ask": "catalog"})[0]
            except (CheckpointError, IntegrityError) as error:
                return {"away": str(error)}
            finally:
                asker.close()

        told = self._ranks.on_first("fetch the sender's catalog", fetch)
        if "away" in told:
            return str(told["away"])
        with self._ranks.agree("plan the pulls"):
            self._plan(told)
            self.version = None
            self._run = str(told["run"])
        return None

    def _plan(self, told: Mapping[str, Any]) -> None:
        ranks = told["ranks"]
        specs = {name: (code, tuple(shape)) for name, (code, shape) in told["tensors"].items()}
        tensors = tensors_from(specs, [one["boxes"] for one in ranks])
        live = self._describe(tensors)
        catalog = Catalog("weights", "the sender's weights", tensors, ())
        hub = automatic_rules(live, self._key_mapping) if self._names is None else None
        rules = Rules(
            resolve_names(live, catalog, self._names, self._key_mapping, hub),
            allow_unused=lambda stored, _: "caller" if matches_any(stored, self._unused) else None,
            allow_missing=lambda name: None,
            caller_declares=True,
            embeddings=partial(embedding_names, live.base),
        )
        plan = plan_load(live, catalog, rules, io=IOOptions()).plan
        if plan.conversions:
            names = sorted({t.wanted for t in plan.transfers if t.path in plan.conversions})
            raise PlanError(
                "these tensors need a conversion that can't be traced to elements, so they can't be pulled: give the receiver a model of the "
                "sender's class, or a mapping of tensors by hub name",
                tuple(names),
            )
        by_rank: dict[int, list[Transfer]] = {}
        for transfer in plan.transfers:
            if transfer.numel:
                by_rank.setdefault(int(transfer.path), []).append(transfer)
        here, secret = host_key(), self._address.secret
        sources = []
        for rank, reads in sorted(by_rank.items()):
            at, files = Address(str(ranks[rank]["at"][0]), int(ranks[rank]["at"][1]), secret), []
            if self._carry != "tcp" and ranks[rank]["host"] == here:
                files = [path for path in ranks[rank]["files"] if os.access(path, os.R_OK)]
                files = files if len(files) == len(ranks[rank]["files"]) else []
            if self._carry == "memory" and not files:
                raise CheckpointError(
                    f"carry='memory': this process can't open the memory of the sender's rank {rank}, at {at.host}; they must be on one "
                    "host, in one container, and of one user"
                )
            source = _Source(rank, at, "", reads, files)
            name = hashlib.blake2b(repr(source.described()).encode(), digest_size=16).hexdigest()
            sources.append(_Source(rank, at, name, reads, files))
        self._sources, self._live, self._tensors = sources, live, len(plan.recipes)

    def _describe(self, stored: Mapping[str, StoredTensor]) -> LiveModel:
        """The tensors to fill, described."""
        if isinstance(self._model, nn.Module):
            return describe(self._model)
        world = self._ranks.world_size
        given = dict(self._model)
        return describe(nn.Module()).of_states(
            given, {n: geometry_of(t, world_size=world, fsdp_order=True) for n, t in given.items()}
        )

    # ------------------------------------------------------------------------------------------------

    def _take_all(self, version: int, taken: list[_Taken]) -> list[str]:
        """Take this rank's part from all ranks of the sender. Returns a word for the outcome, and why."""
        local = None if self.version is None else Destination(self._live.local_tensors())
        for source in self._sources:
            asker = Asker(source.rank, source.at, self._timeout_s)
            try:
                found = self._take(source, asker, version, local)
            except IntegrityError as error:
                return ["damaged", str(error)]
            except CheckpointError as error:
                return ["away", str(error)]
            finally:
                asker.close()
            if found is None:
                return ["gone", f"version {version} was overwritten before it had arrived"]
            taken.append(found)
        return ["taken", ""]

    def _take(self, source: _Source, asker: Asker, version: int, local: Destination | None) -> _Taken | None:
        """All reads from one rank of the sender, proved. None: the version was overwritten."""
        parts, sums = list[torch.Tensor](), list[int]()
        moved = changed = 0
        for first, stop in _batches(source.reads):
            found = self._take_some(source, first, stop, asker, version, local)
            if found is None:
                return None
            parts += found.parts
            sums += found.sums
            moved, changed = moved + found.moved, changed + found.changed
            self._ranks.tick(found.moved)
        return _Taken(source, parts, sums, moved, changed)

    def _take_some(
        self, source: _Source, first: int, stop: int, asker: Asker, version: int, local: Destination | None
    ) -> _Taken | None:
        by_memory, reads = bool(source.files), source.reads[first:stop]
        # A delta is added to what is live, which has to be in the sender's dtype.
        is_cast = any(t.source_dtype != t.target_dtype for t in reads)
        have = None if by_memory or is_cast or self._is_doubted else self.version
        question = {
            "ask": "take",
            "plan": source.plan,
            "reads": [first, stop],
            "version": version,
            "have": have,
        }
        question["carry"] = "memory" if by_memory else "tcp"
        said, nbytes = asker.ask(question)
        if "unknown" in said:
            asker.ask({"ask": "register", "plan": source.plan, "reads": source.described()})
            said, nbytes = asker.ask(question)
        if "gone" in said:
            return None
        sums = [int(one) for one in said["sums"]]
        if len(sums) != len(reads):
            raise IntegrityError(f"the sender's rank {source.rank} answered for another plan")
        if by_memory:
            parts, changed = _copied(source, reads, int(said["slot"])), 0
            moved = sum(part.numel() for part in parts)
        else:
            parts, changed = _received(source, reads, asker, said["changes"], nbytes, local)
            moved = nbytes
        for read, part, expected in zip(reads, parts, sums, strict=True):
            if xxhash.xxh3_64_intdigest(part.numpy().data) != expected:
                if by_memory and asker.ask({"ask": "newest"})[0]["version"] != version:
                    return None  # overwritten as it was copied
                raise IntegrityError(
                    f"part of {read.stored!r} from rank {source.rank} of the sender doesn't have its checksum"
                    + (
                        f"; {read.wanted!r} may have been changed since version {self.version}"
                        if changed
                        else ""
                    )
                )
        return _Taken(source, parts, sums, moved, changed)

    @torch.no_grad()
    def _switch_on(self, version: int, taken: Sequence[_Taken], started: float) -> PullReport:
        """Copy proved bytes into the model. Collective."""
        with self._ranks.agree("switch weights on"):
            if any(t.tensor.is_meta for t in self._live.stored):
                materialize(self._live, self._device or default_device(self._live.stored))
                self._live = self._live.refreshed()
            local = Destination(self._live.local_tensors())
            for one in taken:
                for read, part in zip(one.source.reads, one.parts, strict=True):
                    target = local.strided(read)
                    target.copy_(_elements(part, read).view(target.shape))
            self._sums = {one.source.rank: one.sums for one in taken}
            self.version, self._is_doubted = version, False
        here = sum(bool(one.source.files) for one in taken)
        carry = {
            0: "tcp: the sender is on other hosts, or carry='tcp'",
            len(taken): "memory: on the same host",
        }
        return PullReport(
            version=version,
            tensors=self._tensors,
            local_bytes=sum(t.numel * itemsize(t.source_dtype) for s in self._sources for t in s.reads),
            bytes_moved=sum(one.moved for one in taken),
            changed=sum(one.changed for one in taken),
            carry=carry.get(
                here, f"memory from {here} of {len(taken)} ranks of the sender, tcp from the others"
            ),
            seconds=time.perf_counter() - started,
        )


def _batches(reads: Sequence[Transfer]) -> Iterator[tuple[int, int]]:
    """First and stop of reads that are taken together: of about so many bytes that no answer takes long."""
    first = nbytes = 0
    for k, read in enumerate(reads):
        nbytes += read.numel * itemsize(read.source_dtype)
        if nbytes >= _BATCH_BYTES or k == len(reads) - 1:
            yield first, k + 1
            first, nbytes = k + 1, 0


def _received(
    source: _Source,
    reads: Sequence[Transfer],
    asker: Asker,
    changes: Sequence[int | None],
    nbytes: int,
    local: Destination | None,
) -> tuple[list[torch.Tensor], int]:
    """Reads that come over the network, and how many of them came as changes to what is live."""
    sizes = [t.numel * itemsize(t.source_dtype) for t in reads]
    expected = sum(n if one is None else one for n, one in zip(sizes, changes, strict=True))
    if nbytes != expected or any(one is not None and one > n for n, one in zip(sizes, changes, strict=True)):
        raise IntegrityError(f"the sender's rank {source.rank} sends {nbytes:,} bytes for {expected:,}")
    memory = torch.empty(nbytes, dtype=torch.uint8)
    asker.take(memory.numpy().data)
    parts, at = list[torch.Tensor](), 0
    for read, size, change in zip(reads, sizes, changes, strict=True):
        if change is None:
            parts.append(memory[at : at + size])
            at += size
            continue
        if local is None:
            raise IntegrityError(f"the sender's rank {source.rank} sent changes that weren't asked for")
        part = bytes_of(local.strided(read).cpu()).clone()
        apply(
            memoryview(memory[at : at + change].numpy()), words_of(part.numpy(), itemsize(read.source_dtype))
        )
        parts.append(part)
        at += change
    return parts, sum(one is not None for one in changes)


def _elements(part: torch.Tensor, read: Transfer) -> torch.Tensor:
    """Bytes as elements."""
    if part.storage_offset() % itemsize(read.source_dtype):
        part = part.clone()
    return part.view(torch_dtype(read.source_dtype))


def _copied(source: _Source, reads: Sequence[Transfer], slot: int) -> list[torch.Tensor]:
    """Reads of a source, copied from its snapshot, which this process opens. Raises :class:`CheckpointError` if it can't."""
    try:
        with (
            open(source.files[slot], "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
        ):
            with warnings.catch_warnings():  # nothing writes to it
                warnings.simplefilter("ignore", UserWarning)
                snapshot = Snapshot(torch.frombuffer(memory, dtype=torch.uint8))
            parts = []
            for read in reads:
                loops = [(loop.size, loop.source_stride) for loop in read.loops]
                parts.append(bytes_of(snapshot.strided(read.source_dtype, read.offset_bytes, loops).clone()))
            del snapshot
            return parts
    except (OSError, IndexError, BufferError) as error:
        raise CheckpointError(
            f"the memory of the sender's rank {source.rank} can't be read: {error}"
        ) from error
