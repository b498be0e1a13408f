"""The commands on a pipeline: each model by its name, whole and sharded, and what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.catalog.pipelines import pipeline_in
from shardwise.errors import CheckpointError, PlanError, SourceError
from tests.cli.test_cli import check_paragraph, flip, run, run_json, truncate
from tests.diffusion.models import ZOO, write_pipeline

MODELS = {
    "flux": ("text_encoder", "text_encoder_2", "transformer", "vae"),
    "wan": ("text_encoder", "transformer", "transformer_2", "vae"),
}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``flux``; ``wan``, of whose first transformer there is a variant, too; ``flux-fp16``, which has only that."""
    root = tmp_path_factory.mktemp("pipelines")
    for kind in MODELS:
        write_pipeline(kind, root / kind)
    write_pipeline("flux", root / "flux-fp16", half=True)
    half = ZOO["wan"].cls(**ZOO["wan"].config).half()
    half.save_pretrained(root / "wan" / "transformer", variant="fp16")
    return root


@pytest.fixture
def wan(pipelines: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pipelines / "wan", tmp_path / "wan"))


def theirs(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.nn.Module]:
    """The models that diffusers loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`torch_dtype` is deprecated", FutureWarning
        )  # 0.37 has no other name
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder), torch_dtype=dtype)
    return {n: c for n, c in pipeline.components.items() if isinstance(c, torch.nn.Module)}


def nbytes(model: torch.nn.Module) -> int:
    """Of what is stored of a model, tied tensors once."""
    return sum({id(t): t.nbytes for t in model.state_dict(keep_vars=True).values()}.values())


def test_inspect(pipelines: Path) -> None:
    for name, variant, dtype in (("flux", None, "F32"), ("flux-fp16", "fp16", "F16")):
        found = run_json("inspect", pipelines / name)
        assert (found["kind"], found["class_name"], found["ok"]) == (
            "diffusers pipeline",
            "FluxPipeline",
            True,
        )
        index = json.loads((pipelines / name / "model_index.json").read_text())
        listed = {one["name"]: [one["library"], one["class_name"]] for one in found["components"]}
        assert listed == {key: value for key, value in index.items() if isinstance(value, list) and value[0]}
        for one in found["components"]:
            folder = pipelines / name / one["name"]
            tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
            assert (one["tensors"], one["tensor_bytes"]) == (
                len(tensors),
                sum(t.nbytes for t in tensors.values()),
            )
            assert bool(one["tensors"]) is (one["name"] in MODELS["flux"])
            if tensors:
                assert (one["variant"], [*one["dtypes"]]) == (variant, [dtype])
    text = run("inspect", pipelines / "wan").output
    rows = [line.split() for line in text.splitlines() if line.startswith((" transformer", "transformer"))]
    assert [row[:4] for row in rows] == [
        ["transformer", "diffusers", "WanTransformer3DModel", "-"],
        ["transformer", "diffusers", "WanTransformer3DModel", "fp16"],
        ["transformer_2", "diffusers", "WanTransformer3DModel", "-"],
    ]
    one = run_json("inspect", pipelines / "wan" / "transformer_2")
    assert (one["kind"], one["tensors"]) == ("safetensors", int(rows[2][4]))


def test_variants_are_those_that_diffusers_finds(pipelines: Path, tmp_path: Path) -> None:
    """Also under the older names of an index and its files."""
    from diffusers.pipelines.pipeline_loading_utils import _identify_model_variants

    stem = "diffusion_pytorch_model"
    old = (f"{stem}.safetensors.fp16.index.json", f"{stem}-00001-of-00001.fp16.safetensors")
    shutil.copytree(pipelines / "wan" / "scheduler", tmp_path / "scheduler")
    shutil.copy(pipelines / "wan" / "model_index.json", tmp_path)
    (tmp_path / "vae").mkdir()
    for name in old:
        (tmp_path / "vae" / name).touch()
    for folder in (pipelines / "wan", pipelines / "flux-fp16", tmp_path):
        config = json.loads((folder / "model_index.json").read_text())
        expected = _identify_model_variants(str(folder), "fp16", config)
        components = pipeline_in(str(folder)).components
        assert {name for name, one in components.items() if "fp16" in one.variants} == {*expected}
    with pytest.raises(SourceError, match=r"vae: its weights are only there as variant='fp16'"):
        pipeline_in(str(pipelines / "flux-fp16")).components["vae"].variant(None)
    assert pipeline_in(str(pipelines / "wan")).components["vae"].variant("fp16") is None


@pytest.mark.parametrize(("kind", "dtype"), [("flux", None), ("wan", torch.bfloat16)])
def test_plan(pipelines: Path, kind: str, dtype: torch.dtype | None) -> None:
    """Whole models as diffusers loads them, sharded ones as each model's own plan says."""
    report = sw.reports.plan_pipeline(pipelines / kind, ranks=3, dtype=dtype)
    expected = theirs(pipelines / kind, dtype=dtype)
    assert {one.name: one.whole_bytes for one in report.components} == {
        n: nbytes(m) for n, m in expected.items()
    }
    assert report.shard is None
    for one in report.components:
        alone = sw.plan(pipelines / kind, subfolder=one.name, ranks=3, dtype=dtype or torch.float32)
        assert (one.shard_bytes, one.gathered_bytes) == (
            alone.max_shard_bytes,
            alone.largest_group.gathered_bytes,
        )
    assert report.held_bytes(()) == sum(map(nbytes, expected.values()))


def test_which_models_to_shard(pipelines: Path) -> None:
    """The fewest ones, on as many ranks as it takes; and the line says it."""
    flux, sizes = pipelines / "flux", {n: nbytes(m) for n, m in theirs(pipelines / "flux").items()}
    report = sw.reports.plan_pipeline(flux, device_limit_bytes=sum(sizes.values()))
    assert (report.ranks, report.shard) == (1, ())
    report = sw.reports.plan_pipeline(flux, device_limit_bytes=sum(sizes.values()) - 1)
    assert report.ranks > 1
    fitting = [
        names
        for count in range(5)
        for names in combinations(MODELS["flux"], count)
        if report.held_bytes(names) < sum(sizes.values())
    ]
    assert report.shard in fitting
    assert len(report.shard) == len(fitting[0])
    assert report.held_bytes(report.shard) == min(
        report.held_bytes(one) for one in fitting if len(one) == len(fitting[0])
    )
    half = sw.reports.plan_pipeline(flux, ranks=report.ranks // 2, device_limit_bytes=sum(sizes.values()) - 1)
    assert half.shard is None
    limit = sw.reports.plan_pipeline(flux, ranks=64).least_bytes
    both = sw.reports.plan_pipeline(flux, ranks=64, device_limit_bytes=limit)
    assert both.shard is not None
    assert both.held_bytes(both.shard) == limit
    result = run("plan", flux, "--ranks", 64, "--fit", f"{limit}B", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert (
        f"sw.load_pipeline({str(flux)!r}, mesh, shard={both.shard!r}, dtype=torch.float32)" in result.output
    )
    for name in MODELS["flux"]:
        (row,) = (line for line in result.output.splitlines() if line.split()[:1] == [name])
        assert row.split()[-1] == ("sharded" if name in both.shard else "whole")
    result = run("plan", flux, "--ranks", 64, "--fit", f"{limit - 1}B")
    assert result.exit_code == 1
    assert "Does not fit" in result.output
    assert run_json("plan", flux, "--fit", "100KiB", status=1)["shard"] is None


def test_plan_of_configs_alone(wan: Path) -> None:
    """As of a download that has only them."""
    expected = sw.reports.plan_pipeline(wan, ranks=4)
    for file in [*wan.glob("*/*.safetensors"), *wan.glob("*/*.index.*json")]:
        file.unlink()
    assert sw.reports.plan_pipeline(wan, ranks=4) == expected


def test_plan_of_a_variant_and_of_wrong_options(pipelines: Path) -> None:
    found = run_json("plan", pipelines / "wan", "--ranks", 2, "--variant", "fp16")
    assert {one["name"]: one["variant"] for one in found["components"]} == {
        **dict.fromkeys(MODELS["wan"]),
        "transformer": "fp16",
    }
    result = run("plan", pipelines / "flux-fp16", "--ranks", 2)
    check_paragraph(result, "4 problems", "transformer: ", "variant='fp16'")
    check_paragraph(
        run("plan", pipelines / "wan", "--ranks", 2, "--tp", 2), "--tp doesn't apply to a pipeline"
    )
    check_paragraph(run("plan", pipelines / "wan"), "pass --ranks N, or --fit")
    one = run_json("plan", pipelines / "wan", "--ranks", 2, "--subfolder", "transformer_2")
    assert one["model_class"] == "WanTransformer3DModel"
    with pytest.raises(SourceError, match=r"no model_index.json"):
        sw.reports.plan_pipeline(pipelines / "wan" / "vae", ranks=2)
    with pytest.raises(ValueError, match="ranks=None"):
        sw.reports.plan_pipeline(pipelines / "wan")


def test_verify(pipelines: Path) -> None:
    for name in ("flux", "wan", "flux-fp16"):
        found = run_json("verify", pipelines / name)
        files = len([*(pipelines / name).rglob("*.safetensors")])
        assert (found["ok"], found["models"], found["files"]) == (True, 4, files), found


def _lose_a_file(wan: Path) -> str:
    (wan / "transformer_2" / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    return "diffusion_pytorch_model-00002-of-00003.safetensors"


def _lose_all_weights(wan: Path) -> str:
    for file in (wan / "transformer_2").glob("diffusion_pytorch_model*"):
        file.unlink()
    return "no weights"


def _lose_the_folder(wan: Path) -> str:
    shutil.rmtree(wan / "transformer_2")
    return "transformer_2"


def _truncate(wan: Path) -> str:
    truncate(wan / "transformer_2" / "diffusion_pytorch_model-00001-of-00003.safetensors")
    return "diffusion_pytorch_model-00001-of-00003.safetensors"


def _damage_a_header(wan: Path) -> str:
    flip(wan / "transformer_2" / "diffusion_pytorch_model-00001-of-00003.safetensors", 9)
    return "diffusion_pytorch_model-00001-of-00003.safetensors"


def _lose_a_tensor(wan: Path) -> str:
    """Out of its file; the index still lists it."""
    file = wan / "transformer_2" / "diffusion_pytorch_model-00003-of-00003.safetensors"
    tensors = load_file(file)
    name, _ = tensors.popitem()
    save_file(tensors, file)
    return name


def _of_another_model(wan: Path) -> str:
    """Whole in itself: only the class knows that it's another one."""
    for file in (wan / "transformer_2").glob("*"):
        file.unlink()
    shutil.copytree(wan / "vae", wan / "transformer_2", dirs_exist_ok=True)
    config = {"_class_name": "WanTransformer3DModel", **ZOO["wan"].config}
    (wan / "transformer_2" / "config.json").write_text(json.dumps(config))
    return "patch_embedding.weight"


#: What ``doctor`` finds, too: it doesn't build models.
SEEN = {_lose_a_file, _lose_all_weights, _lose_the_folder, _truncate, _damage_a_header, _lose_a_tensor}


@pytest.mark.parametrize("damage", [*sorted(SEEN, key=lambda one: one.__name__), _of_another_model])
def test_what_is_wrong_has_the_name_of_its_component(wan: Path, damage: Any) -> None:
    said = damage(wan)
    found = run_json("verify", wan, status=1)
    assert found["problems"]
    assert all(problem.startswith("transformer_2: ") for problem in found["problems"]), found["problems"]
    assert any(said in problem for problem in found["problems"]), found["problems"]
    assert "damaged" in run("verify", wan).output
    is_unseen_by_headers = damage in (_lose_a_tensor, _of_another_model, _lose_all_weights)
    assert run("inspect", wan).exit_code == (0 if is_unseen_by_headers else 1)
    diagnosis = run_json("doctor", wan, status=1 if damage in SEEN else 0)
    where = {finding["where"] for finding in diagnosis["findings"] if finding["rule"].startswith("model.")}
    if damage is _lose_the_folder:
        assert where == {str(wan)}
    elif damage in SEEN:
        assert where
        assert all(Path(one).is_relative_to(wan / "transformer_2") for one in where), where
    if damage is _lose_a_tensor:
        with pytest.raises(PlanError, match=rf"transformer_2: missing: parameter '{said}'"):
            sw.reports.plan_pipeline(wan, ranks=2)


def test_doctor(pipelines: Path, tmp_path: Path) -> None:
    found = run("doctor", pipelines / "flux-fp16")
    assert found.exit_code == 0, found.output
    assert (
        "a diffusers pipeline (model_index.json), with text_encoder, text_encoder_2, transformer, vae"
        in found.output
    )
    for given in ("{}", "[1]"):
        (tmp_path / "model_index.json").write_text(given)
        for command in ("inspect", "verify", "doctor"):
            result = run(command, tmp_path)
            assert result.exit_code == 1
            assert "a diffusers pipeline" in result.output


@pytest.fixture(scope="module")
def step(pipelines: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of both transformers of ``wan``, and their pipeline, which was changed."""
    live = diffusers.DiffusionPipeline.from_pretrained(str(pipelines / "wan"))
    models = {name: getattr(live, name) for name in ("transformer", "transformer_2")}
    for number, model in enumerate(models.values(), 1):
        for parameter in model.parameters():
            parameter.data.add_(0.5 * number)
    root = tmp_path_factory.mktemp("run")
    with sw.Checkpointer(root) as checkpointer:
        checkpointer.save(sw.TrainState(model=models), 3)
    sw.save(sw.TrainState(model=models["transformer_2"]), root.parent / "alone")
    return root / "step-00000003", live


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_export_of_one_of_several_models(step: tuple[Path, Any], tmp_path: Path) -> None:
    path, live = step
    for given, variant in ((("--model", "transformer_2"), None), (("--model-name", "transformer"), "bf16")):
        more = ("--variant", variant) if variant else ()
        result = run("export", path, tmp_path / given[1], *given, *more)
        assert result.exit_code == 0, result.output
        getattr(live, given[1]).save_pretrained(tmp_path / "theirs" / given[1], variant=variant)
        own, expected = _files(tmp_path / given[1]), _files(tmp_path / "theirs" / given[1])
        assert own.keys() == expected.keys()
        assert all(own[name] == expected[name] for name in own if name.endswith(".safetensors"))
    check_paragraph(run("export", path, tmp_path / "out"), "transformer_2")


def test_export_of_a_component(pipelines: Path, tmp_path: Path) -> None:
    for name in ("transformer_2", "text_encoder"):
        result = run("export", pipelines / "wan", tmp_path / name, "--model", name)
        assert result.exit_code == 0, result.output
        own, expected = _files(tmp_path / name), theirs(pipelines / "wan")[name].state_dict()
        (weights,) = (file for file in own if file.endswith(".safetensors"))
        found = load_file(tmp_path / name / weights)
        assert found.keys() <= expected.keys()
        assert "config.json" in own
        assert all(torch.equal(tensor, expected[one]) for one, tensor in found.items())
    check_paragraph(run("export", pipelines / "wan", tmp_path / "out", "--model", "scheduler"), "scheduler")


def test_export_into_a_pipeline(pipelines: Path, step: tuple[Path, Any], tmp_path: Path) -> None:
    """All models of a step, one of them, and the only one of a step, each by the name of its component."""
    path, live = step
    alone = path.parent.parent / "alone"
    own = {name: getattr(live, name).state_dict() for name in ("transformer", "transformer_2")}
    old = {name: model.state_dict() for name, model in theirs(pipelines / "wan").items()}
    for source, model, changed in (
        (path, None, {"transformer", "transformer_2"}),
        (path, "transformer_2", {"transformer_2"}),
        (alone, "transformer_2", {"transformer_2"}),
    ):
        out = tmp_path / f"{source.name}-{model}"
        more = ("--model", model) if model else ()
        found = run_json("export", source, out, "--pipeline", pipelines / "wan", *more)
        assert {name.partition("/")[0] for name in found["files"]} == changed
        assert sorted(os.listdir(out)) == sorted(os.listdir(pipelines / "wan"))
        for name, module in theirs(out).items():
            expected = own[name] if name in changed else old[name]
            assert all(torch.equal(t, expected[n]) for n, t in module.state_dict().items()), name
        assert run("verify", out).exit_code == 0
    with pytest.raises(SourceError, match=r"say which component it is: model_name='transformer'"):
        sw.export_hf(alone, tmp_path / "out", pipeline=pipelines / "wan")
    with pytest.raises(SourceError, match=r"has no model 'vae'; it has transformer, transformer_2"):
        sw.export_hf(path, tmp_path / "out", pipeline=pipelines / "wan", model_name="vae")
    assert not (tmp_path / "out").exists()
    (out / "vae" / "left.txt").write_text("of the export before")
    with pytest.raises(CheckpointError, match=r"exists already; export into a new or empty directory"):
        sw.export_hf(path, out, pipeline=pipelines / "wan")
    sw.export_hf(path, out, pipeline=pipelines / "wan", overwrite=True)
    assert not (out / "vae" / "left.txt").exists()
    assert run("verify", out).exit_code == 0
