"""Lists the members of ``torch.save``'s zip container and locates their bytes. Supports nothing else of zip.

torch (1.6-2.14) stores members uncompressed and writes zip64 records and no comment. The last 22 bytes therefore
locate the directory. Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from ..errors import FormatError
from ..limits import MAX_COUNT, MAX_ZIP_DIRECTORY_BYTES, brief
from ..objects import frozen
from .small_reads import OpenFile

__all__ = ["Member", "MemberReader", "TorchZip"]

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_BYTES = 30
_16, _32 = 2**16 - 1, 2**32 - 1


@frozen
class Member:
    """A member: whether it is uncompressed, its size, its CRC, the offset of its own header."""

    is_stored: bool
    nbytes: int
    crc: int
    header_at: int


class TorchZip:
    """The members of one container in a byte range of an open file, by name without the archive's folder.

    Raises :class:`FormatError` for anything that torch does not write, :class:`SourceError` if reading fails. Reads
    the directory only: at most :data:`~shardwise.limits.MAX_ZIP_DIRECTORY_BYTES`.
    """

    def __init__(self, file: OpenFile, begin: int, nbytes: int) -> None:
        self._file, self.begin, self._nbytes = file, begin, nbytes
        self._offsets: dict[int, int] = {}  # of members, by that of their header
        count, at, length = self._find_directory()
        if length > MAX_ZIP_DIRECTORY_BYTES:
            raise self.wrong(f"its directory has {length} bytes, the limit is {MAX_ZIP_DIRECTORY_BYTES}")
        self.members = dict(self._entries(self.read(at, length)))
        if len(self.members) != count:
            raise self.wrong(f"its directory holds {len(self.members)} names, but says {count}")

    def offset_of(self, member: Member) -> int:
        """Offset of a member's bytes in the file. Checks that all of them lie in the container."""
        if member.header_at in self._offsets:
            return self._offsets[member.header_at]
        local = self.read(member.header_at, _LOCAL_BYTES)  # the header holds its own length
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        at = member.header_at + _LOCAL_BYTES + lengths
        if local[:4] != b"PK\3\4" or at + member.nbytes > self._nbytes:
            raise self.wrong("a member ends outside it: damaged or truncated")
        self._offsets[member.header_at] = self.begin + at
        return self.begin + at

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the container. Raises :class:`FormatError` if it is too short."""
        if not 0 <= at <= self._nbytes - nbytes:
            raise self.wrong("it is truncated")
        found = self._file.read(self.begin + at, nbytes)
        if len(found) != nbytes:
            raise self.wrong("it is truncated")
        return found

    def _find_directory(self) -> tuple[int, int, int]:
        """The directory's number of entries, offset and length."""
        tail = self._nbytes - _END.size
        mark, _, _, _, count, length, at, comment = _END.unpack(self.read(tail, _END.size))
        if mark != b"PK\5\6" or comment:
            raise self.wrong(
                "it does not end as a zip file does (before torch 1.6 torch wrote another format)"
            )
        if count == _16 or _32 in (length, at):
            mark, _, end, _ = _LOCATOR.unpack(self.read(tail - _LOCATOR.size, _LOCATOR.size))
            if mark != b"PK\6\7":
                raise self.wrong("it has no zip64 locator")
            mark, *_, count, length, at = _END64.unpack(self.read(end, _END64.size))
            if mark != b"PK\6\6":
                raise self.wrong("it has no zip64 record")
        return count, at, length

    def _entries(self, directory: bytes) -> Iterator[tuple[str, Member]]:
        at = 0
        while at < len(directory):
            if at + _ENTRY.size > len(directory):
                raise self.wrong("its directory is truncated")
            fields = _ENTRY.unpack_from(directory, at)
            mark, method, crc, packed, nbytes, header_at = (fields[k] for k in (0, 4, 7, 8, 9, 16))
            lengths = fields[10:13]  # of the name, the extra fields, a comment
            begin = at + _ENTRY.size
            at = begin + sum(lengths)
            if mark != b"PK\1\2" or at > len(directory):
                raise self.wrong("its directory is damaged")
            try:
                name = directory[begin : begin + lengths[0]].decode().partition("/")[2]
            except UnicodeDecodeError:
                raise self.wrong("a name in its directory is not text") from None
            more = directory[begin + lengths[0] : begin + lengths[0] + lengths[1]]
            large = _zip64(more)
            nbytes, packed, header_at = (
                next(large, -1) if n == _32 else n for n in (nbytes, packed, header_at)
            )
            if not all(0 <= n <= MAX_COUNT for n in (nbytes, packed, header_at)):
                raise self.wrong(f"its directory gives {brief(name)} no size")
            yield name, Member(method == 0 and nbytes == packed, nbytes, crc, header_at)

    def wrong(self, what: str) -> FormatError:
        """The error for this container."""
        return FormatError(f"not a file of torch.save: {what}", path=self._file.stored.path)


def _zip64(more: bytes) -> Iterator[int]:
    """The numbers in the zip64 field among an entry's extra fields, in order."""
    at = 0
    while at + 4 <= len(more):
        kind, length = struct.unpack_from("<2H", more, at)
        if kind == 1:
            for k in range(at + 4, min(at + 4 + length, len(more)) - 7, 8):
                yield int.from_bytes(more[k : k + 8], "little")
            return
        at += 4 + length


class MemberReader:
    """Reads a stored member from its beginning, piece by piece, and checks its CRC at the end."""

    def __init__(self, archive: TorchZip, member: Member) -> None:
        self._archive, self._member = archive, member
        self._at = archive.offset_of(member) - archive.begin
        self._left, self._crc = member.nbytes, 0

    def __call__(self, nbytes: int) -> bytes:
        found = self._archive.read(self._at, min(nbytes, self._left))
        self._at, self._left = self._at + len(found), self._left - len(found)
        self._crc = zlib.crc32(found, self._crc)
        return found

    def finish(self) -> None:
        """Read the rest. Raises :class:`FormatError` if the content does not match its CRC."""
        while self._left:
            self(1024**2)
        if self._crc != self._member.crc:
            raise self._archive.wrong("its description differs from its CRC: damaged")
