"""Stored tensors as a tree of modules. Identical numbered siblings are folded into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..catalog.records import StoredTensor
from ..objects import frozen

__all__ = ["Node", "tree_of"]

# A file may give its tensors any names; these limits bound the tree.
_MAX_DEPTH = 64
_MAX_DIGITS = 9


@frozen
class Node:
    """A module prefix, or a tensor (then with dtype and shape).

    ``name`` is one part of the path, or a range such as ``0-27`` for ``copies`` identical siblings; ``tensors`` and
    ``nbytes`` count all copies.
    """

    name: str
    copies: int
    tensors: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    children: tuple[Node, ...] = ()


@dataclass(slots=True)
class _Branch:
    """A module while the tree grows; a name may be both a tensor and a prefix."""

    tensor: StoredTensor | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def tree_of(tensors: Iterable[StoredTensor]) -> tuple[Node, ...]:
    """The top of the tree. Siblings are sorted, so the order of a file does not matter."""
    root = _Branch()
    for tensor in tensors:
        branch = root
        for part in tensor.name.split(".", _MAX_DEPTH - 1):
            branch = branch.children.setdefault(part, _Branch())
        branch.tensor = tensor
    return _children(root)


def _children(branch: _Branch) -> tuple[Node, ...]:
    nodes: list[Node] = []
    numbered: dict[object, list[tuple[int, Node]]] = {}
    for name, child in sorted(branch.children.items()):
        for node in _nodes(name, child):
            if name.isdecimal() and name.isascii() and len(name) <= _MAX_DIGITS:
                numbered.setdefault(_likeness(node), []).append((int(name), node))
            else:
                nodes.append(node)
    folded = [_fold(sorted(alike, key=lambda pair: pair[0])) for alike in numbered.values()]
    return (*nodes, *folded)


def _nodes(name: str, branch: _Branch) -> Iterable[Node]:
    t = branch.tensor
    if t is not None:
        yield Node(name, 1, 1, t.nbytes, t.dtype, t.shape)
    if branch.children:
        children = _children(branch)
        tensors, nbytes = sum(c.tensors for c in children), sum(c.nbytes for c in children)
        yield Node(name, 1, tensors, nbytes, children=children)


def _likeness(node: Node) -> object:
    """A key that is equal for siblings that differ only in their number."""
    return node.dtype, node.shape, node.children


def _fold(alike: list[tuple[int, Node]]) -> Node:
    first, numbers, count = alike[0][1], [n for n, _ in alike], len(alike)
    return Node(
        _ranges(numbers),
        count,
        first.tensors * count,
        first.nbytes * count,
        first.dtype,
        first.shape,
        first.children,
    )


def _ranges(numbers: list[int]) -> str:
    """``0-2,5,7-8`` for sorted numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
