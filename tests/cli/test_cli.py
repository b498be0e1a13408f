"""The command line: what it says, in which status it ends, and that it never ends in a traceback."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result
from rich.console import Console
from safetensors.torch import load_file, save_file

from shardwise import Checkpointer, TrainState, load_pretrained, save
from shardwise.catalog.records import StoredTensor
from shardwise.cli import main
from shardwise.cli import render as inspection
from shardwise.cli.program import byte_count, tree_of
from shardwise.cli.render import size
from shardwise.doctor.rules import RULES
from shardwise.operations.host_budget import host_budget
from tests.harness.command import runner
from tests.harness.models import sparse_file
from tests.loading.test_plan_promises import make_model

SCRIPT = Path(sys.executable).with_name("shardwise")


def run(*args: object) -> Result:
    return runner().invoke(main, [str(a) for a in args], prog_name="shardwise")


def run_json(*args: object, status: int = 0) -> Any:
    """The command's one document; ``--json`` is given."""
    result = run(*args, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def start(*args: object, launch: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """A process of its own: ``python -m shardwise …``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, *launch, "-m", "shardwise", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def check_paragraph(result: Result, *words: str, status: tuple[int, ...] = (1, 2)) -> None:
    """One paragraph on stderr, nothing on stdout, a status that says so."""
    assert result.exit_code in status, result.output
    assert result.stdout == ""
    paragraph = result.stderr.strip("\n")  # click ends the line that ^C stands in
    assert paragraph.startswith("error: ")
    assert "Traceback" not in paragraph
    assert "\n\n" not in paragraph
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "qwen")


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with steps 10 and 20, with AdamW state."""
    root = tmp_path_factory.mktemp("cli") / "steps"
    live = load_pretrained(model)
    optimizer = torch.optim.AdamW(live.parameters())
    live(torch.arange(8)[None]).logits.float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with Checkpointer(root) as checkpointer:
        for step in (10, 20):
            checkpointer.save(TrainState(model=live, optimizer=optimizer), step)
    return root


@pytest.fixture
def steps(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved`` to damage."""
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "steps"))


def slice_file(step: Path) -> Path:
    return next((step / "model").glob("*.safetensors"))


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


# ----------------------------------------------------------------------------------------------------
# inspect


def test_inspect_a_source(model: Path) -> None:
    document = run_json("inspect", model)
    assert (document["kind"], document["files"], document["tensors"]) == ("safetensors", 2, 36)
    assert document["dtypes"] == {"BF16": document["tensor_bytes"]}
    assert document["file_bytes"] > document["tensor_bytes"]
    assert sum(node["nbytes"] for node in document["tree"]) == document["tensor_bytes"]
    shown = run("inspect", model)
    assert shown.exit_code == 0
    assert "[0-2] x 3" in shown.stdout
    assert "q_proj.weight  BF16 [32, 32]" in shown.stdout


def test_inspect_names_ignored_files(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    save_file({"old": torch.zeros(2)}, tmp_path / "old.safetensors")
    assert run_json("inspect", tmp_path)["ignored_files"] == ["old.safetensors"]
    assert "old.safetensors" in run("inspect", tmp_path).stdout


def test_inspect_a_checkpoint(saved: Path) -> None:
    document = run_json("inspect", saved / "step-00000020")
    assert (document["kind"], document["step"], document["parent_step"]) == ("checkpoint", 20, 10)
    assert (document["world_size"], document["tensors"], document["problems"]) == (1, 36, [])
    assert document["software"]["torch"] == torch.__version__
    assert [use["tensors"] for use in document["geometries"]] == [36]
    states = {s["name"]: s for s in document["optimizer_states"]}
    assert states.keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert states["exp_avg"]["state_bytes"] == document["tensor_bytes"]
    assert states["step"] | {"state_bytes": 36 * 4, "dtypes": ["F32"]} == states["step"]
    shown = run("inspect", saved / "step-00000020")
    assert shown.exit_code == 0
    assert document["run_id"] in shown.stdout


def test_inspect_a_directory_of_steps(steps: Path) -> None:
    document = run_json("inspect", steps)
    assert [(s["step"], s["ok"], s["parent_step"]) for s in document["steps"]] == [
        (20, True, 10),
        (10, True, None),
    ]
    truncate(slice_file(steps / "step-00000020"))
    (steps / "step-00000010" / "manifest.json").unlink()
    (steps / "step-00000030.superseded-0a").mkdir()
    (steps / ".tmp-step-00000040-0b0b0b0b0b0b0b0b").mkdir()
    document = run_json("inspect", steps, status=1)
    assert "truncated" in document["steps"][0]["problem"]
    assert "no manifest.json" in document["steps"][1]["problem"]
    (aside,) = document["set_aside"]
    assert (aside["step"], aside["fate"], aside["ok"]) == (30, "superseded", False)
    assert document["leftovers"] == [".tmp-step-00000040-0b0b0b0b0b0b0b0b"]
    shown = run("inspect", steps)
    assert shown.exit_code == 1
    assert shown.stdout.count("damaged") == 3
    assert "superseded" in shown.stdout


def test_the_history_of_a_run_that_went_back(steps: Path) -> None:
    """It resumed from step 10 because 20 was damaged, saved 15, and was told to go back to 10 again."""
    flip(slice_file(steps / "step-00000020"), 300)  # in the header, which the quick check compares
    (problem,) = (s["problem"] for s in run_json("inspect", steps, status=1)["steps"] if not s["ok"])
    assert "header differs from its checksum" in problem
    model = next(iter(steps.glob("step-00000010/model")))
    for expected, saved in ((10, 15), (10, 17)):
        live = load_pretrained(model)
        state = TrainState(model=live)
        with Checkpointer(steps) as checkpointer:
            report = checkpointer.resume(state, step=None if saved == 15 else 10)
            assert report is not None
            assert report.step == expected
            checkpointer.save(state, saved)
    document = run_json("inspect", steps)
    assert [(s["step"], s["parent_step"], s["fate"]) for s in document["steps"]] == [
        (17, 10, "published"),
        (10, None, "published"),
    ]
    assert [(s["step"], s["fate"], s["ok"]) for s in document["set_aside"]] == [
        (20, "damaged", False),
        (15, "superseded", True),
    ]
    times = [s["written"] for s in (*document["steps"], *document["set_aside"])]
    assert all(datetime.fromisoformat(t).tzinfo is not None for t in times)
    assert len({s["run_id"] for s in document["steps"]}) == 1
    lines = [line.split() for line in run("inspect", steps).stdout.splitlines()]
    assert ["ok:", "manifest,", "headers,", "and", "sizes"] in [line[:5] for line in lines], (
        "what was checked"
    )
    rows = [(line[0], line[1], line[2]) for line in lines if line and line[0] in ("10", "15", "17", "20")]
    assert rows == [
        ("20", "damaged", "damaged"),
        ("17", "ok", "published"),
        ("15", "ok", "superseded"),
        ("10", "ok", "published"),
    ]


def test_inspect_finds_lost_files_of_a_checkpoint(steps: Path) -> None:
    step = steps / "step-00000010"
    lost = slice_file(step)
    lost.unlink()
    (problem,) = run_json("inspect", step, status=1)["problems"]
    assert problem.startswith(f"model/{lost.name}: lost")
    assert "problem: " in run("inspect", step).stdout


def test_inspect_where_only_set_aside_steps_are_left(tmp_path: Path) -> None:
    (tmp_path / "step-00000030.damaged-0a").mkdir()
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert "no published step" in result.stdout


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    deep = ".".join("a" * 500)
    names = ["[bold]x[/bold]", "esc\x1b[2J.w", "x.weight", ":smile:", "", ".", "9" * 1000, "ünï.w", deep]
    _write_names(tmp_path, names)
    assert run_json("inspect", tmp_path)["tensors"] == len(names)
    result = run("inspect", tmp_path)
    assert result.exit_code == 0, result.output
    assert "[bold]x[/bold]" in result.stdout
    assert "\x1b" not in result.stdout
    assert ":smile:" in result.stdout


@pytest.mark.parametrize(("name", "why"), [("9" * 5000, "limit is 1024"), ("ünï.\ud800", "no Unicode text")])
def test_names_that_are_none_are_refused(tmp_path: Path, name: str, why: str) -> None:
    _write_names(tmp_path, ["x.weight", name])
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert why in result.stderr


def _write_names(folder: Path, names: list[str]) -> None:
    header = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))


def test_tree_folds_only_what_is_alike() -> None:
    def stored(name: str, *shape: int) -> StoredTensor:
        return StoredTensor(name, "F32", shape, ())

    names = [stored(f"h.{i}.w", 2) for i in (0, 1, 2, 4, 10)] + [stored("h.3.w", 5), stored("h", 1)]
    leaf, module = tree_of(names)
    assert (leaf.name, leaf.shape, leaf.nbytes) == ("h", (1,), 4)
    assert [(n.name, n.copies, n.nbytes) for n in module.children] == [("0-2,4,10", 5, 40), ("3", 1, 20)]
    assert (module.tensors, module.nbytes) == (6, 60)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**20 // 2, "1.50 MiB"),
        (13 * 2**30, "13.0 GiB"),
        (500 * 2**30, "500 GiB"),
        (2**63, "8192 PiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# ----------------------------------------------------------------------------------------------------
# plan


def test_plan(model: Path) -> None:
    document = run_json("plan", model, "--ranks", 4, "--replicas", 2)
    assert [c["rank"] for c in document["per_rank"]] == [0, 1, 2, 3]
    assert document["total_shard_bytes"] == 2 * document["model_bytes"]
    assert document["largest_group"]["name"] == "model.layers.0"
    shown = run("plan", model, "--ranks", 4, "--replicas", 2)
    assert shown.exit_code == 0
    assert "2 replicas x 2 shards" in shown.stdout
    assert "verified:" in shown.stdout
    wide = run_json("plan", model, "--ranks", 100, "--dtype", "float32")
    assert [c["rank"] for c in wide["per_rank"]] == [0, 99]
    assert wide["model_bytes"] == 2 * document["model_bytes"]


def test_plan_of_a_config_alone(model: Path, tmp_path: Path) -> None:
    """A directory or a file, with and without options of a training."""
    config = tmp_path / "config.json"
    config.write_bytes((model / "config.json").read_bytes())
    expected = run_json("plan", model, "--ranks", 4)["total_shard_bytes"]
    for path in (tmp_path, config):
        assert run_json("plan", path, "--ranks", 4)["total_shard_bytes"] == expected
        shown = run("plan", path, "--ranks", 4, "--fit", "80GiB")
        assert shown.exit_code == 0
        assert "from its config alone" in shown.stdout


@pytest.mark.parametrize("option", ["--fit", "--host", "--bandwidth"])
def test_memory_without_a_unit_is_refused_where_it_is_tiny(model: Path, option: str) -> None:
    found = run("plan", model, "--ranks", 4, option, "80")
    assert found.exit_code == 2
    assert "80 without a unit is 80 bytes; did you mean 80GiB?" in found.stderr
    assert run("plan", model, "--ranks", 4, option, str(80 * 1024**3)).exit_code == 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
def test_plan_of_a_training(model: Path) -> None:
    asked = (
        "plan",
        model,
        "--ranks",
        4,
        "--batch-size",
        2,
        "--sequence-length",
        64,
        "--reduce-dtype",
        "float32",
    )
    document = run_json(*asked)
    steady = next(p for p in document["run"]["phases"] if p["name"] == "steady state")
    assert {"parameters", "optimizer state", "activations"} <= {a["what"] for a in steady["amounts"]}
    shown = run(*asked, "--fit", "80GiB", "--explain")
    assert shown.exit_code == 0
    assert "save, async" in shown.stdout
    assert shown.stdout.startswith("Fits: each device needs at most "), shown.stdout
    assert "trained elements of the rank" in shown.stdout
    small = run(*asked, "--fit", "1MiB", "--host", "1MiB")
    assert small.exit_code == 1
    assert small.stdout.startswith("Does not fit: ")
    assert "None of the changes that were tried would make it fit." in small.stdout.splitlines()[0]
    large = (*asked[:5], 256, "--sequence-length", 256)
    needed = run_json(*large)["run"]["device_bytes"]
    changed = run(*large, "--fit", f"{needed * 9 // 10}B")
    assert changed.exit_code == 1, changed.output
    first, planned, _, second, third, *_ = changed.stdout.splitlines()
    assert first.startswith("Does not fit: ")
    assert planned.startswith("Planned: adamw; parameters bfloat16")
    assert second == "It would fit with one of these changes:"
    assert re.fullmatch(r"  .+: .+ per device, .+ per host", third)
    assert run_json("plan", model, "--ranks", 4)["run"] is None


def test_plan_says_what_it_planned_before_everything_else(model: Path) -> None:
    """The dtypes above all: without an option they are the model's own."""
    answer, planned, other, *_ = run("plan", model, "--fit", "80GiB").stdout.splitlines()
    assert answer.startswith("1 GPU: ")
    assert planned == (
        "Planned: adamw; parameters bfloat16 (the model's own dtype; --dtype changes it), compute bfloat16, reductions bfloat16, "
        "optimizer states bfloat16; 1 x 2048 tokens per rank; storage at 1 GB/s"
    )
    options = other.partition(": ")[2].split()
    asked = ("--optimizer", "momentum", "--batch-size", 2, "--sequence-length", 64, "--bandwidth", "2.5GB")
    planned, path, *_ = run("plan", model, "--ranks", 4, *options, *asked).stdout.splitlines()
    assert planned == (
        "Planned: momentum; parameters float32, compute bfloat16, reductions float32, optimizer states float32; 2 x 64 tokens per "
        "rank; storage at 2.5 GB/s"
    )
    assert path == str(model)
    setup = run_json("plan", model, "--ranks", 4, "--optimizer", "sgd")["run"]["setup"]
    assert (setup["parameters"], setup["optimizer_states"]) == (["bfloat16"], [])
    load, *_ = run("plan", model, "--ranks", 4).stdout.splitlines()
    assert load.startswith("Planned: loading only, in BF16 (the model's own dtype; --dtype changes it)")


def test_messages_of_other_packages_are_not_shown(model: Path) -> None:
    """torchao and bitsandbytes say on import which of their extensions can't be loaded."""
    status, _, err = finish(start("plan", model, "--ranks", 2, "--batch-size", 1))
    assert (status, err) == (0, "")


def test_plan_says_what_all_checkpoints_of_a_run_take(model: Path) -> None:
    asked = ("plan", model, "--ranks", 4, "--keep-last", 5)
    run_plan = run_json(*asked)["run"]
    assert run_plan["run_storage_bytes"] == 6 * run_plan["checkpoint"]["nbytes"]
    line = f"all checkpoints: {size(run_plan['run_storage_bytes'])} with keep_last=5, including the one being written"
    assert line in run(*asked).stdout.splitlines()


def test_plan_shows_ranks_that_are_alike_as_one_row(model: Path) -> None:
    shown = run("plan", model, "--ranks", 8).stdout
    per_rank = run_json("plan", model, "--ranks", 8)["per_rank"]
    numbers = [(r["shard_bytes"], r["bytes_read"], r["staging_bytes"]) for r in per_rank]
    rows = re.findall(r"^ *(\d)(?:-(\d))?  .*B *$", shown, re.MULTILINE)
    assert len(rows) == len({*numbers}) < 8
    assert sorted(k for a, b in rows for k in range(int(a), int(b or a) + 1)) == list(range(8))


def test_plan_says_what_the_host_has(model: Path) -> None:
    document = run_json("plan", model, "--ranks", 4)
    host, needed = document["host"], [c["shard_bytes"] + c["staging_bytes"] for c in document["per_rank"]]
    assert host["fits"]
    assert host["budget"]["limit_bytes"] >= host["budget"]["free_bytes"] > 0
    assert (host["ranks"], host["device"], host["needed_bytes"]) == (4, "cpu", sum(needed))
    two = run_json("plan", model, "--ranks", 4, "--nodes", 2)["host"]
    assert (two["ranks"], two["needed_bytes"]) == (2, sum(sorted(needed)[-2:]))
    assert "this host" not in run("plan", model, "--ranks", 4).stdout, "it is about the hosts of the run"
    shown = run("plan", model, "--ranks", 4, "--device", "cpu")
    assert f"({host['budget']['limit_from']})" in shown.stdout
    assert f"needs {size(host['needed_bytes'])} for 4 ranks on cpu" in shown.stdout
    assert "warning" not in shown.stdout


def test_plan_warns_of_a_load_that_does_not_fit_on_the_host(tmp_path: Path) -> None:
    """A model of headers alone, twice as large as the host's memory."""
    path = make_model(tmp_path / "large", num_hidden_layers=6)
    config = json.loads((path / "config.json").read_text())
    budget = host_budget()
    assert budget is not None
    wide, narrow = budget.limit_bytes // 8 // (2 * config["hidden_size"]), config["intermediate_size"]
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": wide}))
    (path / "model.safetensors.index.json").unlink()
    stored = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
        file.unlink()
    shapes = {name: [wide if n == narrow else n for n in t.shape] for name, t in stored.items()}
    sparse_file(path / "model.safetensors", shapes)
    result = run("plan", path, "--ranks", 2, "--device", "cpu")
    assert result.exit_code == 0
    assert "warning: loading 2 ranks on cpu of this host needs" in result.stdout
    assert not run_json("plan", path, "--ranks", 2)["host"]["fits"]
    assert run_json("plan", path, "--ranks", 8, "--nodes", 8)["host"]["fits"]


def test_plan_prints_why_a_load_can_not_be_proved(tmp_path: Path) -> None:
    path = make_model(tmp_path / "lost")
    file = path / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    name, _ = tensors.popitem()
    save_file({**tensors, **{f"extra{i}": torch.zeros(1) for i in range(40)}}, file)
    (path / "model.safetensors.index.json").unlink()
    result = run("plan", path, "--ranks", 2)
    check_paragraph(result, "more (--json lists all)", status=(1,))
    error = run_json("plan", path, "--ranks", 2, status=1)["error"]
    assert error["type"] == "PlanError"
    assert len(error["problems"]) == 41
    assert any(name in problem for problem in error["problems"])


# ----------------------------------------------------------------------------------------------------
# verify, export, demo


def test_verify(saved: Path) -> None:
    document = run_json("verify", saved / "step-00000010")
    assert (document["ok"], document["step"], document["problems"]) == (True, 10, [])
    document = run_json("verify", saved)
    assert [(s["step"], s["ok"]) for s in document["steps"]] == [(20, True), (10, True)]
    assert document["resumes_from"] == 20
    shown = run("verify", saved)
    assert shown.exit_code == 0
    assert shown.stdout.count("\nok\n") == 2
    assert shown.stdout.endswith("\nresuming would use step 20\n")
    assert shown.stderr == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_verify_of_dcp_directories(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-7")
    check_paragraph(run("verify", tmp_path), "DCP directories", "shardwise convert", status=(1,))


@pytest.mark.parametrize("damage", ["flip", "truncate", "lose", "manifest"])
def test_verify_finds_damage(steps: Path, damage: str) -> None:
    step = steps / "step-00000020"
    file = slice_file(step)
    if damage == "flip":
        flip(file, -3)
    elif damage == "truncate":
        truncate(file)
    elif damage == "lose":
        file.unlink()
    else:
        flip(step / "manifest.json", 200)
    result = run("verify", step)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    document = run_json("verify", step, status=1)
    told = document["error"]["message"] if damage == "manifest" else " ".join(document["problems"])
    assert (file.name if damage != "manifest" else "manifest.json") in told
    every = run_json("verify", steps, status=1)
    assert [s["ok"] for s in every["steps"]] == [False, True]
    assert not every["ok"]
    shown = run("verify", steps)
    assert shown.exit_code == 1
    assert "problem: " in shown.stdout
    assert shown.stdout.endswith("\nresuming would use step 10, not 20\n")
    assert every["resumes_from"] == 10


@pytest.mark.parametrize(
    ("asked", "rule"), [("log.loss-jump", "log.loss-jump"), ("save_only_model", "checkpoint.model-only")]
)
def test_explain_knows_the_checks_of_doctor(asked: str, rule: str) -> None:
    document = run_json("explain", asked)
    assert document["page"] == "docs/howto/doctor.md"
    assert f"**{rule}**: {next(one.about for one in RULES if one.id == rule)}" in document["text"]
    assert run("explain", "no_such_setting").exit_code == 2


def test_the_word_error_is_red_on_a_terminal() -> None:
    for color, head in ((True, "\x1b[31m\x1b[1merror:\x1b[0m "), (False, "error: ")):
        result = runner().invoke(main, ["explain", "KeyError"], color=color)
        assert result.stderr.startswith(head)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7", 7),
        ("40KB", 40_000),
        ("40 kib", 40_960),
        ("1.5MB", 1_500_000),
        ("2GiB", 2**31),
        ("1TB", 10**12),
        ("2e9", 2 * 10**9),
    ],
)
def test_units(text: str, nbytes: int) -> None:
    context = click.Context(main)
    assert byte_count(context, main.params[0], text) == nbytes


def test_export(model: Path, saved: Path, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    step = saved / "step-00000010"
    document = run_json("export", step, tmp_path / "a", "--max-shard-bytes", "40KB")
    assert len(document["files"]) > 1
    assert run("export", step, tmp_path / "b", "--dtype", "float32").exit_code == 0
    exported = Qwen3ForCausalLM.from_pretrained(tmp_path / "b")
    assert exported.dtype == torch.float32
    live = Qwen3ForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(live.lm_head.weight.float(), exported.lm_head.weight)
    assert not torch.equal(live.lm_head.weight, Qwen3ForCausalLM.from_pretrained(model).lm_head.weight)


@pytest.mark.slow
def test_export_under_torchrun(saved: Path, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    step = saved / "step-00000020"
    status, out, err = finish(start("export", saved, tmp_path / "two", "--json", launch=launch))
    assert status == 0, err
    assert err.count("using step 20, the newest valid one") == 1
    assert json.loads(out)["tensors"] == 36
    assert run_json("export", step, tmp_path / "one")["tensors"] == 36
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    status, out, err = finish(start("export", step, tmp_path / "two", "--json", launch=launch))
    assert status != 0
    assert "exists already" in json.loads(out)["error"]["message"]


def test_convert(model: Path, saved: Path, tmp_path: Path) -> None:
    document = run_json("convert", saved / "step-00000010", tmp_path / "again", "--to", "checkpoint")
    assert (document["source_kind"], document["step"], document["tensors"]) == ("checkpoint", 10, 36)
    assert run_json("verify", tmp_path / "again", "--threads", 2)["ok"]
    assert run_json("diff", saved / "step-00000010", tmp_path / "again")["ok"]
    shown = run("convert", model, tmp_path / "from-hub", "--to", "checkpoint")
    assert shown.exit_code == 0
    assert {"tensors 36", "optimizer tensors 0"} <= {
        " ".join(line.split()) for line in shown.stdout.splitlines()
    }
    document = run_json("convert", tmp_path / "from-hub", tmp_path / "hub", "--to", "hf")
    assert document["tensors"] == 36
    (file,) = (tmp_path / "hub").glob("*.safetensors")
    original = {k: v for f in model.glob("*.safetensors") for k, v in load_file(f).items()}
    back = load_file(file)
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in original.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_dcp_directory_lacks_is_said(model: Path, tmp_path: Path) -> None:
    """No config.json, and no step."""
    live = load_pretrained(model)
    dcp.save(live.state_dict(), checkpoint_id=tmp_path / "dcp")
    lines = {
        name: " ".join(run(*words).stdout.split())
        for name, words in {
            "export": ("export", tmp_path / "dcp", tmp_path / "bare"),
            "with config": ("export", tmp_path / "dcp", tmp_path / "whole", "--config", model),
            "convert": ("convert", tmp_path / "dcp", tmp_path / "out", "--to", "checkpoint"),
            "named": ("convert", tmp_path / "dcp", tmp_path / "step-00001200", "--to", "checkpoint"),
            "again": ("convert", tmp_path / "step-00001200", tmp_path / "again", "--to", "checkpoint"),
        }.items()
    }
    assert "no config.json the source has none" in lines["export"]
    assert "--config DIR" in lines["export"]
    assert "no config.json" not in lines["with config"]
    assert "the source names none, so it is 0: that of OUT's name (step-NNNNNNNN), or 0" in lines["convert"]
    assert "the source names none, so it is 1200:" in lines["named"]
    assert "names none" not in lines["again"]
    assert run_json("verify", tmp_path / "step-00001200")["step"] == 1200


def test_several_models(tmp_path: Path) -> None:
    models: dict[str, torch.nn.Module] = {"actor": torch.nn.Linear(2, 3), "critic": torch.nn.Linear(3, 2)}
    save(TrainState(model=models), tmp_path / "both")
    tree = run_json("inspect", tmp_path / "both")["tree"]
    assert [(node["name"], node["tensors"]) for node in tree] == [("actor", 2), ("critic", 2)]
    check_paragraph(
        run("convert", tmp_path / "both", tmp_path / "hub", "--to", "hf"),
        "['actor', 'critic']; say which one",
    )
    result = run(
        "convert", tmp_path / "both", tmp_path / "again", "--to", "checkpoint", "--model-name", "critic"
    )
    check_paragraph(result, "--model-name", "contains all models", status=(2,))
    assert (
        run_json("convert", tmp_path / "both", tmp_path / "hub", "--to", "hf", "--model-name", "critic")[
            "tensors"
        ]
        == 2
    )
    (file,) = (tmp_path / "hub").glob("*.safetensors")
    assert torch.equal(load_file(file)["weight"], models["critic"].weight)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_convert_under_torchrun(model: Path, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = ("convert", model, tmp_path / "two", "--to", "checkpoint", "--json")
    status, out, err = finish(start(*arguments, launch=launch))
    assert status == 0, err
    assert json.loads(out)["tensors"] == 36
    assert len(list((tmp_path / "two" / "model").glob("*.safetensors"))) == 2
    assert run_json("verify", tmp_path / "two")["ok"]
    status, out, err = finish(start(*arguments, launch=launch))
    assert status != 0
    assert "exists already" in json.loads(out)["error"]["message"]


def test_demo_passes_on_what_was_asked(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    demo = pytest.importorskip("shardwise.demo.run")
    calls: list[dict[str, Any]] = []

    def run_demo(out: str, *, model: Path | None, ranks: int, console: Console) -> dict[str, Any]:
        console.print("step by step")
        calls.append({"out": out, "model": model, "ranks": ranks})
        return {"loss": 1.5}

    monkeypatch.setattr(demo, "run_demo", run_demo)
    result = run("demo", "--json", model, "--out", tmp_path, "--ranks", 3)
    assert json.loads(result.stdout) == {"loss": 1.5}
    assert "step by step" in result.stderr
    result = run("demo")
    assert result.exit_code == 0
    assert result.stdout == "step by step\n"
    assert calls == [
        {"out": str(tmp_path), "model": model, "ranks": 3},
        {"out": "shardwise-demo", "model": None, "ranks": 2},
    ]


# ----------------------------------------------------------------------------------------------------
# Bad input

COMMANDS = {
    "inspect": ("inspect", "PATH"),
    "plan": ("plan", "PATH", "--ranks", 2),
    "verify": ("verify", "PATH"),
    "export": ("export", "PATH", "OUT"),
    "convert": ("convert", "PATH", "OUT", "--to", "checkpoint"),
    "diff": ("diff", "PATH", "PATH"),
    "demo": ("demo", "PATH", "--out", "OUT"),
}
every_command = pytest.mark.parametrize("command", COMMANDS)


def check_both(command: str, path: Path, out: Path, *words: str, status: int) -> None:
    """The paragraph without ``--json``, and the object with it."""
    args = [{"PATH": path, "OUT": out}.get(str(a), a) for a in COMMANDS[command]]
    check_paragraph(run(*args), *words, status=(status,))
    error = run_json(*args, status=status)["error"]
    assert error["message"]
    assert not out.exists()


@every_command
def test_no_such_path(command: str, tmp_path: Path) -> None:
    check_both(command, tmp_path / "nowhere", tmp_path / "out", "nowhere", status=1)


@every_command
def test_an_empty_directory(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_both(command, tmp_path / "empty", tmp_path / "out", status=1)


#: Commands that need one step, with what follows the run's directory.
OF_ONE_STEP: dict[str, tuple[object, ...]] = {
    "plan": ("--ranks", 2),
    "export": ("{out}",),
    "convert": ("{out}", "--to", "checkpoint"),
    "diff": ("{saved}/step-00000020",),
}


@pytest.mark.parametrize("command", OF_ONE_STEP)
def test_a_directory_of_steps_stands_for_its_newest_valid_one(
    command: str, saved: Path, steps: Path, tmp_path: Path
) -> None:
    rest = [str(word).format(out=tmp_path / "out", saved=saved) for word in OF_ONE_STEP[command]]
    found = run(command, saved, *rest)
    assert found.exit_code == 0, found.output
    newest = f"{saved}/step-00000020"
    assert f"{saved}: using step 20, the newest valid one: {newest}\n" in found.stderr
    truncate(slice_file(steps / "step-00000020"))
    found = run(command, steps, *[word.replace("out", "older") for word in rest])
    assert f"{steps}: using step 10, the newest valid one: {steps}/step-00000010\n" in found.stderr
    assert found.exit_code == 0, found.output
    (steps / "step-00000010" / "manifest.json").unlink()
    found = run(command, steps, *[word.replace("out", "none") for word in rest])
    assert found.exit_code == 1
    assert "contains no valid step" in found.stderr


@pytest.mark.parametrize("command", ["inspect", "plan", "export", "convert"])
@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b'{"not": "safetensors"}'])
def test_not_safetensors(command: str, tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(content)
    check_both(command, source, tmp_path / "out", "model.safetensors", status=1)


@pytest.mark.parametrize("command", ["inspect", "plan", "export", "convert"])
def test_a_truncated_file(command: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    file = path / "model-00002-of-00002.safetensors"
    truncate(file)
    check_both(command, path, tmp_path / "out", file.name, "truncated", status=1)


@pytest.mark.parametrize("command", ["inspect", "plan", "verify", "export", "convert"])
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 3}', '{"format": "shardwise-checkpoint", "version": 99}']
)
def test_not_a_manifest(command: str, tmp_path: Path, content: str) -> None:
    path = tmp_path / "step"
    path.mkdir()
    (path / "manifest.json").write_text(content)
    check_both(command, path, tmp_path / "out", "manifest.json", status=1)


def test_not_a_checkpoint(model: Path, tmp_path: Path) -> None:
    check_both("verify", model, tmp_path / "out", "not a shardwise checkpoint", status=1)


@pytest.mark.parametrize("content", ["", "\0garbage", "[]", '{"model_type": "qwen3", "hidden_size": "wide"}'])
def test_an_unreadable_config(model: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(content)
    (path / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    check_both("plan", path, tmp_path / "out", "config.json", status=1)


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16")])
@pytest.mark.parametrize("content", ["", "[]", "7", "[" * 100_000])
def test_export_with_a_config_that_is_none(
    model: Path, tmp_path: Path, content: str, options: tuple[str, ...]
) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    path.mkdir()
    (path / "config.json").write_text(content)
    (path / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    check_paragraph(run("export", path, out, *options), "config.json", "JSON", status=(1,))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-command",),
        ("inspect",),
        ("inspect", "PATH", "--no-such-option"),
        ("inspect", "PATH", "and another"),
        ("plan", "PATH"),
        ("plan", "PATH", "--ranks", "0"),
        ("plan", "PATH", "--ranks", "-3"),
        ("plan", "PATH", "--ranks", "two"),
        ("plan", "PATH", "--ranks", "1e3"),
        ("plan", "PATH", "--ranks", str(10**30)),
        ("plan", "PATH", "--ranks", "4", "--replicas", "-1"),
        ("plan", "PATH", "--ranks", "4", "--replicas", "0"),
        ("plan", "PATH", "--ranks", "4", "--replicas", "3"),
        ("plan", "PATH", "--ranks", "4", "--replicas", "8"),
        ("plan", "PATH", "--ranks", "4", "--dtype", "float99"),
        ("export", "PATH"),
        ("convert", "PATH", "out"),
        ("convert", "PATH", "out", "--to", "gguf"),
        ("verify", "PATH", "--threads", "0"),
        ("export", "PATH", "out", "--dtype", "int8"),
        ("export", "PATH", "out", "--max-shard-bytes", "0"),
        ("export", "PATH", "out", "--max-shard-bytes", "-5GB"),
        ("export", "PATH", "out", "--max-shard-bytes", "5 parsecs"),
        ("export", "PATH", "out", "--max-shard-bytes", "0.1B"),
        ("export", "PATH", "out", "--source", "PATH"),
        ("export", "PATH", "out", "--quantize", "as-source"),
        ("export", "PATH", "out", "--quantize", "as-source", "--source", "PATH", "--dtype", "bfloat16"),
        ("demo", "--ranks", "0"),
        ("demo", "--ranks", "-1"),
    ],
)
def test_wrong_usage(model: Path, args: tuple[str, ...]) -> None:
    given = [model if a == "PATH" else a for a in args]
    check_paragraph(run(*given), status=(2,))
    if args:
        assert run_json(*given, status=2)["error"]["message"]


def test_wrong_environment_of_a_launcher(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "two")
    check_paragraph(run("export", saved / "step-00000010", tmp_path / "out"), "RANK", status=(2,))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_paragraph(run("export", saved / "step-00000010", tmp_path / "out"), "WORLD_SIZE=2", status=(2,))


# ----------------------------------------------------------------------------------------------------
# How commands end


def cpu_seconds(*command: object) -> float:
    """User and system time of a process of its own."""
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("plan", "--help")])
def test_help_needs_no_torch(words: tuple[str, ...]) -> None:
    code = "import sys; from shardwise.cli import main\ntry: main()\nfinally: assert not {'torch', 'numpy'} & sys.modules.keys()"
    cost = min(cpu_seconds("-c", code, *words) - cpu_seconds("-c", "pass") for _ in range(3))
    assert cost <= 0.5, f"{cost:.2f} s of CPU beyond Python's start"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RuntimeError("surprise\n\nindeed"), 1, "unexpected RuntimeError: surprise indeed; this is a bug"),
        (RecursionError("deep"), 1, "unexpected RecursionError: deep; this is a bug"),
        (MemoryError(), 1, "out of memory"),
        (PermissionError(13, "Permission denied", "some/file"), 1, "some/file: Permission denied"),
        (OSError("no words"), 1, "no words"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_end_is_a_paragraph(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, text: str
) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr(inspection, "contents_of", fail)
    check_paragraph(run("inspect", "x"), text, status=(status,))
    assert text in run_json("inspect", "x", status=status)["error"]["message"]


def test_tracebacks_only_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(inspection, "contents_of", fail)
    for args in (("--debug", "inspect", "x"), ("inspect", "x", "--debug")):
        result = run(*args)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert "error: unexpected RuntimeError" in result.stderr
    assert "Traceback" not in run("inspect", "--", "--debug").stderr


def test_logging_is_as_before(model: Path) -> None:
    import logging

    logger = logging.getLogger("shardwise")
    before = list(logger.handlers), logger.level, list(logging.getLogger().handlers)
    assert run("inspect", model).exit_code == 0
    assert (list(logger.handlers), logger.level, list(logging.getLogger().handlers)) == before


@pytest.mark.parametrize("command", main.commands)
def test_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_version() -> None:
    assert run("--version").stdout.startswith("shardwise, version ")


# ----------------------------------------------------------------------------------------------------
# As processes


@pytest.mark.processes
@pytest.mark.nightly
def test_module_and_script_do_the_same(model: Path) -> None:
    status, out, err = finish(start("inspect", model, "--json"))
    assert (status, err) == (0, "")
    script = subprocess.run([SCRIPT, "inspect", model, "--json"], capture_output=True, text=True, timeout=120)
    assert (script.returncode, script.stderr) == (0, "")
    assert json.loads(script.stdout) == json.loads(out)


@pytest.mark.nightly
def test_bad_input_in_a_process(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("garbage")
    (tmp_path / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    processes = [
        start("plan", model, "--ranks", "0", "--json"),
        start("plan", tmp_path, "--ranks", "2"),
        start("verify", b"\xff\xfe".decode(errors="surrogateescape")),
    ]
    (usage, out, err), config, name = map(finish, processes)
    assert usage == 2
    assert "--ranks" in json.loads(out)["error"]["message"]
    assert err.count("\n") == 1
    assert config[0] == 1
    assert "config.json" in config[2]
    assert name[0] == 1
    assert all("Traceback" not in text for text in (err, config[2], name[2]))


@pytest.mark.processes
def test_a_closed_pipe_is_no_error(model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("inspect", model, "--json", stdout=write)
    os.close(write)
    _, _, err = finish(process)
    assert err == ""


@pytest.mark.processes
def test_interrupt(tmp_path: Path) -> None:
    save_file({f"{'x' * 50}{i}.{i}": torch.zeros(1) for i in range(2000)}, tmp_path / "model.safetensors")
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell lets its background jobs ignore it
    try:
        process = start(
            "inspect", tmp_path, "--json"
        )  # more than a pipe takes, and the test does not read yet
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    deadline, waiting = time.monotonic() + 60, 0
    while waiting < 2**16 and time.monotonic() < deadline:
        time.sleep(0.05)
        waiting = int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert (status, err.strip()) == (130, "error: interrupted")


def test_help_lists_every_command_in_its_group() -> None:
    from shardwise.cli.program import GROUPS

    assert sorted(name for names in GROUPS.values() for name in names) == sorted(main.commands)
    shown, bare = (runner().invoke(main, given, env={"COLUMNS": "80"}) for given in (["--help"], []))
    assert shown.output == bare.output, "shardwise alone prints its help"
    assert (shown.exit_code, bare.exit_code) == (0, 0)
    assert "..." not in shown.output.split("Options:")[1], "no line is cut"
    assert all(len(line) <= 80 for line in shown.output.splitlines())


def test_diff_shows_what_changed_most(tmp_path: Path) -> None:
    for name, scale in (("a", 0.0), ("b", 1.0)):
        tensors = {f"t{k:02}": torch.ones(4) * (1 + scale * k) for k in range(30)}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    few, every = (run("diff", tmp_path / "a", tmp_path / "b", *more) for more in ((), ("--all",)))
    assert (few.exit_code, every.exit_code) == (1, 1)
    assert "29 tensors, by at most 29 of their norm" in few.stdout
    assert "--all shows all 29" in few.stdout
    assert few.stdout.index("t29") < few.stdout.index("t28"), "the largest change first"
    assert "t05" not in few.stdout
    assert "t05" in every.stdout
    assert len(run_json("diff", tmp_path / "a", tmp_path / "b", status=1)["changed"]) == 29


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
def test_plan_says_how_many_gpus(model: Path) -> None:
    """The answer stands on the first line."""
    found = run("plan", model, "--fit", "80GiB")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("1 GPU: each needs at most ")
    document = run_json("plan", model, "--fit", "80GiB")
    assert (document["ranks"], document["search"]["ranks"]) == (1, 1)
    assert not document["search"]["tried"][0]["binds"]
    same = run_json("plan", model, "--fit", "80GiB", "--ranks", 1)
    assert [one["run"]["ranks_per_host"] for one in (document, same)] == [1, 1]
    none = run("plan", model, "--fit", "64MiB", "--batch-size", 512, "--sequence-length", 512)
    assert none.exit_code == 1, none.output
    assert none.stdout.startswith("no number of 64.0 MiB GPUs is enough: "), none.stderr
    assert "mostly for" in none.stdout.splitlines()[0]
    for words in (("plan", model), ("plan", model, "--fit", "80GiB", "--nodes", 2)):
        assert run(*words).exit_code == 2
