"""``shardwise report``: what it says of a run, that it is one accessible file, and that no input writes HTML into it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import ShardwiseError, SourceError
from shardwise.fit.records import Amount, Checkpoint, RunPlan, Setup
from shardwise.fit.records import Phase as PlannedPhase
from shardwise.operations.operation import phase
from shardwise.report import records as drawing
from shardwise.report.plots import _peaks
from shardwise.report.records import find_material, read_process, starts_of
from shardwise.report.report import marks_of, render, write_report
from tests.harness.bombs import run_apart
from tests.harness.command import runner

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
    return runner().invoke(main, ["report", *map(str, args)], prog_name="shardwise")


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
    with (
        sw.reports.memory_ledger(root / "ledger") as ledger,
        sw.Checkpointer(root / "checkpoints") as checkpoints,
    ):
        with phase("warm-up"):
            pass
        for step in (1, 2, 3):
            checkpoints.save(state, step)
    cut_in_last_save(ledger.file)
    shutil.rmtree(root / "checkpoints" / "step-00000003")
    with sw.reports.memory_ledger(root / "ledger"), sw.Checkpointer(root / "checkpoints") as checkpoints:
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
        "Run my-run Rank 0 died while saving step 3. The run resumed from step 2 on 1 rank; no saved step was lost. The last launch "
        "finished. Step 3 was trained twice; the losses agree to 0. The newest valid checkpoint is step 4.",
        "newest valid step 4", "launches 2", "crashed 1", "resumes 1 (exact)",
        "died while saving step 3", "finished", "1 step was trained twice; the losses differ by at most 0.",
        "Launch 2: resume from step 2", "bit-exact resume yes, for the state you passed (no dataloader)", "2 model tensors, ",
        "the same on every rank that reports it (1)", "Load efficiency", "in total, the ranks read 16.2 KiB, 1.000 × the model",
        "Memory of rank 0 in launch 1", "Saved steps: 1, 2, 3, 4. Crashed at step: 3. Resumed from step: 2",
        "Size of each stored checkpoint", "warm-up",
    ):  # fmt: skip
        assert said in text, said
    marks = marks_of(find_material([str(finished)]))
    assert [(m.step, m.kind) for m in marks] == [
        (1, "save"), (2, "resume"), (2, "save"), (3, "crash"), (3, "save"), (4, "save"),
    ]  # fmt: skip
    rows = re.findall(r'<tr><th scope="row" class="n">(\d+)</th><td>published</td>', page)
    assert rows == ["1", "2", "3", "4"]


def test_a_checkpoint_without_hashes(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    (tmp_path / "theirs").mkdir()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save(model.state_dict(), tmp_path / "theirs/pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "theirs/optimizer.bin")
    with sw.reports.memory_ledger(tmp_path / "ledger"):
        sw.restore(sw.TrainState(model, optimizer), tmp_path / "theirs")
    text = Page(write_report([tmp_path], tmp_path / "report.html").read_text()).text
    assert "saved by an unknown number of ranks (not recorded)" in text
    assert "hashes compared none: the checkpoint has none; restored unchecked: 2 model tensors, 0" in text
    assert "hash of everything –" in text


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
    for svg in drawings:
        assert svg["role"] == "img"
        title, description = str(svg["aria-labelledby"]).split()
        assert f'<title id="{title}">' in page
        assert f'<desc id="{description}">' in page
        assert "width" not in svg
        assert "viewbox" in svg
    assert len(found.all("caption")) == len(found.all("table")) > 4
    assert all("scope" in cell for cell in found.all("th"))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
    for region in (a for tag, a in found.elements if tag == "div" and a.get("role") == "region"):
        assert region["tabindex"] == "0"
        assert region["aria-label"]
    assert not re.search(r"#0000[ef]\d", page), "a color of matplotlib that the page does not replace"


def ledger_of(folder: Path, rank: int, *records: dict[str, Any], began_s: float = 1e9) -> None:
    """A ledger of one of two ranks."""
    begin = {
        "kind": "begin",
        "time_s": began_s,
        "rank": rank,
        "world_size": 2,
        "t": 0,
        "anonymous_bytes": 2**20,
    }
    lines = [json.dumps(record) for record in (begin, *records)]
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank:05d}-{began_s:.0f}.jsonl").write_text("\n".join(lines) + "\n")


def red(page: str) -> list[str]:
    return re.findall(r'<span class="bad">(.*?)</span>', page)


def test_only_the_rank_that_a_crash_began_with_is_red(tmp_path: Path) -> None:
    """The launcher stops the others, whose records end later; an error says by itself whose crash it was."""
    save = {"kind": "phase", "t": 1, "id": 1, "name": "save", "facts": {"step": 24}, "anonymous_bytes": 2**20}
    sample = {"kind": "sample", "t": 2, "anonymous_bytes": 2**20}
    killed = tmp_path / "killed"
    ledger_of(killed, 0, save, {**sample, "t": 2.5})
    ledger_of(killed, 1, save, sample)
    page = write_report([killed], tmp_path / "a.html").read_text()
    text = Page(page).text
    assert "Rank 1 died while saving step 24 or is still running." in text
    assert "was stopped while saving step 24" in text
    assert red(page) == ["died while saving step 24"]
    assert '<p class="conclusion bad">' in page
    drawn = re.findall(
        r'<svg role="img" aria-labelledby="memory-1-(\d)-(?:wide|narrow)-t.*?</svg>', page, re.DOTALL
    )
    assert drawn == ["0", "0", "1", "1"]
    for rank in "01":
        (wide,) = re.findall(
            rf'<svg role="img" aria-labelledby="memory-1-{rank}-wide-t.*?</svg>', page, re.DOTALL
        )
        assert ("var(--bad)" in wide) == (rank == "1")

    failed = tmp_path / "failed"
    ledger_of(failed, 0, sample)
    ledger_of(failed, 1, {**sample, "t": 3}, {"kind": "end", "t": 3.1, "error": "ValueError: no."})
    page = write_report([failed], tmp_path / "b.html").read_text()
    assert "Rank 1 failed: ValueError: no." in Page(page).text
    assert red(page) == ["failed: ValueError: no."]


def test_a_damaged_step_is_in_the_conclusion(finished: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(finished / "checkpoints", tmp_path / "steps"))
    file = next((root / "step-00000004/model").glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    page = write_report([root], tmp_path / "a.html").read_text()
    assert "The newest valid checkpoint is step 3. Step 4 is damaged." in Page(page).text
    assert '<p class="conclusion bad">' in page


def plan_of(path: Path, phases: dict[str, tuple[int, int]]) -> Path:
    """A plan of one rank, as ``shardwise plan --json`` prints it, with these bytes on the host in addition to the process: planned,
    and at most; the process is planned with 1 MiB to 2."""
    amounts = {
        n: (
            Amount("process", "host", 2**20, 2**21, ""),
            Amount("parameters", "host", a, b, ""),
            Amount("files", "page cache", 1, 1, ""),
        )
        for n, (a, b) in phases.items()
    }
    run = RunPlan(
        phases=tuple(PlannedPhase(name, of) for name, of in amounts.items()),
        setup=Setup(
            optimizer="sgd", parameters=("float32",), trained=("float32",), compute="float32", reductions="float32",
            optimizer_states=(), batch_size=1, sequence_length=1, bytes_per_s=1e9,
        ),
        nodes=1, ranks_per_host=1, is_unified=False, largest_gather_bytes=0, largest_reduce_bytes=0, network=(), files=(),
        checkpoint=Checkpoint(nbytes=0, files=0, seconds=0.0, requests=0, kept=3), assumptions=(),
    )  # fmt: skip
    document = {"per_rank": [], "ranks": 1, "model_class": "Linear", "run": run.to_json()}
    path.write_text(json.dumps(document))
    return path


def test_the_phases_of_a_plan_and_the_measured_ones(finished: Path, tmp_path: Path) -> None:
    """The process is measured before its model, and each bar begins there."""
    MIB = 2**20

    def record(t: float, kind: str, anonymous: int, peak: int = 0, **more: Any) -> dict[str, Any]:
        return {
            "kind": kind,
            "t": t,
            "anonymous_bytes": anonymous * MIB,
            "peak_anonymous_bytes": peak * MIB,
            **more,
        }

    run = tmp_path / "ledger"
    records = [record(1, "phase", 300, id=1, name="load"), record(2, "phase-end", 340, 350, id=1)]
    records += [record(3, "phase", 350, id=2, name="save"), record(4, "phase-end", 350, 500, id=2)]
    records += [record(5, "phase", 350, id=3, name="export"), record(6, "phase-end", 350, 310, id=3)]
    ledger_of(run, 0, *records)
    (only,) = run.iterdir()
    only.write_text(only.read_text().replace('"world_size": 2', '"world_size": 1'))
    phases = {
        "load": (40 * MIB, 60 * MIB),
        "save, sync": (100 * MIB, 120 * MIB),
        "export": (20 * MIB, 400 * MIB),
    }
    phases |= {"first step": (2**20, 2**21), "resume": (1, 1)}
    plan = plan_of(tmp_path / "plan.json", phases)
    document = json.loads(plan.read_text())
    for entry in document["run"]["phases"]:
        entry["amounts"][0]["upper_bytes"] = 350 * MIB
    plan.write_text(json.dumps(document))
    text = Page(write_report([run], tmp_path / "a.html", plan=str(plan)).read_text()).text
    assert "Plan of Linear on 1 rank" in text
    assert "load 300 MiB 340 MiB 410 MiB 350 MiB within the plan 1 0" in text
    assert "save, sync 300 MiB 400 MiB 470 MiB 500 MiB ABOVE the plan 1 0" in text
    assert "export 300 MiB 320 MiB 750 MiB 310 MiB below the plan 1 0" in text
    assert "Planned but not measured: resume." in text
    # Beside the run it needs no option; what is no plan is passed by.
    (finished / "plan-other.json").write_text('{"ranks": 1}')
    shutil.copy(plan, finished)
    try:
        found = find_material([str(finished)]).plans
    finally:
        for file in finished.glob("plan*.json"):
            file.unlink()
    assert found == [document]


def test_text_in_drawings_is_legible(page: str) -> None:
    """At the page's widths, 13 px for legends, 12 for words on bars."""
    widths = {"wide": 54 * 16, "narrow": 390 - 32}
    for form, shown in widths.items():
        drawings = re.findall(rf'<svg role="img" aria-labelledby="[\w-]+-{form}-t.*?</svg>', page, re.DOTALL)
        assert drawings
        for svg in drawings:
            (width,) = re.findall(r'viewBox="0 0 ([\d.]+)', svg)
            sizes = [float(one) for one in re.findall(r"font-size: ([\d.]+)px", svg)]
            assert min(sizes) * shown / float(width) > (12 if form == "wide" else 10.5)


def test_steps_are_what_lies_outside_of_operations(tmp_path: Path) -> None:
    """Also where a phase of the caller's own has a save in it; and peaks of devices by phase."""
    MIB = 2**20

    def record(t: float, kind: str, anonymous: int, peak: int = 0, high: int = 1, **more: Any) -> str:
        device = {"device_allocated_bytes": MIB, "device_high_water_bytes": high * MIB}
        host = {"anonymous_bytes": anonymous * MIB, "peak_anonymous_bytes": peak * MIB}
        return json.dumps({"kind": kind, "t": t, **host, **device, **more}) + "\n"

    lines = [
        record(0, "begin", 10, time_s=1e9, rank=0, world_size=1),
        record(1, "phase", 10, 900, id=1, name="load"),
        record(2, "phase-end", 20, 800, high=3, id=1),
        record(3, "sample", 50, 100, high=3),
        record(4, "phase", 60, 150, high=3, id=2, name="save"),
        record(4.5, "sample", 60, 700, high=9),
        record(5, "phase-end", 60, 700, high=9, id=2),
        record(6, "sample", 50, 200, high=9),
        record(7, "phase", 50, 60, high=9, id=3, name="epoch"),
        record(8, "phase", 50, 60, high=9, id=4, name="save", parent=3),
        record(9, "phase-end", 50, 700, high=9, id=4),
        record(10, "phase-end", 50, 700, high=9, id=3),
        record(11, "phase", 50, 60, high=9, id=5, name="resume"),
        record(12, "phase-end", 50, 900, high=9, id=5),  # without a report: it found nothing
        record(13, "phase", 50, 60, high=9, id=6, name="resume"),
        record(14, "phase-end", 50, 400, high=9, id=6),
        json.dumps({"kind": "note", "t": 14, "name": "resume", "report": {}}) + "\n",
    ]
    (tmp_path / "rank-00000.jsonl").write_text("".join(lines))
    process = read_process(tmp_path / "rank-00000.jsonl")
    assert process is not None
    found = {(p.phase, p.where): p.nbytes // MIB for p in _peaks(starts_of([process]))}
    assert found == {
        ("load", "host"): 800, ("load", "device"): 3, ("save, sync", "host"): 700, ("save, sync", "device"): 9,
        ("steps", "host"): 200, ("steps", "device"): 1, ("resume", "host"): 400, ("resume", "device"): 1,
    }  # fmt: skip


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def blended(color: str, paper: str, alpha: float) -> str:
    pairs = [(int(color[k : k + 2], 16), int(paper[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(alpha * a + (1 - alpha) * b):02x}" for a, b in pairs)


def test_text_and_drawings_have_contrast(page: str) -> None:
    """Light, dark and printed: 4.5 for text, also on the bars of phases, and 3 for what is drawn (WCAG 2.2, AA)."""
    style = page[page.index("<style>") : page.index("</style>")]
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#\w+)", one)) for one in roots]
    assert len(schemes) == 3
    assert {"currentColor", *(f"var(--{name})" for name in schemes[0])} >= set(drawing.COLORS.values())
    for short in schemes:
        assert short.keys() == schemes[0].keys()
        found = {n: "#" + "".join(c * (1 if len(v) == 7 else 2) for c in v[1:]) for n, v in short.items()}
        paper = found["paper"]
        for name in ("ink", "soft", "link", "good", "bad"):
            for under in ("paper", "panel"):
                assert contrast(found[name], found[under]) >= 4.5, (name, under, found)
        for name in ("load", "save", "resume", "export", "other", "bad"):
            outer, within = (blended(found[name], paper, alpha) for alpha in drawing.BAR_ALPHAS)
            assert contrast(found["on-bar"], outer) >= 4.5, (name, found)
            assert contrast(found["ink"], within) >= 4.5, (name, found)
            assert contrast(found[name], paper) >= 3, (name, found)
        for name in ("anonymous", "shared", "file"):
            assert contrast(blended(found[name], paper, drawing.AREA_ALPHA), paper) >= 3, (name, found)
        assert contrast(found["device"], paper) >= 3


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
        json.dumps(
            {
                "per_rank": [HOSTILE, {"rank": 0}],
                "model_class": HOSTILE,
                "ranks": 0,
                "run": {
                    "phases": [
                        HOSTILE,
                        {"name": HOSTILE, "amounts": [HOSTILE, {"where": "host", "nbytes": -1}]},
                    ]
                },
            }
        )
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


def _pipe(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def _link_to_zeros(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/zero")


def _lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


_DEEP = "[" * 900 + "]" * 900
_BEGIN = '{"kind":"begin","rank":0,"world_size":1,"time_s":1,"anonymous_bytes":1}'
_FIELDS = (
    "step",
    "rank",
    "bytes_read",
    "seconds_read",
    "local_bytes",
    "model_bytes",
    "exact",
    "digest",
    "is_published",
)


def _notes(value: str) -> Iterator[str]:
    """Reports with ``value`` in all fields, or in all but one."""
    for other in (None, *_FIELDS):
        report = ",".join(f'"{name}":{1 if name == other else value}' for name in _FIELDS)
        for name in ("load", "resume", "restore", "save"):
            yield f'{{"kind":"note","name":"{name}","t":1,"report":{{{report}}}}}'


#: What no run wrote: where in a run's directory, what makes it, and whether it is refused.
ODD: dict[str, tuple[str, Callable[[Path], None], bool]] = {
    "a pipe for a ledger": ("ledger/rank-00000.jsonl", _pipe, True),
    "zeros without end for a ledger": ("ledger/rank-00000.jsonl", _link_to_zeros, True),
    "a pipe for a plan": ("plan.json", _pipe, False),
    "zeros without end for a plan": ("plan.json", _link_to_zeros, False),
    "a directory for a plan": ("plan.json", Path.mkdir, False),
    "a deep plan": ("plan.json", lambda p: _lines(p, ['{"per_rank": [], "ranks": 1, "model_class": ' + _DEEP + "}"]), False),
    "ranks of a plan that are lists": ("plan.json", lambda p: _lines(p, ['{"per_rank": [{"rank": [1]}, {"rank": {}}], "ranks": 1}']), False),
    "deep records": ("ledger/rank-00001.jsonl", lambda p: _lines(p, ['{"kind":"begin","host":' + _DEEP + "}"]), False),
    **{
        f"{value[:9]} in all fields": ("ledger/rank-00001.jsonl", lambda p, value=value: _lines(p, [_BEGIN, *_notes(value)]), False)  # type: ignore[misc]
        for value in ("[1]", "{}", "9" * 4000, "1e308", "NaN", '"x"')
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
@pytest.mark.processes
def test_odd_input_is_read_or_refused(case: str, tmp_path: Path) -> None:
    where, make, is_refused = ODD[case]
    root = tmp_path / "run"
    _lines(root / "loss.jsonl", [])
    _lines(root / "ledger" / "rank-00002.jsonl", [_BEGIN, '{"kind":"note","name":"load","t":1,"report":{}}'])
    make(root / where)
    outcome = run_apart(lambda: write_report([root], tmp_path / "a.html"), seconds=10)
    assert outcome.kind == ("SourceError" if is_refused else "done"), outcome
    if is_refused:
        assert where in outcome.text


@pytest.mark.nightly
@pytest.mark.processes
def test_many_samples_take_little_memory(tmp_path: Path) -> None:
    """Peaks, the last time and sums stay what they were."""
    path = tmp_path / "rank-00000.jsonl"
    most = 400_000
    _lines(
        path,
        [
            _BEGIN,
            *(
                f'{{"kind":"sample","t":{k},"read_bytes":{k},"anonymous_bytes":{k ^ 4096}}}'
                for k in range(most)
            ),
        ],
    )

    def read() -> None:
        process = read_process(path)
        assert process is not None
        assert process.last_t == most - 1
        assert process.peak("anonymous") == max(k ^ 4096 for k in range(most))
        assert process.samples[-1].get("read_bytes") == most - 1
        times = [sample.t for sample in process.samples]
        assert times == sorted(times)

    outcome = run_apart(read, seconds=30)
    assert outcome.kind == "done", outcome
    assert outcome.mbytes < 100, outcome


@pytest.mark.nightly
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


def test_a_file_of_a_run_stands_for_itself(tmp_path: Path) -> None:
    """What the HF Trainer printed, with a second start in it, and its list of losses."""
    log = tmp_path / "train.log"
    lines = [f"{{'loss': '{2 - k / 10}', 'epoch': '{k / 10}'}}" for k in range(1, 7)]
    ends = "{'train_runtime': '1.2', 'train_steps_per_second': '5.0', 'train_loss': '1.7', 'epoch': '0.4'}"
    log.write_text("\n".join([*lines[:4], ends, *lines[4:]]))
    material = find_material([str(log)])
    (found,) = material.losses
    assert found.points == {k: pytest.approx(2 - k / 10) for k in range(1, 7)}
    assert [(m.step, m.kind) for m in marks_of(material)] == [(4, "resume")]
    text = Page(render(material)).text
    assert (
        "names no steps: its losses are numbered in their order; it tells of a resume after step 4." in text
    )

    log.write_text(
        "step 10 loss=2.5\nstep 20: loss: 2.25\nResumed from step-00000020\n{'loss': 2.0, 'step': 30}\nloss: nan step 40\n"
    )
    (found,) = find_material([str(log)]).losses
    assert (found.points, found.names_steps, found.resumes) == ({10: 2.5, 20: 2.25, 30: 2.0}, True, (20,))

    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"loss": 2.5, "step": 1}, {"loss": 2.25, "step": 2}]}))
    for path in (state, tmp_path):
        (found,) = find_material([str(path)]).losses
        assert (found.file, found.points) == (str(state), {1: 2.5, 2: 2.25})


def test_a_log_and_the_trainers_state_of_one_run_are_one_training(tmp_path: Path) -> None:
    """transformers prints four significant digits and strips zeros; other programs print decimals."""
    losses = {step: 12.3456789 / step for step in range(10, 70, 10)}
    points = [{"loss": loss, "step": step} for step, loss in losses.items()]
    state, log = tmp_path / "trainer_state.json", tmp_path / "train.log"
    state.write_text(json.dumps({"log_history": points}))
    other = tmp_path / "loss.jsonl"
    other.write_text("".join(json.dumps({**point, "loss": point["loss"] + 0.01}) + "\n" for point in points))
    for form in (".4g", ".3f"):
        lines = [f"{{'loss': '{loss:{form}}', 'step': {step}}}" for step, loss in losses.items()]
        log.write_text("\n".join([*lines[:4], "Resuming from checkpoint-45", *lines[4:]]))
        text = Page(render(find_material([str(state), str(log)]))).text
        assert "trained twice" not in text
        assert f"{log} tells of a resume after step 40; it prints the losses in {state}." in text
        assert "Losses from 2 logs, from step 10 to 60" in text
        assert "Resumed from step: 40" in text
        for another in ((log, other), (state, other)):
            text = Page(render(find_material([str(path) for path in another]))).text
            assert "6 steps (10 to 60) were trained twice" in text
    # Steps that a log doesn't name aren't compared.
    log.write_text("\n".join(f"loss: {k}.5" for k in range(70)))
    assert "trained twice" not in Page(render(find_material([str(state), str(log)]))).text


def test_a_resume_that_a_log_tells_of_began_at_a_checkpoint(tmp_path: Path) -> None:
    """Losses are logged every 10 steps; the run crashed after step 40, and resumed from step 35."""
    log = tmp_path / "train.log"
    steps = [10, 20, 30, 40]
    lines = [f"step {step} loss=2.5" for step in steps]
    log.write_text("\n".join([*lines, "Resuming from the newest checkpoint", "step 40 loss=2.5"]))
    (found,) = find_material([str(log)]).losses
    assert found.resumes == (30,)
    for step in (20, 35):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    material = find_material([str(log), str(tmp_path / "out")])
    assert [m.step for m in marks_of(material) if m.kind == "resume"] == [35]
    assert Page(render(material)).text.count("not checked, without an optimizer") == 2


def test_a_checkpoint_of_a_model_alone_is_not_called_whole(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(sw.TrainState(model=torch.nn.Linear(2, 2)), 1)
    text = Page(render(find_material([str(tmp_path)]))).text
    assert "1 published valid, without an optimizer" in text
    assert "whole" not in text


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
        (tmp_path / "other.jsonl", "contains no losses: expected a ledger"),
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
