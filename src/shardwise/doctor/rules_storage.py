"""Rules over the places in which a run writes: directories and buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .facts import Facts, Mount, Place
from .rule import Bite, Rule, gib

__all__ = ["STORAGE"]

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


def _mounts(facts: Facts) -> Iterator[tuple[Place, Mount]]:
    for place in facts.places:
        if place.mount is not None:
            yield place, place.mount


def _silent(facts: Facts) -> Iterator[Bite]:
    for path, waited_s in facts.silent.items():
        yield Bite(
            path,
            f"Every rank would hang here: the storage did not answer in {waited_s:.0f} s.",
            "A server of files or objects is down, overloaded or unreachable, and calls wait for it without an end.",
            "See whether ls answers there, and the mount, its server and the network.",
        )


def _read_only(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if why := place.failures.get("write"):
            yield Bite(
                place.path,
                f"A save fails: nothing can be written here ({why}).",
                f"A file system {place.mount.kind if place.mount else ''} is mounted at "
                f"{place.mount.point if place.mount else 'this path'}; the system refused a file of a few MiB.",
                "Give the run a directory that it may write, or mount this one with the right user and rw.",
            )


def _fsync(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if why := place.failures.get("fsync") or place.failures.get("read"):
            yield Bite(
                place.path,
                f"A save fails or is lost: fsync or reading back failed here ({why}).",
                "After a failed fsync the pages count as clean, so that a second try reports success without the bytes.",
                "Look at dmesg for errors of the disk, and write elsewhere.",
            )


def _space(facts: Facts) -> Iterator[Bite]:
    needed = max([_LEAST_FREE_BYTES, *(_STATE_PER_WEIGHT * m.nbytes for m in facts.models)])
    for place in facts.places:
        if place.free_bytes < needed and "write" not in place.failures:
            what = "A checkpoint of the given model with AdamW" if facts.models else "A checkpoint"
            yield Bite(
                place.path,
                f"{what} does not fit: {gib(place.free_bytes)} are free, and {gib(needed)} are wanted.",
                "fp32 masters and two moments take 12 bytes for each trained parameter, and the old step stays until the "
                "new one is published.",
                "Make room, keep fewer steps (keep_last), or give another directory.",
            )


def _inodes(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if (
            place.free_inodes is not None
            and place.free_inodes < _LEAST_INODES
            and "write" not in place.failures
        ):
            yield Bite(
                place.path,
                f"Saves end in 'No space left on device' although bytes are free: {place.free_inodes} inodes are left.",
                "Each file and directory takes one; each rank writes files of its own at each step.",
                "Delete small files (caches, old logs), or ask for a larger quota of files.",
            )


def _in_memory(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if mount.kind in _IN_MEMORY:
            yield Bite(
                place.path,
                "Checkpoints here are gone after a restart, and take the memory that training needs.",
                f"{mount.point} is a {mount.kind}: its files are pages of the host's memory, charged to the cgroup.",
                "Give a directory on a disk or a shared file system, or a URL of an object store.",
            )


def _overlay(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if mount.kind in ("overlay", "fuse.fuse-overlayfs", "aufs"):
            yield Bite(
                place.path,
                "Checkpoints here are gone with the container.",
                "The path lies in the container's own writable layer (overlay), not in a volume.",
                "Mount a volume or a shared file system there, or give a URL of an object store.",
            )


def _slow(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if place.speeds is not None and place.speeds.write_bytes_s < _LEAST_BYTES_S:
            yield Bite(
                place.path,
                f"Saves are slow: one process wrote {place.speeds.write_bytes_s / _MIB:.0f} MiB/s with fsync.",
                f"At that rate 10 GiB a rank take {10 * 1024 * _MIB / place.speeds.write_bytes_s / 60:.0f} minutes, and "
                "collectives time out after 10.",
                "Save in the background (Checkpointer(mode='async')) to a local disk with a mirror, or use faster storage.",
            )


def _slow_reads(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if place.speeds is None:
            continue
        slowest = min(place.speeds.read_bytes_s, place.speeds.random_bytes_s)
        if slowest < _LEAST_BYTES_S:
            yield Bite(
                place.path,
                f"Loads are slow: one process read {slowest / _MIB:.0f} MiB/s in pieces of 8 MiB.",
                "1.4 TB took 31 minutes that way on 8 nodes, long enough for NCCL's timeout to end the job.",
                "Copy the files to a local disk once, or let ranks read each byte once (IOOptions, docs/concepts/strategies.md).",
            )


def _slow_fsync(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if place.speeds is not None and place.speeds.fsync_s > _MOST_FSYNC_S:
            yield Bite(
                place.path,
                f"Every save waits: one fsync of 4 KiB took {place.speeds.fsync_s:.1f} s.",
                "A published step needs several, one after the other, for files and directories.",
                "Ask whose writes fill this file system, or save to a local disk with a mirror.",
            )


def _no_lock(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if why := place.failures.get("lock"):
            yield Bite(
                place.path,
                f"A Checkpointer refuses this directory: files can't be locked ({why}).",
                "The lock keeps a second run from writing into the same steps; Lustre and NFS may be mounted without locks.",
                "Mount it with locks (Lustre: flock; NFS: without nolock), or use a local disk or an object store.",
            )


def _no_exclusion(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if "exclude" in place.failures:
            yield Bite(
                place.path,
                "Two runs may write into one directory: the file system grants one lock twice.",
                "Locks are accepted and do nothing, as with local_lock or some FUSE file systems.",
                "Give each run a directory of its own, or mount the file system with real locks.",
            )


def _no_rename(facts: Facts) -> Iterator[Bite]:
    for place in facts.places:
        if why := place.failures.get("rename"):
            yield Bite(
                place.path,
                f"No step can be published: renaming failed ({why}).",
                "A checkpoint appears whole by one rename; file systems over object stores have none for directories.",
                "Give the URL of the store (s3://…, gs://…) in place of its mount.",
            )


def _no_direct(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if "direct" in place.failures and mount.kind not in _IN_MEMORY and "write" not in place.failures:
            yield Bite(
                place.path,
                f"Saves go through the page cache, which took three times as long: O_DIRECT fails "
                f"({place.failures['direct']}).",
                f"{mount.kind} does not take writes past the cache, and cached bytes count against the cgroup.",
                "Nothing is wrong with the data; for speed use ext4, xfs or a parallel file system.",
            )


def _over_store(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if mount.kind in _OVER_STORES:
            yield Bite(
                place.path,
                "A reader may see half a checkpoint, and locks do not reach other hosts.",
                f"{mount.kind} puts files over an object store, where a rename copies object by object.",
                "Give the URL of the store (s3://…, gs://…): there a step appears by one conditional write.",
            )


def _nfs_locks(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        bad = [o for o in mount.options if o in ("nolock", "local_lock=all", "local_lock=posix")]
        if mount.kind.startswith("nfs") and bad:
            yield Bite(
                place.path,
                f"Runs on two hosts may write into one directory: NFS is mounted with {bad[0]}.",
                "Locks then stay on this host, and the other one never hears of them.",
                f"Mount it without {bad[0]}.",
            )


def _nfs_soft(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if mount.kind.startswith("nfs") and {"soft", "softerr"} & set(mount.options):
            yield Bite(
                place.path,
                "A slow server makes a save fail, or loses bytes without an error.",
                "NFS is mounted soft: after a few timeouts the client gives up on a write that was accepted.",
                "Mount it hard, which is the default.",
            )


def _nfs_late(facts: Facts) -> Iterator[Bite]:
    for place, mount in _mounts(facts):
        if not mount.kind.startswith("nfs"):
            continue
        for option in mount.options:
            name, _, value = option.partition("=")
            if name in ("acdirmax", "acregmax", "actimeo") and value.isdecimal() and int(value) > 60:
                yield Bite(
                    place.path,
                    f"Other hosts see a new step up to {value} s late: NFS is mounted with {option}.",
                    "The client answers from its cache of names and sizes until that time has passed.",
                    f"Mount it with the default (60 s) or less, or wait {value} s before another host reads a step.",
                )
                break


def _clocks(facts: Facts) -> Iterator[Bite]:
    found = [(p.path, p.clock_ahead_s) for p in facts.places]
    found += [(b.url, b.clock_ahead_s) for b in facts.buckets]
    for where, ahead_s in found:
        if abs(ahead_s) > _MOST_AHEAD_S:
            yield Bite(
                where,
                f"Times of files are wrong: the storage's clock is {abs(ahead_s):.0f} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} this machine's.",
                "Signatures of requests expire after 15 minutes of difference, and tools that look at times of files "
                "take old for new.",
                "Set both clocks by one time service (chronyd).",
            )


def _bucket_refuses(facts: Facts) -> Iterator[Bite]:
    for bucket in facts.buckets:
        for what in ("list", "write"):
            if why := bucket.failures.get(what):
                yield Bite(
                    bucket.url,
                    f"A run can't {what} this prefix: {why.partition(chr(10))[0]}.",
                    "A checkpoint needs to list, write, read, replace under a condition, and delete.",
                    "See the endpoint, the region, the credentials and their rights for this prefix.",
                )


def _bucket_conditions(facts: Facts) -> Iterator[Bite]:
    for bucket in facts.buckets:
        for what in ("create", "replace"):
            if why := bucket.failures.get(what):
                yield Bite(
                    bucket.url,
                    f"Two runs may overwrite each other's steps: {why.partition(chr(10))[0]}.",
                    "A step is published by one write under a condition (If-None-Match, If-Match), which this store ignores "
                    "or refuses.",
                    "Use a store or a release with conditional writes, or give each run a prefix of its own.",
                )
                break


def _bucket_deletes(facts: Facts) -> Iterator[Bite]:
    for bucket in facts.buckets:
        if why := bucket.failures.get("delete"):
            yield Bite(
                bucket.url,
                f"Old steps stay for ever, and cost: nothing can be deleted ({why.partition(chr(10))[0]}).",
                "Retention deletes steps; the credentials lack that right, or a retention lock holds the objects.",
                "Give the right to delete below this prefix, or let a rule of the bucket expire old objects.",
            )


def _rule(name: str, about: str, source: str, check: Callable[[Facts], Iterator[Bite]]) -> Rule:
    return Rule(id=name, about=about, source=source, check=check)


_NFS, _LOCKS = "nfs(5)", "docs/concepts/publish.md"
STORAGE = (
    _rule("storage.no-answer", "no answer in about 10 s", "torchtitan#3065", _silent),
    _rule("storage.not-writable", "nothing can be written", "errno(3)", _read_only),
    _rule("storage.fsync", "fsync or reading back fails", "Rebello et al., ATC '20", _fsync),
    _rule("storage.space", "less free than 1 GiB, or than 6 × the given model", "case 15", _space),
    _rule("storage.inodes", "fewer than 10,000 inodes", "statvfs(3)", _inodes),
    _rule("storage.memory", "tmpfs or ramfs", "tmpfs(5)", _in_memory),
    _rule("storage.overlay", "a container's writable layer", "overlayfs of Linux", _overlay),
    _rule("storage.slow-write", "under 30 MiB/s with fsync", "NeMo-RL#3624", _slow),
    _rule("storage.slow-read", "under 30 MiB/s", "transformers#48239", _slow_reads),
    _rule("storage.slow-fsync", "over 1 s for 4 KiB", "fsync(2)", _slow_fsync),
    _rule("storage.no-locks", "files can't be locked", _LOCKS, _no_lock),
    _rule("storage.no-exclusion", "a lock is granted twice", _LOCKS, _no_exclusion),
    _rule("storage.no-rename", "renaming fails", _LOCKS, _no_rename),
    _rule("storage.no-direct", "O_DIRECT fails, not in memory", "docs/figures.md", _no_direct),
    _rule("storage.over-object-store", "s3fs, gcsfuse, rclone and the like", _LOCKS, _over_store),
    _rule("storage.nfs-locks", "NFS with nolock or local_lock", _NFS, _nfs_locks),
    _rule("storage.nfs-soft", "NFS mounted soft", _NFS, _nfs_soft),
    _rule("storage.nfs-late", "NFS with attribute caches over 60 s", _NFS, _nfs_late),
    _rule(
        "storage.clock", "storage's clock over 5 s from this machine's", "RequestTimeTooSkewed of S3", _clocks
    ),
    _rule(
        "bucket.refused",
        "list or write is refused",
        "docs/howto/object-stores.md",
        _bucket_refuses,
    ),
    _rule("bucket.no-conditions", "conditional writes do not hold", "verl#7641", _bucket_conditions),
    _rule("bucket.no-delete", "nothing can be deleted", "docs/howto/runs-in-a-store.md", _bucket_deletes),
)
