"""What each command says of one host's part of a step, which ``Checkpointer(local=True)`` has saved: it is not damaged."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.doctor.examine import collect, findings_of
from tests.checkpoint._checkpointer_fns import _flip
from tests.cli import _parts_fns as fns
from tests.cli.test_cli import check_paragraph, run, run_json
from tests.harness.pool import RankPool
from tests.loading.test_plan_promises import make_model

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def hosts(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hosts' directories, and the model."""
    folder = tmp_path_factory.mktemp("parts")
    ranks.run_ranks(3, fns.save, str(make_model(folder / "qwen")), str(folder))
    return folder


def root(hosts: Path, number: int) -> Path:
    return hosts / f"host-{number}/run"


def part(hosts: Path, number: int) -> Path:
    return root(hosts, number) / "step-00000002"


@pytest.fixture
def damaged(hosts: Path, tmp_path: Path) -> Path:
    """A directory of the second host, whose newest step has a flipped bit."""
    copied = Path(shutil.copytree(root(hosts, 1), tmp_path / "run"))
    _flip(next((copied / "step-00000002/model").glob("shard-*")), -3)
    return copied


@pytest.fixture
def torn(hosts: Path, tmp_path: Path) -> Path:
    """As :func:`damaged`, but a file is lost."""
    copied = Path(shutil.copytree(root(hosts, 1), tmp_path / "torn/run"))
    next((copied / "step-00000002/optimizer").glob("shard-*")).unlink()
    return copied


def merged(hosts: Path, out: Path, *numbers: int) -> Path:
    for number in numbers:
        shutil.copytree(part(hosts, number), out, dirs_exist_ok=True)
    return out


def check_text(text: str, own: int = 2, rank: int = 1) -> None:
    flat = " ".join(text.split())
    assert f"part {own} of 3 of the step (host {HOST})" in flat
    others = [n for n in range(3) if n != rank]
    for other in others:
        assert f"has the files of ranks {other}" in flat
    assert f"rsync -a {HOST}:DIRECTORY/step-00000002/ " in flat
    assert "local=True on all hosts that saved it" in flat


def test_inspect(hosts: Path, damaged: Path, torn: Path) -> None:
    one = run("inspect", part(hosts, 1))
    assert one.exit_code == 0, one.output
    check_text(one.output)
    assert "not damaged" in one.output
    assert "problem" not in one.output
    found = run_json("inspect", part(hosts, 1))
    assert found["ok"]
    assert [(p["host"], p["ranks"], p["is_here"]) for p in found["parts"]] == [
        (HOST, [n], n == 1) for n in range(3)
    ]
    here = [p for p in part(hosts, 1).rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert found["parts"][1]["files"] == len(here)
    assert found["parts"][1]["file_bytes"] == sum(p.stat().st_size for p in here)
    assert found["tensors"] > 10, "the manifest knows all of them"

    steps = run("inspect", root(hosts, 1))
    assert steps.exit_code == 0, steps.output
    assert "damaged" not in steps.output
    check_text(steps.output)
    assert all(step["ok"] and step["part"] for step in run_json("inspect", root(hosts, 1))["steps"])

    assert run("inspect", torn).exit_code == 1
    (lost,) = run_json("inspect", torn / "step-00000002", status=1)["problems"]
    assert lost.startswith("optimizer/shard-00002-")
    # Payload is not read: verify finds it.
    assert run("inspect", damaged).exit_code == 0


def test_verify(hosts: Path, damaged: Path, torn: Path, tmp_path: Path) -> None:
    one = run("verify", part(hosts, 1))
    assert one.exit_code == 3, one.output
    check_text(one.output)
    assert "not fully verified" in one.output
    report = run_json("verify", part(hosts, 0), status=3)
    assert report["problems"] == []
    assert not report["ok"], "a script that deletes the originals after it must not go on"
    check_text(report["part"], 1, 0)
    files = [p for p in part(hosts, 0).rglob("*") if p.is_file()]
    assert report["files"] == len(files)
    manifest = (part(hosts, 0) / "manifest.json").stat().st_size
    assert report["bytes_read"] == sum(p.stat().st_size for p in files) - manifest, "all of it was checked"

    assert run("verify", root(hosts, 1)).exit_code == 3
    documents = run_json("verify", root(hosts, 1), status=3)
    assert not documents["ok"]
    assert [d["problems"] for d in documents["steps"]] == [[], []]

    assert run("verify", damaged).exit_code == 1
    (problem,) = run_json("verify", damaged / "step-00000002", status=1)["problems"]
    assert "differ from their checksum" in problem
    (problem,) = run_json("verify", torn / "step-00000002", status=1)["problems"]
    assert problem.endswith("lost")

    two = merged(hosts, tmp_path / "two/step-00000002", 0, 1)
    assert "parts 1, 2 of 3 of the step" in sw.verify(two).part  # type: ignore[operator]
    whole = merged(hosts, tmp_path / "all/step-00000002", 0, 1, 2)
    assert run("verify", whole).exit_code == 0
    assert run_json("verify", whole)["part"] is None


def test_a_manifest_alone_is_no_part(hosts: Path, tmp_path: Path) -> None:
    bare = tmp_path / "step-00000002"
    bare.mkdir()
    shutil.copy(part(hosts, 1) / "manifest.json", bare)
    for command in ("inspect", "verify"):
        assert run(command, bare).exit_code == 1, command
        assert "none of 3 of the step" in run(command, bare).output
    assert rules(bare) == {"checkpoint.damaged"}


def rules(*paths: Path) -> set[str]:
    facts = collect([str(p) for p in paths])
    return {f.rule for f in findings_of(facts) if f.rule.startswith("checkpoint.")}


def test_doctor(hosts: Path, torn: Path) -> None:
    assert rules(root(hosts, 0), part(hosts, 1)) == set()
    assert rules(torn) == {"checkpoint.damaged"}


@pytest.mark.parametrize("number", [0, 1])
def test_what_needs_the_whole_step_says_what_to_do(hosts: Path, tmp_path: Path, number: int) -> None:
    one, out = part(hosts, number), tmp_path / "out"
    for words in (
        ("plan", one, "--ranks", 2),
        ("export", one, out),
        ("convert", one, out, "--to", "hf"),
        ("convert", one, out, "--to", "checkpoint"),
        ("copy", one, out),
        ("diff", one, hosts / "qwen"),
    ):
        result = run(*words)
        check_paragraph(result, f"part {number + 1} of 3 of the step", "rsync -a", status=(1,))
        assert not out.exists()


def test_loading_says_what_to_do(hosts: Path) -> None:
    def load(path: Path) -> Any:
        return sw.load_pretrained(path)

    def restore(path: Path) -> Any:
        live = sw.load_pretrained(hosts / "qwen")
        return sw.restore(sw.TrainState(model=live), path)

    for call in (load, restore):
        for number in (0, 1):
            with pytest.raises(
                sw.errors.ShardwiseError, match=rf"part {number + 1} of 3 of the step .*rsync -a"
            ):
                call(part(hosts, number))


def test_report(hosts: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run("report", root(hosts, 1), "--out", out).exit_code == 0
    text = out.read_text()
    assert "part 2 of 3 of the step" in text
    assert "damaged" not in text.split("</style>")[-1]
