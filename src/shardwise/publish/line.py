"""The line of a run: its published steps in one place, which one process at a time may change."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..errors import CheckpointError, FormatError, IntegrityError, LockedError, SourceError
from ..format.header import (
    HEAD_NAME,
    MOST_HEAD_BYTES,
    Fate,
    Head,
    SetAside,
    checked_step,
    parse_head,
    stored_name,
    stored_step,
)
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..ranks.ranks import patiently
from ..storage import files_below, files_in, folders_in, stat_of
from ..storage.records import Held, is_url, join, place_of
from ..storage.stores import store_of
from . import places as publish
from .lock import DirectoryLock, check_held, run_of
from .places import DirectoryTarget, Target
from .write import PROBE, commit_in_store, delete_below, discard_in_store, refuse_without_conditions

# ----------------------------------------------------------------------------------------------------
# The line of a run in an object store, by ``head.json``: a step belongs to the run once a compare-and-swap has put it there.
#
# Payload lies in directories whose names no other save has, so that two saves never mix. Each has a manifest, which is written last
# and only if there is none; then the head is replaced, only if it is still the one that this run wrote. So of two runs one is refused,
# with :class:`LockedError`: the one whose head was replaced by the other.

_log = logging.getLogger(__name__)
#: Objects that no head names are leftovers of a killed save, if the youngest of them is older than this, by the store's clock.
LEFT_AFTER_S = 24 * 3600.0
_PROBE = re.compile(re.escape(PROBE) + "[0-9a-f]{16}")


class HeadLine:
    """Steps below a URL. Implements :class:`.Line`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._place = place_of(join(root, HEAD_NAME))
        self._store = store_of(self._place.root)
        self._base: str | None = None
        """Nonce of the head that this run wrote, or found when it began."""
        self._written: Head | None = None
        """The head that this run wrote last."""
        self._in_doubt: set[str] = set()
        """Nonces of heads whose write got no reply: they may have been written."""
        self._is_proved = False
        self._is_swept = False

    def open(self) -> None:
        self._read()

    def close(self) -> None:
        """Nothing is held: the next run takes the line by its first write."""

    def steps(self) -> dict[int, str]:
        return _newest_first(self._own()[0])

    def own_steps(self) -> dict[int, str]:
        """The head names steps of one run alone."""
        return self.steps()

    def seen_steps(self) -> dict[int, str]:
        return _newest_first(self._read()[0])

    def held_steps(self) -> dict[int, str]:
        if self._written is not None and not self._in_doubt:
            # No request: training waits here, also for a save in the background. The save's first step asks the store.
            return _newest_first(self._written)
        self._prove()
        head, _ = self._own()
        if head is None:
            if strange := self.strangers():
                raise CheckpointError(strange)
            # Before the first payload: so a head that is missing later was deleted.
            self._swap(None, None, Head().followed_by({}, ()))
        return _newest_first(head)

    def fresh_name(self, step: int) -> str:
        return stored_name(checked_step(step))

    def target(self, name: str) -> Target:
        return _HeadTarget(self, name)

    def add(self, step: int, name: str) -> None:
        self._change(lambda head: head.followed_by({**head.steps, step: name}, head.aside))

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        self._prove()

        def taken(head: Head) -> Head:
            kept = {s: n for s, n in head.steps.items() if s <= resumed and s not in aside}
            gone = [
                SetAside(s, n, aside.get(s, "superseded")) for s, n in head.steps.items() if s not in kept
            ]
            return head.followed_by(kept, (*head.aside, *gone))

        self._change(taken)

    def remove(self, steps: Iterable[int]) -> None:
        gone = set(steps)
        names: list[str] = []

        def fewer(head: Head) -> Head:
            names[:] = [n for s, n in head.steps.items() if s in gone]
            return head.followed_by({s: n for s, n in head.steps.items() if s not in gone}, head.aside)

        if not gone:
            return
        try:
            self._change(fewer)
        except (CheckpointError, SourceError) as error:
            _log.warning("no step is deleted: %s", error)
            return
        for name in names:
            self._delete(name)

    def tidy(self, newest: int) -> None:
        if self._is_swept:
            return
        self._is_swept = True
        try:
            self._sweep()
        except (CheckpointError, SourceError) as error:
            _log.warning("%s: can't look for leftovers from killed saves: %s", self.root, error)

    def set_aside(self) -> list[SetAside]:
        head, _ = self._read()
        return list(head.aside) if head else []

    def leftovers(self) -> list[str]:
        head, _ = self._read()
        named = head.names if head else frozenset()
        folders = [
            n for n in patiently(folders_in, self.root) if stored_step(n) is not None and n not in named
        ]
        return sorted(folders + [n for n in patiently(files_in, self.root) if _PROBE.fullmatch(n)])

    def was_ever_published(self) -> bool:
        head, _ = self._read()
        return head is not None and bool(head.steps or head.aside)

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        # The head last: a run that begins meanwhile writes it before its steps.
        names = sorted(name for name in patiently(folders_in, self.root) if name.startswith("step-"))
        if not names or self._read()[0] is not None:
            return None
        return (
            f"{self.root}: holds {', '.join(names[-3:])}, but no {HEAD_NAME} that names the steps of a run: it was deleted, or they "
            f"were copied here. Restore one with sw.restore(state, {join(self.root, names[-1])!r}), and save to another URL"
        )

    # ------------------------------------------------------------------------------------------------
    # The head

    def _read(self) -> tuple[Head | None, Held | None]:
        held = patiently(self._store.get, self._place.key, MOST_HEAD_BYTES)
        return (None, None) if held is None else (parse_head(held.content, self._place.url), held)

    def _own(self) -> tuple[Head | None, Held | None]:
        """The head, if it is still this run's. The first call takes it as it is. Raises :class:`LockedError`."""
        head, held = self._read()
        nonce = None if head is None else head.nonce
        if nonce is not None and nonce in self._in_doubt:
            self._base = nonce
        if self._base is None:
            self._base = nonce
        if nonce != self._base:
            who = f"it was written by {head.writer}" if head is not None else "it is gone"
            raise LockedError(
                f"{self._place.url}: another run has taken over these steps ({who}); nothing is published. Stop the other run if there is "
                f"one, and start again"
            )
        return head, held

    def _change(self, change_of: Callable[[Head], Head]) -> None:
        """Replace this run's head by a changed one. Raises :class:`LockedError` if it is no longer this run's."""
        for _ in range(1 + len(self._in_doubt)):  # a write without a reply may come late, once
            head, held = self._own()
            if head is None and (strange := self.strangers()):
                raise CheckpointError(strange)
            try:
                return self._swap(head, held, change_of(head or Head()))
            except LockedError:
                if not self._in_doubt:
                    raise
        raise self._lost()

    def _swap(self, head: Head | None, held: Held | None, new: Head) -> None:
        content = new.to_bytes()
        if len(content) > MOST_HEAD_BYTES:
            raise CheckpointError(
                f"{self._place.url}: would name {len(new.names)} steps, more than a reader takes; give keep_last"
            )
        self._in_doubt.add(new.nonce)
        if held is None:
            is_ours = patiently(self._store.create, self._place.key, content)
        else:
            is_ours = patiently(self._store.replace, self._place.key, content, held)
        self._in_doubt.discard(new.nonce)
        if not is_ours:
            raise self._lost()
        self._base, self._written = new.nonce, new

    def _lost(self) -> LockedError:
        return LockedError(
            f"{self._place.url}: another run has taken over these steps meanwhile; nothing is published. Stop the other run if there is "
            f"one, and start again"
        )

    def raise_if_taken(self) -> None:
        """Raise :class:`LockedError` if the head is another run's."""
        self._own()

    def names(self, name: str) -> bool:
        """Whether the head names this directory. Another run may have written the head."""
        head, _ = self._read()
        return head is not None and name in head.names

    def _prove(self) -> None:
        if not self._is_proved:
            refuse_without_conditions(self.root)
            self._is_proved = True

    # ------------------------------------------------------------------------------------------------
    # Leftovers

    def _sweep(self) -> None:
        self._own()
        stat = patiently(stat_of, self._place.url)
        now_s = stat.changed_s if stat is not None else None
        for name in self.leftovers() if now_s is not None else ():
            url = join(self.root, name)
            one = patiently(stat_of, url)
            found = [one] if one is not None else list(patiently(files_below, url).values())
            ages = [now_s - one.changed_s for one in found if one and now_s and one.changed_s is not None]
            if not ages or len(ages) < len(found) or min(ages) <= LEFT_AFTER_S:
                continue
            if one is None and not self._may_be_left(url):
                continue
            if one is None:
                self._delete(name)
            else:
                patiently(self._store.delete, place_of(url).key)

    def _may_be_left(self, url: str) -> bool:
        """Whether a save here can have left a directory that no head names. A later step of another run was copied there.

        A first step may be that of a run which was killed before the head named it; the run after it has another id.
        """
        if patiently(stat_of, join(url, MANIFEST_NAME)) is None:
            return True
        try:
            manifest = patiently(read_manifest, url)
        except (FormatError, IntegrityError):  # none of ours: a manifest appears whole
            return False
        newest = next(iter(self.steps().values()), None)
        if manifest.parent_step is None or newest is None:
            return manifest.parent_step is None
        return manifest.run_id == patiently(read_manifest, join(self.root, newest)).run_id

    def _delete(self, name: str) -> None:
        url = join(self.root, name)
        try:
            delete_below(url)
        except (CheckpointError, SourceError) as error:
            _log.warning("can't delete %s: %s", url, error)


def _newest_first(head: Head | None) -> dict[int, str]:
    return dict(sorted(head.steps.items(), reverse=True)) if head else {}


class _HeadTarget(Target):
    """A step to be: a directory with a name of its own, the manifest, then the head."""

    def __init__(self, line: HeadLine, name: str) -> None:
        super().__init__(join(line.root, name))
        self._line, self._name = line, name
        self._may_be_published = False

    def _begin(self, folders: Sequence[str]) -> str:
        self._line.raise_if_taken()  # before payload is sent
        return self.final

    def _commit(self, manifest: Manifest) -> None:
        commit_in_store(self.final, manifest)
        self._may_be_published = True
        try:
            self._line.add(manifest.step, self._name)
        except LockedError:
            with contextlib.suppress(CheckpointError, SourceError):
                self._may_be_published = self._line.names(self._name)
            raise

    def _discard(self) -> None:
        if not self._may_be_published:
            discard_in_store(self.final)


# ----------------------------------------------------------------------------------------------------


class Line(Protocol):
    """Every rank makes one. Rank 0 alone calls its methods, but for :meth:`target`. They raise :class:`CheckpointError`, or
    :class:`SourceError` where a store can't be asked."""

    @property
    def root(self) -> str:
        """The directory or URL of the steps."""

    def open(self) -> None:
        """Look at the place; a directory is locked. Raises :class:`LockedError` if another run holds it."""

    def close(self) -> None:
        """Release what :meth:`open` took."""

    def steps(self) -> dict[int, str]:
        """The published steps and the names of their directories, newest first."""

    def own_steps(self) -> dict[int, str]:
        """As :meth:`steps`, without what another run or program has put there: what retention may count and delete."""

    def seen_steps(self) -> dict[int, str]:
        """As :meth:`steps`; another run may hold the line. From any thread."""

    def held_steps(self) -> dict[int, str]:
        """As :meth:`steps`, before a save, which the target's :meth:`~.Target.begin` refuses if another run has taken the line
        meanwhile. Raises :class:`LockedError`."""

    def fresh_name(self, step: int) -> str:
        """The name of the directory for a save of ``step``. Raises :class:`StateError` if it is not a step."""

    def target(self, name: str) -> Target:
        """Where a save publishes; its commit makes the step one of the line."""

    def add(self, step: int, name: str) -> None:
        """Make a checkpoint that was copied under :meth:`fresh_name` one of the line. Raises :class:`LockedError`."""

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        """Go on from a step: set the newer ones aside, as superseded, and those of ``aside``. They stay, but no resume or retention
        counts them.

        Raises :class:`LockedError` if another run has changed the line since :meth:`steps`.
        """

    def remove(self, steps: Iterable[int]) -> None:
        """Delete steps, but no others than :meth:`own_steps`, so that a half-deleted one never counts. Logs a warning for one that can't be
        deleted, and goes on."""

    def tidy(self, newest: int) -> None:
        """After a save: write hints for people, delete leftovers of killed saves. Logs what fails."""

    def set_aside(self) -> list[SetAside]:
        """The steps that a resume set aside."""

    def leftovers(self) -> list[str]:
        """Names of what killed saves left, and saves that are under way."""

    def was_ever_published(self) -> bool:
        """Whether there is any step, including those set aside."""

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        """The text of an error if the place holds steps that are not of a line: another program's, or copies. None if it does not."""


def line_of(root: str, *, sweeps: bool = True) -> Line:
    """The line in a directory, or below a URL. Without ``sweeps`` the caller deletes what killed saves left in a directory."""
    return HeadLine(root) if is_url(root) else DirectoryLine(root, sweeps=sweeps)


class DirectoryLine:
    """Steps in a local directory: see :mod:`.publish` and :mod:`.lock`."""

    def __init__(self, root: str, *, sweeps: bool = True) -> None:
        self.root = root
        self._sweeps = sweeps
        self._lock: DirectoryLock | None = None
        self._runs: dict[str, str] = {}
        """By the name of a step, the run that published it."""
        self._said: set[str] = set()

    def open(self) -> None:
        self._lock = DirectoryLock(self.root)
        if self._sweeps:
            publish.sweep_leftovers(self.root)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def steps(self) -> dict[int, str]:
        return {step: os.path.basename(path) for step, path in publish.published_steps(self.root).items()}

    def own_steps(self) -> dict[int, str]:
        steps = self.steps()
        for name in steps.values():
            if name not in self._runs and (run := run_of(os.path.join(self.root, name))) is not None:
                self._runs[name] = run
        runs = {step: self._runs[name] for step, name in steps.items() if name in self._runs}
        newest = next(iter(runs.values()), None)  # a run takes no directory whose newest step is not its own
        return {step: steps[step] for step, run in runs.items() if run == newest}

    def seen_steps(self) -> dict[int, str]:
        return self.steps()

    def held_steps(self) -> dict[int, str]:
        check_held(self.root)
        return self.steps()

    def fresh_name(self, step: int) -> str:
        return publish.step_name(step)

    def target(self, name: str) -> Target:
        return DirectoryTarget(os.path.join(self.root, name))

    def add(self, step: int, name: str) -> None:
        check_held(self.root)

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        for step, name in self.steps().items():
            if step > resumed or step in aside:
                publish.set_aside(os.path.join(self.root, name), aside.get(step, "superseded"))

    def remove(self, steps: Iterable[int]) -> None:
        own = self.own_steps()
        names = [own[step] for step in steps if step in own]
        # Looked at again, because the directory of that name may be another one now.
        publish.delete_all(
            [os.path.join(self.root, name) for name in names],
            lambda path: run_of(path) == self._runs[os.path.basename(path)],
        )

    def tidy(self, newest: int) -> None:
        try:
            publish.write_hint(self.root, newest)
        except (CheckpointError, SourceError) as error:  # the step is published already
            if str(error) not in self._said:  # of what is in the way: once, not after each save
                self._said.add(str(error))
                _log.warning("%s", error)

    def set_aside(self) -> list[SetAside]:
        return publish.steps_set_aside(self.root)

    def leftovers(self) -> list[str]:
        return publish.leftovers(self.root)

    def was_ever_published(self) -> bool:
        return publish.was_ever_published(self.root)

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        return publish.describe_dcp_steps(self.root, damaged)
