"""Which files of a directory are the model: those that transformers' own resolver takes, in every entry point."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    modeling_utils,
)

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.weights import Choice, listed, weights_in
from shardwise.cli.render import contents_of
from shardwise.errors import PlanError, SourceError
from shardwise.models.hub import HubOptions, find_model
from shardwise.ranks.ranks import Ranks

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NAMED = "hf.safetensors"

#: Names of files and their content, as a model directory may hold them: whole files, indexes with all shards, with
#: lost shards, and with an entry that no file holds.
Files = Mapping[str, str]


def _index(*files: str, surplus: bool = False) -> str:
    entries = {f"layer.{k}": file for k, file in enumerate(files)} | ({"mtp.0": files[-1]} if surplus else {})
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": entries})


def _family(single: str, index: str, variant: str | None = None) -> Iterator[Files]:
    """All ways in which one format of one variant can be there."""
    stem, _, end = single.rpartition(".")
    shards = [f"{stem}{f'.{variant}' if variant else ''}-{k:05}-of-00002.{end}" for k in (1, 2)]
    if variant:
        single, index = (f"{n.rpartition('.')[0]}.{variant}.{n.rpartition('.')[2]}" for n in (single, index))
    wholes: tuple[Files, ...] = ({}, {single: ""})
    indexed: tuple[Files, ...] = (
        {},
        {index: _index(*shards)} | dict.fromkeys(shards, ""),
        {index: _index(*shards)},
        {index: _index(*shards, surplus=True)} | dict.fromkeys(shards, ""),
    )
    for whole, several in product(wholes, indexed):
        yield {**whole, **several}


def _directories() -> Iterator[Files]:
    """All combinations without a variant, and the wholes and complete indexes of a variant beside them."""
    safetensors, pickled = list(_family(SINGLE, INDEX)), list(_family(BIN, BIN_INDEX))
    of_variant = [
        list(_family(s, i, "fp16"))[k] for s, i in ((SINGLE, INDEX), (BIN, BIN_INDEX)) for k in (4, 1)
    ]
    for a, b in product(safetensors, pickled):
        for chosen in product((False, True), repeat=4):
            more = [files for files, taken in zip(of_variant, chosen, strict=True) if taken]
            yield {
                "config.json": "{}",
                "other.safetensors": "",
                **a,
                **b,
                **{k: v for f in more for k, v in f.items()},
            }


def _written(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def _theirs(path: str, **given: Any) -> list[str] | type[Exception]:
    """What transformers' resolver takes; the one place of these tests that calls this private function."""
    resolve: Callable[..., Any] = modeling_utils._get_resolved_checkpoint_files
    hub = {name: given.pop(name) for name in ("subfolder", "cache_dir", "local_files_only") if name in given}
    known = inspect.signature(resolve).parameters
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": path, "is_remote_code": False, **given}
    arguments |= {"download_kwargs": hub} if "download_kwargs" in known else hub
    arguments |= {name: None for name, p in known.items() if p.default is p.empty and name not in arguments}
    try:
        found, _ = resolve(**arguments)
    except (OSError, ValueError):
        return SourceError
    return list(found)


def _ours(folder: Path, choice: Choice) -> list[str] | type[Exception]:
    try:
        weights = weights_in(str(folder), choice)
        if weights is None:
            return SourceError
        return [str(folder / name) for name in listed(str(folder), weights, is_asked=False).names]
    except SourceError:
        return SourceError


def test_the_same_files_as_transformers_in_every_combination(tmp_path: Path) -> None:
    compared, with_files, differences = 0, 0, []
    for k, files in enumerate(_directories()):
        subfolder = ("", "inner")[k % 2]
        folder = _written(files, tmp_path / str(k) / subfolder)
        for variant, safe in product((None, "fp16", "other"), (None, True, False)):
            given = {"variant": variant, "use_safetensors": safe}
            theirs = _theirs(str(tmp_path / str(k)), subfolder=subfolder, **given)
            ours = _ours(folder, Choice(**given))
            compared, with_files = compared + 1, with_files + isinstance(theirs, list)
            if ours != theirs:
                differences.append((sorted(files), given, theirs, ours))
    assert differences == []
    assert (compared, with_files) == (9216, 5296)


def test_the_file_that_the_config_names(tmp_path: Path) -> None:
    """``transformers_weights``: there or not, a file or an index, beside every other candidate."""
    names = (
        NAMED,
        "lost.safetensors",
        "deep/hf.safetensors",
        "hf.safetensors.index.json",
        INDEX,
        BIN,
        "hf.pt",
        "",
    )
    directories = list(_directories())[::16]
    for k, (files, name) in enumerate(product(directories, names)):
        more = {
            "config.json": json.dumps({"model_type": "qwen3", "transformers_weights": name}),
            NAMED: "",
            "hf.safetensors.index.json": _index(NAMED, "lost.safetensors"),
        }
        folder = _written({**files, **more}, tmp_path / str(k))
        for variant, safe in ((None, None), ("fp16", None), (None, False)):
            theirs = _theirs(
                str(folder), variant=variant, use_safetensors=safe, transformers_explicit_filename=name
            )
            given = {"variant": variant, "use_safetensors": safe}
            assert _ours(folder, Choice(**given)) == theirs, (sorted(files), name)
            assert _ours(folder, Choice(**given, config=Qwen3Config(transformers_weights=name))) == theirs
            plain = _theirs(str(folder), **given)
            assert _ours(folder, Choice(**given, config=Qwen3Config())) == plain, (
                "the caller's config decides"
            )
    outside = _written(
        {"config.json": json.dumps({"transformers_weights": "../x.safetensors"})}, tmp_path / "out"
    )
    with pytest.raises(SourceError, match="not a path inside its directory"):
        open_catalog(outside)


@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_the_same_files_from_a_snapshot_of_the_hub(
    tmp_path: Path, subfolder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    compared = 0
    for k, files in enumerate(list(_directories())[::11]):
        repository = tmp_path / str(k) / "models--tiny--model"
        snapshot = repository / "snapshots" / ("a" * 40)
        name = (None, NAMED)[k % 4 == 3]
        config = {"config.json": json.dumps({"transformers_weights": name} if name else {}), NAMED: ""}
        _written({**files, **config}, snapshot / subfolder)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        for variant, safe in product((None, "fp16"), (None, True, False)):
            place: dict[str, Any] = {
                "cache_dir": str(tmp_path / str(k)),
                "local_files_only": True,
                "subfolder": subfolder,
            }
            given: dict[str, Any] = {"variant": variant, "use_safetensors": safe}
            theirs = _theirs("tiny/model", **place, **given, transformers_explicit_filename=name)
            options = HubOptions(**place, **given)
            try:
                folder = find_model("tiny/model", options, Ranks())
                ours = _ours(Path(folder), options.choice)
            except SourceError:
                ours = SourceError
            assert ours == theirs, (sorted(files), given, name)
            compared += 1
    assert compared == 564


# ----------------------------------------------------------------------------------------------------
# The same weights, and one warning

CONFIG = Qwen3Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=False,
)


def _model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(CONFIG)


def _state(seed: int) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in _model(seed).state_dict().items()}


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _whole_and_index(folder: Path) -> None:
    _model(1).save_pretrained(folder, max_shard_size="8KB")
    save_file(_state(2), folder / SINGLE)


def _pickled_and_index(folder: Path) -> None:
    folder.mkdir()
    CONFIG.save_pretrained(folder)
    torch.save(_state(2), folder / BIN)
    torch.save(_state(1), folder / "pytorch_model-00001-of-00001.bin")
    (folder / BIN_INDEX).write_text(
        json.dumps(
            {"metadata": {}, "weight_map": dict.fromkeys(_state(1), "pytorch_model-00001-of-00001.bin")}
        )
    )


def _both_formats(folder: Path) -> None:
    _model(2).save_pretrained(folder)
    torch.save(_state(1), folder / BIN)


def _stray_safetensors(folder: Path) -> None:
    folder.mkdir()
    CONFIG.save_pretrained(folder)
    torch.save(_state(2), folder / BIN)
    save_file({"optimizer.step": torch.ones(1)}, folder / "training.safetensors")


def _named_by_config(folder: Path) -> None:
    _model(1).save_pretrained(folder)
    save_file(_state(2), folder / NAMED)
    _edit(folder / "config.json", transformers_weights=NAMED)


def _stale_index(folder: Path) -> None:
    _model(2).save_pretrained(folder)
    entries = dict.fromkeys(_state(2), "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": entries}))


def _surplus_entry(folder: Path) -> None:
    _model(2).save_pretrained(folder, max_shard_size="8KB")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    _edit(folder / INDEX, weight_map={**weight_map, "mtp.fc.weight": sorted(weight_map.values())[-1]})


CASES: dict[Callable[[Path], None], tuple[str, ...]] = {
    _whole_and_index: (f"uses {SINGLE}, as from_pretrained does, and ignores {INDEX},",),
    _pickled_and_index: (f"uses {BIN}, as from_pretrained does, and ignores {BIN_INDEX},",),
    _both_formats: (f"uses {SINGLE}, as from_pretrained does, and ignores {BIN},",),
    _stray_safetensors: (),
    _named_by_config: (f"uses {NAMED}, as from_pretrained does, and ignores {SINGLE},",),
    _stale_index: (),
    _surplus_entry: ("its index lists tensors that its files don't hold: mtp.fc.weight",),
}


@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_every_entry_point_takes_what_from_pretrained_takes(
    write: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    write(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in _state(2).items())
    with caplog.at_level(logging.WARNING, "shardwise"):
        loaded, report = sw.load_pretrained(folder, return_report=True)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == len(CASES[write]), said
    for text, expected_text in zip(said, CASES[write], strict=True):
        assert expected_text in text
        assert str(folder) in text
    _assert_equal(loaded, expected)
    taken = {Path(f.path).name for f in open_catalog(folder).files}
    there = {p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")}
    assert there - taken == {n for n in report.ignored_files if not n.endswith(".json")}

    with sw.meta_init():
        mine = Qwen3ForCausalLM(CONFIG)
    sw.load(mine, folder)
    _assert_equal(mine, expected)
    assert contents_of(str(folder)).ignored_files == report.ignored_files
    planned = sw.plan(folder, ranks=2)
    assert planned.ignored_files == report.ignored_files
    converted = sw.convert(folder, tmp_path / "step-00000001")
    assert [
        n for n in report.ignored_files if not any(line.startswith(f"{n}: ") for line in converted.skipped)
    ] == []
    _assert_equal(sw.load_pretrained(tmp_path / "step-00000001"), expected)
    for source, out in ((folder, "export"), (loaded, "export of the model")):
        sw.export_hf(source, tmp_path / out)
        _assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / out), expected)
    assert sw.diff(folder, tmp_path / "export").changed == ()


def _assert_equal(model: Any, expected: Mapping[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def test_variant_and_format_as_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _model(1).save_pretrained(folder)
    torch.save(_state(2), folder / BIN)
    _model(3).save_pretrained(folder, variant="fp16", max_shard_size="8KB")
    torch.save(_state(4), folder / "pytorch_model.old.bin")
    for seed, given in (
        (1, {}),
        (2, {"use_safetensors": False}),
        (3, {"variant": "fp16"}),
        (4, {"variant": "old"}),
    ):
        loaded = sw.load_pretrained(folder, **given)
        _assert_equal(loaded, _state(seed))
        _assert_equal(AutoModelForCausalLM.from_pretrained(folder, **given), _state(seed))
    for wrong in ({"variant": "fp32"}, {"variant": "old", "use_safetensors": True}):
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(folder, **wrong)
        with pytest.raises(SourceError, match="none that fits"):
            sw.load_pretrained(folder, **wrong)


def test_an_entry_of_the_index_that_is_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _model(2).save_pretrained(folder, max_shard_size="8KB")
    name = "model.norm.weight"
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    state = {
        n: t
        for n, t in _state(2).items()
        if json.loads((folder / INDEX).read_text())["weight_map"][n] == file.name
    }
    save_file({n: t for n, t in state.items() if n != name}, file)
    with pytest.raises(PlanError, match=rf"missing: parameter '{name}'.*the index finds it in {file.name}"):
        sw.load_pretrained(folder)
    loaded, report = sw.load_pretrained(folder, allow_missing=(name,), return_report=True)
    assert [d.name for d in report.initialized] == [name]
    assert torch.equal(loaded.lm_head.weight, _state(2)["lm_head.weight"])


def test_slices_go_before_a_whole_file(tmp_path: Path) -> None:
    """``save_pretrained`` of a distributed model, by the names that transformers looks for."""
    knows = importlib.util.find_spec("transformers.distributed.checkpoint")  # later than 5.3
    slices = "shard-00001-model-00001-of-00001.safetensors"
    for names, are_slices in (({SINGLE, slices}, True), ({SINGLE, f"x-{slices}"}, False)):
        folder = _written(dict.fromkeys(names, ""), tmp_path / str(are_slices))
        if knows is not None:
            theirs = importlib.import_module("transformers.distributed.checkpoint")
            assert theirs.is_sharded_checkpoint(folder) is are_slices
        assert (weights_in(str(folder), Choice()) is None) is are_slices


def test_a_generation_config_in_another_folder_is_not_the_models(tmp_path: Path) -> None:
    _model(2).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert expected.max_new_tokens != 7
    assert sw.load_pretrained(tmp_path).generation_config.max_new_tokens == expected.max_new_tokens


# ----------------------------------------------------------------------------------------------------
# sentence-transformers


def _sentence_model(folder: Path, of_transformer: str) -> None:
    """The files that ``SentenceTransformer.save`` writes for a transformer, pooling and a dense layer."""
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=30
    )
    BertModel(config).save_pretrained(folder / of_transformer)
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 16, "out_features": 8}))
    save_file({"linear.weight": torch.ones(8, 16), "linear.bias": torch.ones(8)}, folder / "2_Dense" / SINGLE)
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (kind, path) in enumerate(zip(kinds, (of_transformer, "1_Pooling", "2_Dense"), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_modules_of_sentence_transformers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _sentence_model(tmp_path / "new", "")
    with caplog.at_level(logging.WARNING, "shardwise"):
        loaded, report = sw.load_pretrained(tmp_path / "new", return_report=True)
    assert type(loaded) is BertModel
    assert report.ignored_files == ("2_Dense/model.safetensors",)
    (warning,) = caplog.records
    assert (
        "loads only the transformers model: modules.json lists 2_Dense/model.safetensors"
        in warning.getMessage()
    )
    assert sw.plan(tmp_path / "new", ranks=1).ignored_files == report.ignored_files
    converted = sw.convert(tmp_path / "new", tmp_path / "step")
    assert any(line.startswith("2_Dense/model.safetensors: ") for line in converted.skipped)

    caplog.clear()
    shutil.rmtree(tmp_path / "new" / "2_Dense")  # pooling has no weights
    assert sw.reports.load_report(sw.load_pretrained(tmp_path / "new")).ignored_files == ()
    assert caplog.records == []


def test_a_transformer_in_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    _sentence_model(tmp_path, "0_Transformer")
    with pytest.raises(SourceError, match="give subfolder='0_Transformer'"):
        sw.load_pretrained(tmp_path)
    assert type(sw.load_pretrained(tmp_path, subfolder="0_Transformer")) is BertModel
