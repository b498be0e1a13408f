"""Rules over logs, over ranks that differ, and over storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from .facts import Bite, Bucket, Facts, Meeting, Place, Rule, Seen, Speeds, each, gib, number
from .logs import KNOWN, Known

__all__ = [
    "LOGS",
    "RANKS",
    "STORAGE",
]


# ----------------------------------------------------------------------------------------------------
# One rule for each known line of a log, and one for the first loss.


def _rule(known: Known) -> Rule:
    def check(facts: Facts) -> Iterator[Bite]:
        for log in facts.logs:
            if line := log.lines.get(known.name):
                yield Bite(f"{log.path}: {line}", known.bites, known.why, known.do)

    return Rule(f"log.{known.name}", known.bites[:-1], known.source, check)


def _random_loss(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        for model in facts.models:
            words = number(model.text_config.get("vocab_size"))
            if log.first_loss is not None and words and log.first_loss > 0.95 * math.log(words):
                yield Bite(
                    f"{log.path}: loss {log.first_loss:g}",
                    f"Training started from random or corrupted weights: the first loss was {log.first_loss:g}, and "
                    f"guessing among {words} tokens gives {math.log(words):.1f}.",
                    "Weights weren't loaded, or to_empty left buffers uninitialized that aren't stored, such as RoPE's inv_freq.",
                    f"Load {model.path} with sw.load_pretrained, and build with sw.meta_init, which keeps such buffers.",
                )


def _jump(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.jump is not None:
            line, before, after = log.jump
            at = "at a resume" if log.jump_is_certain else f"after {line}, from which a run may have resumed"
            yield Bite(
                f"{log.path}: {line}",
                f"The loss jumped {at}: {before:.4g} before, {after:.4g} after.",
                "Part of the training state wasn't restored: the optimizer's moments, the scheduler, the data position, or weights "
                "that were saved in a different dtype.",
                "Compare what was stored with what was restored: trainer.resume_report of a ShardwiseTrainer lists every difference, and so "
                "does print(checkpoints.resume(state)) (docs/cases/5-loss-spike.md). shardwise diff A B compares two checkpoints.",
            )


def _rate_jump(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.rate_jump is not None:
            line, before, after = log.rate_jump
            at = "at a resume" if log.jump_is_certain else f"after {line}"
            yield Bite(
                f"{log.path}: {line}",
                f"The learning rate jumped back {at}: {before:.4g} before, {after:.4g} after.",
                "The scheduler wasn't restored: the schedule started again, or the run was resumed with different arguments.",
                "Resume from a checkpoint that has scheduler.pt and the optimizer (the HF Trainer restores neither without both), and "
                "keep learning_rate and max_steps as they were.",
            )


def _not_a_number(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.not_a_number is not None:
            yield Bite(
                f"{log.path}: {log.not_a_number}",
                "The loss became NaN or infinite.",
                "A step overflowed, or weights are corrupted. Every checkpoint saved since then contains such values.",
                "Resume from a step before it: checkpoints.resume(state, step=N). shardwise verify shows whether files are corrupted "
                "or training diverged.",
            )


def _rise(facts: Facts) -> Iterator[Bite]:
    for log in facts.logs:
        if log.rise is not None:
            low, last = log.rise
            yield Bite(
                log.path,
                f"The loss has risen: from {low:g} to {last:g} at the end of the log.",
                "Training is diverging: the learning rate is too high, a plain optimizer updates bf16 weights, or the data changed.",
                "Resume from a step before the rise, with a lower learning rate or fp32 weights (dtype=torch.float32 and mixed precision).",
            )


LOGS = (
    *map(_rule, KNOWN),
    Rule(
        "log.loss-jump",
        "The loss jumped after a resume, or after a Trainer checkpoint",
        "case 5",
        _jump,
    ),
    Rule("log.lr-jump", "The learning rate jumped back after a resume", "case 5", _rate_jump),
    Rule("log.nan-loss", "The loss became NaN or infinite", "case 5", _not_a_number),
    Rule("log.rising-loss", "The loss rose throughout the log", "case 5", _rise, kind="note"),
    Rule(
        "log.random-loss",
        "The initial loss was as high as with random weights",
        "case 9; case 10",
        _random_loss,
    ),
)


# ----------------------------------------------------------------------------------------------------
# Rules over what the ranks told each other: they name the odd one out.

_MOST_APART_S = 5.0


def _odd(ranks: tuple[Seen, ...], value: Callable[[Seen], object]) -> tuple[object, list[Seen]]:
    """What most ranks have (of equally many, what the first rank has), and the ranks that have something else."""
    values = [value(one) for one in ranks]
    usual = max(values, key=lambda one: (values.count(one), one == values[0]))
    return usual, [one for one, has in zip(ranks, values, strict=True) if has != usual]


def _named(odd: list[Seen]) -> str:
    names = ", ".join(f"{one.rank} ({one.host})" for one in odd[:8])
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return f"rank{'s' if len(odd) > 1 else ''} {names}{more}"


def _meetings(facts: Facts) -> Iterator[Meeting]:
    if facts.meeting is not None and facts.meeting.ranks:
        yield facts.meeting


def _missing(facts: Facts) -> Iterator[Bite]:
    if facts.meeting is not None and facts.meeting.missing:
        names = ", ".join(map(str, facts.meeting.missing[:16]))
        yield Bite(
            f"rank {names}",
            f"A run would hang at startup: rank {names} of {facts.meeting.world_size} didn't show up within "
            f"{facts.meeting.waited_s:.0f} s.",
            "Its process didn't start, died, is waiting for storage, or can't reach MASTER_ADDR.",
            "Check that rank's log and host, or leave the host out.",
        )


def _no_store(facts: Facts) -> Iterator[Bite]:
    if facts.meeting is not None and facts.meeting.problem is not None:
        yield Bite(
            "MASTER_ADDR, MASTER_PORT",
            f"A run wouldn't start: rank 0 can't listen for the other ranks ({facts.meeting.problem}).",
            "Another program, often an earlier launch, is using the port, or the address isn't one of this host's.",
            "Stop it, or choose a free MASTER_PORT.",
        )


def _versions(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for name in sorted({n for one in meeting.ranks for n in one.versions}):
            usual, odd = _odd(meeting.ranks, lambda one, name=name: one.versions.get(name))  # type: ignore[misc]
            if odd:
                yield Bite(
                    _named(odd),
                    f"Ranks may compute and save different things: {name} is {odd[0].versions.get(name)} on "
                    f"{_named(odd)} and {usual} on the other ranks.",
                    "The hosts have different environments or images.",
                    "Install the same versions, or use the same image everywhere.",
                )


def _limits(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for name in sorted({n for one in meeting.ranks for n in one.limits}):
            values = [one.limits.get(name, 0.0) for one in meeting.ranks]
            usual = sorted(values)[len(values) // 2]
            odd = [one for one in meeting.ranks if one.limits.get(name, 0.0) < 0.9 * usual]
            if odd:
                yield Bite(
                    _named(odd),
                    f"The run fails where the limit is lowest: {name} is {odd[0].limits.get(name, 0.0):g} on {_named(odd)}, and "
                    f"{usual:g} on most others.",
                    "Another job shares that host, or its container was started with different limits.",
                    "Give all hosts the same limits, or leave that host out.",
                )


def _clocks(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        middle = sorted(one.clock_s for one in meeting.ranks)[len(meeting.ranks) // 2]
        odd = [one for one in meeting.ranks if abs(one.clock_s - middle) > _MOST_APART_S]
        if odd:
            apart_s = odd[0].clock_s - middle
            yield Bite(
                _named(odd),
                f"Timestamps in logs and files can't be compared: the clock on {_named(odd)} is {abs(apart_s):.0f} s "
                f"{'ahead' if apart_s > 0 else 'behind'}.",
                "Stores reject signed requests if the clocks are more than 15 minutes apart.",
                "Start the time service on that host (chronyd).",
            )


def _files(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        hosts = tuple(one for one in meeting.ranks if one.files is not None)
        found = []
        for name in sorted({n for one in hosts for n in one.files or {}}):
            usual, odd = _odd(hosts, lambda one, name=name: (one.files or {}).get(name))  # type: ignore[misc]
            if odd:
                found.append((name, usual, odd))
        if found:
            name, usual, odd = found[0]
            size = (odd[0].files or {}).get(name)
            what = "is missing" if size is None else f"has {size} bytes"
            most = "it's missing" if usual is None else f"it has {usual} bytes"
            more = f" ({len(found) - 1} more files differ)" if len(found) > 1 else ""
            yield Bite(
                _named(odd),
                f"Ranks would load different files: {name} {what} on {_named(odd)}, and on the other hosts {most}{more}.",
                "The directory isn't shared, a copy was interrupted, or the file system doesn't show it yet.",
                "Copy it again on that host (shardwise copy), or use a directory that all hosts share.",
            )


def _not_shared(facts: Facts) -> Iterator[Bite]:
    for meeting in _meetings(facts):
        for path in sorted({p for one in meeting.ranks for p in one.unseen}):
            blind = [one for one in meeting.ranks if one.unseen.get(path)]
            hidden = blind[0].unseen[path]
            yield Bite(
                path,
                f"A save will fail or be split up: {_named(blind)} didn't see the file that rank {hidden[0]} wrote there.",
                "The directory is local to each host, or the file system shows other hosts' files late.",
                "Use a directory that all hosts share, or the URL of an object store.",
            )


RANKS = (
    Rule("ranks.missing", "a rank that didn't show up in time", "case 19", _missing),
    Rule("ranks.no-store", "rank 0 can't listen on MASTER_ADDR:MASTER_PORT", "torch.distributed", _no_store),
    Rule("ranks.versions", "package versions that differ across ranks", "case 4", _versions),
    Rule("ranks.limits", "less memory, fewer cores, or lower limits on some ranks", "case 2", _limits),
    Rule(
        "ranks.clocks",
        "a clock that differs from the other ranks' by more than 5 s",
        "S3's RequestTimeTooSkewed",
        _clocks,
    ),
    Rule("ranks.files", "files you passed that differ in size across ranks", "case 18", _files),
    Rule(
        "ranks.not-shared",
        "a rank that can't see other ranks' files in an output directory",
        "case 18; verl#7641",
        _not_shared,
    ),
)


# ----------------------------------------------------------------------------------------------------
# Rules over the places in which a run writes: directories and buckets.

_MIB = 1024**2
_LEAST_FREE_BYTES = 1024**3
_LEAST_INODES = 10_000
_LEAST_BYTES_S = 30 * _MIB
_MOST_FSYNC_S = 1.0
_MOST_AHEAD_S = 5.0
#: Bytes of a checkpoint with fp32 masters and AdamW's moments, for each byte of bf16 weights.
_STATE_PER_WEIGHT = 6
#: File systems over object stores: a rename copies, and a reader may see half of it.
_OVER_STORES: tuple[str, ...] = (
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.goofys",
    "fuse.rclone",
    "fuse.blobfuse",
    "fuse.blobfuse2",
)
_OVER_STORES += ("fuse.mountpoint-s3", "fuse.geesefs", "fuse.ossfs")
_IN_MEMORY = ("tmpfs", "ramfs")


def _places(facts: Facts) -> Iterator[Place]:
    return iter(facts.places)


def _written(facts: Facts) -> Iterator[Place]:
    """Places in which a file could be written: of the rest one rule speaks."""
    return (place for place in facts.places if "write" not in place.failures)


def _mounted(*kinds: str) -> Callable[[Facts], Iterator[Place]]:
    """Places on file systems whose kind begins so."""

    def places(facts: Facts) -> Iterator[Place]:
        return (p for p in facts.places if p.mount is not None and p.mount.kind.startswith(kinds))

    return places


def _failed(row: tuple[str, str, str], step: str, *, bites: str, why: str, do: str) -> Rule:
    """A rule over one step of the probe; ``bites`` says where the system's words stand."""
    return each(
        _places,
        row,
        when=lambda place: step in place.failures,
        bites=lambda place: bites.format(why=place.failures[step]),
        why=why,
        do=do,
    )


def _silent(facts: Facts) -> Iterator[Bite]:
    for path, waited_s in facts.silent.items():
        yield Bite(
            path,
            f"Every rank would hang here: the storage didn't answer within {waited_s:.0f} s.",
            "A file server or object store is down, overloaded or unreachable, and calls wait for it indefinitely.",
            "Check whether ls works there, and look at the mount, its server and the network.",
        )


def _space(facts: Facts) -> Iterator[Bite]:
    needed = max([_LEAST_FREE_BYTES, *(_STATE_PER_WEIGHT * m.nbytes for m in facts.models)])
    for place in _written(facts):
        if place.free_bytes is not None and place.free_bytes < needed:
            what = "A checkpoint of this model with AdamW" if facts.models else "A checkpoint"
            yield Bite(
                place.path,
                f"{what} won't fit: {gib(place.free_bytes)} is free, but {gib(needed)} is needed.",
                "fp32 master weights and two moments take 12 bytes per trained parameter, and the old step stays until the "
                "new one is published.",
                "Free up space, keep fewer steps (keep_last), or use a different directory.",
            )


def _point(place: Place) -> str:
    return f"{place.mount.point} is a {place.mount.kind}" if place.mount else "This is memory"


def _speed(what: Callable[[Speeds], float]) -> Callable[[Place], float]:
    """A speed of the probe; infinite where it measured none."""
    return lambda place: math.inf if place.speeds is None else what(place.speeds)


_write_speed = _speed(lambda speeds: speeds.write_bytes_s)
_read_speed = _speed(lambda speeds: min(speeds.read_bytes_s, speeds.random_bytes_s))


def _fsync_s(place: Place) -> float:
    return 0.0 if place.speeds is None else place.speeds.fsync_s


def _options(place: Place, *names: str) -> list[str]:
    """Which of these options it is mounted with."""
    return [o for o in names if place.mount is not None and o in place.mount.options]


def _no_locks(place: Place) -> list[str]:
    return _options(place, "nolock", "local_lock=all", "local_lock=posix")


def _late_s(place: Place) -> tuple[int, str]:
    """The longest time that NFS's client answers from its cache, over the default; and the option."""
    found = [(0, "")]
    for option in place.mount.options if place.mount else ():
        name, _, value = option.partition("=")
        if name in ("acdirmax", "acregmax", "actimeo") and value.isdecimal() and int(value) > 60:
            found.append((int(value), option))
    return max(found)


def _clocks_of_storage(facts: Facts) -> Iterator[Bite]:
    found = [(p.path, p.clock_ahead_s) for p in facts.places]
    found += [(b.url, b.clock_ahead_s) for b in facts.buckets]
    for where, ahead_s in found:
        if abs(ahead_s) > _MOST_AHEAD_S:
            yield Bite(
                where,
                f"File timestamps will be wrong: the storage's clock is {abs(ahead_s):.0f} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} this machine's.",
                "Stores reject requests if the clocks are more than 15 minutes apart, and tools that compare file times mistake old "
                "files for new ones.",
                "Synchronize both clocks with the same time service (chronyd).",
            )


def _failure(bucket: Bucket, *steps: str) -> tuple[str, str] | None:
    """The first of these steps that failed, and the first line of the store's words."""
    return next(((s, bucket.failures[s].partition("\n")[0]) for s in steps if s in bucket.failures), None)


def _bucket(row: tuple[str, str, str], *steps: str, bites: str, why: str, do: str) -> Rule:
    """A rule over steps of the probe of a store; ``bites`` says where step and words stand."""

    def check(facts: Facts) -> Iterator[Bite]:
        for bucket in facts.buckets:
            if failure := _failure(bucket, *steps):
                yield Bite(bucket.url, bites.format(step=failure[0], why=failure[1]), why, do)

    return Rule(*row, check)


_NFS, _LOCKS = "nfs(5)", "docs/concepts/publish.md"
STORAGE = (
    Rule("storage.no-answer", "no answer within about 10 s", "torchtitan#3065", _silent),
    _failed(
        ("storage.not-writable", "files can't be written", "errno(3)"),
        "write",
        bites="A save will fail: nothing can be written here ({why}).",
        why="The system rejected a file of a few MiB because of the mount, permissions, a quota, or a process limit.",
        do="Give the run a directory that it can write to, or mount this one with the right user and rw.",
    ),
    each(
        _places,
        ("storage.fsync", "fsync or reading the data back fails", "Rebello et al., ATC '20"),
        when=lambda p: p.failures.keys() & {"fsync", "read"},
        bites=lambda p: (
            f"A save will fail or be lost: fsync or reading back failed here ({p.failures.get('fsync') or p.failures['read']})."
        ),
        why="After a failed fsync, the kernel marks the pages as clean, so a second try reports success although the data is lost.",
        do="Check dmesg for disk errors, and save to a different disk.",
    ),
    Rule(
        "storage.space", "less than 1 GiB of free space, or less than 6× the model's size", "case 15", _space
    ),
    each(
        _written,
        ("storage.inodes", "fewer than 10,000 free inodes", "statvfs(3)"),
        when=lambda p: p.free_inodes is not None and p.free_inodes < _LEAST_INODES,
        bites=lambda p: (
            f"Saves will fail with 'No space left on device' although there's free space: only {p.free_inodes} inodes are left."
        ),
        why="Each file and directory takes one, and each rank writes its own files at each step.",
        do="Delete small files (caches, old logs), or ask for a larger file quota.",
    ),
    each(
        _mounted(*_IN_MEMORY),
        ("storage.memory", "tmpfs or ramfs", "tmpfs(5)"),
        when=lambda p: True,
        bites="Checkpoints here are lost on a restart and take up memory that training needs.",
        why=lambda p: f"{_point(p)}: its files are pages of the host's memory, charged to the cgroup.",
        do="Use a directory on a disk or a shared file system, or the URL of an object store.",
    ),
    each(
        _mounted("overlay", "fuse.fuse-overlayfs", "aufs"),
        ("storage.overlay", "a container's writable layer", "Linux overlayfs"),
        when=lambda p: True,
        bites="Checkpoints here are lost with the container.",
        why="The path is in the container's own writable layer (overlay), not in a volume.",
        do="Mount a volume or a shared file system there, or use the URL of an object store.",
    ),
    each(
        _places,
        ("storage.slow-write", "writes slower than 30 MiB/s, including fsync", "NeMo-RL#3624"),
        when=lambda p: _write_speed(p) < _LEAST_BYTES_S,
        bites=lambda p: f"Saves are slow: one process wrote {_write_speed(p) / _MIB:.0f} MiB/s with fsync.",
        why=lambda p: (
            f"At that rate, 10 GiB per rank takes {10 * 1024 * _MIB / _write_speed(p) / 60:.0f} minutes, but collectives time "
            "out after 10."
        ),
        do="Save in the background (Checkpointer(mode='async')) to a local disk with a mirror, or use faster storage.",
    ),
    each(
        _places,
        ("storage.slow-read", "reads slower than 30 MiB/s", "transformers#48239"),
        when=lambda p: _read_speed(p) < _LEAST_BYTES_S,
        bites=lambda p: (
            f"Loads are slow: one process read {_read_speed(p) / _MIB:.0f} MiB/s in 8 MiB chunks."
        ),
        why="In one report, 1.4 TB took 31 minutes on 8 nodes, long enough for NCCL's timeout to kill the job.",
        do="Copy the files to a local disk once, or let ranks read each byte once (IOOptions, docs/concepts/strategies.md).",
    ),
    each(
        _places,
        ("storage.slow-fsync", "fsync of 4 KiB takes more than 1 s", "fsync(2)"),
        when=lambda p: _fsync_s(p) > _MOST_FSYNC_S,
        bites=lambda p: f"Every save waits: one fsync of 4 KiB took {_fsync_s(p):.1f} s.",
        why="Publishing a step takes several of them, one after the other, for files and directories.",
        do="Find out what else is writing to this file system, or save to a local disk with a mirror.",
    ),
    _failed(
        ("storage.no-locks", "files can't be locked", _LOCKS),
        "lock",
        bites="A Checkpointer rejects this directory: files can't be locked ({why}).",
        why="The lock keeps a second run from writing to the same steps; Lustre and NFS may be mounted without locks.",
        do="Mount it with locks (Lustre: flock; NFS: without nolock), or use a local disk or an object store.",
    ),
    _failed(
        ("storage.no-exclusion", "the same lock is granted twice", _LOCKS),
        "exclude",
        bites="Two runs may write to the same directory: the file system grants the same lock twice.",
        why="Locking succeeds but has no effect, as with local_lock or some FUSE file systems.",
        do="Give each run its own directory, or mount the file system with working locks.",
    ),
    _failed(
        ("storage.no-rename", "files can't be renamed", _LOCKS),
        "rename",
        bites="No step can be published: renaming failed ({why}).",
        why="A single rename publishes a checkpoint; file systems over object stores can't rename directories.",
        do="Use the URL of the store (s3://…, gs://…) instead of its mount.",
    ),
    each(
        _written,
        ("storage.no-direct", "O_DIRECT fails on storage other than memory", "docs/figures.md"),
        kind="note",
        when=lambda p: "direct" in p.failures and p.mount is not None and p.mount.kind not in _IN_MEMORY,
        bites=lambda p: (
            "Saves go through the page cache, which took three times as long in our tests: O_DIRECT fails "
            f"({p.failures['direct']})."
        ),
        why="This file system doesn't support direct writes, and cached bytes count toward the cgroup's limit.",
        do="The data is fine; for speed, use ext4, xfs or a parallel file system.",
    ),
    each(
        _mounted(*_OVER_STORES),
        ("storage.over-object-store", "a mounted object store (s3fs, gcsfuse, rclone, …)", _LOCKS),
        when=lambda p: True,
        bites="A reader may see half a checkpoint, and other hosts don't see locks.",
        why=lambda p: f"{_point(p)}: a file system over an object store, where a rename copies every object.",
        do="Use the URL of the store (s3://…, gs://…), where a single conditional write publishes a step.",
    ),
    each(
        _mounted("nfs"),
        ("storage.nfs-locks", "NFS mounted with nolock or local_lock", _NFS),
        when=_no_locks,
        bites=lambda p: (
            f"Runs on two hosts may write to the same directory: NFS is mounted with {_no_locks(p)[0]}."
        ),
        why="Locks then stay on this host, and other hosts don't see them.",
        do=lambda p: f"Mount it without {_no_locks(p)[0]}.",
    ),
    each(
        _mounted("nfs"),
        ("storage.nfs-soft", "NFS mounted with soft", _NFS),
        when=lambda p: _options(p, "soft", "softerr"),
        bites="A slow server makes a save fail, or loses bytes without an error.",
        why="NFS is mounted soft: after a few timeouts, the client gives up on a write that was accepted.",
        do="Mount it hard, which is the default.",
    ),
    each(
        _mounted("nfs"),
        ("storage.nfs-stale", "NFS mounted with an attribute cache timeout above 60 s", _NFS),
        when=lambda p: _late_s(p)[0],
        bites=lambda p: (
            f"Other hosts see a new step up to {_late_s(p)[0]} s late: NFS is mounted with {_late_s(p)[1]}."
        ),
        why="Until then, the client answers from its cache of names and sizes.",
        do=lambda p: (
            f"Mount it with the default (60 s) or less, or wait {_late_s(p)[0]} s before another host reads a step."
        ),
    ),
    Rule(
        "storage.clock",
        "a storage clock that differs from this machine's by more than 5 s",
        "S3's RequestTimeTooSkewed",
        _clocks_of_storage,
    ),
    _bucket(
        ("bucket.refused", "listing or writing is refused", "docs/howto/object-stores.md"),
        "list",
        "write",
        bites="A run can't {step} objects under this prefix: {why}.",
        why="Checkpoints need permission to list, write, read, conditionally replace, and delete objects.",
        do="Check the endpoint, the region, the credentials, and their permissions for this prefix.",
    ),
    _bucket(
        ("bucket.no-conditions", "conditional writes are ignored", "verl#7641"),
        "create",
        "replace",
        bites="Two runs may overwrite each other's steps: {why}.",
        why="A single conditional write (If-None-Match, If-Match) publishes a step, and this store ignores or rejects "
        "it.",
        do="Use a store or a release with conditional writes, or give each run its own prefix.",
    ),
    _bucket(
        ("bucket.no-delete", "objects can't be deleted", "docs/howto/runs-in-a-store.md"),
        "delete",
        bites="Old steps stay forever and cost money: nothing can be deleted ({why}).",
        why="Retention deletes steps; the credentials lack that permission, or a retention lock protects the objects.",
        do="Grant permission to delete under this prefix, or have a lifecycle rule in the bucket expire old objects.",
    ),
)
