"""``head.json`` of a run's steps in an object store: which steps belong to the run. It is replaced only by compare-and-swap.

Source: docs/format.md.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from ..errors import FormatError, VersionError
from ..limits import MAX_NAME_CHARS, brief, parse_json
from ..objects import frozen

__all__ = [
    "HEAD_NAME",
    "MOST_HEAD_BYTES",
    "Fate",
    "Head",
    "SetAside",
    "parse_head",
    "stored_name",
    "stored_step",
]

HEAD_NAME = "head.json"
#: About 100 bytes a step.
MOST_HEAD_BYTES = 64 * 1024**2
_FORMAT, _VERSION = "shardwise-head", 1
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})\.([0-9a-f]{16})")
_NONCE = re.compile("[0-9a-f]{16}")

Fate = Literal["superseded", "damaged"]


def stored_name(step: int) -> str:
    """A fresh name for the directory of a step in a store, where nothing can be renamed: no other save has it."""
    return f"step-{step:08d}.{secrets.token_hex(8)}"


def stored_step(name: str) -> int | None:
    """The step whose directory in a store has this name; None for another name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


@frozen
class SetAside:
    """A step that a resume set aside: its directory stays, and no resume or retention counts it."""

    step: int
    name: str
    why: Fate


@frozen
class Head:
    """The steps of a run, by number, and the names of their directories."""

    steps: Mapping[int, str] = field(default_factory=dict)
    aside: tuple[SetAside, ...] = ()
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at each write: two writes of one content differ."""
    writer: str = ""
    """Host, process and time of the last write, for people."""

    @property
    def names(self) -> frozenset[str]:
        """All directories that belong to the run."""
        return frozenset((*self.steps.values(), *(one.name for one in self.aside)))

    def followed_by(self, steps: Mapping[int, str], aside: tuple[SetAside, ...]) -> Head:
        """The next head, by this process, now."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return Head(steps, aside, writer=f"process {os.getpid()} on {socket.gethostname()}, {now}")

    def to_bytes(self) -> bytes:
        """The text of ``head.json``."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "nonce": self.nonce,
            "writer": self.writer,
            "steps": {str(step): name for step, name in sorted(self.steps.items())},
            "aside": [{"name": one.name, "why": one.why} for one in self.aside],
        }
        return (json.dumps(document, indent=1) + "\n").encode()


def parse_head(raw: bytes, url: str) -> Head:
    """Parse the text of a head and check everything in it.

    Raises :class:`FormatError`; :class:`VersionError` for one of a later release. Both name ``url``.
    """
    document = parse_json(raw, url, "not a run's head: it")
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(f"not a run's head: expected the format {_FORMAT!r}", path=url)
    if document.get("version") != _VERSION:
        raise VersionError(
            f"head version {brief(document.get('version'))}, this release reads {_VERSION}; update shardwise",
            path=url,
        )
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"malformed head: {brief(str(error))}", path=url) from error


def _from_document(document: dict[str, Any]) -> Head:
    steps = {int(step): name for step, name in document["steps"].items()}
    for step, name in steps.items():
        if not isinstance(name, str) or stored_step(name) != step:
            raise ValueError(f"step {step} has the name {brief(name)}")
    aside = tuple(_set_aside(one["name"], one["why"]) for one in document["aside"])
    names = [*steps.values(), *(one.name for one in aside)]
    if len(set(names)) != len(names):
        raise ValueError("two steps have one name")
    nonce, writer = document["nonce"], document["writer"]
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise ValueError(f"the nonce is {brief(nonce)}")
    if not isinstance(writer, str) or len(writer) > MAX_NAME_CHARS:
        raise ValueError("the writer is no short text")
    return Head(steps, aside, nonce, writer)


def _set_aside(name: Any, why: Any) -> SetAside:
    step = stored_step(name) if isinstance(name, str) else None
    if step is None:
        raise ValueError(f"a quarantined step has the name {brief(name)}")
    if why not in ("superseded", "damaged"):
        raise ValueError(f"a step was quarantined as {brief(why)}")
    return SetAside(step, name, why)
