"""Files of other hosts: served over TCP to those who know the run's secret, and read from there."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

import xxhash

from ..errors import CheckpointError, FormatError, IntegrityError, LowSpaceError, ShardwiseError
from ..format.manifest import FileEntry, Unit, units_of
from .ring import open_below, unwritten

# ----------------------------------------------------------------------------------------------------
# Reads files of another host's ring or part of a step, over TCP. A rank serves its host's, to those who know the run's secret.
#
# Plain sockets, because no collective may run concurrently with those of training. One request: bytes of a file. The secret travels through the
# group's store. Both sides prove that they know it by a keyed hash of the random bytes of both, and derive the keys of the connection from
# them: each request, reply and piece of a file has a tag, so whoever stands between the two can read, and can neither ask nor alter. Content
# is not encrypted, as that of gloo and NCCL is not.

_NONCE_BYTES, _HASH_BYTES, TAG_BYTES = 16, 32, 16
#: Length of the name, first byte and number of bytes.
_REQUEST = struct.Struct("!HQQ")
_REPLY = struct.Struct("!BQ")
_COUNT = struct.Struct("!Q")
_MAX_BYTES = 128 * 1024**2
#: A server answers so many proved connections at a time. Others wait in the kernel's queue, which the system may make shorter: after a restart
#: every host of a run asks rank 0's host for its documents.
_MAX_PROVED, _MAX_WAITING = 64, 4096
#: Connections that have proved nothing yet. For one more, the oldest is closed once it has had this long: strangers keep nobody out.
_MAX_UNPROVED, _GRACE_S = 64, 1.0
#: Before the next try to accept a connection: the process may be out of descriptors.
_PAUSE_S = 0.05
#: Of a reply, as it arrives: each has a tag, and stays in a core's cache until it is hashed and written.
PIECE_BYTES = 256 * 1024


def own_address(toward: tuple[str, int]) -> str:
    """The address of this host, IPv4 or IPv6, with which it reaches another one. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, proto, _, address in socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def address_toward_store() -> str:
    """The address of this host with which it reaches the group's store, by torch's environment."""
    return own_address((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))))


def _keyed(secret: bytes, use: bytes, nonces: bytes) -> bytes:
    """A proof of the secret or a key of one connection: of the random bytes of server and reader."""
    return hmac.digest(secret, use + nonces, "sha256")


class Seal:
    """The tags of one side's messages on one connection. Each counts those before it, so that none can be left out, repeated or moved."""

    def __init__(self, key: bytes) -> None:
        self._start, self._count = hmac.new(key, digestmod="sha256"), 0

    def tag(self, *message: bytes | memoryview) -> bytes:
        """Of the next message."""
        found = self._start.copy()
        found.update(_COUNT.pack(self._count))
        for part in message:
            found.update(part)
        self._count += 1
        return found.digest()[:TAG_BYTES]

    def is_of(self, tag: bytes, *message: bytes | memoryview) -> bool:
        """Whether the next message has this tag."""
        return hmac.compare_digest(tag, self.tag(*message))


def _seals(secret: bytes, nonces: bytes) -> tuple[Seal, Seal]:
    """Of the reader's messages and the server's."""
    return Seal(_keyed(secret, b"requests", nonces)), Seal(_keyed(secret, b"replies", nonces))


def _send_at_once(link: socket.socket) -> None:
    """Else the end of each reply waits for the acknowledgment of what came before it: 40 ms, more than 16 MiB take."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive_bytes(link: socket.socket, nbytes: int, until: float) -> bytes:
    """So many bytes, before that time of the monotonic clock, however slowly they come. Raises ``OSError``."""
    content = bytearray(nbytes)
    receive_into(link, memoryview(content), until)
    return bytes(content)


def receive_into(link: socket.socket, view: memoryview, until: float) -> None:
    """Fill ``view`` before that time of the monotonic clock, however slowly bytes come."""
    while view.nbytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        link.settimeout(left)
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]


class Readable(Protocol):
    """What a server serves: a ring, or a host's part of a step."""

    @property
    def path(self) -> str:
        """The directory of all its files."""

    def readable(self, name: str) -> str:
        """The path of a file that other hosts may read. Raises :class:`CheckpointError`, :class:`FormatError` for any other."""


class Server:
    """Serves one ring or part until it is closed; its threads are daemons. ``address`` may be an IPv4 or IPv6 address or a name."""

    def __init__(self, ring: Readable, secret: bytes, address: str, timeout_s: float, port: int = 0) -> None:
        self._ring, self._secret, self._timeout_s = ring, secret, timeout_s
        self._changed = threading.Condition()
        self._unproved: dict[socket.socket, float] = {}  # and since when
        self._proved = 0
        self._closed = False
        try:
            found = socket.getaddrinfo(
                address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, at = found[0]
            self._socket = socket.create_server(at, family=family, backlog=_MAX_WAITING)
        except OSError as error:
            raise CheckpointError(
                f"can't listen on {address}: {error.strerror}; give InMemoryCheckpoints an address, if this is for the memory tier"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="shardwise-memory-server", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while self._wait_for_room():
            try:
                link, _ = self._socket.accept()
            except OSError:
                time.sleep(_PAUSE_S)
                continue
            with self._changed:
                self._unproved[link] = time.monotonic()
            try:
                threading.Thread(
                    target=self._serve, args=(link,), name="shardwise-memory-link", daemon=True
                ).start()
            except RuntimeError:  # the system is out of threads
                self._leave(link)
                link.close()
                time.sleep(_PAUSE_S)

    def _wait_for_room(self) -> bool:
        """Until one more connection may come. False: the server is closed."""
        with self._changed:
            while not self._closed:
                if self._proved >= _MAX_PROVED:
                    self._changed.wait()
                    continue
                if len(self._unproved) < _MAX_UNPROVED:
                    break
                oldest, since = next(iter(self._unproved.items()))
                left = since + _GRACE_S - time.monotonic()
                if left <= 0:
                    del self._unproved[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                    break
                self._changed.wait(left)
            return not self._closed

    def _leave(self, link: socket.socket) -> bool:
        """No longer count a connection as unproved. False: it was closed meanwhile."""
        with self._changed:
            self._changed.notify_all()
            return self._unproved.pop(link, None) is not None

    def _serve(self, link: socket.socket) -> None:
        seals = None
        with link:
            try:
                with contextlib.suppress(OSError):
                    seals = self._meet(link)
            finally:
                is_open = self._leave(link)
            if is_open and seals is not None:
                self._answer_all(link, *seals)

    def _meet(self, link: socket.socket) -> tuple[Seal, Seal] | None:
        """Exchange proofs, all before one deadline. None: the reader does not know the secret."""
        until = time.monotonic() + self._timeout_s
        link.settimeout(self._timeout_s)
        _send_at_once(link)
        own = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(own)
        proof, nonces = (
            receive_bytes(link, _HASH_BYTES, until),
            own + receive_bytes(link, _NONCE_BYTES, until),
        )
        if not hmac.compare_digest(proof, _keyed(self._secret, b"reader", nonces)):
            return None
        link.sendall(_keyed(self._secret, b"server", nonces))
        return _seals(self._secret, nonces)

    def _answer_all(self, link: socket.socket, requests: Seal, replies: Seal) -> None:
        with self._changed:
            self._proved += 1
        try:
            with contextlib.suppress(OSError, ShardwiseError):
                while not self._closed:
                    self._answer(link, requests, replies)
        finally:
            with self._changed:
                self._proved -= 1
                self._changed.notify_all()

    def _answer(self, link: socket.socket, requests: Seal, replies: Seal) -> None:
        until = time.monotonic() + self._timeout_s
        head = receive_bytes(link, _REQUEST.size, until)
        length, start, nbytes = _REQUEST.unpack(head)
        text = receive_bytes(link, length, until)
        if not requests.is_of(receive_bytes(link, TAG_BYTES, until), head, text):
            raise ConnectionError("a request has another tag: whoever sent it does not know the secret")
        link.settimeout(self._timeout_s)
        name = text.decode(errors="replace")
        try:
            self._ring.readable(name)
            fd = open_below(self._ring.path, name)
        except (OSError, ShardwiseError):
            reply = _REPLY.pack(1, 0)
            link.sendall(reply + replies.tag(reply))
            return
        try:
            left = max(0, os.fstat(fd).st_size - start)
            found = min(nbytes or left, left, _MAX_BYTES)
            reply = _REPLY.pack(0, found)
            link.sendall(reply + replies.tag(reply))
            _send(link, fd, start, found, replies)
        finally:
            os.close(fd)


def _send(link: socket.socket, fd: int, start: int, nbytes: int, replies: Seal) -> None:
    """Send bytes of a file in pieces, each with its tag. Raises ``OSError``, also if the file has become shorter."""
    memory = memoryview(bytearray(min(PIECE_BYTES, nbytes) + TAG_BYTES))
    for at in range(0, nbytes, PIECE_BYTES):
        size, filled = min(PIECE_BYTES, nbytes - at), 0
        while filled < size:
            count = os.preadv(fd, [memory[filled:size]], start + at + filled)
            if not count:
                raise ConnectionError("the file has become shorter")
            filled += count
        memory[size : size + TAG_BYTES] = replies.tag(memory[:size])
        link.sendall(memory[: size + TAG_BYTES])


class Reader:
    """Reads from one other rank's server. Not for several threads. A failure is a :class:`CheckpointError` naming the host; bytes that are
    not those that the server sent are an :class:`IntegrityError`, and are given to no caller."""

    def __init__(self, host: str, address: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._at, self._secret = (address, port), secret
        self._link: socket.socket | None = None
        self._requests = self._replies = Seal(b"")
        self._unread = 0  # bytes of the last reply

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes of a file, in order. All pieces lie in the same memory: each is valid until the next one."""
        self._ask_for_all_of(name, start, nbytes)
        memory = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
        while self._unread:
            yield self._next_piece(name, memory)

    def read_whole(self, name: str) -> bytes:
        """A file of at most 128 MiB."""
        content = bytearray(self._ask(name, 0, 0))
        view = memoryview(content)
        while self._unread:
            view = view[self._next_piece(name, view).nbytes :]
        return bytes(content)

    def _ask_for_all_of(self, name: str, start: int, nbytes: int) -> None:
        if self._ask(name, start, nbytes) != nbytes:
            raise CheckpointError(f"host {self._host}: {name} is shorter than expected")

    def _ask(self, name: str, start: int, nbytes: int) -> int:
        """Ask for bytes; 0: all. Returns how many come."""
        with self._explained():
            if self._unread:  # the caller did not want the rest
                self.close()
            link = self._link or self._connect()
            text = name.encode()
            head = _REQUEST.pack(len(text), start, nbytes)
            link.settimeout(self._timeout_s)
            link.sendall(head + text + self._requests.tag(head, text))
            until = time.monotonic() + self._timeout_s
            reply = receive_bytes(link, _REPLY.size, until)
            self._check(receive_bytes(link, TAG_BYTES, until), reply, name)
            status, found = _REPLY.unpack(reply)
            if status or found > (nbytes or _MAX_BYTES):
                self.close()
                raise CheckpointError(f"host {self._host}: doesn't have {name}")
            self._unread = int(found)
        return self._unread

    def _next_piece(self, name: str, view: memoryview) -> memoryview:
        """The next piece of the reply, at the start of ``view``."""
        assert self._link is not None
        piece = view[: min(PIECE_BYTES, self._unread)]
        until = time.monotonic() + self._timeout_s
        with self._explained():
            self._take(piece, until)
            self._check(receive_bytes(self._link, TAG_BYTES, until), piece, name)
        self._unread -= piece.nbytes
        return piece

    def _take(self, view: memoryview, until: float) -> None:
        """Fill ``view`` from the reply."""
        assert self._link is not None
        receive_into(self._link, view, until)

    def _check(self, tag: bytes, message: bytes | memoryview, name: str) -> None:
        """Raise unless the server has sent this message, as the next one."""
        if not self._replies.is_of(tag, message):
            self.close()
            raise IntegrityError(
                f"data received from host {self._host} doesn't match what it sent", path=name
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise CheckpointError(f"host {self._host} at {self._at[0]}: {error}") from error

    def _connect(self) -> socket.socket:
        until = time.monotonic() + self._timeout_s
        link = socket.create_connection(self._at, timeout=self._timeout_s)
        try:
            _send_at_once(link)
            own = secrets.token_bytes(_NONCE_BYTES)
            nonces = receive_bytes(link, _NONCE_BYTES, until) + own
            link.sendall(_keyed(self._secret, b"reader", nonces) + own)
            proof = receive_bytes(link, _HASH_BYTES, until)
            if not hmac.compare_digest(proof, _keyed(self._secret, b"server", nonces)):
                raise ConnectionError("does not know the secret of this run")
        except BaseException:
            link.close()
            raise
        self._requests, self._replies = _seals(self._secret, nonces)
        self._link, self._unread = link, 0
        return link


# ----------------------------------------------------------------------------------------------------
# Which units of a checkpoint's files are here. A step is held where every unit of every file of its manifest is proved on some host: then every box of every tensor is.

#: Numbers of units, as first and stop of each run of consecutive ones: a host holds most files whole, and every rank hears of all files.
Runs = Sequence[list[int]]

#: Small enough to stay in a core's cache between reading and hashing.
_UNIT_PIECE_BYTES = 1024**2


def units_in(entry: FileEntry) -> int:
    """How many units a file has."""
    return 1 + len(entry.blocks)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers in rising order as runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def are_all(runs: Runs, count: int) -> bool:
    """Whether runs, in any order, hold all numbers below ``count``."""
    reached = 0
    for first, stop in sorted(runs):
        if first > reached:
            return False
        reached = max(reached, stop)
    return reached >= count


def proved_units(path: str, entry: FileEntry, on_progress: Callable[[], object]) -> list[int]:
    """The numbers of the units of a file whose bytes are those that were saved. None of a file that is lost or has another size, or
    whose checksums are not those of its blocks."""
    try:
        fd = open_below(*os.path.split(path))
    except OSError:
        return []
    try:
        if os.fstat(fd).st_size != entry.nbytes:
            return []
        found = []
        for number, unit in enumerate(units_of(entry)):
            if _checksum(fd, unit) == unit.xxh3:
                found.append(number)
            on_progress()
        return found
    except (OSError, FormatError):
        return []
    finally:
        os.close(fd)


def _checksum(fd: int, unit: Unit) -> str:
    total, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(_UNIT_PIECE_BYTES, unit.nbytes)))
    for piece in _pieces(fd, unit, buffer):
        total.update(piece)
    return total.hexdigest()


def _pieces(fd: int, unit: Unit, buffer: memoryview) -> Iterator[memoryview]:
    at = unit.start
    while at < unit.stop:
        count = os.preadv(fd, [buffer[: unit.stop - at]], at)
        if not count:
            return  # the file became shorter: the checksum will differ
        yield buffer[:count]
        at += count


# ----------------------------------------------------------------------------------------------------
# Brings units of another host into files or memory of this one. Each is compared with its checksum as it arrives.

#: A unit that arrives damaged is read again: a resume takes what stays damaged for damage on the disk, and goes on from an older step.
_ATTEMPTS = 3


#: Takes bytes of a file that have come, and where they are in it.
Put = Callable[[int, memoryview], object]


def copy_units(
    reader: Reader, name: str, units: Iterable[Unit], path: str, on_progress: Callable[[], object]
) -> None:
    """Copy units of the file ``name`` of another ring into the file at ``path``, which has its size.

    Memory: a piece of 256 KiB; bytes go to their place before the unit is whole. Raises as :func:`receive`, after which the file holds
    damaged bytes, and :class:`LowSpaceError` if the file's pages find no room.
    """
    with _into_file(path) as put:
        for unit in units:
            receive(reader, name, unit, put)
            on_progress()


def receive(reader: Reader, name: str, unit: Unit, put: Put) -> None:
    """Bring a unit of the file ``name`` of another ring, or a part of one without a checksum, which the other host has proved: each piece that
    arrives has the tag that it was given there.

    Raises :class:`IntegrityError` for bytes that arrived damaged, :class:`CheckpointError` if the other host does not send them.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(IntegrityError):
            if _bring(reader, name, unit, put):
                return
    raise IntegrityError(f"bytes {unit.start} to {unit.stop} arrived corrupted", path=name)


def _bring(reader: Reader, name: str, unit: Unit, put: Put) -> bool:
    """Whether what arrived has its checksum."""
    at, found = unit.start, xxhash.xxh3_64()
    for piece in reader.pieces(name, unit.start, unit.nbytes):
        found.update(piece)
        put(at, piece)
        at += piece.nbytes
    return unit.xxh3 in (None, found.hexdigest())


@contextlib.contextmanager
def _into_file(path: str) -> Iterator[Put]:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise unwritten(path, error) from error

    def put(start: int, piece: memoryview) -> None:
        at = 0
        try:
            while at < piece.nbytes:
                at += os.pwrite(fd, piece[at:], start + at)
        except OSError as error:
            raise unwritten(path, error) from error

    try:
        yield put
    finally:
        os.close(fd)


def _into_memory(memory: memoryview, start: int) -> Put:
    """Of bytes from ``start`` on."""

    def put(at: int, piece: memoryview) -> None:
        memory[at - start : at - start + piece.nbytes] = piece

    return put


# ----------------------------------------------------------------------------------------------------
# Reads files of a step of which other hosts hold the units.

#: For each file of a step, the ranks that have proved units of it: rank, slot, and which units.
Holdings = Mapping[str, Sequence[tuple[int, str, Runs]]]

#: At most so many reads of a unit come alone, and so many bytes by them; the next read brings the unit. Few hosts hold the bytes
#: that every rank of a run reads, such as the optimizer's count of steps: to send each rank 16 MiB would keep these hosts busy.
_MOST_ALONE, _MOST_BYTES_ALONE = 8, 1024**2


class RemoteFiles:
    """The files of ``entries``, read from the ranks that hold them. Rank-local; not for several threads.

    Each read tries the holders in their order; a holder that was away comes last from then on. ``reader_of`` takes a holder's rank. A connection
    lasts for one read: a host answers some connections at a time, and closes one that is idle. Calls ``on_progress`` whenever some bytes
    have come. Memory: one unit (16 MiB). Methods raise :class:`CheckpointError` if no host sends the bytes, :class:`IntegrityError` if the
    last one that was asked sends other bytes than were saved.
    """

    def __init__(
        self,
        entries: Mapping[str, FileEntry],
        holdings: Holdings,
        reader_of: Callable[[int], Reader],
        on_progress: Callable[[], object],
        *,
        most_alone: int = _MOST_ALONE,
    ) -> None:
        """``most_alone``: 0 if holders have not proved their units, so that only whole ones may come."""
        self.taken = Counter[int]()
        """Bytes that came, by the rank that sent them."""
        self._entries, self._holdings = entries, holdings
        self._reader_of, self._on_progress, self._most_alone = reader_of, on_progress, most_alone
        self._reading: tuple[str, Sequence[Unit]] = "", ()
        self._memory: memoryview | None = None
        self._kept: tuple[str, int] | None = None  # the unit in memory: its file and number
        self._away = set[int]()  # holders that did not send what was asked of them
        # By unit: reads while it was not here, and their bytes.
        self._alone: dict[tuple[str, int], tuple[int, int]] = {}

    def close(self) -> None:
        """Give the memory back."""
        self._memory = self._kept = None

    def copy(self, name: str, path: str) -> None:
        """Copy a whole file into the one at ``path``, which has its size. Raises :class:`LowSpaceError` if there is no room."""
        with _into_file(path) as put:
            for number, unit in enumerate(units_of(self._entries[name], path=name)):
                self._from_a_holder(name, number, unit, put)
                self._on_progress()

    def read_into(self, name: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with bytes of a file.

        Whole units come, each compared with its checksum, and the last one stays in memory, because reads go through a file in order.
        A few short reads of a unit come alone, with the tag of the connection: the holder has proved the unit.
        Raises :class:`IntegrityError` for bytes beyond the end.
        """
        if self._reading[0] != name:
            self._reading = name, units_of(self._entries[name], path=name)
        units, at, stop = self._reading[1], offset_bytes, offset_bytes + view.nbytes
        if stop > self._entries[name].nbytes:
            raise IntegrityError(f"ends before byte {stop}: truncated", path=name)
        number = bisect_right(units, at, key=lambda unit: unit.start) - 1
        while at < stop:
            unit = units[number]
            end = min(stop, unit.stop)
            part = view[at - offset_bytes : end - offset_bytes]
            if self._comes_alone(name, number, part):
                self._from_a_holder(name, number, Unit(at, part.nbytes, None), _into_memory(part, at))
            else:
                part[:] = self._unit(name, number, unit)[at - unit.start : end - unit.start]
            number, at = number + 1, end
            self._on_progress()

    def _comes_alone(self, name: str, number: int, part: memoryview) -> bool:
        """Whether a part of a unit is read by itself: the unit is not here, and few bytes of it were read."""
        if (name, number) == self._kept:
            return False
        count, nbytes = self._alone.get((name, number), (0, 0))
        self._alone[name, number] = count + 1, nbytes + part.nbytes
        return count < self._most_alone and nbytes + part.nbytes <= _MOST_BYTES_ALONE

    def _unit(self, name: str, number: int, unit: Unit) -> memoryview:
        """A unit in memory, until the next one is read."""
        if self._memory is None or self._memory.nbytes < unit.nbytes:
            self._memory = self._kept = None  # before the next one is there
            self._memory = memoryview(bytearray(unit.nbytes))
        memory = self._memory[: unit.nbytes]
        if (name, number) != self._kept:
            self._kept = None  # until all of the unit has come
            self._from_a_holder(name, number, unit, _into_memory(memory, unit.start))
            self._kept = name, number
        return memory

    def _from_a_holder(self, name: str, number: int, wanted: Unit, put: Put) -> None:
        """Bring a unit, or a part of it, from the first of its holders that sends that."""
        problem: ShardwiseError = CheckpointError("no host has all of it")
        for rank, slot, runs in sorted(self._holdings[name], key=lambda holder: holder[0] in self._away):
            if not any(first <= number < stop for first, stop in runs):
                continue
            try:
                with closing(self._reader_of(rank)) as reader:
                    receive(reader, os.path.join(slot, name), wanted, put)
            except LowSpaceError:
                raise
            except (CheckpointError, IntegrityError) as error:
                problem = error
                if isinstance(error, CheckpointError):
                    self._away.add(rank)
                continue
            self.taken[rank] += wanted.nbytes
            return
        if isinstance(problem, IntegrityError):
            raise IntegrityError(str(problem), path=name)
        raise CheckpointError(f"{name}: {problem}")
