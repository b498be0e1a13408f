"""Publishes a checkpoint directory: all of it or nothing, whenever the machine stops; in parts if hosts share it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import xxhash

from ..catalog.records import METADATA_NAME
from ..errors import CheckpointError, ShardwiseError, SourceError
from ..format.header import STEP_NAME, Fate, SetAside, checked_step
from ..format.manifest import MANIFEST_NAME, FileEntry, Manifest, Place, parse_manifest
from ..limits import inside, read_small
from ..objects import frozen
from ..ranks.ranks import Ranks, patiently
from ..storage.records import is_url
from .lock import NOTE_NAME, check_held, is_checkpoint, is_ours, mark, remove_ours, unmark
from .write import (
    check_written,
    claim,
    commit_in_store,
    discard_in_store,
    fsync_directory,
    make_directories,
    readable_text,
    release,
    write_file,
)

# ----------------------------------------------------------------------------------------------------
# Publishes a checkpoint directory: all of it or nothing, whenever the machine stops.
#
# A save writes and syncs all files under a temporary name with a fresh nonce, the manifest last. It then syncs the
# directories, renames the top one, and syncs its parent. A reader sees no step or the whole step. Leftovers of a
# killed save keep their nonce, so they can't mix into another save.

_log = logging.getLogger(__name__)
_SET_ASIDE = re.compile(r"step-(?P<step>\d{8,19})\.(?P<why>superseded|damaged)-\w+")
_WHY: dict[str, Fate] = {"superseded": "superseded", "damaged": "damaged"}
_TEMPORARY, _TRASH = ".tmp-", ".trash-"
#: A name may have 255 bytes; the rest is for the prefix and the nonce.
MOST_NAME_BYTES = 200
_HINT = re.compile(rb"(step-\d+)?\s*")


def step_name(step: int) -> str:
    """Directory name of a step. Raises :class:`StateError` if ``step`` is not one."""
    return f"step-{checked_step(step):08d}"


def published_steps(root: str) -> dict[int, str]:
    """Published steps and their directories, by falling step, without superseded and damaged ones."""
    found = {int(m.group(1)): os.path.join(root, n) for n in _names_in(root) if (m := STEP_NAME.fullmatch(n))}
    return dict(sorted(found.items(), reverse=True))


def steps_set_aside(root: str) -> list[SetAside]:
    """Steps that a resume superseded or found damaged."""
    found = [(name, m) for name in _names_in(root) if (m := _SET_ASIDE.fullmatch(name))]
    return [SetAside(int(m["step"]), name, _WHY[m["why"]]) for name, m in found]


def leftovers(root: str) -> list[str]:
    """Names of what killed saves and deletions left, and of saves that are under way. What another program made is not among them, whatever
    its name."""
    names = sorted(name for name in _names_in(root) if name.startswith((_TEMPORARY, _TRASH)))
    return [name for name in names if is_ours(os.path.join(root, name))]


def was_ever_published(root: str) -> bool:
    """Whether a directory holds any step, including those set aside."""
    return any(name.startswith("step-") and ".copying" not in name for name in _names_in(root))


def describe_dcp_steps(root: str, damaged: Iterable[int] = ()) -> str | None:
    """The text of an error if DCP wrote the steps in a directory (torchtitan's ``step-100``), not shardwise.

    None if there are none, or if one of the steps ``damaged`` is shardwise's.
    """
    names = [name for name in dcp_directories(root) if name.startswith("step-")]
    if not names or any(step_name(s) not in names for s in damaged):
        return None
    return (
        f"{root}: contains DCP directories (torch.distributed.checkpoint) but no shardwise step: {', '.join(names[-3:])}. "
        f"Restore one with sw.restore(state, {os.path.join(root, names[-1])!r}), or write it as a step into another "
        f"directory with 'shardwise convert'"
    )


def dcp_directories(root: str) -> list[str]:
    """Names of the directories in ``root`` that DCP wrote; of names with numbers the largest last."""
    names = [n for n in _names_in(root) if os.path.isfile(os.path.join(root, n, METADATA_NAME))]
    return sorted(names, key=lambda n: (len(n), n))


def _names_in(root: str) -> list[str]:
    """Names in a directory; none if it does not exist. Raises :class:`CheckpointError` if it can't be listed."""
    try:
        return patiently(os.listdir, root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: can't be listed: {error.strerror}") from error


def refuse_published(final: str) -> None:
    """Raise :class:`CheckpointError` if there is something under this name."""
    if os.path.lexists(final):
        raise CheckpointError(f"{final}: exists already; published checkpoints are never overwritten")


def make_temporary(final: str, folders: Iterable[str]) -> str:
    """Make a fresh temporary directory beside ``final``, with these folders in it. For rank 0."""
    path = temporary_beside(final)
    make_marked(path, folders)
    return path


def make_marked(path: str, folders: Iterable[str]) -> None:
    """Make a directory marked as unfinished and ours, with these folders in it. Leaves nothing if that fails."""
    try:
        make_directories(os.path.dirname(path))
        patiently(os.mkdir, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be created: {error.strerror}") from error
    try:
        mark(path)
        for folder in folders:
            patiently(os.makedirs, inside(path, folder), exist_ok=True)
    except (OSError, CheckpointError) as error:
        remove_ours(path)
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: can't be created: {reason}") from error


def temporary_beside(final: str, prefix: str = _TEMPORARY) -> str:
    """A fresh name beside ``final`` that begins like it and, if ``final`` fits the file system, fits it too."""
    parent, name = os.path.split(os.path.abspath(final))
    return os.path.join(parent, f"{prefix}{shortened(name)}-{secrets.token_hex(8)}")


def shortened(name: str, most_bytes: int = MOST_NAME_BYTES) -> str:
    """As much of the beginning of a name as fits."""
    while len(os.fsencode(name)) > most_bytes:
        name = name[:-1]
    return name


def seal(temporary: str, text: bytes, files: Mapping[str, FileEntry]) -> None:
    """Complete a directory, but for its name: write the manifest's text, and make all names durable. From then on the manifest says whose
    the directory is, not the note. ``files``: those of the manifest's that belong here.

    Raises :class:`CheckpointError` if other files are there.
    """
    check_written(temporary, _files_in(temporary), files)
    write_file(os.path.join(temporary, MANIFEST_NAME), text)
    for folder in sorted({os.path.dirname(n) for n in files} | {""}, reverse=True):
        fsync_directory(os.path.join(temporary, folder))
    try:
        unmark(temporary)
    except OSError as error:
        raise CheckpointError(f"{temporary}: can't be completed: {error.strerror}") from error


def appear(temporary: str, final: str) -> None:
    """Give a sealed directory its name.

    Raises :class:`CheckpointError` if ``final`` exists already (a published directory is never written again); :class:`LockedError` if this
    process held the lock of the directory above and has lost it.
    """
    if os.path.lexists(final):
        raise CheckpointError(f"{final}: is published already and can't be written again")
    check_held(os.path.dirname(final))
    try:
        patiently(os.rename, temporary, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))


def _files_in(root: str) -> dict[str, int]:
    """Every file below a directory and its size, but for the note."""
    found = {}
    for folder, _, names in patiently(lambda: list(os.walk(root))):
        for name in names:
            if name == NOTE_NAME and folder == root:
                continue
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root).replace(os.sep, "/")] = patiently(os.lstat, path).st_size
    return found


def write_hint(root: str, step: int) -> None:
    """Point ``latest`` at a step, for people; no code reads it.

    Raises :class:`CheckpointError`, leaving no file, also if what has that name is a link or no such hint: it stays as it is;
    :class:`LockedError` if this process held the directory's lock and has lost it.
    """
    check_held(root)
    temporary = os.path.join(root, f"{_TEMPORARY}latest-{secrets.token_hex(8)}")
    hint = os.path.join(root, "latest")
    if not _may_be_replaced(hint):
        raise CheckpointError(f"{hint}: is not the hint that shardwise writes, and stays as it is")
    try:
        write_file(temporary, (step_name(step) + "\n").encode())
        patiently(os.replace, temporary, hint)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            patiently(os.unlink, temporary)
        raise CheckpointError(f"{hint}: can't be written: {error}") from error


def _may_be_replaced(hint: str) -> bool:
    """Whether there is no such name, or a hint of ours under it."""
    try:
        status = patiently(os.lstat, hint)
        is_file = stat.S_ISREG(status.st_mode) and status.st_size <= MOST_NAME_BYTES
        return is_file and bool(_HINT.fullmatch(patiently(read_small, hint, "hint", MOST_NAME_BYTES)))
    except FileNotFoundError:
        return True
    except (OSError, SourceError):
        return False


def set_aside(path: str, why: str, name: str | None = None) -> str:
    """Rename a step to ``step-N.<why>-<nonce>``, or to ``<name>-<nonce>``: it stays, but resume and retention never count it.

    Raises :class:`CheckpointError`; :class:`LockedError` if this process held the directory's lock and has lost it.
    """
    check_held(os.path.dirname(path))
    root, before = os.path.split(path)
    moved = os.path.join(root, f"{name or f'{before}.{why}'}-{secrets.token_hex(4)}")
    try:
        patiently(os.rename, path, moved)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be renamed: {error.strerror}") from error
    fsync_directory(os.path.dirname(path))
    return moved


def discard(path: str) -> None:
    """Rename a checkpoint's directory, then delete it: a half-deleted step never counts as a step. The caller has made sure that it is ours.

    Raises ``OSError``; :class:`CheckpointError` for a link; :class:`LockedError` if this process held the lock of the directory above and has
    lost it.
    """
    check_held(os.path.dirname(path))
    if os.path.islink(path):
        raise CheckpointError(f"{path}: is a link, which is neither followed nor deleted")
    trash = temporary_beside(path, _TRASH)
    patiently(os.rename, path, trash)
    # A power loss must not bring back the step's name for what is left of it.
    fsync_directory(os.path.dirname(trash))
    with contextlib.suppress(CheckpointError):  # on a full disk the manifest tells that it is ours
        mark(trash)
    remove_ours(trash)


def delete_all(paths: Iterable[str], are_ours: Callable[[str], bool] = is_checkpoint) -> None:
    """Delete old checkpoints, as :func:`discard`, but none that ``are_ours`` denies. Logs a warning for each that can't be deleted, and continues.

    For retention, which never makes a save fail: the new checkpoint is published, and an extra old one does no harm.
    """
    for path in paths:
        try:
            if os.path.lexists(path) and not are_ours(path):
                _log.info(
                    "%s: is not deleted: nothing in it proves that it is a checkpoint of this run", path
                )
                continue
            discard(path)
        except (OSError, CheckpointError, SourceError) as error:
            _log.warning("can't delete %s: %s", path, error)


def sweep_leftovers(root: str, spared: Container[str] = ()) -> list[str]:
    """Delete leftovers of killed saves and deletions of ours, but for the names ``spared``. Call it only while holding the directory's lock.

    Leftovers that can't be deleted stay: they never count as steps. Returns the names that were tried.
    """
    swept = [name for name in leftovers(root) if name not in spared]
    for name in swept:
        remove_ours(os.path.join(root, name))
    return swept


# ----------------------------------------------------------------------------------------------------
# Publishes a step in parts: each host's own directory gets the files of its ranks, and the manifest, under one name.

#: As :func:`.temporary_beside` makes it.
_TEMPORARY_PART = re.compile(r"\.tmp-(?P<final>.+)-[0-9a-f]{16}")


@frozen
class SealedPart:
    """A part that a killed or failed save left complete, but for its name."""

    name: str
    """Of the directory that holds it."""
    digest: str
    """Of the manifest's text."""
    places: list[str]
    """The ids of the places that have a part."""

    @property
    def final(self) -> str:
        """The name that it gets when it is published."""
        match = _TEMPORARY_PART.fullmatch(self.name)
        assert match is not None
        return match["final"]


def sealed_parts(root: str) -> list[SealedPart]:
    """The sealed parts in a directory. Rank-local."""
    found = []
    for name in filter(_TEMPORARY_PART.fullmatch, leftovers(root)):
        with contextlib.suppress(ShardwiseError):  # no manifest, or not all of it
            manifest, digest = _manifest_at(os.path.join(root, name))
            if manifest.places:
                found.append(SealedPart(name, digest, [place.id for place in manifest.places]))
    return found


def delete_sealed(root: str, final: str | None = None) -> None:
    """Delete the sealed parts in a directory; with ``final`` those that would get that name. Rank-local.

    Logs what fails, for a save that is published already.
    """
    try:
        parts = sealed_parts(root)
    except CheckpointError as error:
        _log.warning("no sealed part is deleted: %s", error)
        return
    for part in parts:
        if final in (None, part.final):
            delete_part(os.path.join(root, part.name))


def delete_part(path: str) -> None:
    """Delete a part, which gets a name of trash first, durably: what a deletion that is cut leaves is no sealed part. What can't be deleted
    stays."""
    folder, name = os.path.split(path)
    trash = os.path.join(folder, name.replace(".tmp-", ".trash-", 1))  # the nonce stays that of the note
    try:
        patiently(os.rename, path, trash)
        fsync_directory(folder)
    except FileNotFoundError:
        return
    except (OSError, CheckpointError) as error:
        _log.warning("%s: can't be deleted: %s", path, error)
        return
    remove_ours(trash)


def digest_of(path: str) -> str:
    """The digest of the manifest of a published checkpoint; empty if there is none. Rank-local."""
    try:
        return _manifest_at(path)[1]
    except ShardwiseError:  # a resume says so
        return ""


def _manifest_at(path: str) -> tuple[Manifest, str]:
    text = read_small(os.path.join(path, MANIFEST_NAME), "manifest")
    return parse_manifest(text, path), xxhash.xxh3_64_hexdigest(text)


def settle(root: str, part: SealedPart, *, appears: bool) -> None:
    """Give a sealed part its name, or delete it. Raises as :func:`appear`."""
    path, final = os.path.join(root, part.name), os.path.join(root, part.final)
    if appears and not os.path.lexists(final):
        appear(path, final)
    else:
        delete_part(path)


# ----------------------------------------------------------------------------------------------------
# Where one checkpoint is published: ranks write into a place that no reader takes for a checkpoint, until rank 0 commits it.


class Target(ABC):
    """One checkpoint to be. Every rank makes one. :meth:`begin`, :meth:`commit` and :meth:`discard` are collective."""

    places: tuple[Place, ...] = ()
    """The directories of several hosts, each of which gets a part; empty for one place, in which rank 0 does the work."""

    def __init__(self, final: str) -> None:
        self.final = final
        """The path of the checkpoint."""

    def begin(self, folders: Sequence[str], check: Callable[[], None], ranks: Ranks) -> tuple[str, str]:
        """Take the place, after ``check`` on rank 0, and make these folders in it. Returns ``final`` of rank 0, which must be this rank's, and
        the path below which this rank writes.

        Raises :class:`CheckpointError` if something is there already, :class:`LockedError` if another save has taken it.
        """

        def first() -> list[str]:
            check()
            return [self.final, self._begin(folders)]

        final, path = ranks.on_first("make temporary directory", first)
        return final, path

    def commit(self, manifest: Callable[[], Manifest], ranks: Ranks) -> None:
        """Publish, after every rank wrote its files. ``manifest`` is called on rank 0.

        Raises :class:`CheckpointError` if the files are not exactly the manifest's, or no reader would take it.
        """
        ranks.on_first("publish checkpoint", lambda: self._commit(manifest()))

    def discard(self, ranks: Ranks) -> None:
        """Delete what was written, after :meth:`begin` and a failure, unless it was published. Logs what can't be deleted. Takes no round."""
        if ranks.rank == 0:
            with ranks.patience():
                self._discard()

    @abstractmethod
    def _begin(self, folders: Sequence[str]) -> str: ...

    @abstractmethod
    def _commit(self, manifest: Manifest) -> None: ...

    @abstractmethod
    def _discard(self) -> None: ...


def target_of(path: str) -> Target:
    """A directory, or the objects below a URL."""
    return ObjectTarget(path) if is_url(path) else DirectoryTarget(path)


class DirectoryTarget(Target):
    """A directory, which appears by a rename."""

    def __init__(self, final: str) -> None:
        super().__init__(final)
        self._temporary: str | None = None

    def _begin(self, folders: Sequence[str]) -> str:
        refuse_published(self.final)
        self._temporary = make_temporary(self.final, folders)
        return self._temporary

    def _commit(self, manifest: Manifest) -> None:
        assert self._temporary is not None
        seal(self._temporary, readable_text(manifest, self.final), manifest.files)
        appear(self._temporary, self.final)

    def _discard(self) -> None:
        if self._temporary is not None:
            remove_ours(self._temporary)


class ObjectTarget(Target):
    """Objects of a store under the names of a checkpoint directory, by a claim and the manifest: see :mod:`.write`."""

    _claimed = False

    def _begin(self, folders: Sequence[str]) -> str:
        claim(self.final)
        self._claimed = True
        return self.final

    def _commit(self, manifest: Manifest) -> None:
        commit_in_store(self.final, manifest)
        self._claimed = False  # it is published: a failure of another rank deletes nothing
        release(self.final)

    def _discard(self) -> None:
        if self._claimed and discard_in_store(self.final):
            release(self.final)
