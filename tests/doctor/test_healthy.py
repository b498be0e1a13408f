"""Real healthy files have no finding; the command, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import shardwise as sw
from shardwise.cli import main
from shardwise.doctor.files import read_settings
from tests.doctor.real import FSDP2, NOISE, ROOT, WHERE, arguments, check, found
from tests.harness.command import runner

# ----------------------------------------------------------------------------------------------------
# Healthy


def test_healthy_files_have_no_finding(model: Path, steps: Path, tmp_path: Path, here: set[str]) -> None:
    """Each kind of file, by itself and all at once, for one rank and for two."""
    good = tmp_path / "good.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
    good.write_text(yaml.safe_dump({**base, "fsdp_config": FSDP2}))
    ddp = tmp_path / "ddp.yaml"
    ddp.write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", "num_processes": 2, "num_machines": 1}))
    log = tmp_path / "run.log"
    log.write_text(NOISE * 100)
    single = tmp_path / "single"
    single.mkdir()
    save_file({"w": torch.zeros(4)}, single / "model.safetensors")
    plain = arguments(tmp_path / "plain.json", fsdp="", fsdp_config={"xla": False, "min_num_params": 0})
    sharded = arguments(
        tmp_path / "sharded.json", fsdp_config={"version": 2, "activation_checkpointing": True}
    )
    files = [good, ddp, log, single, plain, sharded, model, steps / "step-00000001"]
    places = [steps, tmp_path / "not/there/yet"]
    for ranks in (1, 2):
        for path in files:
            check(found(path, ranks=ranks), here)
        check(found(*files, ranks=ranks), here)
    for path in places:
        check(found(outputs=[path]), here)
    assert not (tmp_path / "not").exists()
    check(found(*files, outputs=places, ranks=2), here)


def test_the_command(tmp_path: Path, here: set[str]) -> None:

    yaml_of_case_1 = str(ROOT / "examples/accelerate_fsdp.yaml")
    shown = runner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1"])
    assert shown.exit_code == 1
    assert "accelerate.device-mesh" in shown.stdout
    assert "2 problems found, 1 note (" in shown.stdout or here > WHERE
    said = runner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1", "--json"])
    document = json.loads(said.stdout)
    assert not document["ok"]
    assert document["facts"]["accelerate"][0]["path"] == yaml_of_case_1
    quiet = tmp_path / "quiet.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 1}
    quiet.write_text(
        yaml.safe_dump({**base, "fsdp_config": {**FSDP2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}})
    )
    noted = runner().invoke(main, ["doctor", str(quiet), "--ranks", "1"])
    assert "note: accelerate.sharded-fp32" in noted.stdout
    if here == WHERE:
        assert noted.exit_code == 0, "a note is no failure"
        assert "No problems found, 1 note (" in noted.stdout
    if here == WHERE:
        assert runner().invoke(main, ["doctor", "--ranks", "1"]).exit_code == 0


def test_the_command_says_what_it_took_each_path_for(
    model: Path, steps: Path, tmp_path: Path, here: set[str]
) -> None:
    """And a path that does not exist is a problem; the directory of a run that will be made has an option."""
    log = tmp_path / "run.log"
    log.write_text("{'loss': 2.1}\n{'loss': 2.0}\nresuming from step 100\n{'loss': 9.8}\n{'loss': 9.1}\n")
    trainer = tmp_path / "out"
    for step in (2, 4):
        (trainer / f"checkpoint-{step}").mkdir(parents=True)
        history = [{"step": k, "loss": 2.0} for k in range(1, step + 1)]
        (trainer / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"log_history": history}))
    new, lost = tmp_path / "runs/a", tmp_path / "nope"
    words = {
        model: "a model directory",
        steps: "a directory of checkpoints, steps 1, 2",
        steps / "step-00000001": "a checkpoint",
        log: "a log, 4 losses, 0 known lines",
        trainer: "a run of the HF Trainer or Accelerate, steps 2, 4; 4 losses in checkpoint-4/trainer_state.json",
        lost: "nothing: it doesn't exist",
        tmp_path: "a directory to write to; wrote test files to it and deleted them",
        new: f"a directory that the run will create; wrote test files to {tmp_path}",
    }
    given = [str(path) for path in words if path != new]
    shown = runner().invoke(main, ["doctor", *given, "--run", str(new), "--ranks", "1"])
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[: len(words)] == [f"{path}: {said}" for path, said in words.items()]
    assert f"path.absent  {lost}" in shown.stdout
    assert "log.loss-jump" in shown.stdout
    assert ", 1 rank on this host)." in shown.stdout
    assert not new.parent.exists()


def test_hostile_text_does_not_move_the_cursor(tmp_path: Path) -> None:

    path = tmp_path / "run.log"
    path.write_text("\x1b[2JOSError: [Errno 24] Too many open files \x1b]0;title\x07 [bold]x[/bold]\n")
    shown = runner().invoke(main, ["doctor", str(path), "--ranks", "1"]).stdout
    assert "\x1b" not in shown
    assert "[bold]x[/bold]" in shown


_SECRETS = {
    "output_dir": "x",
    "hub_token": "SENT1",
    "env": [{"HF_TOKEN": "SENT2"}],
    "api_keys": ["SENT3"],
    "wandb": {"password": {"v": "SENT4"}},
    "auth": "SENT5",
    "args": ["--token=SENT6"],
    "url": "https://user:SENT7@host/",
    "tokens": {"a": "SENT8"},
    "password": 77123456,
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "auth": "SENT9", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


@pytest.mark.parametrize("name", ["args.json", "args.yaml"])
def test_secrets_are_not_repeated(tmp_path: Path, name: str) -> None:
    """What rules read is shown, and no other text: a name does not say whether a text is a secret."""
    path = tmp_path / name
    path.write_text(json.dumps(_SECRETS))  # which is YAML, too
    outcome = runner().invoke(main, ["doctor", str(path), "--ranks", "1", "--json"])
    document = json.loads(outcome.stdout)
    assert "SENT" not in outcome.output
    assert "77123456" not in outcome.output
    (shown,) = document["facts"]["arguments"]
    assert shown["values"]["fsdp"] == "full_shard auto_wrap"
    assert shown["values"]["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    assert shown["values"]["hub_token"] == "…"


_ODD: dict[str, str] = {
    "bool.yaml": "distributed_type: FSDP\nx: !!bool maybe\n",
    "int.yaml": "x: !!int ''\n",
    "float.yaml": "x: !!float ''\n",
    "time.yaml": "x: !!timestamp soon\n",
    "binary.yaml": "x: !!binary 1\n",
    "hex.yaml": "distributed_type: FSDP\nnum_processes: 0x" + "f" * 4000 + "\n",
    "digits.yaml": "distributed_type: FSDP\nnum_processes: " + "9" * 4000 + "\n",
    "sexagesimal.yaml": "num_machines: 1:" + ":".join(["59"] * 3000) + "\n",
    "python.yaml": "!!python/object/apply:os.system ['true']",
    "itself.yaml": "distributed_type: FSDP\nx: &a {y: *a}\n",
    "brackets.yaml": "[" * 2**16,
    "deep.yaml": "output_dir: " + "{a: " * 150 + "1" + "}" * 150,
    "merges.yaml": "b: &b {"
    + ", ".join(f"k{k}: 1" for k in range(4000))
    + "}\n"
    + "".join(f"c{k}: {{<<: *b}}\n" for k in range(100)),
    "nested-merges.yaml": "a0: &a0 {x: 1}\n"
    + "".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}\n" for k in range(1, 9)),
    **{
        f"deep-{n}.json": '{"output_dir":' + '{"a":' * n + "1" + "}" * n + "}"
        for n in (40, 300, 480, 600, 900)
    },
    "digits.json": '{"output_dir": ' + "9" * 4000 + "}",
}


@pytest.mark.parametrize("name", _ODD)
def test_an_odd_configuration_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(_ODD[name])
    with pytest.raises(sw.errors.FormatError, match=re.escape(name)):
        read_settings(str(path))


def test_a_name_with_nul_is_refused() -> None:
    outcome = runner().invoke(main, ["doctor", "a\0b", "--json"])
    assert "NUL" in json.loads(outcome.stdout)["error"]["message"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.processes
def test_an_interrupted_probe_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    """The signal comes while the probe's folder is there."""
    begun, release = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_tell, args=(tmp_path, release), daemon=True).start()
            runner().invoke(main, ["doctor", str(tmp_path), "--json"])
        finally:
            os._exit(0)
    os.close(release)
    assert os.read(begun, 1) == b"x"
    os.kill(child, sent)
    os.waitpid(child, 0)
    os.close(begun)
    assert os.listdir(tmp_path) == []


def _tell(folder: Path, pipe: int) -> None:
    while not os.listdir(folder):
        time.sleep(0.001)
    os.write(pipe, b"x")


def test_a_yaml_of_aliases_is_refused(tmp_path: Path) -> None:
    """Nine lists of nine: a few hundred bytes that stand for billions of values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(sw.errors.FormatError, match="holds more than 100000 values"):
        found(path)


def test_a_yaml_that_runs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text("distributed_type: !!python/object/apply:os.system ['touch /nope']\n")
    with pytest.raises(sw.errors.FormatError, match="is not YAML"):
        found(path)
