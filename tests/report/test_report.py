"""``shardwise report``: what it says of a run, that it is one accessible file, and that no input writes HTML into it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import ShardwiseError, SourceError
from shardwise.operations.recorder import phase
from shardwise.report.ledger_files import read_process, starts_of
from shardwise.report.material import find_material
from shardwise.report.sections import marks_of
from shardwise.report.write import write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page, its texts, and whether all tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)], prog_name="shardwise")


def cut_in_last_save(file: Path) -> None:
    """Leave of a ledger what a process leaves that is killed as it writes its last save: the records up to there, and a torn line."""
    lines = file.read_text().splitlines(keepends=True)
    begun = max(k for k, line in enumerate(lines) if '"kind":"phase"' in line and '"name":"write"' in line)
    file.write_text("".join(lines[: begun + 1]) + lines[begun + 1][:20])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the save of step 3, resumed from step 2, and ended."""
    root = tmp_path_factory.mktemp("report") / "my-run"
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    state = sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    model(torch.ones(64)).sum().backward()
    state.optimizer.step()  # type: ignore[union-attr]
    state.optimizer.zero_grad()  # type: ignore[union-attr]
    with sw.ledger(root / "ledger") as ledger, sw.Checkpointer(root / "checkpoints") as checkpoints:
        with phase("warm-up"):
            pass
        for step in (1, 2, 3):
            checkpoints.save(state, step)
    cut_in_last_save(ledger.file)
    shutil.rmtree(root / "checkpoints" / "step-00000003")
    with sw.ledger(root / "ledger"), sw.Checkpointer(root / "checkpoints") as checkpoints:
        assert checkpoints.resume(state) is not None
        for step in (3, 4):
            checkpoints.save(state, step)
        sw.load(model, root / "checkpoints" / "step-00000004" / "model")
    losses = {"run-1": {1: 2.0, 2: 1.5, 3: 1.25}, "run-2": {3: 1.25, 4: 1.0}}
    for name, points in losses.items():
        (root / name).mkdir()
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in points.items()]
        (root / name / "loss.jsonl").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([finished], tmp_path_factory.mktemp("out") / "report.html").read_text()


def test_it_tells_the_story_of_a_run(finished: Path, page: str) -> None:
    text = Page(page).text
    for said in (
        "Run my-run", "newest valid step 4", "starts 2", "of them stopped early 1", "resumes 1 (exact)",
        "stopped without a word, in save of step 3", "left its ledger", "1 step was trained twice: losses differ by at most 0.",
        "Start 2: resume from step 2", "bitwise as never stopped yes", "2 tensors of the model, ",
        "the same on every rank that reports it (1)", "Load against its floor", "all ranks together read 16.2 KiB = 1.000 × the model",
        "Memory of rank 0 in start 1", "Saved steps: 1, 2, 3, 4. Crashed at step: 3. Resumed from step: 2",
        "Size of each stored checkpoint", "warm-up",
    ):  # fmt: skip
        assert said in text, said
    marks = marks_of(find_material([str(finished)]))
    assert [(m.step, m.kind) for m in marks] == [
        (1, "save"), (2, "resume"), (2, "save"), (3, "crash"), (3, "save"), (4, "save"),
    ]  # fmt: skip
    rows = re.findall(r'<tr><th scope="row" class="n">(\d+)</th><td>published</td>', page)
    assert rows == ["1", "2", "3", "4"]


def test_the_same_input_gives_the_same_file(finished: Path, page: str, tmp_path: Path) -> None:
    assert write_report([finished], tmp_path / "again.html").read_text() == page


def test_it_is_one_accessible_file(page: str) -> None:
    found = Page(page)
    assert found.all("html") == [{"lang": "en"}]
    for tag in ("script", "link", "img", "iframe", "object", "form"):
        assert found.all(tag) == [], tag
    outside = {
        v for _, a in found.elements for n, v in a.items() if v and "//" in v and not n.startswith("xmlns")
    }
    assert outside == set()
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    identifiers = Counter(a["id"] for _, a in found.elements if "id" in a)
    assert [name for name, count in identifiers.items() if count > 1] == []
    links = [
        v[1:] for _, a in found.elements for n, v in a.items() if n.endswith("href") and v and v[0] == "#"
    ]
    links += re.findall(r"url\(#([^)]+)\)", page)
    assert set(links) <= identifiers.keys()
    drawings = found.all("svg")
    assert len(drawings) >= 8
    for drawing in drawings:
        assert drawing["role"] == "img"
        title, description = str(drawing["aria-labelledby"]).split()
        assert f'<title id="{title}">' in page
        assert f'<desc id="{description}">' in page
        assert "width" not in drawing
        assert "viewbox" in drawing
    assert len(found.all("caption")) == len(found.all("table")) > 4
    assert all("scope" in cell for cell in found.all("th"))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
    for region in (a for tag, a in found.elements if tag == "div" and a.get("role") == "region"):
        assert region["tabindex"] == "0"
        assert region["aria-label"]
    assert not re.search(r"#0000[ef]\d", page), "a colour of matplotlib that the page does not replace"


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&$\\frac{ \u202e\x00"


def test_no_input_writes_html_into_it(tmp_path: Path) -> None:
    root = tmp_path / "<b onclick=x>run"
    (root / "ledger").mkdir(parents=True)
    sample = {
        "anonymous_bytes": 2**20,
        "file_bytes": -5,
        "cgroup_bytes": 2**21,
        "shared_bytes": "many",
        "odd_bytes": 1e400,
    }
    report = dict.fromkeys(
        ("path", "digest", "saved_mesh", "mesh", "rng", "run_id", "tensors", "bytes_read"), HOSTILE
    )
    report |= {
        "step": 1,
        "differences": [HOSTILE],
        "damaged": {HOSTILE: HOSTILE},
        "documents": {"a": [HOSTILE]},
        "exact": "yes",
    }
    lines: list[Any] = [
        {"kind": "begin", "time_s": 1e300, "rank": -3, "world_size": HOSTILE, "host": HOSTILE, "cgroup": HOSTILE, "t": 0, **sample},
        {"kind": "phase", "id": 1, "name": HOSTILE, "parent": None, "facts": {"step": HOSTILE}, "t": 0.1, **sample},
        {"kind": "phase", "id": 2, "name": "save", "parent": 1, "facts": HOSTILE, "t": 0.2, **sample},
        {"kind": "phase-end", "id": 2, "t": 0.1, "error": HOSTILE, **sample},
        {"kind": "phase-end", "id": 99, "t": 0.1},
        {"kind": "note", "name": "resume", "report": report, "t": 1},
        {"kind": "note", "name": "load", "report": report, "t": 1},
        {"kind": HOSTILE},
        [1, 2],
        "text",
        {"kind": "sample", "t": "now", **sample},
        {"kind": "sample", "t": 1e200, **sample},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "ledger" / "rank-00000.jsonl").write_text(f"{text}[[[[\n{'[' * 100_000}\n\n{{")
    losses = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": float("nan")},
        {"step": HOSTILE, "loss": 1},
        {"step": 3, "loss": float("inf")},
    ]
    (root / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    (tmp_path / "plan.json").write_text(
        json.dumps({"per_rank": [HOSTILE, {"rank": 0}], "model_class": HOSTILE})
    )
    out = write_report([root], tmp_path / "report.html", plan=str(tmp_path / "plan.json"))
    found = Page(out.read_text())
    assert {tag for tag, _ in found.elements} & {"script", "img", "b"} == set()
    assert not [a for _, a in found.elements if any(name.startswith("on") for name in a)]
    assert "<script>alert(1)</script>" in found.text, "it is shown as text"
    assert "\x00" not in out.read_text()
    assert "\u202e" not in out.read_text()
    process = read_process(root / "ledger" / "rank-00000.jsonl")
    assert process is not None
    assert process.skipped_lines == 8


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    """64 ranks and a day of records: most ranks are rows, and few are drawn."""
    for rank in range(64):
        lines = [{"kind": "begin", "time_s": 1e9, "rank": rank, "world_size": 64, "host": "a", "t": 0}]
        lines += [
            {
                "kind": "sample",
                "t": k * 10,
                "anonymous_bytes": (k * 7919 * (rank + 1)) % 2**30,
                "file_bytes": 2**20,
            }
            for k in range(1_500)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text(text)
    out = write_report([tmp_path], tmp_path / "report.html")
    assert out.stat().st_size < 3_000_000
    text = Page(out.read_text()).text
    assert "Drawn: rank 0, and the 5 other ranks with the highest peaks." in text


def test_processes_are_grouped_by_start(finished: Path) -> None:
    (first, second) = find_material([str(finished)]).starts
    assert [p.rank for p in first.processes + second.processes] == [0, 0]
    assert not first.is_whole
    assert second.is_whole
    two = [read_process(Path(first.processes[0].file)), read_process(Path(second.processes[0].file))]
    for rank, process in enumerate(two):
        assert process is not None
        process.rank, process.world_size = rank, 2
    assert [len(start.processes) for start in starts_of(p for p in two if p is not None)] == [2]


def test_the_command(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "per_rank": [{"rank": 0, "shard_bytes": 16640, "bytes_read": 16640}],
                "ranks": 1,
                "model_class": "Net",
            }
        )
    )
    done = run(
        finished / "checkpoints",
        finished / "ledger",
        finished / "run-1" / "loss.jsonl",
        "--out",
        out,
        "--plan",
        plan,
        "--json",
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"path": str(out), "bytes": out.stat().st_size}
    text = Page(out.read_text()).text
    assert "Plan of Net on 1 rank" in text
    assert "Run checkpoints, ledger, loss.jsonl" in text

    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text("{}\n")
    for path, said in (
        (tmp_path / "empty", "holds nothing to report"),
        (tmp_path / "nowhere", "no such file"),
        (tmp_path / "other.jsonl", "neither a ledger nor a loss log"),
    ):
        done = run(path, "--out", out)
        assert (done.exit_code, said in done.stderr) == (1, True), done.output
    with pytest.raises(SourceError, match="is not what"):
        write_report([finished], out, plan=str(tmp_path / "other.jsonl"))
    with pytest.raises(ShardwiseError, match="can't be written"):
        write_report([finished], tmp_path / "no" / "folder.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(finished, "--out", out)
    assert done.exit_code == 1
    assert "pip install 'shardwise[plot]'" in done.stderr
