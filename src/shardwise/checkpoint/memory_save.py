"""Keeps one step in memory: copies the state into the ring at once. A thread agrees with the other ranks beside the copy; behind training it
hashes the copy, and lets other hosts copy it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..digests.digest import partial_sum
from ..digests.pending import partial_sums
from ..dtypes import torch_dtype
from ..errors import CheckpointError, FormatError, IntegrityError, ShardwiseError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry
from ..format.places import rank_of_file
from ..format.slices import header_bytes
from ..limits import parse_json
from ..memory.copies import copy_units
from ..memory.link import Reader
from ..memory.maps import Maps, copy_tensors
from ..memory.options import InMemoryCheckpoints
from ..memory.places import Places
from ..memory.ring import Ring, Slot, write_whole
from ..memory.units import units_of
from ..objects import frozen
from ..ranks.ranks import Ranks
from .collect import Collected, Taken, compare
from .document_files import checked_text, write_documents
from .own_files import OwnFile, Piece, boxes_on
from .pieces import LiveContents, live_piece
from .save_manifest import file_records, manifest_of_written, merged_records, outline_of
from .stage import detached_documents

__all__ = ["Host", "MemorySave"]

#: Every rank reads what rank 0 sends through the group's store, which one process serves.
_MOST_SENT_BYTES = 1024**3


@frozen
class Host:
    """This rank's host, and how to reach the hosts of the other ranks."""

    tier: InMemoryCheckpoints
    ring: Ring
    places: Places
    secret: bytes
    maps: Maps

    def reader(self, rank: int) -> Reader:
        """Reads from the ring of another rank's host."""
        peer = self.places.peers[rank]
        return Reader(peer.host, peer.address, peer.port, self.secret, self.tier.timeout_s)


@dataclass(slots=True)
class _File:
    """One slice file in the slot."""

    own: OwnFile
    header: bytes
    memory: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(s.nbytes for s in self.own.slices)


class MemorySave:
    """One step on its way into memory. :meth:`copy` in the training's thread; a thread of its own beside it, and then behind training.

    ``ranks`` agree in the thread until :meth:`copy` returns, those on ``behind`` afterwards.
    """

    def __init__(
        self, step: int, host: Host, number: int, ranks: Ranks, behind: Ranks, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self.step = step
        self.slot = host.ring.slot(f"own-{number}")
        self.is_complete = self.has_copies = False
        self.nbytes = 0
        self.error: BaseException | None = None
        self._number, self._host, self._ranks, self._behind = number, host, ranks, behind
        self._stream: torch.Stream | None = None
        self._taken: Future[Taken] = Future()
        self._agreed: Future[Collected | None] = Future()
        self._copied, self._ended, self._has_started = threading.Event(), threading.Event(), False
        self._files: list[_File] = []
        self._thread = threading.Thread(target=self._run, name=f"shardwise-memory-{self.step}", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._has_started and not self._ended.is_set()

    def join(self) -> None:
        """Wait for the thread. Not by ``Thread.join``: after Ctrl-C in it Python (3.11) takes a running thread for one that has ended."""
        if self._has_started:
            self._ended.wait()

    def start(self) -> bool:
        """Start the thread, which :meth:`copy` needs. False: the system is out of threads."""
        try:
            self._thread.start()
        except RuntimeError:
            return False
        self._has_started = True
        return True

    def copy(self, taking: Callable[[], Taken]) -> bool:
        """Copy this rank's slices into the slot; the caller may then change the state. False: not all ranks keep this step. Collective.

        It does not wait for the other ranks first: the slot never holds the newest step. Raises what ``taking``
        raises, and the errors of :func:`.collect.compare`, alike on all ranks. A failure of the copy is all ranks', later, and so is
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
        self._copied.set()

    def _copy(self, taken: Taken) -> None:
        rank, places = self._ranks.rank, self._host.places
        self.slot.clear()
        self._files = [_File(f, header_bytes(f.slices)) for part in taken.own for f in part.files]
        sizes = {f.name: f.nbytes for f in self._files}
        if not self._host.maps.has(self.slot, sizes):  # else there is nothing to make room for
            self.slot.keep_only({rank}, sizes.keys())
            if places.is_leader(rank):
                others = {rank_of_file(n) for n in self.slot.files()}.difference(places.beside(rank))
                self.slot.keep_only(others, ())
        memories = self._host.maps.of(self.slot, sizes)
        contents = LiveContents(piece for file in self._files for piece in file.own.pieces)
        for file in self._files:
            memory = file.memory = memories[file.name]
            memory[: len(file.header)] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            offsets = [len(file.header) + one.offset_bytes for one in file.own.slices]
            pieces = list(zip(file.own.pieces, offsets, strict=True))
            copy_tensors([(live_piece(p), memory, at) for p, at in pieces if not p.is_on_device])
            for piece, at in pieces:
                if piece.is_on_device:
                    for _, part in contents.parts_of(piece):
                        at += copy_tensors([(part, memory, at)])
            self.nbytes += file.nbytes - len(file.header)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def _work(self) -> None:
        try:  # beside the copy
            found = compare(self._taken_here, self._ranks)
            collected = None if found is None else detached_documents(found)
        except BaseException as error:
            self._agreed.set_exception(error)
            return
        self._agreed.set_result(collected)
        self._copied.wait()
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
            files, sums = self._records(collected)
            text = json.dumps({name: asdict(entry) for name, entry in files.items()}).encode()
            write_whole(self._records_path(ranks.rank), text)
        merged: list[dict[str, Any]] = []
        ranks.reduce(
            "file records in memory",
            lambda: file_records(collected, ranks.rank, files, sums),
            merged_records,
            merged.append,
        )
        checksum = ranks.on_first("manifest in memory", lambda: self._write_manifest(collected, merged[0]))
        text = self._sent_manifest(checksum)
        with ranks.agree("take the manifest in memory"):
            if self._host.places.is_leader(ranks.rank):
                self._take_manifest(text)
        self.is_complete = True
        problems = self._copy_others()
        found = ranks.combine("copies in memory", lambda: problems, list)
        self.has_copies = not any(found)
        if not self.has_copies:
            self._warn(f"step {self.step} in memory lacks copies: {'; '.join(p for p in found if p)}")

    def _records(self, collected: Collected) -> tuple[dict[str, FileEntry], list[int]]:
        """Entries of this rank's files, and the digest sums of what it wrote."""
        rank = self._behind.rank
        counted = [v for part in collected.snapshot.parts for v in part.live if v.counted]
        totals = {id(v): 0 for v in counted}
        files: dict[str, FileEntry] = {}
        for file in self._files:
            assert file.memory is not None
            at = len(file.header)
            for piece in file.own.pieces:
                live, nbytes = piece.live, piece.nbytes
                if id(live) in totals and nbytes:
                    data = file.memory[at : at + nbytes]
                    box = piece.held.box
                    dtype = torch_dtype(live.stored.dtype)
                    values = torch.frombuffer(data.numpy().data, dtype=dtype).view(box.sizes)
                    totals[id(live)] += partial_sum(values, box.start)
                at += nbytes
                self._behind.tick()
            payload = file.memory[len(file.header) :].numpy().data
            blocks = [
                xxhash.xxh3_64_hexdigest(payload[a : a + BLOCK_BYTES])
                for a in range(0, payload.nbytes, BLOCK_BYTES)
            ]
            files[file.name] = FileEntry(
                file.nbytes, len(file.header), xxhash.xxh3_64_hexdigest(file.header), tuple(blocks)
            )
            file.memory = None
        for v in counted:
            if v.refers:
                boxes = boxes_on(v.stored, rank)
                totals[id(v)] = sum(partial_sums((live_piece(Piece(v, b)), b.box.start) for b in boxes))
        self._write_documents(collected, files)
        return files, [totals[id(v)] % 2**64 for v in counted]

    def _write_documents(self, collected: Collected, files: dict[str, FileEntry]) -> None:
        ranks = self._behind
        self.slot.keep_only({ranks.rank}, {f.name for f in self._files})  # not the documents of an older step
        documents: dict[str, Mapping[str, Any]] = {f"rank/{ranks.rank:05d}": collected.local}
        if ranks.rank == 0:
            documents["state"] = collected.shared
        outline = outline_of(collected, ranks)
        for stem, of_stem in documents.items():
            text = checked_text(of_stem, outline, stem, self.slot.path)
            os.makedirs(os.path.dirname(os.path.join(self.slot.path, stem)), 0o700, exist_ok=True)
            write_documents(self.slot.path, stem, text, of_stem, files)
        for name, content in collected.assets.items() if ranks.rank == 0 else ():
            write_whole(os.path.join(self.slot.path, name), content)
            files[name] = FileEntry(len(content), len(content), xxhash.xxh3_64_hexdigest(content))

    def _write_manifest(self, collected: Collected, merged: Mapping[str, Any]) -> str:
        text = manifest_of_written(collected, self._behind, merged).to_text().encode()
        write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
        return xxhash.xxh3_64_hexdigest(text)

    def _sent_manifest(self, checksum: str) -> bytes:
        """The manifest, on the first rank of each host. Collective.

        It comes over the network from rank 0's host; through the group's store where that does not answer some host.
        """
        ranks, text = self._behind, b""

        def fetch() -> bool:
            nonlocal text
            if not self._host.places.is_leader(ranks.rank):
                return True
            text = self._manifest_of_first()
            return xxhash.xxh3_64_hexdigest(text) == checksum

        if ranks.combine("fetch the manifest in memory", fetch, all):
            return text
        return ranks.on_first("send the manifest in memory", self._sendable_manifest)

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

    def _sendable_manifest(self) -> bytes:
        text = self._manifest_of_first()
        if len(text) * self._behind.world_size > _MOST_SENT_BYTES:
            raise CheckpointError(
                f"rank 0's host does not send the manifest to all hosts, and it is too large for the group's store: {len(text):,} "
                f"bytes for each rank"
            )
        return text

    def _take_manifest(self, text: bytes) -> None:
        """Into this host's slots: the own one, and the one of copies, whose old content then proves nothing any more. Deletes files of
        ranks whose slices this host does not copy."""
        write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
        if min(self._host.tier.copies, self._host.places.hosts) > 1:
            held, places, copies = self._held, self._host.places, self._host.tier.copies
            write_whole(os.path.join(held.path, MANIFEST_NAME), text)
            sources = {s for r in places.beside(self._ranks.rank) for s in places.sources_of(r, copies)}
            held.keep_only({rank_of_file(name) for name in held.files()} - sources, ())

    @property
    def _held(self) -> Slot:
        number = self._number % self._host.tier.received_slots
        return self._host.ring.slot(f"held-{number}")

    def _records_path(self, rank: int) -> str:
        return os.path.join(f"{self.slot.path}.files", f"{rank:05d}.json")

    def _copy_others(self) -> str:
        """Copy the slices of other hosts' ranks. Returns what went wrong; never raises for a host that is away."""
        problems, held = [], self._held
        for source in self._host.places.sources_of(self._ranks.rank, self._host.tier.copies):
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
