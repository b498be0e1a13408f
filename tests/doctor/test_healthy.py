"""Real healthy files have no finding; the command, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import shardwise as sw
from shardwise.doctor.collect import collect
from tests.doctor.real import FSDP2, NOISE, ROOT, WHERE, arguments, check, found

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
        check(found(path), here)
    assert not (tmp_path / "not").exists()
    check(found(*files, *places, ranks=2), here)


def test_the_command(tmp_path: Path, here: set[str]) -> None:
    from click.testing import CliRunner

    from shardwise.cli import main

    yaml_of_case_1 = str(ROOT / "examples/accelerate_fsdp.yaml")
    shown = CliRunner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1"])
    assert shown.exit_code == 1
    assert "accelerate.device-mesh" in shown.stdout
    assert "2 findings, 1 note" in shown.stdout or here > WHERE
    said = CliRunner().invoke(main, ["doctor", yaml_of_case_1, "--ranks", "1", "--json"])
    document = json.loads(said.stdout)
    assert not document["ok"]
    assert document["facts"]["accelerate"][0]["path"] == yaml_of_case_1
    quiet = tmp_path / "quiet.yaml"
    base = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 1}
    quiet.write_text(
        yaml.safe_dump({**base, "fsdp_config": {**FSDP2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}})
    )
    noted = CliRunner().invoke(main, ["doctor", str(quiet), "--ranks", "1"])
    assert "note: accelerate.sharded-fp32" in noted.stdout
    if here == WHERE:
        assert noted.exit_code == 0, "a note is no failure"
        assert "no finding, 1 note" in noted.stdout
    lost = CliRunner().invoke(main, ["doctor", str(tmp_path / "no.yaml")])
    assert lost.exit_code == 1
    assert "no such file" in lost.stderr
    if here == WHERE:
        assert CliRunner().invoke(main, ["doctor", "--ranks", "1"]).exit_code == 0


def test_hostile_text_does_not_move_the_cursor(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from shardwise.cli import main

    path = tmp_path / "run.log"
    path.write_text("\x1b[2JOSError: [Errno 24] Too many open files \x1b]0;title\x07 [bold]x[/bold]\n")
    shown = CliRunner().invoke(main, ["doctor", str(path), "--ranks", "1"]).stdout
    assert "\x1b" not in shown
    assert "[bold]x[/bold]" in shown


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    path = arguments(
        tmp_path / "args.json", hub_token="hf_abcdef", fsdp_config={"version": 2, "api_key": "k-123"}
    )
    facts = collect([str(path)])
    assert "hf_abcdef" not in repr(facts)
    assert "k-123" not in repr(facts)
    assert facts.arguments[0].values["hub_token"] == "…"


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
