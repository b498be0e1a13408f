"""In-memory steps: saved into a ring in host memory, listed with the stored steps, and read back from it or from other hosts."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..digests import partial_sums
from ..dtypes import torch_dtype
from ..errors import CheckpointError, FormatError, IntegrityError, RankError, ShardwiseError
from ..format.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    parse_manifest,
    rank_of_file,
    step_of_manifest,
    units_of,
)
from ..format.slices import header_bytes
from ..limits import inside, parse_json, read_small
from ..objects import frozen
from ..publish.hosts import (
    Holdings,
    Reader,
    RemoteFiles,
    Server,
    address_toward_store,
    are_all,
    copy_units,
    proved_units,
    runs_of,
    units_in,
)
from ..publish.ring import (
    Maps,
    Record,
    Ring,
    Slot,
    copy_tensors,
    new_word,
    read_or_make_record,
    unwritten,
    write_record,
    write_whole,
)
from ..publish.sites import Sites
from ..publish.write import InPlace
from ..ranks.ranks import Ranks, remove_tree
from ..state.optimizer import TrainState
from ..tensors.boxes import Box
from .save import (
    BackgroundSave,
    checked_texts,
    folders_of,
    manifest_of,
    records_on_first,
    write_rank,
)
from .sites import has_slices, make_view, reading_from
from .snapshot import OwnPart, Piece, agree
from .take import (
    Collected,
    InMemoryCheckpoints,
    Lineage,
    LiveContents,
    Taken,
    compare,
    detached_documents,
    live_piece,
    take,
)

# ----------------------------------------------------------------------------------------------------
# Keeps one step in memory: copies the state into the ring at once. A thread agrees with the other ranks beside the copy; behind training it
# hashes the copy, and lets other hosts copy it.

#: Every rank reads what rank 0 sends through the group's store, which one process serves.
_MOST_SENT_BYTES = 1024**3


@frozen
class Host:
    """This rank's host, and how to reach the hosts of the other ranks."""

    tier: InMemoryCheckpoints
    ring: Ring
    sites: Sites
    peers: Sequence[Sequence[Any]]
    """For each rank its host's name, and the address and port at which others reach it."""
    secret: bytes
    maps: Maps

    def reader(self, rank: int) -> Reader:
        """Reads from the ring of another rank's host."""
        host, address, port = self.peers[rank]
        return Reader(host, address, port, self.secret, self.tier.timeout_s)


class _Copied:
    """The copied pieces of a step, in its slice files in the slot. Pieces that other ranks write aren't there."""

    def __init__(self, own: Sequence[OwnPart]) -> None:
        self._referred = [piece for part in own for piece in part.summed if piece.live.refers]
        self._bytes: dict[int, torch.Tensor] = {}

    def put(self, piece: Piece, memory: torch.Tensor) -> None:
        """Where the bytes of a piece are."""
        self._bytes[id(piece)] = memory

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        memory = self._bytes.pop(id(piece), None)
        if memory is not None and memory.numel():
            values = torch.frombuffer(memory.numpy().data, dtype=torch_dtype(piece.live.stored.dtype))
            yield piece.held.box, values.view(piece.held.box.sizes)

    def late_sums(self) -> Iterable[tuple[Piece, int]]:
        """Of what the step only refers to: the host waits once for all that is on a device."""
        sums = partial_sums((live_piece(p), p.held.box.start) for p in self._referred)
        return zip(self._referred, sums, strict=True)


class MemorySave(BackgroundSave):
    """One step on its way into memory. :meth:`copy` in the training's thread; a thread of its own beside it, and then behind training.

    ``ranks`` agree in the thread until :meth:`copy` returns, those on ``behind`` afterwards.
    """

    def __init__(
        self, step: int, host: Host, number: int, ranks: Ranks, behind: Ranks, warn: Callable[[str], None]
    ) -> None:
        super().__init__(step, "shardwise-memory", is_daemon=True)
        self._warn = warn
        self.slot = host.ring.slot(f"own-{number}")
        self.is_complete = self.has_copies = False
        self.nbytes = 0
        self._number, self._host, self._ranks, self._behind = number, host, ranks, behind
        self._stream: torch.Stream | None = None
        self._taken: Future[Taken] = Future()
        self._agreed: Future[Collected | None] = Future()
        self._contents: _Copied
        self._names: Collection[str] = ()  # of the slice files in the slot
        self._has_copied = threading.Event()

    def copy(self, taking: Callable[[], Taken]) -> bool:
        """Copy this rank's slices into the slot; the caller may then change the state. False: not all ranks keep this step. Collective.

        It does not wait for the other ranks first: the slot never holds the newest step. Raises what ``taking``
        raises, and the errors of :func:`.compare`, alike on all ranks. A failure of the copy is all ranks', later, and so is
        Ctrl-C, which this rank raises when all have compared: until then the thread uses this thread's ranks.
        """
        if torch.accelerator.is_available():
            self._stream = torch.accelerator.current_stream()
        try:
            try:
                with self._ranks.patience():
                    taken = taking()
            except BaseException as error:
                self._taken.set_exception(error)
                raise
            self._taken.set_result(taken)
            self._copy(taken)
        except BaseException as error:
            self.error = error
        finally:
            self._wait_for_agreement()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error
        return self._agreed.result() is not None

    def _wait_for_agreement(self) -> None:
        """Until the thread no longer uses this thread's ranks, and no longer reads the state; also through Ctrl-C."""
        while not self._agreed.done():
            try:
                if not self._taken.done():  # Ctrl-C came first
                    self._taken.set_exception(KeyboardInterrupt())
                wait([self._agreed])
            except BaseException as error:
                self.error = error
        self._has_copied.set()

    def _copy(self, taken: Taken) -> None:
        rank, sites = self._ranks.rank, self._host.sites
        self.slot.clear()
        files = [file for part in taken.own for file in part.files]
        headers = [header_bytes(file.slices) for file in files]
        sizes = {f.name: len(h) + f.payload_bytes for f, h in zip(files, headers, strict=True)}
        if not self._host.maps.has(self.slot, sizes):  # else there is nothing to make room for
            self.slot.keep_only({rank}, sizes.keys())
            if sites.leads(rank):
                others = {rank_of_file(n) for n in self.slot.files()}.difference(sites.beside)
                self.slot.keep_only(others, ())
        memories = self._host.maps.of(self.slot, sizes)
        self._names, self._contents = sizes.keys(), _Copied(taken.own)
        live = LiveContents(piece for file in files for piece in file.pieces)
        for file, header in zip(files, headers, strict=True):
            memory = memories[file.name]
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            offsets = [len(header) + one.offset_bytes for one in file.slices]
            pieces = list(zip(file.pieces, offsets, strict=True))
            copy_tensors([(live_piece(p), memory, at) for p, at in pieces if not p.is_on_device])
            for piece, at in pieces:
                self._contents.put(piece, memory[at : at + piece.nbytes])
                if piece.is_on_device:
                    for _, part in live.parts_of(piece):
                        at += copy_tensors([(part, memory, at)])
            self.nbytes += file.payload_bytes

    # -- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:  # beside the copy
            found = compare(self._taken_here, self._ranks)
            collected = None if found is None else detached_documents(found)
        except BaseException as error:
            self._agreed.set_exception(error)
            return
        self._agreed.set_result(collected)
        self._has_copied.wait()
        if collected is None:
            return
        try:
            self._publish(collected)
        except BaseException as error:
            self.error = error
            self._warn(f"step {self.step} is not kept in memory: {error}")

    def _taken_here(self) -> Taken:
        """What the caller's thread has taken; this thread's device work comes after that one's from here on."""
        taken = self._taken.result()
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        return taken

    def _publish(self, collected: Collected) -> None:
        ranks = self._behind
        # Before hashing, which would slow down ranks that still copy, and for which training waits.
        with ranks.agree("copy a step into memory"):
            if self.error is not None:
                raise self.error
        with ranks.agree("keep a step in memory"):
            root = self.slot.path
            self.slot.keep_only({ranks.rank}, self._names)  # not the documents of an older step
            for folder in folders_of(collected):
                os.makedirs(os.path.join(root, folder), 0o700, exist_ok=True)
            texts = checked_texts(collected, ranks, root)
            files, sums = write_rank(root, collected, texts, ranks, self._contents, InPlace)
            text = json.dumps({name: asdict(entry) for name, entry in files.items()}).encode()
            write_whole(os.path.join(f"{self.slot.path}.files", f"{ranks.rank:05d}.json"), text)
        merged = records_on_first("file records in memory", collected, ranks, files, sums)

        def write_manifest() -> str:
            text = manifest_of(collected, ranks, *merged).to_text().encode()
            write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
            return xxhash.xxh3_64_hexdigest(text)

        text = self._sent_manifest(ranks.on_first("manifest in memory", write_manifest))
        with ranks.agree("take the manifest in memory"):
            if self._host.sites.leads(ranks.rank):
                self._take_manifest(text)
        self.is_complete = True
        problems = self._copy_others()
        found = ranks.combine("copies in memory", lambda: problems, list)
        self.has_copies = not any(found)
        if not self.has_copies:
            self._warn(f"step {self.step} in memory lacks copies: {'; '.join(p for p in found if p)}")

    def _sent_manifest(self, checksum: str) -> bytes:
        """The manifest, on the first rank of each host. Collective.

        It comes over the network from rank 0's host; through the group's store where that does not answer some host.
        """
        ranks, text = self._behind, b""

        def fetch() -> bool:
            nonlocal text
            if not self._host.sites.leads(ranks.rank):
                return True
            text = self._manifest_of_first()
            return xxhash.xxh3_64_hexdigest(text) == checksum

        if ranks.combine("fetch the manifest in memory", fetch, all):
            return text

        def sendable() -> bytes:
            text = self._manifest_of_first()
            if len(text) * ranks.world_size > _MOST_SENT_BYTES:
                raise CheckpointError(
                    f"rank 0's host does not send the manifest to all hosts, and it is too large for the group's store: {len(text):,} "
                    f"bytes for each rank"
                )
            return text

        return ranks.on_first("send the manifest in memory", sendable)

    def _manifest_of_first(self) -> bytes:
        """Empty if rank 0's host does not send it."""
        if self._behind.rank == 0:
            return Path(self.slot.path, MANIFEST_NAME).read_bytes()
        reader = self._host.reader(0)
        try:
            return reader.read_whole(f"own-{self._number}/{MANIFEST_NAME}")
        except (CheckpointError, IntegrityError):
            return b""
        finally:
            reader.close()

    def _take_manifest(self, text: bytes) -> None:
        """Into this host's slots: the own one, and the one of copies, whose old content then proves nothing any more. Deletes files of
        ranks whose slices this host does not copy."""
        write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
        if min(self._host.tier.copies, len(self._host.sites.places)) > 1:
            held, sites, copies = self._held, self._host.sites, self._host.tier.copies
            write_whole(os.path.join(held.path, MANIFEST_NAME), text)
            sources = {s for r in sites.beside for s in sites.sources_of(r, copies)}
            held.keep_only({rank_of_file(name) for name in held.files()} - sources, ())

    @property
    def _held(self) -> Slot:
        number = self._number % self._host.tier.received_slots
        return self._host.ring.slot(f"held-{number}")

    def _copy_others(self) -> str:
        """Copy the slices of other hosts' ranks. Returns what went wrong; never raises for a host that is away."""
        problems, held = [], self._held
        for source in self._host.sites.sources_of(self._ranks.rank, self._host.tier.copies):
            reader = self._host.reader(source)
            try:
                self._copy_rank(reader, source, held)
            except (ShardwiseError, OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"rank {source}'s on host {self._host.tier.host_name}: {error}")
            finally:
                reader.close()
        return "; ".join(problems)

    def _copy_rank(self, reader: Reader, source: int, held: Slot) -> None:
        slot = f"own-{self._number}"
        name = f"{slot}.files/{source:05d}.json"
        records = parse_json(reader.read_whole(name), name)
        if not isinstance(records, dict):
            raise FormatError("is not a list of files: not a JSON object", path=name)
        held.keep_only({source}, records.keys())
        for name, fields in records.items():
            entry = FileEntry(**{**fields, "blocks": tuple(fields["blocks"])})
            path = held.room_for(name, entry.nbytes)
            copy_units(reader, f"{slot}/{name}", units_of(entry, path=name), path, self._behind.tick)


# ----------------------------------------------------------------------------------------------------
# The steps of a run in memory: keeping them, finding the newest that is held and proved, and a view of it for a restore.

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()


@frozen
class HeldStep:
    """A step that some hosts have a manifest of."""

    step: int
    checksum: str
    """Of its manifest."""


class MemorySteps:
    """Every rank makes one. Collective, and raises alike on all ranks: :class:`CheckpointError`, :class:`RankError`."""

    def __init__(self, tier: InMemoryCheckpoints, root: str, ranks: Ranks) -> None:
        self._tier, self._root = tier, root
        self.newest: int | None = None
        """The newest step that this run has in memory, or had taken from there."""
        self._slot, self._is_off, self._has_line = 1, False, False
        self._has_warned = False
        self._saving: MemorySave | None = None
        self.failed: list[HeldStep] = []
        """Steps that were tried, and are not held whole."""

        def begin() -> list[str]:
            record = read_or_make_record(root)
            # Rank 0 names the channel of the threads' agreements: other ranks may have had another number of runs.
            return [record.name, record.line, secrets.token_hex(32), f"memory-{next(_NUMBERS)}-"]

        self._name, self._line, secret, self._channel = ranks.on_first("begin the memory tier", begin)

        self._server: Server | None = None

        def told() -> list[Any]:
            ring = Ring(tier.root, self._name)
            address = tier.address or address_toward_store()
            self._server = Server(ring, secret.encode(), address, tier.timeout_s)
            self._ring = ring
            return [tier.host_name, address, self._server.port]

        try:
            peers = ranks.combine("meet the hosts", told, list)
        except BaseException:  # the caller gets no object to close
            if self._server is not None:
                self._server.close()
            raise
        sites = Sites.of_hosts([host for host, *_ in peers], ranks.rank)
        self._host = Host(tier, self._ring, sites, peers, secret.encode(), Maps())
        if ranks.rank == 0 and (count := len(sites.places)) < tier.copies:
            _log.warning(
                "in-memory checkpoints: you asked for %d copies but have %d hosts, so each slice is kept on %d",
                tier.copies,
                count,
                min(count, tier.copies),
            )

    # -- keeping ------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether the tier keeps this step."""
        return step % self._tier.every == 0 and step != self.newest

    def save(self, state: TrainState, step: int, lineage: Lineage, ranks: Ranks) -> int:
        """Copy the state into memory and let a thread do the rest. Returns the copied bytes; 0 if the step is left out. Collective."""
        self._settle_if_done()
        if not self._has_line:
            self.begin_line(None, ranks)
        agreed = agree(state, ranks)
        level = (
            logging.INFO if self._has_warned else logging.WARNING
        )  # one warning, until a step is held whole

        def warn(text: str) -> None:
            self._has_warned = True
            if ranks.rank == 0:
                _log.log(level, "%s", text)

        behind = Ranks.current(timeout_s=ranks.timeout_s, channel=self._channel)
        saving = MemorySave(step, self._host, 1 - self._slot, ranks, behind, warn)
        if self._saving is not None or self._is_off or saving.start():
            compare(lambda: None, ranks)
            return 0
        self._saving = (
            saving  # also after Ctrl-C in the copy: its thread has to end before the next one begins
        )
        try:
            is_kept = saving.copy(lambda: take(state, step, lineage, agreed, ranks.rank))
        except Exception:
            self._saving = None  # the thread has ended, or is about to
            raise
        if not is_kept:
            self._saving = None
            return 0
        return saving.nbytes

    def wait(self) -> int | None:
        """Wait for the thread. Returns the newest step that is held."""
        if self._saving is not None:
            self._saving.join()
            self._settle_if_done()
        return self.newest

    def _settle_if_done(self) -> None:
        saving = self._saving
        if saving is None or saving.is_running:
            return
        self._saving = None
        if saving.is_complete:
            self.newest, self._slot = saving.step, 1 - self._slot
        self._has_warned = self._has_warned and not saving.has_copies
        if isinstance(saving.error, RankError) and saving.error.missing:
            self._is_off = True  # ranks are out of step

    def close(self, *, keep: bool, ranks: Ranks) -> None:
        """Wait, and give the memory back unless the next start wants it."""
        self.wait()
        assert self._server is not None
        self._server.close()
        self._host.maps.forget()
        if not keep and self._host.sites.leads(ranks.rank):
            self._ring.remove()

    def begin_line(self, step: int | None, ranks: Ranks) -> None:
        """From here on nothing but steps up to ``step`` may ever be taken from memory, on hosts that are here. Collective."""
        line = ranks.on_first("begin a line", new_word)

        def begin() -> int:
            """The slot on this host that holds the step; -1: none."""
            found = -1
            if self._host.sites.leads(ranks.rank):
                is_ours = self._line in self._ring.lines
                for name in self._ring.slots():
                    held = _held_in(self._ring.slot(name))
                    if not is_ours or step is None or held is None or held.step > step:
                        self._ring.slot(name).clear()
                    elif held.step == step and name.startswith("own"):
                        found = int(name[-1])
                self._ring.set_lines([self._line, line] if is_ours else [line])
            return found

        # The slot that must stay, from the hosts that have one.
        self._slot = ranks.combine(
            "begin a line", begin, lambda found: max((n for n in found if n >= 0), default=1)
        )
        ranks.on_first("write the line", lambda: write_record(self._root, Record(self._name, line)))
        self.newest, self._line, self._has_line = None, line, True

    def took(self, held: HeldStep) -> None:
        """A resume has taken this step: it stays until a newer one is held."""
        self.newest = held.step

    def path_of(self, held: HeldStep) -> str:
        """Where a step is held, for people."""
        return f"{self._ring.path} step {held.step}"

    # -- finding ------------------------------------------------------------------------------------------

    def candidates(self, ranks: Ranks) -> list[HeldStep]:
        """Steps of which some host has a manifest, newest first; nothing is proved yet. Waits for one that is on its way. Collective."""
        self.wait()

        def look() -> list[list[Any]]:
            if self._line not in self._ring.lines:
                return []
            found = [_held_in(self._ring.slot(name)) for name in self._ring.slots()]
            return [[one.step, one.checksum] for one in found if one is not None]

        def newest_first(every: list[list[list[Any]]]) -> list[list[Any]]:
            return sorted(([*one] for one in {tuple(one) for found in every for one in found}), reverse=True)

        return [HeldStep(*one) for one in ranks.combine("look into memory", look, newest_first)]

    @contextmanager
    def opened(self, held: HeldStep, ranks: Ranks) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Prove a step, and open it for the block: the path of a directory of it on this host, and the bytes that this rank has brought there,
        by host. Collective; raises :class:`CheckpointError` alike if any unit is held by no host, :class:`LowSpaceError` without room for
        documents.

        The directory has links to the files that this host holds whole, and the documents of other hosts that a restore reads whole, but for
        those of other hosts' ranks. Slices come when this thread reads them, and stay on their hosts.
        """
        manifest, text, holdings = self._find(held, ranks)
        host, beside = self._host, self._host.sites.beside
        here: dict[str, str] = {}
        for name, entry in manifest.files.items():
            for rank, slot, runs in holdings[name]:
                if rank in beside and are_all(runs, units_in(entry)):
                    here.setdefault(name, inside(self._ring.slot(slot).path, name))
        leads, lacking = host.sites.leads(ranks.rank), sorted(manifest.files.keys() - here.keys())
        remote = RemoteFiles(manifest.files, holdings, host.reader, ranks.tick)
        view = ranks.combine("name views", lambda: self._ring.new_view() if leads else "", list)[beside[0]]
        with ranks.agree("make a view"):
            if leads:
                self._ring.sweep_views()
                try:
                    os.mkdir(view, 0o700)
                    make_view(view, text, manifest, here, os.link)
                except OSError as error:
                    raise unwritten(view, error) from error
        brought = Counter[str]()
        try:
            with ranks.agree("bring documents from memory"):
                documents = [
                    name
                    for name in lacking
                    if not has_slices(name) and (not name.startswith("rank/") or rank_of_file(name) in beside)
                ]
                # The ranks of a host share the work.
                for name in documents[beside.index(ranks.rank) :: len(beside)]:
                    remote.copy(name, inside(view, name))
            with reading_from(remote, view, filter(has_slices, lacking)):
                yield view, brought
            for rank, nbytes in remote.taken.items():
                brought[host.peers[rank][0]] += nbytes
        finally:
            remote.close()
            with ranks.agree("remove the view"):
                if leads:
                    remove_tree(view)

    def _find(self, held: HeldStep, ranks: Ranks) -> tuple[Manifest, bytes, Holdings]:
        """The manifest of a step, its text, and who holds which units, proved. Collective."""
        mine: dict[str, list[str]] = {}  # this host's slots of the step, and their files
        text = b""

        def find() -> dict[str, list[str]]:
            nonlocal text
            if self._line in self._ring.lines:
                for name in self._ring.slots():
                    slot = self._ring.slot(name)
                    found = _manifest_of(slot)
                    if xxhash.xxh3_64_hexdigest(found) == held.checksum:
                        mine[name] = sorted(slot.files())
                        text = found
            return mine

        first, only_copies = ranks.combine("who has the manifest", find, _first_and_copies)
        text = ranks.combine(
            "send the manifest", lambda: text if first == ranks.rank else b"", lambda found: found[first]
        )
        with ranks.agree("read the manifest in memory"):
            manifest = parse_manifest(text, self._ring.path)
        # Hosts prove their own slices, and at once copies of those whose own host is lost; other copies only where those are damaged.
        of_step = frozenset(manifest.files)  # slots may hold files of other ranks, which an older step had
        wanted = {"own": of_step, "held": of_step.intersection(only_copies)}
        holdings, lost = ranks.combine(
            "prove a step in memory",
            partial(self._proved, manifest, mine, wanted, ranks),
            partial(_merged, manifest, {}),
        )
        if lost:
            wanted = {"own": frozenset(), "held": frozenset(lost).difference(only_copies)}
            holdings, lost = ranks.combine(
                "prove copies in memory",
                partial(self._proved, manifest, mine, wanted, ranks),
                partial(_merged, manifest, holdings),
            )
        if lost:
            raise CheckpointError(f"step {held.step} in memory: no host has all of {', '.join(lost[:5])}")
        return manifest, text, holdings

    def _proved(
        self,
        manifest: Manifest,
        slots: Mapping[str, Sequence[str]],
        wanted: Mapping[str, Collection[str]],
        ranks: Ranks,
    ) -> dict[str, Any]:
        """What this rank proves of the files that are wanted of each kind of slot; the ranks of a host share the work."""
        beside = self._host.sites.beside
        index = beside.index(ranks.rank)
        found: dict[str, Any] = {}
        for slot, files in slots.items():
            of_slot = [f for f in files if f in wanted[slot.partition("-")[0]]]
            for name in of_slot[index :: len(beside)]:
                path = inside(self._ring.slot(slot).path, name)
                if units := proved_units(path, manifest.files[name], ranks.tick):
                    found.setdefault(name, []).append([ranks.rank, slot, runs_of(units)])
        return found


def _manifest_of(slot: Slot) -> bytes:
    """The text of a slot's manifest; empty if it can't be read."""
    try:
        return read_small(os.path.join(slot.path, MANIFEST_NAME))
    except ShardwiseError:
        return b""


def _held_in(slot: Slot) -> HeldStep | None:
    """What a slot holds by its manifest, if that is intact."""
    text = _manifest_of(slot)
    try:
        return HeldStep(step_of_manifest(text, slot.path), xxhash.xxh3_64_hexdigest(text))
    except ShardwiseError:
        return None


def _first_and_copies(found: list[dict[str, list[str]]]) -> list[Any]:
    """The first rank whose host has the manifest, and the files of which only copies are there, on other hosts than their own."""
    by_kind: dict[str, set[str]] = {"own": set(), "held": set()}
    for slots in found:
        for slot, files in slots.items():
            by_kind[slot.partition("-")[0]].update(files)
    first = next((rank for rank, slots in enumerate(found) if slots), None)
    if first is None:
        raise CheckpointError("the step in memory is gone: no host has its manifest any more")
    return [first, sorted(by_kind["held"] - by_kind["own"])]


def _merged(manifest: Manifest, before: Holdings, new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All holdings, and the files of which a unit is held by no rank."""
    merged: dict[str, list[Any]] = {name: [] for name in manifest.files}
    for one in (before, *new):
        for name, holders in one.items():
            merged[name] += holders
    lost = [
        name
        for name, entry in manifest.files.items()
        if not are_all([run for _, _, runs in merged[name] for run in runs], units_in(entry))
    ]
    return [merged, lost]
