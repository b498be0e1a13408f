"""The targets: each makes an input from a seed's files and a generator, and gives it to what a user would call."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.torch import load, save

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.zero import read_zero
from shardwise.checkpoint.sites import Hosts
from shardwise.cli.commands import main
from shardwise.errors import ShardwiseError
from shardwise.format.manifest import read_manifest
from shardwise.handover.changes import apply, encoded
from shardwise.integrations._folders import trainer_line_of
from shardwise.integrations._trainer_data import DataPlace, check_place
from shardwise.integrations._trainer_files import newest
from shardwise.rng import capture_host_rng
from shardwise.state.typed_json import decode, encode
from tests.fuzz.mutate import (
    mutate_archive,
    mutate_bytes,
    mutate_header,
    mutate_json,
    mutate_pickle,
    mutated_text,
)
from tests.fuzz.seeds import Net, data_loader, state_of
from tests.harness.command import runner

__all__ = [
    "TARGETS",
    "Call",
    "Seeds",
    "Target",
    "copied",
    "fix_checksums",
    "removed",
    "replaced",
    "restored",
    "resumed",
    "target",
    "trainer_resumed",
    "verified",
]

Seeds = dict[str, Path]
Call = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input: ``make`` writes it into a directory, and each of ``calls`` reads it as a user would."""

    name: str
    weight: float
    """Share of the inputs, among all targets'."""
    make: Callable[[random.Random, Seeds, Path], None]
    calls: tuple[Call, ...]


TARGETS: dict[str, Target] = {}


def target(weight: float, *calls: Call) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(make: Callable[..., None]) -> Callable[..., None]:
        name = make.__name__.removeprefix("_")
        TARGETS[name] = Target(name, weight, make, calls)
        return make

    return register


_CONTENT: dict[Path, bytes] = {}


def _bytes(path: Path) -> bytes:
    if path not in _CONTENT:
        _CONTENT[path] = path.read_bytes()
    return _CONTENT[path]


def copied(source: Path, place: Path) -> Path:
    """A seed's directory at ``place``: links to its files, which a mutation replaces and never writes into."""
    for path in source.rglob("*"):
        to = place / path.relative_to(source)
        if path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, to)
    return place


def replaced(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


# -------------------------------------------------------------------------------------------- calls


def _converted(place: Path) -> None:
    """Convert, which either publishes what verifies or leaves nothing."""
    out = place.parent / f"{place.name}-out"
    try:
        sw.convert(place, out)
    except ShardwiseError:
        left = [name for name in os.listdir(out.parent) if name.startswith((out.name, f".tmp-{out.name}"))]
        assert not left, f"a call that failed left {left}"
        raise
    assert sw.verify(out).ok, "convert published what does not verify"


def restored(place: Path) -> None:
    sw.restore(state_of(3), place)


def resumed(place: Path) -> None:
    """Resume of a run of two steps whose newest was changed: that step, the one before, or an error of ours."""
    state = state_of(3, trained=False)
    with sw.Checkpointer(place) as checkpoints:
        report = checkpoints.resume(state)
    assert report is not None, "a run that holds steps was taken as empty"
    if report.step == 1:
        assert state.extra["plain"][0] == 1, "step 1 was resumed with another step's values"


def trainer_resumed(place: Path) -> None:
    """The newest checkpoint of a Trainer that is of its form, its place in the data, and the rest of the epoch."""
    path = newest([trainer_line_of(str(place))], {}, Hosts())
    data = DataPlace(lambda _: None, reads_again=True)
    state = state_of(3, trained=False)
    state = dataclasses.replace(state, dataloader=None, extra={"trainer": {}, "data": data})
    sw.restore(state, path)
    manifest = read_manifest(path)
    documents = check_place(path, manifest, "state") | check_place(path, manifest, "rank/00000")
    stored = documents.get("extra.data", {"epoch": None})
    loader = data_loader()
    for _ in data.differences(loader, stored["epoch"] or 0, stored.get("consumed", 0), has_seeds=True):
        pass
    for _ in data.open(loader, stored["epoch"] or 0, stored.get("consumed", 0), True, capture_host_rng()):
        pass


def verified(place: Path) -> None:
    sw.verify(place / "step-00000001", threads=1)


def _planned(place: Path) -> None:
    sw.plan(place, ranks=2)


def _loaded(place: Path) -> None:
    sw.load_pretrained(place)


def _loaded_with_adapter(place: Path) -> None:
    sw.load_pretrained(place, adapter=str(place / "adapter"))


def _filled(place: Path) -> None:
    sw.load(Net(), place)


def _command(*words: str) -> Call:
    """A command of the command line. ``{}`` stands for the input's path."""

    def call(place: Path) -> None:
        result = runner().invoke(main, [word.format(place) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 1, 2), f"exit status {result.exit_code}"
        for word in ("Traceback", "this is a bug", "out of memory"):
            assert word not in result.output, result.output

    return call


_COMMANDS = (
    *(
        _command("inspect", "{}"),
        _command("inspect", "{}", "--json"),
        _command("verify", "{}", "--threads", "1"),
    ),
    *(_command("diff", "{}", "{}"), _command("export", "{}", "{}-out", "--json")),
)

# ----------------------------------------------------------------------------------- files of weights


@target(90, open_catalog)
def _header(rng: random.Random, seeds: Seeds, place: Path) -> None:
    replaced(place / "model.safetensors", mutate_header(rng, _bytes(seeds["trainer"] / "model.safetensors")))


@target(60, open_catalog)
def _index(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["hub"], place)
    name = "model.safetensors.index.json"
    replaced(place / name, mutated_text(rng, json.loads(_bytes(seeds["hub"] / name))))


@target(75, open_catalog)
def _torch_archive(rng: random.Random, seeds: Seeds, place: Path) -> None:
    replaced(
        place / "pytorch_model.bin", mutate_archive(rng, _bytes(seeds["torch_file"] / "pytorch_model.bin"))
    )


@target(60, open_catalog)
def _rank_files(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["rank_files"], place)
    name = f"model_world_size_2_rank_{rng.randrange(2)}.pt"
    replaced(place / name, mutate_archive(rng, _bytes(seeds["rank_files"] / name)))


def _read_whole_zero(place: Path) -> None:
    if (optimizer := read_zero(str(place)).optimizer) is not None:
        optimizer()


@target(60, _read_whole_zero)
def _zero(rng: random.Random, seeds: Seeds, place: Path) -> None:
    folder = rng.choice(("zero-2", "zero-3"))
    copied(seeds["zero"] / folder / "global_step2", place)
    file = rng.choice(sorted(place.iterdir()))
    replaced(file, mutate_archive(rng, _bytes(seeds["zero"] / folder / "global_step2" / file.name)))


@target(60, open_catalog)
def _megatron(rng: random.Random, seeds: Seeds, place: Path) -> None:
    folder = seeds["megatron"] / "iter_0000100"
    copied(folder, place)
    name = rng.choice(("common.pt", ".metadata", "metadata.json", "__0_0.distcp"))
    mutate = mutate_archive if name == "common.pt" else mutate_bytes
    replaced(place / name, mutate(rng, _bytes(folder / name)))


@target(10, lambda place: open_catalog(place / "model.pt"))
def _torch_legacy(rng: random.Random, seeds: Seeds, place: Path) -> None:
    replaced(place / "model.pt", mutate_bytes(rng, _bytes(seeds["torch_file"] / "legacy.pt")))


@target(30, open_catalog)
def _torch_index(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["torch_index"], place)
    name = "pytorch_model.bin.index.json"
    replaced(place / name, mutated_text(rng, json.loads(_bytes(seeds["torch_index"] / name))))


@target(75, open_catalog)
def _dcp_metadata(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["dcp"], place)
    replaced(place / ".metadata", mutate_pickle(rng, _bytes(seeds["dcp"] / ".metadata")))


@target(15, open_catalog)
def _dcp_data(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["dcp"], place)
    data = next(path for path in seeds["dcp"].iterdir() if path.suffix == ".distcp")
    replaced(place / data.name, mutate_bytes(rng, _bytes(data), 12))


@target(2, _filled)
def _load(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """A plain module, filled from a changed source of any kind."""
    rng.choice((_header, _torch_archive, _dcp_metadata))(rng, seeds, place)


# ------------------------------------------------------------------------------ runs of other programs


@target(3, _converted, restored)
def _dcp_run(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["dcp"], place)
    replaced(place / ".metadata", mutate_pickle(rng, _bytes(seeds["dcp"] / ".metadata"), 2))


@target(3, _converted, restored)
def _trainer_run(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["trainer"], place)
    name = rng.choice(("trainer_state.json", "optimizer.pt", "scheduler.pt"))
    content = _bytes(seeds["trainer"] / name)
    changed = (
        mutated_text(rng, json.loads(content)) if name.endswith("json") else mutate_archive(rng, content)
    )
    replaced(place / name, changed)


@target(3, _converted, restored, restored)
def _full_state(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["full_state"], place)
    name = rng.choice(("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"))
    replaced(place / name, mutate_archive(rng, _bytes(seeds["full_state"] / name)))


# ------------------------------------------------------------------------------------ our checkpoints


def _decoded(place: Path) -> None:
    text = (place / "document.json").read_text()
    decode(json.loads(text), load((place / "document.safetensors").read_bytes()))


_ENCODED: list[tuple[Any, bytes]] = []


@target(90, _decoded)
def _typed_json(rng: random.Random, seeds: Seeds, place: Path) -> None:
    if not _ENCODED:
        for name, value in state_of(1).extra.items():
            encoded = encode(value, where=name)
            _ENCODED.append((json.loads(json.dumps(encoded.document)), save(encoded.tensors)))
    document, tensors = rng.choice(_ENCODED)
    replaced(place / "document.json", json.dumps(mutate_json(rng, document, 6)).encode())
    replaced(place / "document.safetensors", tensors)


def fix_checksums(step: Path) -> None:
    """Make the sums of a step's manifest right, as an author of the damage would: its files' and its own."""
    path = step / "manifest.json"
    try:
        document = json.loads(path.read_bytes())
        for name, entry in document["files"].items():
            file = step / name
            if name.endswith(".json") and file.is_file() and isinstance(entry, dict):
                content = file.read_bytes()
                entry["nbytes"] = entry["header_bytes"] = len(content)
                entry["header_xxh3"] = xxhash.xxh3_64_hexdigest(content)
        rest = {k: v for k, v in document.items() if k != "xxh3"}
        text = json.dumps(rest, separators=(",", ":"), sort_keys=True)
        replaced(path, json.dumps({**rest, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())}).encode())
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OSError):
        return


def _mutate_manifest(rng: random.Random, step: Path) -> None:
    path = step / "manifest.json"
    document = json.loads(path.read_bytes())
    changed = mutate_json(rng, document)
    if rng.random() < 0.2 and isinstance(changed, dict) and isinstance(changed.get("geometries"), list):
        changed["geometries"] = mutate_json(rng, document["geometries"], 6)
    replaced(path, json.dumps(changed).encode())
    fix_checksums(step)


def _one_step(rng: random.Random, seeds: Seeds, place: Path) -> Path:
    return copied(seeds[rng.choice(("run", "spread"))] / "step-00000001", place / "step-00000001")


@target(45, lambda place: open_catalog(place / "step-00000001"))
def _manifest(rng: random.Random, seeds: Seeds, place: Path) -> None:
    _mutate_manifest(rng, _one_step(rng, seeds, place))


@target(5, verified)
def _manifest_verify(rng: random.Random, seeds: Seeds, place: Path) -> None:
    _mutate_manifest(rng, _one_step(rng, seeds, place))


@target(2, lambda place: _converted(place / "step-00000001"))
def _manifest_convert(rng: random.Random, seeds: Seeds, place: Path) -> None:
    _mutate_manifest(rng, _one_step(rng, seeds, place))


def _found(place: Path) -> None:
    report = sw.verify(place / "step-00000001", threads=1)
    assert not report.ok, "verify did not find damage"


@target(2, _found)
def _slices(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Damage without right sums: verify finds it, and says so in words."""
    step = _one_step(rng, seeds, place)
    file = rng.choice(sorted(p for p in step.rglob("*") if p.is_file()))
    before = file.read_bytes()
    changed = mutate_bytes(rng, before)
    replaced(file, changed if changed != before else before + b"x")


@target(5, resumed)
def _resume_documents(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["run"], place)
    step = place / "step-00000002"
    path = step / rng.choice(("state.json", "rank/00000.json"))
    document = json.loads(path.read_bytes())
    if rng.random() < 0.3:
        changed = mutate_json(rng, document)
    else:
        changed = dict(document)
        name = rng.choice(sorted(changed))
        is_nested = isinstance(changed[name], (dict, list))
        changed[name] = mutate_json(rng, changed[name]) if is_nested else rng.choice(([], {}, "x"))
    replaced(path, json.dumps(changed).encode())
    fix_checksums(step)


@target(5, trainer_resumed)
def _trainer_place(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """What a checkpoint of our Trainer says of its place in the data."""
    copied(seeds["trainer_place"], place)
    step = place / "checkpoint-3"
    path = step / rng.choice(("state.json", "rank/00000.json"))
    document = json.loads(path.read_bytes())
    names = [name for name in document if name in ("extra.trainer", "extra.data")]
    if names:
        name = rng.choice(names)
        document[name] = mutate_json(rng, document[name], rng.choice((1, 1, 3)))
    else:
        document = mutate_json(rng, document)
    replaced(path, json.dumps(document).encode())
    fix_checksums(step)


@target(2, resumed)
def _resume_manifest(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["run"], place)
    _mutate_manifest(rng, place / "step-00000002")


def _resumed_or_empty(place: Path) -> None:
    """As :func:`resumed`, where the directory itself was changed and may hold no step any more."""
    try:
        resumed(place)
    except AssertionError as error:
        if "taken as empty" not in str(error):
            raise


@target(2, _resumed_or_empty, _command("inspect", "{}"), _command("verify", "{}"))
def _run_directory(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Odd entries beside steps and in place of their files."""
    copied(seeds["run"], place)
    beside = ("latest", ".lock", "step-00000003", "step-1", "step-99999999999999999999", ".tmp-step-3-x")
    within = ("state.json", "manifest.json", "model", "rank/00000.json")
    for _ in range(rng.randint(1, 3)):
        targets = (place / rng.choice(beside), place / "step-00000002" / rng.choice(within))
        path = rng.choice(targets)
        removed(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = rng.randrange(5)
        if kind == 0:
            path.symlink_to(rng.choice(("nowhere", path.name, "step-00000001")))
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.write_bytes(rng.randbytes(20))


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.parent.is_dir():
        path.unlink(missing_ok=True)


# -------------------------------------------------------------------------- model directories, commands


@target(2, _planned)
def _config(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["model"], place)
    (place / "own.py").write_text("import tests.fuzz.guard as guard\nguard.canary()\n")
    document = json.loads(_bytes(seeds["model"] / "config.json"))
    if rng.random() < 0.2:
        document["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    replaced(place / "config.json", mutated_text(rng, document))


@target(2, _loaded)
def _generation_config(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["model"], place)
    name = "generation_config.json"
    replaced(place / name, mutated_text(rng, json.loads(_bytes(seeds["model"] / name))))


@target(2, _loaded_with_adapter)
def _adapter(rng: random.Random, seeds: Seeds, place: Path) -> None:
    copied(seeds["model"], place)
    name = rng.choice(("adapter_config.json", "adapter_model.safetensors"))
    content = _bytes(seeds["model"] / "adapter" / name)
    changed = mutated_text(rng, json.loads(content)) if name.endswith("json") else mutate_header(rng, content)
    replaced(place / "adapter" / name, changed)


@target(2, *_COMMANDS)
def _commands(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Every command that reads, over a changed checkpoint."""
    copied(seeds["run"] / "step-00000001", place)
    _mutate_manifest(rng, place)


@target(2, *_COMMANDS[:2], _COMMANDS[3])
def _commands_source(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Every command that reads, over a changed source."""
    rng.choice((_index, _torch_archive, _dcp_metadata))(rng, seeds, place)


# -------------------------------------------------------------------------------------------- weights


def _applied(place: Path) -> None:
    apply(memoryview((place / "changes").read_bytes()), np.zeros(3000, np.uint16))


@target(2, _applied)
def _weight_changes(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """What a sender says of a version's changes."""
    before, after = np.zeros(3000, np.uint16), np.zeros(3000, np.uint16)
    for _ in range(rng.randrange(1, 60)):
        after[rng.randrange(3000)] = rng.randrange(1 << 16)
    changes = encoded(before, after, 1 << 20)
    assert changes is not None
    replaced(place / "changes", mutate_bytes(rng, changes))
