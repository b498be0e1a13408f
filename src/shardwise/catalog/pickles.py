"""Reads other programs' pickles as plain values and records, without running code."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import FormatError
from ..limits import (
    MAX_ARGUMENTS_PER_BYTE,
    MAX_PICKLE_BYTES,
    MAX_PICKLE_DEPTH,
    MAX_PICKLED_INT_BYTES,
    MAX_PICKLED_TEXT_BYTES,
    MAX_VISITS_PER_BYTE,
    brief,
)
from ..objects import frozen

# ----------------------------------------------------------------------------------------------------
# The values of pickles as trees: records for objects, and the check that a walk through a value comes to an end.


class Record:
    """Stands for an object of the class ``kind``, with its arguments and state. Equal only to itself."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, *args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


_CONTAINERS = frozenset((dict, list, tuple, Record, Counter))


def check_walk(value: Any, most: int) -> None:
    """Refuse cycles, too deep nesting, and shared parts that a walk would meet more than ``most`` times.

    Looks at each container about once. After it any reader can walk through the value as a tree. Raises
    :class:`FormatError`, in which the caller names the file.
    """
    done: dict[int, tuple[int, int]] = {}  # visits and depth, by id: all are alive
    frames = [_Frame(value)] if type(value) in _CONTAINERS else []
    open_here = {id(value)}
    while frames:
        frame = frames[-1]
        inner = frame.next_unknown(done, most)
        if inner is None:
            frames.pop()
            open_here.discard(frame.key)
            done[frame.key] = frame.visits, frame.depth
            continue
        if id(inner) in open_here:
            raise FormatError("rejected: a container of its pickle holds itself")
        if len(frames) == MAX_PICKLE_DEPTH:
            raise FormatError(f"rejected: its pickle is nested deeper than {MAX_PICKLE_DEPTH} containers")
        open_here.add(id(inner))
        frames.append(_Frame(inner))


class _Frame:
    """A container that the walk is in, with the number of values met below it and their depth."""

    __slots__ = ("_at", "_parts", "depth", "key", "visits")

    def __init__(self, node: Any) -> None:
        self.key, self.visits, self.depth = id(node), 1, 1
        self._parts, self._at = _parts(node), 0

    def next_unknown(self, done: Mapping[int, tuple[int, int]], most: int) -> Any:
        """The next part to walk through before this one is finished; None at the end."""
        parts = self._parts
        for k in range(self._at, len(parts)):
            part = parts[k]
            self.visits += 1
            cls = type(part)
            if cls in _CONTAINERS:
                known = done.get(id(part))
                if known is not None:
                    self.visits += known[0]
                    self.depth = max(self.depth, 1 + known[1])
                elif cls is tuple and _CONTAINERS.isdisjoint(map(type, part)):  # a shape
                    self.visits += len(part)
                    self.depth = max(self.depth, 2)
                else:
                    self._at = k
                    self.visits -= 1
                    return part
            if self.visits > most:
                raise FormatError(
                    f"rejected: its pickle repeats shared parts, and a walk meets more than {most} values"
                )
        if self.depth > MAX_PICKLE_DEPTH:
            raise FormatError(f"rejected: its pickle is nested deeper than {MAX_PICKLE_DEPTH} containers")
        return None


def _parts(node: Any) -> Sequence[Any]:
    """The values that a container holds. The state of a record belongs to the record."""
    cls = type(node)
    if cls is tuple or cls is list:
        return node  # type: ignore[no-any-return]
    if cls is Record:
        state = node.state
        return (*node.args, *(_parts(state) if type(state) in (dict, tuple) else (state,)))
    return [*(key for key in node if type(key) is Record), *node.values()]


# ----------------------------------------------------------------------------------------------------
# Reads pickles of other programs as plain values and records, at a cost in proportion to their bytes.
#
# Interprets only the opcodes that ``torch.save`` (protocol 2) and torch's DCP (protocols 4 and 5) write. Python's own
# ``pickle.Unpickler`` can restrict names, but not cost: it hashes keys of any type (nested tuples that share parts: for
# ever), allocates a memo up to any index (64 GB from 20 bytes), and allocates a text before it reads it. This reader
# takes text, small numbers or records as keys, keeps the memo in a dict, and counts what calls copy. Its results can be walked through: no
# cycles, at most :data:`~shardwise.limits.MAX_PICKLE_DEPTH` levels, shared parts met a bounded number of times.
#
# It takes two to four times as long as the C unpickler with the same records (``.metadata`` of 20,000 tensors: 6 MB in
# one chunk each, 26 MB in eight). Locating each chunk in its file, the next step, takes longer.


@frozen
class Name:
    """Stands for the name of a class or function in a pickle. A call of the name calls ``make``, our own function."""

    make: Callable[..., Any]


#: (module, name) → the :class:`Name` or value that it stands for.
Names = Mapping[tuple[str, str], Any]


class AnyNames(dict[tuple[str, str], Any]):
    """:data:`Names` with a :class:`.Record` for each call of any other name: nothing is imported, and no code of it runs."""

    def __missing__(self, asked: tuple[str, str]) -> Name:
        module, name = asked
        if len(module) + len(name) >= _MAX_LINE_BYTES:
            raise KeyError(asked)
        return Name(partial(_unread, f"{module}.{name}"))


def _unread(kind: str, *args: Any) -> Record:
    """Stands for an object of any class, with its first arguments: all that is ever said of it is what it is."""
    return Record(kind, *args[:_MOST_ARGUMENTS])


#: ``torch._tensor._rebuild_from_type_v2``, whose second argument is the class, has four.
_MOST_ARGUMENTS = 8


def is_name_of(found: Any, make: Callable[..., Any]) -> bool:
    """Whether a value from a pickle is the name that calls ``make``."""
    return isinstance(found, Name) and found.make is make


def unpickled(read: Callable[[int], bytes], nbytes: int, names: Names, file: str) -> Any:
    """The value of a pickle of ``nbytes``, with ``names`` for its classes. ``read(n)`` gives the next n bytes or fewer.

    Containers are dicts, lists and tuples. Pure except for ``read``. Raises :class:`FormatError`: any other name or
    opcode, damage, a limit of :mod:`..limits`.
    """
    if nbytes > MAX_PICKLE_BYTES:
        raise FormatError(f"its pickle has {nbytes} bytes, the limit is {MAX_PICKLE_BYTES}", path=file)
    try:
        machine = _Machine(read, names)
        value = machine.run()
        check_walk(value, machine.taken * MAX_VISITS_PER_BYTE)
        return value
    except FormatError as error:
        raise FormatError(str(error), path=file) from None
    except MemoryError as error:
        raise FormatError(
            f"its pickle of {nbytes} bytes needs more memory than this process can get", path=file
        ) from error
    except _DAMAGE as error:
        raise FormatError(f"can't be read ({type(error).__name__}: {error}): damaged", path=file) from error


#: Errors of the interpreter in a pickle that no pickler wrote: an empty stack, a missing entry of the memo, too few
#: bytes, wrong arguments for a record.
_DAMAGE = (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error)


# ----------------------------------------------------------------------------------------------------
# The interpreter


#: The longest argument of fixed length, and two lines of text after GLOBAL.
_AHEAD_BYTES = 1024
_PIECE_BYTES = 256 * 1024
_MAX_LINE_BYTES = 256
#: Python's hash of an int below this is the int: such keys can't be made to collide.
_MAX_KEY = 2**61 - 1


def check_key(key: Any) -> Any:
    """``key`` if a dict or set may have it: it hashes in one step, and a file can't choose the hash."""
    cls = type(key)
    if cls is str or cls is Record or (cls in (int, bool) and -_MAX_KEY < key < _MAX_KEY):
        return key
    raise FormatError(f"a {cls.__name__} is the key of a dict; only text and small whole numbers can be")


class _Machine:
    """The stack, the memo, and the next bytes."""

    def __init__(self, read: Callable[[int], bytes], names: Names) -> None:
        self._read, self._names = read, names
        self._bytes, self._at, self._refill_at, self._before = b"", 0, 0, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    @property
    def taken(self) -> int:
        """Bytes of the pickle so far. Every cost is bounded by them: the file may be sparse, and its length a claim."""
        return self._before + self._at

    def run(self) -> Any:
        steps = _STEPS
        while True:
            if self._at >= self._refill_at:
                self._refill(_AHEAD_BYTES)
            code = self._bytes[self._at]
            self._at += 1
            step = steps[code]
            if step is not None:
                step(self)
            elif code == _STOP:
                return self._stack.pop()
            else:
                at = self.taken - 1
                raise FormatError(
                    f"rejected: opcode {code:#04x} at byte {at} of its pickle is none of torch's"
                )

    # -- bytes

    def _refill(self, nbytes: int) -> None:
        """Read ahead at least ``nbytes``, or to the end."""
        pieces = [self._bytes[self._at :]]
        self._before += self._at
        held = len(pieces[0])
        piece = b"?"
        while piece and held < nbytes:
            piece = self._read(max(_PIECE_BYTES, nbytes - held))
            pieces.append(piece)
            held += len(piece)
        self._bytes, self._at = b"".join(pieces), 0
        self._refill_at = held if not piece else held - _AHEAD_BYTES + 1

    def _take(self, nbytes: int) -> bytes:
        if nbytes > MAX_PICKLED_TEXT_BYTES:
            raise FormatError(f"text of {nbytes} bytes, the limit is {MAX_PICKLED_TEXT_BYTES}")
        if self._at + nbytes > len(self._bytes):
            self._refill(nbytes)
        end = self._at + nbytes
        if end > len(self._bytes):
            raise ValueError(f"ends before byte {self._before + end}")
        found = self._bytes[self._at : end]
        self._at = end
        return found

    def _number(self, layout: struct.Struct) -> Any:
        (found,) = layout.unpack_from(self._bytes, self._at)
        self._at += layout.size
        return found

    def _line(self) -> str:
        end = self._bytes.index(b"\n", self._at, self._at + _MAX_LINE_BYTES)
        found = self._bytes[self._at : end].decode()
        self._at = end + 1
        return found

    # -- the stack

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> None:
        self._stack.pop()

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        found = self._stack[begin:]
        del self._stack[begin:]
        return found

    def put(self, layout: struct.Struct) -> None:
        self._memo[self._number(layout)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, layout: struct.Struct) -> None:
        self._stack.append(self._memo[self._number(layout)])

    def skip(self, layout: struct.Struct) -> None:
        self._number(layout)

    # -- values

    def number(self, layout: struct.Struct) -> None:
        self._stack.append(self._number(layout))

    def long(self) -> None:
        nbytes = self._number(_U8)
        if nbytes > MAX_PICKLED_INT_BYTES:
            raise FormatError(f"a number of {nbytes} bytes, the limit is {MAX_PICKLED_INT_BYTES}")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def text(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)).decode())

    def data(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)))

    def tuple_of(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise IndexError("a tuple of more values than the stack has")
        found = tuple(stack[-count:])
        del stack[-count:]
        stack.append(found)

    def tuple(self) -> None:
        found = tuple(self._since_mark())
        self._stack.append(found)

    def append(self) -> None:
        value = self._stack.pop()
        self._top(list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._top(list).extend(values)

    def set_item(self) -> None:
        value = self._stack.pop()
        key = check_key(self._stack.pop())
        self._top(dict)[key] = value

    def set_items(self) -> None:
        values = self._since_mark()
        found = self._top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            found[check_key(key)] = value

    def _top(self, cls: type) -> Any:
        found = self._stack[-1]
        if type(found) is Record:
            return cls()  # what an object has as a list or dict isn't kept
        if type(found) is not cls:
            raise TypeError(f"expected a {cls.__name__}, got a {type(found).__name__}")
        return found

    # -- names and calls

    def name(self) -> None:
        module = self._line()
        self._find(module, self._line())

    def stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name that is not text")
        self._find(module, name)

    def _find(self, module: str, name: str) -> None:
        try:
            self._stack.append(self._names[module, name])
        except KeyError:
            asked = f"{module}.{name}"
            asked = asked if len(asked) <= _MAX_LINE_BYTES and asked.isprintable() else brief(asked)
            raise FormatError(
                f"rejected: its pickle asks for {asked}, which is not part of the format"
            ) from None

    def call(self) -> None:
        args, name = self._stack.pop(), self._stack.pop()
        if type(name) is Record and isinstance(self._names, AnyNames):
            name = Name(
                partial(_unread, name.kind)
            )  # a method, as pickles of Python have it: getattr of a class
        if type(name) is not Name or type(args) is not tuple:
            raise TypeError(f"a call of a {type(name).__name__}")
        self._copied += len(args) + sum(len(one) for one in args if type(one) in _SIZED)
        if self._copied > self.taken * MAX_ARGUMENTS_PER_BYTE:
            raise FormatError(
                f"rejected: calls in its pickle copy shared arguments, more than {MAX_ARGUMENTS_PER_BYTE} values for each byte"
            )
        self._stack.append(name.make(*args))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Record and target.state is None:
            target.state = state
        elif type(target) is not dict:  # a state dict's attributes (``_metadata``) are dropped
            raise ValueError(f"state for a {type(target).__name__}")


#: What a function of :data:`Names` may copy or walk through.
_SIZED = frozenset((str, bytes, tuple, list, dict, set, Counter))

_STOP = 0x2E
_U8, _U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _steps() -> tuple[Callable[[_Machine], None] | None, ...]:
    """The action of each opcode; None for those that are refused."""
    known: dict[int, Callable[[_Machine], None]] = {
        0x80: lambda m: m.skip(_U8),  # PROTO
        0x95: lambda m: m.skip(_U64),  # FRAME
        0x28: _Machine.mark,  # MARK
        0x30: _Machine.pop,  # POP
        0x4E: lambda m: m.push(None),  # NONE
        0x88: lambda m: m.push(True),  # NEWTRUE
        0x89: lambda m: m.push(False),  # NEWFALSE
        0x4A: lambda m: m.number(_I32),  # BININT
        0x4B: lambda m: m.number(_U8),  # BININT1
        0x4D: lambda m: m.number(_U16),  # BININT2
        0x8A: _Machine.long,  # LONG1
        0x47: lambda m: m.number(_F64),  # BINFLOAT
        0x8C: lambda m: m.text(_U8),  # SHORT_BINUNICODE
        0x58: lambda m: m.text(_U32),  # BINUNICODE
        0x43: lambda m: m.data(_U8),  # SHORT_BINBYTES
        0x42: lambda m: m.data(_U32),  # BINBYTES
        0x29: lambda m: m.push(()),  # EMPTY_TUPLE
        0x5D: lambda m: m.push([]),  # EMPTY_LIST
        0x7D: lambda m: m.push({}),  # EMPTY_DICT
        0x74: _Machine.tuple,  # TUPLE
        0x85: lambda m: m.tuple_of(1),  # TUPLE1
        0x86: lambda m: m.tuple_of(2),  # TUPLE2
        0x87: lambda m: m.tuple_of(3),  # TUPLE3
        0x61: _Machine.append,  # APPEND
        0x65: _Machine.appends,  # APPENDS
        0x73: _Machine.set_item,  # SETITEM
        0x75: _Machine.set_items,  # SETITEMS
        0x71: lambda m: m.put(_U8),  # BINPUT
        0x72: lambda m: m.put(_U32),  # LONG_BINPUT
        0x94: _Machine.memoize,  # MEMOIZE
        0x68: lambda m: m.get(_U8),  # BINGET
        0x6A: lambda m: m.get(_U32),  # LONG_BINGET
        0x63: _Machine.name,  # GLOBAL
        0x93: _Machine.stack_name,  # STACK_GLOBAL
        0x52: _Machine.call,  # REDUCE
        0x81: _Machine.call,  # NEWOBJ
        0x62: _Machine.build,  # BUILD
        0x51: lambda m: None,  # BINPERSID: the id, which says where a storage lies, stays on the stack
    }
    return tuple(known.get(code) for code in range(256))


_STEPS = _steps()
