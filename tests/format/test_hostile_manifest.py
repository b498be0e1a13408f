"""What an author of a checkpoint may write, checksums and all: refused by name, in little time, and nothing leaves OUT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.verify import check_files, quick_check
from shardwise.errors import CheckpointError, FormatError, IntegrityError, ShardwiseError, StateError
from shardwise.format.manifest import read_manifest
from tests.catalog import _bombs
from tests.harness.bombs import refused_within
from tests.harness.hostile import edit_manifest, put_file, run

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    sw.save(run(), tmp_path / "step", step=7)
    return tmp_path / "step"


def tree(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


def test_a_models_name_does_not_leave_the_directory(tmp_path: Path) -> None:
    """``models/../../escaped`` was made outside OUT, with Python files that a config named."""
    source, home = tmp_path / "deep" / "source", tmp_path / "deep" / "escaped"
    sw.save(run(), source)
    home.mkdir()
    (home / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "sitecustomize.Model"}}))
    (home / "sitecustomize.py").write_text("raise SystemExit")
    edit_manifest(source, lambda m: m["models"].update({"../../escaped": {}}))
    (source / "models").mkdir()  # so that models/../../escaped is found
    (tmp_path / "there").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ShardwiseError) as caught:
        sw.convert(source, tmp_path / "there" / "out")
    assert tree(tmp_path) == before, "nothing was written anywhere"
    assert isinstance(caught.value, FormatError)
    assert "'../../escaped' of a model or an optimizer is not a word" in str(caught.value)


ENTRY = {"nbytes": 0, "header_bytes": 0, "header_xxh3": "2d06800538d394c2"}


def of_weight(change: Change) -> Change:
    return lambda m: change(m["models"]["model"]["layer.weight"])


MALFORMED: dict[str, Change] = {
    "model ..": lambda m: m["models"].update({"..": {}}),
    "model with a slash": lambda m: m["models"].update({"a/b": {}}),
    "model without a name": lambda m: m["models"].update({"": {}}),
    "model with half a character": lambda m: m["models"].update({"\ud800": {}}),
    "optimizer in packed": lambda m: m["packed"].update({"../x": {}}),
    "optimizer in states": of_weight(lambda t: t["states"].update({"../x": {}})),
    "optimizer that is not in packed": of_weight(lambda t: t["states"].update({"other": {}})),
    "hub tensors of a model that is not there": lambda m: m["hub_tensors"].update({"../x": {}}),
    "no model": lambda m: m.update(models={}, packed={}),
    "file outside": lambda m: m["files"].update({"../x": ENTRY}),
    "file with an absolute path": lambda m: m["files"].update({"/x": ENTRY}),
    "file with a NUL": lambda m: m["files"].update({"a\0b": ENTRY}),
    "file with half a character": lambda m: m["files"].update({"\udc80": ENTRY}),
    "the manifest among its files": lambda m: m["files"].update({"manifest.json": ENTRY}),
    "tensor with half a character": lambda m: m["models"]["model"].update(
        {"\ud800": m["models"]["model"]["layer.bias"]}
    ),
    "documents that are no list": lambda m: m.update(local_documents={"rng": 1}),
    "header of more than 100 MB": lambda m: m["files"].update(
        x={**ENTRY, "nbytes": 2**30, "header_bytes": 2**30}
    ),
    "ranks without files": lambda m: m.update(world_size=2),
    "pack of more than is used": lambda m: next(iter(m["packed"]["optimizer"].values())).update(count=2**40),
    "element used twice": of_weight(lambda t: t["states"]["optimizer"]["step"].update(index=1)),
    "state with a dot": of_weight(
        lambda t: t["states"]["optimizer"].update({"a.b": t["states"]["optimizer"]["exp_avg"]})
    ),
    "gradient of one element": of_weight(
        lambda t: t["states"]["optimizer"].update(__grad__=t["states"]["optimizer"].pop("step"))
    ),
    "shape that multiplies beyond 64 bits": of_weight(lambda t: t.update(shape=[0, 2**61, 2**61])),
    "65 dims": of_weight(lambda t: t.update(shape=[1] * 65)),
    "digest in another form": of_weight(lambda t: t.update(digest="0x1")),
    "digest with capitals": of_weight(lambda t: t.update(digest="ABCDEF0123456789")),
    "digest with a sign": of_weight(lambda t: t.update(digest="+000000000000001")),
    "digest of 17 digits": of_weight(lambda t: t.update(digest="0" * 17)),
    "negative step": lambda m: m.update(step=-5),
    "step of 64 bits": lambda m: m.update(step=2**63),
    "states of two models": lambda m: m["models"].update(other={"w": m["models"]["model"]["layer.bias"]}),
    "seed a text": lambda m: m.update(seed="x"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifests(step: Path, name: str) -> None:
    edit_manifest(step, MALFORMED[name])
    for use in (read_manifest, sw.verify, lambda path: sw.restore(run(1), path)):
        with pytest.raises(FormatError, match="malformed manifest") as caught:
            use(step)
        assert len(str(caught.value)) < 1000
    with pytest.raises(FormatError, match="malformed manifest"):
        sw.convert(step, step.with_name("out"))
    assert not step.with_name("out").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"3", b"null", b"[" * 100_000, b"9" * 5000, b"\xff", b'{"format": [], "x": NaN}'],
    ids=["empty", "list", "number", "null", "deep", "digits", "no UTF-8", "other format"],
)
def test_manifests_that_are_none(step: Path, content: bytes) -> None:
    (step / "manifest.json").write_bytes(content)
    for use in (read_manifest, sw.verify, lambda path: sw.restore(run(1), path)):
        with pytest.raises(FormatError, match=r"manifest\.json: "):
            use(step)


# ---------------------------------------------------------------------------------------------------- bombs


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each bomb took, in one process that imports torch once; it ends after two minutes."""
    command = [sys.executable, "-m", "tests.catalog._bombs", str(tmp_path_factory.mktemp("bombs"))]
    root = Path(__file__).resolve().parents[2]
    try:
        printed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120).stdout
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode()
    return {one["name"]: one for one in map(json.loads, printed.splitlines())}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", _bombs.BOMBS)
@pytest.mark.processes
def test_bombs_take_a_second_and_200_megabytes_at_most(tried: dict[str, dict[str, Any]], name: str) -> None:
    assert name in tried, "it, or one before it, never ended"
    bomb = tried[name]
    assert bomb["said"].startswith(("FormatError", "IntegrityError")), bomb
    assert bomb["seconds"] <= 1.0, bomb
    assert bomb["bytes"] <= 200 * 1000**2, bomb


@pytest.mark.parametrize("files_too", [False, True])
def test_tensors_larger_than_their_files(step: Path, files_too: bool) -> None:
    """``export`` made a file of 2^59 bytes first, and cut it into 600 MB of pieces."""

    def change(manifest: dict[str, Any]) -> None:
        for name, tensor in manifest["models"]["model"].items():
            if name == "layer.bias":
                tensor["shape"] = [2**57]
        for name, entry in manifest["files"].items():
            if files_too and name.startswith("model/"):
                entry["nbytes"] = 2**59 + 2**20

    edit_manifest(step, change)
    out = step.with_name("out")
    for use in (sw.export_hf, sw.convert):
        text = refused_within(lambda use=use: use(step, out))  # type: ignore[misc]
        assert "model" in text
        assert not out.exists()
    assert not sw.verify(step).ok


# -------------------------------------------------------------------------------- nothing that no reader takes


def test_steps_that_no_manifest_holds_are_refused(tmp_path: Path) -> None:
    state = sw.TrainState(model=nn.Linear(2, 2))
    for step in (2**62 + 1, 2**63, 10**19, -5):
        with pytest.raises(StateError, match=r"an integer from 0 to 2\^62"):
            sw.save(state, tmp_path / "one", step=step)
        with (
            sw.Checkpointer(tmp_path / "run") as checkpoints,
            pytest.raises(StateError, match=r"an integer from 0 to 2\^62"),
        ):
            checkpoints.save(state, step)
    assert [n for n in tree(tmp_path) if "step" in n or "one" in n] == []
    with sw.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(state, 2**62)
        assert checkpoints.resume(state).step == 2**62  # type: ignore[union-attr]


class Surrogate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w\ud800", nn.Parameter(torch.zeros(2)))


def test_names_that_no_reader_takes_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is published, because it couldn't be read back"):
        sw.save(sw.TrainState(model=Surrogate()), tmp_path / "step")
    assert tree(tmp_path) == []


class Dotted(torch.optim.SGD):
    """Keeps a state under a name that slice files can't tell from a parameter's."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["a.b"] = torch.zeros_like(parameter)


def test_states_that_could_not_be_restored_are_not_published(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Dotted(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"the optimizer state 'a\.b' has a dot in its name"):
        sw.save(sw.TrainState(model=model, optimizer=optimizer), tmp_path / "step")
    assert tree(tmp_path) == []


def test_a_run_of_a_negative_step_is_not_converted(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-5"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    (source / "trainer_state.json").write_text('{"global_step": -5}')
    with pytest.raises(FormatError, match="global_step is -5, which can't count steps"):
        sw.convert(source, tmp_path / "out")
    assert tree(tmp_path) == [
        "checkpoint-5",
        *(f"checkpoint-5/{name}" for name in sorted(os.listdir(source))),
    ]


def test_a_conversion_of_damaged_tensors_publishes_nothing_even_for_a_moment(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(step, of_weight(lambda t: t.update(digest="0" * 16)))
    renamed: list[object] = []
    own = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (renamed.append(b), own(a, b))[1])
    with pytest.raises(IntegrityError, match=r"content of 1 tensors differs .*layer\.weight"):
        sw.convert(step, tmp_path / "out")
    assert renamed == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step"]


def test_names_as_long_as_a_file_system_allows(tmp_path: Path) -> None:
    state = sw.TrainState(model=nn.Linear(2, 2))
    for name in ("x" * 255, "ü" * 127):
        sw.save(state, tmp_path / name)
        assert sw.verify(tmp_path / name).ok
        sw.convert(tmp_path / name, tmp_path / f"y{name[1:]}")
        sw.export_hf(tmp_path / name, tmp_path / f"z{name[1:]}")
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".")]


def test_large_documents_are_in_blocks(tmp_path: Path) -> None:
    """A header has 100 MB at most, and so has the part of a small file that one checksum covers."""
    large = torch.arange(110_000_000, dtype=torch.uint8)
    state = sw.TrainState(model=nn.Linear(2, 2), extra={"large": large})
    sw.save(state, tmp_path / "step")
    entry = read_manifest(tmp_path / "step").files["state.safetensors"]
    assert (entry.header_bytes, len(entry.blocks)) == (100_000_000, 1)
    assert sw.verify(tmp_path / "step").ok
    state.extra["large"] = None
    sw.restore(state, tmp_path / "step")
    assert torch.equal(state.extra["large"], large)
    with (tmp_path / "step" / "state.safetensors").open("r+b") as stream:
        stream.seek(105_000_000)
        stream.write(b"\1\2\3")
    with pytest.raises(IntegrityError, match="content differs"):
        sw.restore(state, tmp_path / "step")
    assert not sw.verify(tmp_path / "step").ok


# ------------------------------------------------------------------------------------------- files of a step


@pytest.mark.parametrize("target", ["nowhere", "state.json"], ids=["dangling", "circular"])
def test_links_that_lead_nowhere_are_a_line(step: Path, target: str) -> None:
    (step / "state.json").unlink()
    (step / "state.json").symlink_to(target)
    assert any(p.startswith("state.json: lost") for p in sw.verify(step).problems)
    with pytest.raises(ShardwiseError):
        quick_check(str(step), 7)


def test_what_is_no_regular_file_is_a_line(step: Path) -> None:
    put_file(step, "note", b"")
    (step / "note").unlink()
    os.mkfifo(step / "note")
    assert sw.verify(step).problems == ("note: is not a regular file",)
    with pytest.raises(IntegrityError, match="note: is not a regular file"):
        check_files(str(step), 7)


def test_assets_are_read_from_inside(step: Path) -> None:
    """A pipe beside the weights is no tokenizer, and a document of hundreds of megabytes is no config."""
    with (step / "model" / "config.json").open("wb") as stream:
        stream.truncate(300 * 1024**2)
    with pytest.raises(FormatError, match=r"config\.json has 314572800 bytes, the limit is"):
        sw.convert(step, step.with_name("out"))
