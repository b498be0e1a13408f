"""Exports into the source's own format: what is untouched comes out byte for byte, what changed as the format's library quantizes it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.cli import main
from shardwise.errors import (
    CheckpointError,
    IntegrityError,
    PlanError,
    StateError,
    UnsupportedConversionError,
)
from shardwise.quantized.open import dequantized
from tests.export._as_source_fns import CHANGED, export_all, export_one, touch
from tests.harness import models
from tests.harness.command import runner
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.quantized._boxes import State
from tests.quantized._made import fp8_directory, plain_tensors, quantized_directories
from tests.quantized._references import quantized_by_library
from tests.quantized.compressed_cases import CASES
from tests.quantized.compressed_models import write

NESTED = "nested fp4"
#: Directories whose models are exported from checkpoints in each run: conversions, ties, means and extremes of whole tensors.
SAVED = ("qwen3-moe", "qwen3-tied", NESTED, "fp8-tensor")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of each format, and two with a scale of a whole tensor."""
    root = tmp_path_factory.mktemp("quantized")
    found = quantized_directories(root)
    for case in ("fp8-tensor", "int8-tensor-zeros"):
        write(root / case, CASES[case][0], torch.bfloat16, inner=150)
    return [*found, root / "fp8-tensor", root / "int8-tensor-zeros"]


def _by_name(directories: list[Path], name: str) -> Path:
    return next(d for d in directories if d.name == name)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _different(found: State, expected: State) -> list[str]:
    """Names of tensors that differ by dtype, shape or bytes, or that one lacks."""
    wrong = list(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        a, b = found[name], expected[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(_bytes(a), _bytes(b)):
            wrong.append(name)
    return sorted(wrong)


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def _expected(directory: Path) -> tuple[State, list[str], list[str]]:
    """What an export of the changed model must hold; the stored names that change; the tensors that are quantized again."""
    stored = plain_tensors(directory)
    plain = sw.load_pretrained(directory, dtype="bfloat16")
    touch(plain)
    sw.export_hf(plain, directory.parent / f"plain {directory.name}")
    wanted = plain_tensors(directory.parent / f"plain {directory.name}")
    shutil.rmtree(directory.parent / f"plain {directory.name}")
    before = sw.load_pretrained(directory, dtype="bfloat16")
    sw.export_hf(before, directory.parent / f"before {directory.name}")
    untouched = plain_tensors(directory.parent / f"before {directory.name}")
    shutil.rmtree(directory.parent / f"before {directory.name}")
    coded = {one.tensor.name for one in dequantized(open_catalog(directory)).coded.values()}
    expected, again = dict(stored), []
    for name in _different(wanted, untouched):
        if name in coded:
            again.append(name)
            parts = quantized_by_library(directory, name, wanted[name], stored)
            expected |= {
                part: tensor.view(stored[part].dtype) for part, tensor in parts.items() if part in stored
            }
        else:
            expected[name] = wanted[name].to(stored[name].dtype)
    return expected, _different(expected, stored), again


def _nearly(found: State, expected: State) -> None:
    """Codes of scales: bitsandbytes' CPU kernel is less exact than its plain code, and takes the code beside now and then."""
    for name in expected:
        if name.endswith("weight.absmax"):
            steps = (found[name].int() - expected[name].int()).abs()
            assert steps.max() <= 1
            assert steps.sum() <= len(steps) // 100
            expected[name] = found[name]


@pytest.mark.parametrize(
    "run",
    nightly_but(((1, True), (2, True), (3, True), (2, False)), (2, False)),
    ids=lambda run: f"{run[0]}-{'all' if run[1] else 'some'}",
)
def test_every_format_on_ranks(
    run: tuple[int, bool], directories: list[Path], ranks: RankPool, tmp_path: Path
) -> None:
    """``run``: ranks, and whether all formats go by way of a checkpoint, too."""
    world_size, all_saved = run
    given = [str(d) for d in directories]
    saved = [str(d) for d in directories if all_saved or d.name in SAVED]
    found = ranks.run_ranks(world_size, export_all, given, str(tmp_path), saved, timeout_s=500)
    assert all(len(one) == len(directories) for one in found)
    for k, directory in enumerate(directories):
        same, changed = (tmp_path / str(k) / name for name in ("same", "changed"))
        assert _different(plain_tensors(same), plain_tensors(directory)) == [], directory.name
        assert _config(same) == _config(directory), directory.name
        reports = [one[k][0] for one in found]
        assert sum(r["bytes_written"] for r in reports) == reports[0]["total_bytes"]
        refused = directory.name.startswith(("gptq", "awq"))
        for name in (("same",) if refused else ("same", "changed")) if str(directory) in saved else ():
            _same_from_a_checkpoint(tmp_path / str(k), name, directory)
        assert reports[0]["as_source"]["requantized"] == () == reports[0]["as_source"]["written"]
        if refused:
            assert all("its scales come from calibration data" in one[k][1] for one in found)
            assert not changed.exists()
            continue
        expected, names, again = _expected(directory)
        assert again
        assert "model.norm.weight" in names
        found_parts = plain_tensors(changed)
        if directory.name == NESTED:
            _nearly(found_parts, expected)
        assert _different(found_parts, expected) == [], directory.name
        report = found[0][k][1]["as_source"]
        assert sorted(name for rule in report["requantized"] for name in rule["names"]) == again
        assert sorted(report["written"]) == sorted(set(names) & set(report["written"]))
        assert "model.norm.weight" in report["written"]
        assert not set(report["written"]) & set(again)
        assert _config(changed) == _config(directory)


def _same_from_a_checkpoint(root: Path, name: str, source: Path) -> None:
    """A checkpoint gives what the live model gave, on the ranks that saved it and in one process."""
    live = plain_tensors(root / name)
    assert _different(plain_tensors(root / f"stored {name}"), live) == [], source.name
    step, out = root / f"stored {name} step", root / f"one process {name}"
    report = sw.export_hf(step, out, quantize="as-source", source=source)
    assert report.bytes_written == report.total_bytes
    assert _different(plain_tensors(out), live) == [], source.name
    assert _config(out) == _config(source) == _config(root / f"stored {name}")


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("nf4", 0.05),
        ("int8", 0.05),
        ("mxfp4", 0.05),
        ("int8-channel", 0.05),
        ("fp8-blocks", 0.1),
        ("nvfp4", 0.3),
    ],
)
def test_transformers_reads_it(name: str, close: float, directories: list[Path], tmp_path: Path) -> None:
    """It runs some formats with activations in codes, too."""
    model = sw.load_pretrained(_by_name(directories, name), dtype="bfloat16")
    touch(model)
    sw.export_hf(model, tmp_path / "out", quantize="as-source")
    found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, device_map="cpu"
    )
    again = sw.load_pretrained(tmp_path / "out", dtype="bfloat16")
    ids = torch.arange(6).view(1, -1)
    with torch.no_grad():
        theirs, ours, before = (m(input_ids=ids).logits.float() for m in (found, again, model))
    assert (theirs - ours).norm() < close * ours.norm()
    assert (ours - before).norm() < 0.3 * before.norm()


def test_into_files_by_a_model_without_a_directory(directories: list[Path], tmp_path: Path) -> None:
    """``source=`` for a model that was filled from elsewhere; then what has the same values is copied, too."""
    source = _by_name(directories, "nf4")
    model = sw.load_pretrained(source, dtype="bfloat16")
    sw.export_hf(model, tmp_path / "plain")
    plain = sw.load_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"is not quantized, and quantize='as-source' writes"):
        sw.export_hf(plain, tmp_path / "out", quantize="as-source")
    report = sw.export_hf(plain, tmp_path / "out", quantize="as-source", source=source)
    assert report.as_source is not None
    assert report.as_source.requantized == () == report.as_source.not_in_model
    assert _different(plain_tensors(tmp_path / "out"), plain_tensors(source)) == []
    sw.export_hf(tmp_path / "plain", tmp_path / "stored", quantize="as-source", source=source)
    assert _different(plain_tensors(tmp_path / "stored"), plain_tensors(source)) == []


def test_options_that_do_not_go_together(directories: list[Path], tmp_path: Path) -> None:
    source, out = _by_name(directories, "nf4"), tmp_path / "out"
    model = sw.load_pretrained(source, dtype="bfloat16")
    for options, said in (
        ({"quantize": "nf4"}, "quantize must be 'as-source' or None, got 'nf4'"),
        ({"source": source}, "source= goes with 'as-source'"),
        ({"quantize": "as-source", "dtype": "float16"}, "dtype= and quantize= can't be combined"),
    ):
        with pytest.raises(ValueError, match=said):
            sw.export_hf(model, out, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of a stored model needs source="):
        sw.export_hf(source, out, quantize="as-source")
    with pytest.raises(UnsupportedConversionError, match=r"quantized .*which isn't accepted here"):
        sw.export_hf(source, out, quantize="as-source", source=source)
    assert not out.exists()


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    models.write_hub_directory("qwen3", tmp_path / "plain", torch.bfloat16)
    fp8_directory(tmp_path / "plain", tmp_path / "fp8", (4, 8))
    return tmp_path / "fp8"


def test_a_source_that_is_gone_or_another(fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = sw.load_pretrained(fp8)
    file = fp8 / "model.safetensors"
    os.utime(file, ns=(0, 0))
    with pytest.raises(
        CheckpointError, match=r"has changed since the model was loaded from it.*Give source="
    ):
        sw.export_hf(model, out, quantize="as-source")
    sw.export_hf(model, out, quantize="as-source", source=fp8)
    fp8.rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=r"can't be read as the source of quantize='as-source'.*give source="
    ):
        sw.export_hf(model, tmp_path / "again", quantize="as-source")
    sw.export_hf(model, tmp_path / "again", quantize="as-source", source=tmp_path / "moved")
    assert _different(plain_tensors(tmp_path / "again"), plain_tensors(out)) == []
    bare = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"can't tell which quantized source.*give source="):
        sw.export_hf(bare, tmp_path / "bare", quantize="as-source")


def test_codes_that_may_be_the_model_s_under_another_name(fp8: Path, tmp_path: Path) -> None:
    """Neither is the model's weight written beside old codes, nor are these copied as if they were it."""
    model = sw.load_pretrained(fp8)
    bare = torch.nn.ModuleDict({"other": model.model})
    with pytest.raises(PlanError, match="can't be requantized in the source's format") as caught:
        sw.export_hf(bare, tmp_path / "out", quantize="as-source", source=fp8)
    assert "it is not known whether the ones are the others" in caught.value.problems[0]
    small = torch.nn.Module()
    small.register_parameter("w", torch.nn.Parameter(torch.ones(4, 8)))
    with pytest.raises(PlanError):
        sw.export_hf(small, tmp_path / "out", quantize="as-source", source=fp8)
    assert not (tmp_path / "out").exists()


def test_a_changed_tensor_without_a_rule(tmp_path: Path) -> None:
    """Untouched it is copied, as any other; changed it is refused by name, and nothing is written."""
    write(tmp_path / "q", CASES["w4-group"][0], torch.bfloat16)
    stem, stored = "model.layers.0.self_attn.q_proj.weight", plain_tensors(tmp_path / "q")
    stored[f"{stem}_g_idx"] = (torch.randperm(96) // 32).to(torch.int32)
    (
        tmp_path / "q" / "model.safetensors"
    ).unlink()  # these tensors are its memory; safetensors before 0.8 would write into it
    save_file(stored, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    model = sw.load_pretrained(tmp_path / "q", dtype="bfloat16")
    sw.export_hf(model, tmp_path / "same", quantize="as-source")
    assert _different(plain_tensors(tmp_path / "same"), stored) == []
    touch(model)
    with pytest.raises(
        UnsupportedConversionError,
        match=rf"^{stem}: was changed and can't be requantized as .*weight_g_idx",
    ):
        sw.export_hf(model, tmp_path / "out", quantize="as-source")
    assert not (tmp_path / "out").exists()


def test_ties_stored_twice_change_together(tmp_path: Path) -> None:
    """A stored copy of a tied tensor is not left behind with its old content."""
    models.write_hub_directory("qwen3-tied", tmp_path / "plain", torch.bfloat16)
    source = tmp_path / "fp8"
    fp8_directory(tmp_path / "plain", source, (4, 8))
    stored = {
        name: tensor.clone() for name, tensor in plain_tensors(source).items()
    }  # not of the file itself
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    model = sw.load_pretrained(source)
    touch(model, ("embed_tokens.weight",))
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    for given in (model, tmp_path / "step"):
        sw.export_hf(given, tmp_path / "out", quantize="as-source", source=source)
        found = plain_tensors(tmp_path / "out")
        assert _different(found, stored) == ["lm_head.weight", "model.embed_tokens.weight"]
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
        assert torch.equal(found["lm_head.weight"], model.model.embed_tokens.weight)
        shutil.rmtree(tmp_path / "out")


def test_a_damaged_checkpoint(fp8: Path, tmp_path: Path) -> None:
    """What its digests do not fit is not taken for a change."""
    model = sw.load_pretrained(fp8)
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    (file,) = (tmp_path / "step" / "model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="content of 1 tensors differs from what was saved"):
        sw.export_hf(tmp_path / "step", tmp_path / "out", quantize="as-source", source=fp8)
    assert not (tmp_path / "out").exists()


@pytest.mark.needs("kept-fp8")
def test_a_checkpoint_of_kept_codes(fp8: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(fp8, quantized="keep")
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    with pytest.raises(UnsupportedConversionError, match=r"quantized \(fp8"):
        sw.export_hf(tmp_path / "step", tmp_path / "out", quantize="as-source", source=fp8)
    assert not (tmp_path / "out").exists()


def test_the_command(fp8: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(fp8)
    touch(model)
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    sw.export_hf(model, tmp_path / "live", quantize="as-source")
    given = ["export", str(tmp_path / "step"), str(tmp_path / "out"), "--quantize", "as-source"]
    failed = runner().invoke(main, given)
    assert failed.exit_code == 2
    assert "--quantize as-source and --source must be used together" in " ".join(failed.stderr.split())
    done = runner().invoke(main, [*given, "--source", str(fp8)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "from the source" in said
    assert "quantized again (2) model.layers.0.mlp.down_proj.weight" in said
    assert "Fp8Quantize" in said
    assert _different(plain_tensors(tmp_path / "out"), plain_tensors(tmp_path / "live")) == []


def test_nan_has_no_code(fp8: Path, tmp_path: Path, ranks: RankPool) -> None:
    for ends, said in ((CHANGED[:1], "q_proj.weight: holds NaN or infinite elements"),):
        found = ranks.run_ranks(2, export_one, str(fp8), str(tmp_path / "out"), ends, float("nan"))
        assert all(said in one for one in found), found
    assert not (tmp_path / "out").exists()
    model = sw.load_pretrained(fp8)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(StateError, match="holds NaN or infinite"):
        sw.export_hf(model, tmp_path / "out", quantize="as-source")
    assert not (tmp_path / "out").exists()


def test_a_difference_of_one_rank_is_one_of_all(fp8: Path, tmp_path: Path, ranks: RankPool) -> None:
    """Only the last rank's rows differ; all ranks quantize the tensor again."""
    assert ranks.run_ranks(2, export_one, str(fp8), str(tmp_path / "out"), CHANGED[:1], 0.5) == ["", ""]
    changed = _different(plain_tensors(tmp_path / "out"), plain_tensors(fp8))
    assert changed == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
    ]


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT's use of it
def test_merged_adapters_are_what_changed(fp8: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = sw.load_pretrained(fp8, adapter=peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match="merge_and_unload"):
        sw.export_hf(model, tmp_path / "out", quantize="as-source")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and "layers.0" in name:
                parameter.fill_(0.1)
    report = sw.export_hf(model.merge_and_unload(), tmp_path / "out", quantize="as-source").as_source
    assert report is not None
    assert [rule.names for rule in report.requantized] == [("model.layers.0.self_attn.q_proj.weight",)]
    assert len(_different(plain_tensors(tmp_path / "out"), plain_tensors(fp8))) == 2
