"""Keeps one step in memory: copies the state into the ring at once; a thread hashes it, agrees, and lets other hosts copy it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from ..digests.digest import partial_sum
from ..digests.pending import partial_sums
from ..dtypes import torch_dtype
from ..errors import CheckpointError, ShardwiseError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry
from ..format.places import rank_of_file
from ..format.slices import header_bytes
from ..memory.copies import copy_units
from ..memory.link import Reader
from ..memory.maps import Maps, copy_bytes
from ..memory.options import MemoryTier
from ..memory.places import Places
from ..memory.ring import Ring, Slot, write_whole
from ..memory.units import units_of
from ..ranks.ranks import Ranks
from ..store.slice_file import tensor_bytes
from .collect import Collected
from .document_files import checked_text, write_documents
from .own_files import OwnFile, Piece, boxes_on
from .pieces import LiveContents, live_piece
from .save_manifest import file_records, manifest_of_written, merged_records, outline_of
from .stage import detached_documents

__all__ = ["Host", "MemorySave"]


@dataclass(frozen=True, slots=True)
class Host:
    """This rank's host, and how to reach the hosts of the other ranks."""

    tier: MemoryTier
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
    """One step on its way into memory. :meth:`copy` in the training's thread, then a thread of its own."""

    def __init__(
        self, collected: Collected, host: Host, number: int, ranks: Ranks, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self.step = collected.step
        self.slot = host.ring.slot(f"own-{number}")
        self.is_complete = self.has_copies = False
        self.nbytes = 0
        self.error: BaseException | None = None
        self._number, self._host, self._ranks = number, host, ranks
        self._collected = collected
        self._files: list[_File] = []
        self._thread = threading.Thread(target=self._run, name=f"shardwise-memory-{self.step}", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def copy(self) -> None:
        """Copy this rank's slices into the slot; the caller may then change the state. A failure is all ranks', later."""
        try:
            self._collected = detached_documents(self._collected)
            self._copy()
        except Exception as error:
            self.error = error
        self._thread.start()

    def _copy(self) -> None:
        rank, places = self._ranks.rank, self._host.places
        self.slot.clear()
        self._files = [_File(f, header_bytes(f.slices)) for part in self._collected.own for f in part.files]
        beside = places.beside(rank)
        self.slot.keep_only({rank}, {f.name for f in self._files})
        if places.is_leader(rank):
            self.slot.keep_only({rank_of_file(n) for n in self.slot.files()}.difference(beside), ())
        contents = LiveContents(piece for file in self._files for piece in file.own.pieces)
        memories = self._host.maps.of(self.slot, {f.name: f.nbytes for f in self._files})
        for file in self._files:
            memory = file.memory = memories[file.name]
            at = len(file.header)
            memory[:at] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            for piece in file.own.pieces:
                for _, part in contents.parts_of(piece):
                    for view in tensor_bytes(part):
                        copy_bytes(view, memory, at)
                        at += view.nbytes
                        self.nbytes += view.nbytes

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publish()
        except BaseException as error:
            self.error = error
            self._warn(f"step {self.step} is not kept in memory: {error}")

    def _publish(self) -> None:
        collected, ranks = self._collected, self._ranks
        with ranks.agree(
            "copy a step into memory"
        ):  # hashing would slow down ranks that still copy, for which training waits
            if self.error is not None:
                raise self.error
        with ranks.agree("keep a step in memory"):
            files, sums = self._records()
            text = json.dumps({name: asdict(entry) for name, entry in files.items()}).encode()
            write_whole(self._records_path(ranks.rank), text)
        merged: list[dict[str, Any]] = []
        ranks.reduce(
            "file records in memory",
            lambda: file_records(collected, ranks.rank, files, sums),
            merged_records,
            merged.append,
        )
        checksum = ranks.on_first("manifest in memory", lambda: self._write_manifest(merged[0]))
        with ranks.agree("take the manifest in memory"):
            if self._host.places.is_leader(ranks.rank):
                self._take_manifest(checksum)
        self.is_complete = True
        problems = self._copy_others()
        found = ranks.combine("copies in memory", lambda: problems, list)
        self.has_copies = not any(found)
        if not self.has_copies:
            self._warn(f"step {self.step} in memory lacks copies: {'; '.join(p for p in found if p)}")

    def _records(self) -> tuple[dict[str, FileEntry], list[int]]:
        """Entries of this rank's files, and the digest sums of what it wrote."""
        collected, rank = self._collected, self._ranks.rank
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
                self._ranks.tick()
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
        self._write_documents(files)
        return files, [totals[id(v)] % 2**64 for v in counted]

    def _write_documents(self, files: dict[str, FileEntry]) -> None:
        collected, ranks = self._collected, self._ranks
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

    def _write_manifest(self, merged: Mapping[str, Any]) -> str:
        text = manifest_of_written(self._collected, self._ranks, merged).to_text().encode()
        write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
        return xxhash.xxh3_64_hexdigest(text)

    def _take_manifest(self, checksum: str) -> None:
        """Into this host's slots: the own one, and the one of copies, whose old content then proves nothing any more."""
        if self._ranks.rank == 0:
            with open(os.path.join(self.slot.path, MANIFEST_NAME), "rb") as file:
                text = file.read()
        else:
            reader = self._host.reader(0)
            text = reader.read_whole(f"own-{self._number}/{MANIFEST_NAME}")
            reader.close()
        if xxhash.xxh3_64_hexdigest(text) != checksum:
            raise CheckpointError("the manifest arrived damaged")
        write_whole(os.path.join(self.slot.path, MANIFEST_NAME), text)
        if min(self._host.tier.copies, self._host.places.hosts) > 1:
            write_whole(os.path.join(self._held.path, MANIFEST_NAME), text)

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
        records = json.loads(reader.read_whole(f"{slot}.files/{source:05d}.json"))
        held.keep_only({source}, records.keys())
        for name, fields in records.items():
            entry = FileEntry(**{**fields, "blocks": tuple(fields["blocks"])})
            path = held.room_for(name, entry.nbytes)
            copy_units(reader, f"{slot}/{name}", units_of(entry), path, self._ranks.tick)
