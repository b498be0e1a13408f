"""``WeightReceiver``: the engine's side. Each rank pulls its own slices of a version, proves them, and switches them on together."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from ..catalog.records import Catalog, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..engine.engine import Destination, fill
from ..errors import CheckpointError, IntegrityError, PlanError, ShardwiseError, StateError
from ..loading.load import Names, plan_load, resolve_names
from ..models.meta import default_device, materialize
from ..names import patterns_of
from ..objects import frozen
from ..operations.printed import Printed
from ..planning.hub_rules import automatic_rules, embedding_names
from ..planning.match import Rules, matches_any
from ..planning.plan import IOOptions, Transfer, transfers_of
from ..publish.hosts import PIECE_BYTES
from ..ranks.ranks import Ranks, host_key
from ..tensors.live import LiveModel, describe
from ..tensors.placements import geometry_of
from .changes import apply, words_of
from .layout import Snapshot, bytes_of, layout_of, read_of, tensors_from
from .links import Address, Asker
from .loaders import Loaded, Loader

#: How often bytes may arrive damaged, or be overwritten on the way when there is no time left.
_TRIES = 3
#: Of a request, counted as if all came whole.
_BATCH_BYTES = 64 * 1024**2
#: Between two questions for a newer version.
_POLL_S = 0.05


@frozen
class PullReport(Printed):
    """A version that is switched on."""

    version: int
    tensors: int
    """Number of the model's tensors that were filled; for a function, of the parts that it takes."""
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
    at_bytes: Sequence[int]
    """Where each read begins among the bytes that come from there, one after another; and the end."""

    def part(self, staging: torch.Tensor, k: int) -> torch.Tensor:
        """The bytes of the ``k``-th read."""
        return staging[self.at_bytes[k] : self.at_bytes[k + 1]]


@frozen
class _Plan:
    """What this rank takes from a sender, for tensors that are laid out like this."""

    run: str
    """Of the sender: one that was restarted has another."""
    sources: Sequence[_Source]
    tensors: int
    layouts: Mapping[str, object]


@frozen
class _Taken:
    """The bytes of one source's reads, proved, one after another."""

    source: _Source
    staging: torch.Tensor
    sums: Sequence[int]
    moved: int
    changed: int


@frozen
class _On:
    """The version that is on: the sender's run, and for each source the checksums of the live elements."""

    version: int
    run: str
    sums: Sequence[tuple[_Source, Sequence[int]]]


class WeightReceiver:
    """Receive versions of a model's weights from a trainer's :class:`WeightSender`.

    Args:
        model: the engine's model, in any layout, or a mapping of tensors by hub name (plain tensors or DTensors, all with memory). Every
            tensor must be in what the sender publishes, as in :func:`load`. A model's tensors on meta are allocated by the first :meth:`pull`.
            Or a function that loads pairs of a hub name and a tensor, such as ``load_weights`` of a model of vLLM or SGLang: it's run
            once on tensors without data, to see which parts this rank takes, and then for each version.
        url: the sender's ``url``. It is contacted by the first :meth:`pull`.
        names: as in :func:`load`.
        key_mapping: as in :func:`load`.
        allow_unused: as in :func:`load`.
        device: where tensors on meta are allocated. Default: the mesh's device, otherwise the CPU.
        carry: ``"tcp"``: over the network. ``"memory"``: from the memory of a sender on the same host. ``"auto"``: from memory where this
            process can open it, otherwise over the network.
        timeout_s: limit for a rank, or the sender, that makes no progress.

    Every rank of the default process group must create it and call its methods. The sender's ranks are in another process group, or in
    the same one. Memory: from the first pull on, this rank's shards once more, in host memory; for a function, the parts that it takes
    twice.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor] | Loader,
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
        self._loader: Loader | None = None
        if not isinstance(model, nn.Module | Mapping):
            if names is not None or key_mapping is not None or device is not None:
                raise ValueError(
                    "names, key_mapping and device are for models; a function that loads gets the sender's names"
                )
            self._loader, model = model, {}
        if not isinstance(model, nn.Module) and (empty := [n for n, t in model.items() if t.is_meta]):
            raise ValueError(
                f"{len(empty)} tensors of the mapping are on meta, e.g. {empty[0]!r}: give them memory first"
            )
        self._model, self._address = model, Address.parse(url)
        self._names, self._key_mapping, self._device = names, key_mapping, device
        self._unused = patterns_of("allow_unused", allow_unused)
        self._carry, self._timeout_s = carry, timeout_s
        self._ranks = Ranks.current(timeout_s=timeout_s)
        self._plan: _Plan | None = None
        self._loaded: Loaded | None = None
        self._staging = dict[
            int, torch.Tensor
        ]()  # by source's plan; kept, because getting memory takes as long as filling it
        self._mapped = dict[str, Snapshot]()  # a sender's snapshots, by their files
        self._on: _On | None = None
        self._is_doubted = False  # changes didn't make the version: the model may have been changed

    @property
    def version(self) -> int | None:
        """The version that is on; None before the first."""
        return None if self._on is None else self._on.version

    def pull(self, *, wait_s: float = 0.0) -> PullReport | None:
        """Pull the newest version, prove it, and switch it on, on all ranks.

        Returns None if there is no version other than the one that is on, after waiting ``wait_s`` for one. Every rank must call it, and
        none may use the model meanwhile. Each read is compared with a checksum that the sender took of the same elements, and nothing is
        copied into the model before all ranks have everything.

        Raises, on every rank, :class:`CheckpointError` if the sender can't be reached within ``wait_s``, or overwrites versions faster than they can be
        pulled; :class:`IntegrityError` if bytes arrived damaged three times; and :class:`PlanError` if the sender's tensors don't fill the
        model. The model then has the version that it had. Raises :class:`RankError`, or :class:`StateError` for a function that failed, if copying
        into the model itself failed on a rank: no version is on then, and the next pull brings all of it.
        """
        started, until = time.perf_counter(), time.monotonic() + wait_s
        tries = Counter[str]()
        while True:
            found = self._ranks.on_first("ask for the newest version", partial(self._ask_newest, until))
            kind, problem = "none", "the sender has published nothing new"
            if "away" in found:
                kind, problem = "away", found["away"]
                self._mapped.clear()  # else the memory of a trainer that has ended would stay
            elif self._plan is None or self._plan.run != found["run"]:
                kind, problem = self._connect()
            if kind == "none" and found["version"] is not None and not self._has(found):
                taken: list[_Taken] = []
                version, plan = int(found["version"]), self._plan
                assert plan is not None
                work = partial(self._take_all, plan, version, taken)
                kind, problem = self._ranks.combine("pull weights", work, _worst)
                if kind == "taken":
                    try:
                        return self._switch_on(version, plan, taken, started)
                    except ShardwiseError:  # on all ranks; a loader may take other parts now
                        self._plan = self._loaded = None
                        raise
                if kind == "moved":
                    self._plan = None
            tries[kind] += 1
            self._is_doubted |= kind == "damaged"
            if tries["damaged"] == _TRIES:
                with self._ranks.agree("pull weights"):
                    raise IntegrityError(f"version {found['version']} isn't switched on: {problem}")
            # Once the time is over, what happens while a trainer publishes or is replaced gets a few more tries.
            if found["late"] and (kind in ("none", "away") or tries[kind] >= _TRIES) and kind != "damaged":
                if kind == "none":
                    return None
                with self._ranks.agree("pull weights"):
                    raise CheckpointError(f"no new version: {problem}")
            time.sleep(_POLL_S)

    def verify(self) -> None:
        """Prove that the model still has the version that is on: compare the live weights with checksums. Collective; reads the weights once.

        Where the sender's dtype was cast, the checksum is that of the values after the cast. Raises :class:`RankError` or
        :class:`IntegrityError`, naming the first tensor that differs, and :class:`StateError` if no version is on, or if a function loads them.
        """
        with self._ranks.agree("verify weights"):
            if self._on is None:
                raise StateError("verify: no version is on; pull one first")
            if self._loader is not None:
                raise StateError(
                    "verify: what a function has loaded can't be compared; the parts that it got were"
                )
            local = Destination(self._describe().local_tensors())
            for source, sums in self._on.sums:
                for read, expected in zip(source.reads, sums, strict=True):
                    if _checksum(local, read) != expected:
                        raise IntegrityError(
                            f"{read.wanted!r} was changed since version {self.version} was switched on (part of {read.stored!r} from "
                            f"rank {source.rank} of the sender)"
                        )

    # ------------------------------------------------------------------------------------------------

    def _has(self, newest: Mapping[str, Any]) -> bool:
        """Whether the newest version is on."""
        return self._on is not None and (self._on.run, self._on.version) == (newest["run"], newest["version"])

    def _describe(self) -> LiveModel:
        """The tensors to fill as they are now; FSDP2's as shards."""
        if isinstance(self._model, nn.Module):
            return describe(self._model)
        given = dict(self._model)
        geometries = {n: geometry_of(t, world_size=self._ranks.world_size) for n, t in given.items()}
        return describe(nn.Module()).of_states(given, geometries)

    def _asker(self, rank: int, at: Address) -> Asker:
        """Gives up before the other ranks of the engine would give this one up."""
        return Asker(rank, at, self._timeout_s / 3)

    def _ask_newest(self, until: float) -> dict[str, Any]:
        """On rank 0, whose clock says for all ranks whether the time is over."""
        late = time.monotonic() >= until
        with closing(self._asker(0, self._address)) as asker:
            try:
                return asker.ask({"ask": "newest"})[0] | {"late": late}
            except (CheckpointError, IntegrityError) as error:
                return {"away": str(error), "late": late}

    def _connect(self) -> tuple[str, str]:
        """Plan the reads from a sender that is new, or was restarted. Collective. Returns a word for the outcome, and why."""

        def fetch() -> dict[str, Any]:
            with closing(self._asker(0, self._address)) as asker:
                try:
                    return asker.ask({"ask": "catalog"})[0]
                except (CheckpointError, IntegrityError) as error:
                    return {"away": str(error)}

        told = self._ranks.on_first("fetch the sender's catalog", fetch)
        if "away" in told:
            return "away", str(told["away"])
        with self._ranks.agree("plan the pulls"):
            plan = self._planned(told)
        if self._loaded is not None:
            own = sorted({tile.source for tiles in self._loaded.parts.values() for tile in tiles})
            taken = self._ranks.combine(
                "compare what is taken", lambda: own, lambda said: sorted({n for one in said for n in one})
            )
            with self._ranks.agree("plan the pulls"):
                self._check_unused(self._loaded.specs.keys() - set(taken))
        self._plan = plan
        self._forget()
        return "none", ""

    def _check_unused(self, names: Collection[str]) -> None:
        if unused := sorted(n for n in names if not matches_any(n, self._unused)):
            raise PlanError(
                "the engine's loader takes nothing of these tensors; if that's right, name them in allow_unused=",
                tuple(unused),
            )

    def _planned(self, told: Mapping[str, Any]) -> _Plan:
        ranks = told["ranks"]
        specs = {name: (code, tuple(shape)) for name, (code, shape) in told["tensors"].items()}
        tensors = tensors_from(specs, [one["boxes"] for one in ranks])
        live, transfers, count = (
            self._of_loader(specs, tensors) if self._loader is not None else self._of_model(tensors)
        )
        by_rank: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.numel:
                by_rank.setdefault(int(transfer.path), []).append(transfer)
        sources = [self._source(rank, ranks[rank], reads) for rank, reads in by_rank.items()]
        # Not all ranks ask the same one first.
        sources.sort(key=lambda one: (one.rank - self._ranks.rank) % len(ranks))
        layouts = {n: layout_of(t) for n, t in live.local_tensors().items()}
        return _Plan(str(told["run"]), sources, count, layouts)

    def _of_loader(
        self, specs: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, StoredTensor]
    ) -> tuple[LiveModel, Iterable[Transfer], int]:
        """What a function takes: where its parts are kept, the copies that fill them, and their number."""
        assert self._loader is not None
        if self._loaded is None or self._loaded.specs != specs:
            self._loaded = Loaded(self._loader, specs)
            self._model = self._loaded.tensors
        live, parts = self._describe(), self._loaded.parts
        wanted = {w.name: w for w in live.layout().wanted}
        transfers = [
            x for n, tiles in parts.items() for tile in tiles for x in transfers_of(tile, wanted[n], tensors)
        ]
        return live, transfers, len(parts)

    def _of_model(self, tensors: Mapping[str, StoredTensor]) -> tuple[LiveModel, Iterable[Transfer], int]:
        """A model or mapping, which gets memory, the copies that fill it, and the number of tensors that they fill."""
        live = self._describe()
        if any(t.tensor.is_meta for t in live.stored):
            materialize(live, self._device or default_device(live.stored))
            live = live.refreshed()
        catalog = Catalog("weights", "the sender's weights", dict(tensors), ())
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
        return live, plan.transfers, len(plan.recipes)

    def _source(self, rank: int, told: Mapping[str, Any], reads: Sequence[Transfer]) -> _Source:
        at = Address(str(told["at"][0]), int(told["at"][1]), self._address.secret)
        files: list[str] = []
        if self._carry != "tcp" and told["host"] == host_key():
            files = [str(path) for path in told["files"]]
            files = files if all(os.access(path, os.R_OK) for path in files) else []
        if self._carry == "memory" and not files:
            raise CheckpointError(
                f"carry='memory': this process can't open the memory of the sender's rank {rank}, at {at.host}; they must be on one "
                "host, in one container, and of one user"
            )
        name = hashlib.blake2b(repr([read_of(t) for t in reads]).encode(), digest_size=16).hexdigest()
        ends = accumulate((t.numel * itemsize(t.source_dtype) for t in reads), initial=0)
        return _Source(rank, at, name, reads, files, list(ends))

    # ------------------------------------------------------------------------------------------------

    def _take_all(self, plan: _Plan, version: int, taken: list[_Taken]) -> list[str]:
        """Take this rank's part from all ranks of the sender. Returns a word for the outcome, and why."""
        tensors = self._describe().local_tensors()
        if {n: layout_of(t) for n, t in tensors.items()} != plan.layouts:
            return ["moved", "the model's tensors have changed"]
        local = Destination(tensors)
        for source in plan.sources:
            if source.rank not in self._staging:
                self._staging[source.rank] = torch.empty(source.at_bytes[-1], dtype=torch.uint8, device="cpu")
            with closing(self._asker(source.rank, source.at)) as asker:
                try:
                    found = self._take(plan, source, asker, version, local)
                except IntegrityError as error:
                    return ["damaged", str(error)]
                except CheckpointError as error:
                    self._forget()
                    return ["cut", str(error)]
            if found is None:
                return [
                    "gone",
                    "versions are overwritten faster than they are pulled; give the WeightSender a larger keep=",
                ]
            taken.append(found)
        return ["taken", ""]

    def _forget(self) -> None:
        """Give back memory: this rank's, and with the mappings that of a sender that has ended."""
        self._staging.clear()
        self._mapped.clear()

    def _take(
        self, plan: _Plan, source: _Source, asker: Asker, version: int, local: Destination
    ) -> _Taken | None:
        """All reads from one rank of the sender, proved. None: the version was overwritten, or the sender replaced."""
        staging, sums = self._staging[source.rank], list[int]()
        moved = changed = 0
        on = self._on if self._on is not None and self._on.run == plan.run and not self._is_doubted else None
        for first, stop in _batches(source.reads):
            reads = source.reads[first:stop]
            # Changes are added to the live elements, which have to be in the sender's dtype.
            is_cast = any(t.source_dtype != t.target_dtype for t in reads)
            have = None if on is None or source.files or is_cast else on.version
            question = {"run": plan.run, "plan": source.plan}
            take = question | {"ask": "take", "reads": [first, stop], "version": version, "have": have}
            take["carry"] = "memory" if source.files else "tcp"
            said, nbytes = asker.ask(take)
            if "unknown" in said:
                asker.ask(question | {"ask": "register", "reads": [read_of(t) for t in source.reads]})
                said, nbytes = asker.ask(take)
            if "sums" not in said:
                return None
            expected = [int(one) for one in said["sums"]]
            if len(expected) != len(reads):
                raise IntegrityError(f"the sender's rank {source.rank} answered for another plan")
            of_them = 0
            if source.files:
                nbytes = source.at_bytes[stop] - source.at_bytes[first]
                found = self._copy(source, first, stop, int(said["slot"]), staging)
                self._ranks.tick(nbytes)
            else:
                of_them = _receive(
                    source, first, said["changes"], asker, nbytes, staging, local, self._ranks.tick
                )
                found = [
                    xxhash.xxh3_64_intdigest(source.part(staging, k).numpy().data) for k in range(first, stop)
                ]
            for read, own, one in zip(reads, found, expected, strict=True):
                if own != one:
                    if source.files and version not in asker.ask({"ask": "newest"})[0]["versions"]:
                        return None  # overwritten as it was copied
                    raise IntegrityError(
                        f"part of {read.stored!r} from rank {source.rank} of the sender doesn't have its checksum"
                        + (
                            f"; {read.wanted!r} may have been changed since version {self.version}"
                            if of_them
                            else ""
                        )
                    )
            sums += expected
            moved, changed = moved + nbytes, changed + of_them
        return _Taken(source, staging, sums, moved, changed)

    def _copy(self, source: _Source, first: int, stop: int, slot: int, staging: torch.Tensor) -> list[int]:
        """Copy reads from a snapshot of a source, which this process maps. Returns their checksums. Raises :class:`CheckpointError` if it can't."""
        try:
            snapshot = self._mapped.get(source.files[slot])
            if snapshot is None:
                with open(source.files[slot], "rb") as file:
                    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                with warnings.catch_warnings():  # nothing writes to it
                    warnings.simplefilter("ignore", UserWarning)
                    snapshot = Snapshot(torch.frombuffer(memory, dtype=torch.uint8))
                self._mapped[source.files[slot]] = snapshot
            return [
                _copied(
                    bytes_of(snapshot.strided(*read_of(source.reads[k]))).numpy(),
                    source.part(staging, k).numpy(),
                )
                for k in range(first, stop)
            ]
        except (OSError, IndexError) as error:
            raise CheckpointError(
                f"the memory of the sender's rank {source.rank} can't be read: {error}"
            ) from error

    @torch.no_grad()
    def _switch_on(self, version: int, plan: _Plan, taken: Sequence[_Taken], started: float) -> PullReport:
        """Copy proved bytes into the model. Collective."""
        self._on = None
        sums = []
        with self._ranks.agree("switch weights on"):
            local = Destination(self._describe().local_tensors())
            for one in taken:
                live = list(one.sums)
                for k, read in enumerate(one.source.reads):
                    target = local.strided(read)
                    fill(target, _elements(one.source.part(one.staging, k), read).view(target.shape))
                    if read.source_dtype != read.target_dtype:
                        live[k] = _checksum(local, read)
                sums.append((one.source, live))
            if self._loaded is not None:
                self._loaded.load()
        self._on, self._is_doubted = _On(version, plan.run, sums), False
        here = sum(bool(one.source.files) for one in taken)
        carry = {
            0: "tcp: the sender is on other hosts, or carry='tcp'",
            len(taken): "memory: on the same host",
        }
        return PullReport(
            version=version,
            tensors=plan.tensors,
            local_bytes=sum(t.numel * itemsize(t.source_dtype) for s in plan.sources for t in s.reads),
            bytes_moved=sum(one.moved for one in taken),
            changed=sum(one.changed for one in taken),
            carry=carry.get(
                here, f"memory from {here} of {len(taken)} ranks of the sender, tcp from the others"
            ),
            seconds=time.perf_counter() - started,
        )


#: Outcomes of ranks; the first one that any of them has counts for all.
_OUTCOMES = ("moved", "damaged", "cut", "gone", "taken")


def _worst(said: list[list[str]]) -> list[str]:
    return min(said, key=lambda one: _OUTCOMES.index(one[0]))


def _checksum(local: Destination, read: Transfer) -> int:
    """Of the elements that are live."""
    return xxhash.xxh3_64_intdigest(bytes_of(local.strided(read).cpu()).numpy().data)


def _batches(reads: Sequence[Transfer]) -> Iterator[tuple[int, int]]:
    """First and stop of reads that are taken together: of about so many bytes that no answer takes long."""
    first = nbytes = 0
    for k, read in enumerate(reads):
        nbytes += read.numel * itemsize(read.source_dtype)
        if nbytes >= _BATCH_BYTES or k == len(reads) - 1:
            yield first, k + 1
            first, nbytes = k + 1, 0


def _copied(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> int:
    """Copy bytes, and return the checksum of the copy. In pieces: each is hashed while it's in a core's cache."""
    found = xxhash.xxh3_64()
    for at in range(0, source.size, PIECE_BYTES):
        piece = target[at : at + PIECE_BYTES]
        piece[:] = source[at : at + PIECE_BYTES]
        found.update(piece.data)
    return found.intdigest()


def _receive(
    source: _Source,
    first: int,
    changes: Sequence[int | None],
    asker: Asker,
    nbytes: int,
    staging: torch.Tensor,
    local: Destination,
    on_progress: Callable[[int], object],
) -> int:
    """Reads from ``first`` on that come over the network. Returns how many of them came as changes to the live elements."""
    stop = first + len(changes)
    sizes = [source.at_bytes[k + 1] - source.at_bytes[k] for k in range(first, stop)]
    expected = sum(n if one is None else one for n, one in zip(sizes, changes, strict=True))
    if nbytes != expected or any(one is not None and one > n for n, one in zip(sizes, changes, strict=True)):
        raise IntegrityError(f"the sender's rank {source.rank} sends {nbytes:,} bytes for {expected:,}")
    of_them = sum(one is not None for one in changes)
    if not of_them:
        asker.take(staging[source.at_bytes[first] : source.at_bytes[stop]].numpy().data, on_progress)
        return 0
    memory, at = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
    asker.take(memory.numpy().data, on_progress)
    for k, size, change in zip(range(first, stop), sizes, changes, strict=True):
        part, read = source.part(staging, k), source.reads[k]
        if change is None:
            part.copy_(memory[at : at + size])
            at += size
            continue
        part.copy_(bytes_of(local.strided(read).cpu()))
        content: Any = memory[at : at + change].numpy()
        apply(content.data, words_of(part.numpy(), itemsize(read.source_dtype)))
        at += change
    return of_them


def _elements(part: torch.Tensor, read: Transfer) -> torch.Tensor:
    """Bytes as elements."""
    if part.storage_offset() % itemsize(read.source_dtype):
        part = part.clone()
    return part.view(torch_dtype(read.source_dtype))
