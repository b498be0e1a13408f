"""A disk as POSIX lets it be: what was not fsynced may be lost, in any part and any order.

A file's content is durable as of its last fsync; a name, as of the last fsync of the directory that holds it. What
came after may be there or not. Replays recorded calls and builds the trees that a crash can leave.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CRASHES", "Disk", "Link", "Tree", "read_tree", "write_tree"]

#: Content by path; None for a directory.
Tree = dict[str, bytes | None]


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Since the last fsync: (offset, data), or (size, None) for a truncation."""

    def apply(self, offset: int, data: bytes | None) -> None:
        _apply(self.content, offset, data)
        self.pending.append((offset, data))

    def fsync(self) -> None:
        self.durable, self.pending = bytes(self.content), []


@dataclass(slots=True, eq=False)
class Link(_File):
    """A symbolic link. What a crash leaves of one is an empty file: no link of a save outlives its process."""

    target: str = ""


@dataclass(slots=True, eq=False)
class _Directory:
    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)
    """Since the last fsync: (name that goes or "", name that comes or "", what it stands for)."""

    def apply(self, gone: str, come: str, node: Any) -> None:
        _rename(self.entries, gone, come, node)
        self.pending.append((gone, come, node))

    def fsync(self) -> None:
        self.durable, self.pending = dict(self.entries), []


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
        return
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def _rename(entries: dict[str, Any], gone: str, come: str, node: Any) -> None:
    if gone:
        entries.pop(gone, None)
    if come:
        entries[come] = node


class Disk:
    """A directory tree, everything in it durable at first, and the calls that change it."""

    def __init__(self, tree: Tree) -> None:
        self.root = _Directory()
        self._opened: dict[Any, tuple[Any, list[int]]] = {}  # handle -> node, position
        for path, content in sorted(tree.items()):
            parent, name = self._parent(path)
            node: Any = _Directory() if content is None else _File(bytearray(content), content)
            parent.entries[name] = parent.durable[name] = node

    def _node(self, path: str) -> Any:
        node: Any = self.root
        for part in () if path == "." else path.split("/"):
            node = node.entries[part]
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._node(parent or "."), name

    def _held(self, path: str, handle: Any) -> Any:
        """What was opened, whatever its name is by now; by its name if opening it was not recorded (for reading)."""
        return self._opened[handle][0] if handle in self._opened else self._node(path)

    def replay(self, entry: tuple[Any, ...]) -> None:
        """Make one recorded call (see ``calls.record_into``)."""
        name, path, target, handle, data, offset, creates, empties = entry
        if name in ("open", "open for reading"):
            if creates:
                parent, base = self._parent(path)
                if base not in parent.entries:
                    parent.apply("", base, _File())
            node = self._node(path)
            self._opened[handle] = (node, [0])
            if empties:
                node.apply(0, None)
        elif name in ("write", "writev", "pwrite", "pwritev"):
            node, position = self._opened[handle]
            at = position[0] if offset is None else offset
            node.apply(at, data)
            if offset is None:
                position[0] += len(data)
        elif name in ("fsync", "fdatasync"):
            self._held(path, handle).fsync()
        elif name in ("truncate", "ftruncate"):
            self._held(path, handle).apply(offset, None)
        elif name == "posix_fallocate":
            node = self._held(path, handle)
            node.apply(max(offset, len(node.content)), None)
        elif name == "mkdir":
            parent, base = self._parent(path)
            parent.apply("", base, _Directory())
        elif name == "symlink":
            parent, base = self._parent(path)
            parent.apply("", base, Link(target=target))
        elif name in ("unlink", "remove", "rmdir"):
            parent, base = self._parent(path)
            parent.apply(base, "", None)
        elif name in ("rename", "replace"):
            (parent, base), (target_parent, target_base) = self._parent(path), self._parent(target)
            node = parent.entries[base]
            if parent is target_parent:
                parent.apply(base, target_base, node)
            else:
                parent.apply(base, "", None)
                target_parent.apply("", target_base, node)
        elif name not in ("close", "close for reading", "chmod", "fchmod", "utime"):
            raise NotImplementedError(f"{name} is not known to the crash images")

    def now(self) -> Tree:
        """What a process sees."""
        return _walk(self.root, lambda d: d.entries, lambda f: bytes(f.content))

    def crash(self, kind: str, draw: random.Random) -> Tree:
        """What is left after a crash of one of the ``CRASHES``."""
        names, content = CRASHES[kind]
        return _walk(self.root, lambda d: names(d, draw), lambda f: content(f, draw))


def _walk(
    root: _Directory, names: Callable[[_Directory], dict[str, Any]], content: Callable[[_File], bytes]
) -> Tree:
    tree: Tree = {}
    # One directory may come to have two names in the image of a torn rename; neither is followed twice.
    pending: list[tuple[str, _Directory, frozenset[int]]] = [("", root, frozenset())]
    while pending:
        prefix, directory, above = pending.pop()
        for name, node in sorted(names(directory).items()):
            if isinstance(node, _File):
                tree[prefix + name] = content(node)
            elif id(node) not in above:
                tree[prefix + name] = None
                pending.append((f"{prefix}{name}/", node, above | {id(directory)}))
    return tree


# ------------------------------------------------------------------------------------------------- crashes


def _synced_names(directory: _Directory, _: random.Random) -> dict[str, Any]:
    return directory.durable


def _all_names(directory: _Directory, _: random.Random) -> dict[str, Any]:
    return directory.entries


def _some_names(directory: _Directory, draw: random.Random) -> dict[str, Any]:
    found = dict(directory.durable)
    for gone, come, node in directory.pending:
        if draw.random() < 0.5:
            _rename(found, gone, come, node)
    return found


def _synced_content(file: _File, _: random.Random) -> bytes:
    return file.durable


def _zeroed(file: _File, _: random.Random) -> bytes:
    """The size came to disk, the data did not."""
    found = bytearray(file.durable)
    for offset, data in file.pending:
        _apply(found, offset, None if data is None else bytes(len(data)))
    return bytes(found)


def _torn(file: _File, _: random.Random) -> bytes:
    """All but the second half of the last write."""
    found = bytearray(file.durable)
    for k, (offset, data) in enumerate(file.pending):
        is_last = k == len(file.pending) - 1
        _apply(found, offset, data[: len(data) // 2] if data is not None and is_last else data)
    return bytes(found)


def _some_content(file: _File, draw: random.Random) -> bytes:
    """Any of the writes, in any part: whole, lost, zeroed, torn."""
    found = bytearray(file.durable)
    for offset, data in file.pending:
        fate = draw.randrange(4)
        if fate == 0 or data is None:
            _apply(found, offset, data)
        elif fate == 1:
            _apply(found, offset, bytes(len(data)))
        elif fate == 2:
            _apply(found, offset, data[: draw.randrange(len(data) + 1)])
    return bytes(found)


_Names = Callable[[_Directory, random.Random], dict[str, Any]]
_Content = Callable[[_File, random.Random], bytes]

#: How names and contents that were not fsynced fare.
CRASHES: dict[str, tuple[_Names, _Content]] = {
    "only what was fsynced": (_synced_names, _synced_content),
    "all names, unsynced content lost": (_all_names, _synced_content),
    "all names, unsynced content zero": (_all_names, _zeroed),
    "all names, last write torn": (_all_names, _torn),
    "any part of the rest": (_some_names, _some_content),
}


# ------------------------------------------------------------------------------------------ real directories


def read_tree(root: Path) -> Tree:
    """A directory as it is."""
    paths = sorted(root.rglob("*"))
    return {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in paths}


def write_tree(root: Path, tree: Tree) -> None:
    """Make a directory with exactly this in it."""
    root.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
