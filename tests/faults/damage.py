"""A published step that is damaged on disk: every file in turn, in every way; and what lies beside the steps."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import Found, find, step_path

__all__ = ["beside_rows", "damage_rows"]


@dataclass(frozen=True, slots=True)
class _Damage:
    """What is done to a directory with steps 1 and 2, and what must come of it."""

    fault: str
    place: str
    apply: Callable[[Path], Any]
    """Gets the directory of the run."""
    step: int | None = 1
    """That a resume finds; None: it is refused by a named error."""
    words: tuple[str, ...] = ()
    """One of them is in the warning, or in the error."""
    verify_finds: bool = True


def damage_rows(context: Context) -> Iterator[Row]:
    """Every file of the newest step in turn."""
    step = step_path(context.pristine(1, 2), 2)
    files = sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())
    damages = [d for name in files for d in _damages_of(context, step, name)]
    yield from _rows(context, damages)


def _damages_of(context: Context, step: Path, name: str) -> Iterator[_Damage]:
    place = name.partition("/")[0]
    size = (step / name).stat().st_size
    # Of payload that is changed in place the tensors are named, by their digests.
    words = (name, *(("differs from what was saved",) if name.endswith(".safetensors") else ()))

    def damage(fault: str, what: str, work: Callable[[Path], Any]) -> _Damage:
        def apply(root: Path) -> None:
            work(step_path(root, 2) / name)

        return _Damage(fault, f"{place}: {name}, {what}", apply, 1, words)

    for length in {0, size // 2, size - 1} if not context.short else {size - 1}:
        yield damage("file truncated", f"to {length} of {size}", lambda f, n=length: os.truncate(f, n))
    yield damage("file deleted", "", lambda f: f.unlink())
    places = 3 if context.short else 24
    for k in range(places):
        at = k * (size - 1) // (places - 1)
        yield damage("bit flipped", f"in byte {at} of {size}", lambda f, at=at, k=k: _flip(f, at, k % 8))
    if context.short and not name.startswith(("model", "manifest")):
        return
    yield damage("file grown", "by a byte", lambda f: os.truncate(f, f.stat().st_size + 1))
    yield damage("file zeroed", "", lambda f: f.write_bytes(bytes(f.stat().st_size)))
    yield damage("file a directory", "", lambda f: (f.unlink(), f.mkdir()))
    before = step_path(context.pristine(1, 2), 1) / name
    if name != "manifest.json" and before.read_bytes() != (step / name).read_bytes():
        yield damage("file of the step before", "", lambda f: shutil.copyfile(before, f))
    other = name.replace("shard-00001", "shard-00002").replace("rank/00000", "rank/00001")
    if other != name:
        swap = partial(_swap, name, other)
        yield _Damage("files swapped", f"{place}: {name} and {other}", swap, 1, (name, other))


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ (1 << bit)]))


def _swap(first: str, second: str, root: Path) -> None:
    step = step_path(root, 2)
    content = (step / first).read_bytes()
    (step / first).write_bytes((step / second).read_bytes())
    (step / second).write_bytes(content)


# ------------------------------------------------------------------------------------------ beside the files


def beside_rows(context: Context) -> Iterator[Row]:
    """Whole directories, and things beside the steps or in them that are not theirs."""
    yield from _rows(context, list(_beside()))


def _beside() -> Iterator[_Damage]:
    def third(root: Path) -> Path:
        return step_path(root, 3)

    def second(root: Path) -> Path:
        return step_path(root, 2)

    whole = "whole step"
    lost = ("no such file", "lost")
    yield _Damage("step lost in part", f"{whole}: emptied", lambda r: _empty(second(r)), words=lost)
    for folder in ("model", "optimizer", "rank"):
        work: Callable[[Path], Any] = lambda r, f=folder: shutil.rmtree(second(r) / f)  # noqa: E731
        yield _Damage("step lost in part", f"{whole}: {folder}/ deleted", work, words=lost)
    yield _Damage("step lost in part", f"{whole}: a file in its place", _file_instead, words=lost)
    for name in ("note.txt", "model/note.txt", ".nfs0001"):
        work = lambda r, n=name: (second(r) / n).write_text("?")  # noqa: E731
        yield _Damage("extra file", f"in a step (does not matter): {name}", work, 2)

    beside = "beside the steps"
    for what, work in (
        ("stale temporary directory", lambda r: _copy_in_part(r, ".tmp-step-00000002-0123456789abcdef")),
        ("stale trash", lambda r: _copy_in_part(r, ".trash-step-00000002-0123456789abcdef")),
        ("other names", lambda r: [(r / n).mkdir() for n in ("step-3", "step-00000003.bak", "model")]),
        ("wrong hint", lambda r: (r / "latest").write_text("step-00000009\n")),
        ("no hint", lambda r: (r / "latest").unlink()),
        ("no lock file", lambda r: (r / ".lock").unlink()),
    ):
        yield _Damage("clutter", f"{beside}: {what}", work, 2, verify_finds=False)
    for what, work in (
        ("empty directory", lambda r: third(r).mkdir()),
        ("a file", lambda r: third(r).write_text("?")),
        ("link to nothing", lambda r: third(r).symlink_to("nowhere")),
    ):
        fault, words = "no step under a step's name", ("step-00000003",)
        yield _Damage(fault, f"{beside}: {what}", work, 2, words, verify_finds=False)
    yield _Damage(
        "step under another's name",
        f"{beside}: copy of step 2 as step 3",
        lambda r: _copy_in_part(r, third(r).name),
        2,
        ("contains step 2, but step 3",),
        verify_finds=False,
    )
    renamed: Callable[[Path], Any] = lambda r: second(r).rename(third(r))  # noqa: E731
    yield _Damage(
        "step under another's name", f"{whole}: renamed", renamed, words=("contains step 2, but step 3",)
    )
    yield _Damage(
        "old manifest", f"{whole}: of step 1", _other_manifest, words=("contains step 1, but step 2",)
    )
    for what, work, words in (
        ("later format version", _later_version, ("format version 7",)),
        ("no step valid", _damage_all, ("none is valid",)),
    ):
        yield _Damage("resume refused", f"whole step: {what}", work, None, words)


def _empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def _file_instead(root: Path) -> None:
    shutil.rmtree(step_path(root, 2))
    step_path(root, 2).write_text("?")


def _damage_all(root: Path) -> None:
    for step in (1, 2):
        (step_path(root, step) / "state.json").unlink()


def _copy_in_part(root: Path, name: str) -> None:
    shutil.copytree(step_path(root, 2), root / name)
    next((root / name).glob("model/shard*")).unlink()


def _other_manifest(root: Path) -> None:
    shutil.copyfile(step_path(root, 1) / "manifest.json", step_path(root, 2) / "manifest.json")


def _later_version(root: Path) -> None:
    file = step_path(root, 2) / "manifest.json"
    document = json.loads(file.read_text()) | {"version": 7}
    del document["xxh3"]
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    file.write_text(json.dumps(document | {"xxh3": xxhash.xxh3_64_hexdigest(text.encode())}))


# --------------------------------------------------------------------------------------------------- trials


def _rows(context: Context, damages: list[_Damage]) -> Iterator[Row]:
    started = time.monotonic()
    roots = [context.fresh() for _ in damages]
    pristine = context.pristine(1, 2)
    pairs = list(zip(roots, damages, strict=True))
    results = context.batches(pairs, partial(_try, pristine=pristine), size=40)
    by_fault: dict[str, list[Case]] = {}
    for damage, by_rank in zip(damages, results, strict=True):
        by_fault.setdefault(damage.fault, []).append(_judge(damage, by_rank))
    seconds = (time.monotonic() - started) / len(damages)
    for fault, cases in by_fault.items():
        yield from rows_of(fault, cases, seconds * len(cases))


def _try(pair: tuple[Path, _Damage], pristine: Path) -> tuple[Found, str, list[str]]:
    """What ranks find, what verify says of step 2 and which names were there, before that."""
    root, damage = pair
    verdict = ""
    if dist.get_rank() == 0:
        shutil.copytree(pristine, root)
        damage.apply(root)
        try:
            verdict = "; ".join(sw.verify(step_path(root, 2)).problems)
        except ShardwiseError as error:
            verdict = f"{type(error).__name__}: {error}"
    dist.barrier()
    found = find(root, verifies=damage.step != 2, saves_next=damage.step is not None)
    dist.barrier()
    names = sorted(p.name for p in root.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    return found, verdict, names


def _judge(damage: _Damage, by_rank: Any) -> Case:
    if isinstance(by_rank, str):
        return judge(damage.place, by_rank)
    found = agreed([f for f, _, _ in by_rank])
    _, verdict, names = by_rank[0]
    problem = ""
    if bool(verdict) != damage.verify_finds:
        problem += f" verify says {verdict or 'nothing'};"
    if isinstance(found, str):
        return judge(damage.place, found, problem=problem)
    if damage.step is None:
        if not any(word in found.error for word in damage.words):
            problem += f" resume: {found.error or found.step}, expected an error with {damage.words};"
        if [n for n in names if ".damaged" in n or ".superseded" in n]:
            problem += f" a refused resume set something aside: {names};"
        return Case(damage.place, "wrong" if problem else "error", problem=problem)
    # The resume that follows says which settings of the program it replaced.
    told = [*found.damaged.values(), *(w for w in found.warnings if not w.startswith("restored "))]
    if damage.words and not (found.damaged and all(any(w in t for w in damage.words) for t in told)):
        problem += f" it is not named: {told};"
    if not damage.words and found.damaged:
        problem += f" taken for damage: {found.damaged};"
    return judge(damage.place, found, allowed=[damage.step], problem=problem)
