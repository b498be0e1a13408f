"""The documents of a model's directory: what goes out is what came in, for every class of tokenizer and processor."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.errors import SourceError
from shardwise.models.documents import documents_among, files_below_modules, is_document
from shardwise.models.homes import asset_files, read_assets, remember_home
from shardwise.models.hub import _documents, _named_by_documents
from tests.harness.models import build_reference
from tests.models import _tokenizers as every

#: Tokenizer classes whose files can't be written here although their packages are installed. Their names are held by the first test.
NOT_BUILT = {
    "CpmTokenizerFast",  # a sentencepiece model alone
    "ParakeetTokenizer",  # the same
    "PegasusTokenizer",  # its default vocabulary is none that it takes
    "ReformerTokenizer",  # the same
    "RobertaTokenizerFast",  # of older transformers: the same
}


def written(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_every_file_that_a_tokenizer_class_declares(tmp_path: Path) -> None:
    """Also of classes whose packages are not installed; vocabularies may be binary."""
    declared = every.declared_names()
    for kind in every.tokenizer_classes():
        declared.setdefault(kind.__name__, set()).update(kind.vocab_files_names.values())
    assert len(declared) > 80
    names = set().union(*declared.values()) | {
        "tekken.json",
        "source.spm",
        "target.spm",
        "qwen.tiktoken",
        "ice_text.model",
    }
    assert len(names) > 20
    content = {name: bytes(range(256)) + name.encode() for name in names}
    assert read_assets(str(written(content, tmp_path / "x"))) == content
    model = build_reference("qwen3-tied")
    remember_home(model, str(tmp_path / "x"))
    assert {n: c for n, c in asset_files(model).items() if n in names} == content


@pytest.mark.filterwarnings(
    "ignore:.*unclosed file.*byte_maps", "ignore:.*byte_maps"
)  # MyT5Tokenizer leaves it open
@pytest.mark.filterwarnings(
    "ignore:Deprecated in 0.9.0:DeprecationWarning"
)  # tokenizers, of older transformers
def test_every_tokenizer_class_gives_the_same_ids(tmp_path: Path) -> None:
    built, lacking, failed = [], [], {}
    for kind in {k.__name__: k for k in every.tokenizer_classes()}.values():
        folder = tmp_path / kind.__name__
        try:
            expected = every.ids_of(every.write_tokenizer(kind, folder))
        except Exception as error:
            if every.needs_a_package(error):
                lacking.append(kind.__name__)
            else:
                failed[kind.__name__] = error
            continue
        out = written(read_assets(str(folder)), tmp_path / f"{kind.__name__}-out")
        assert every.ids_of(kind.from_pretrained(out)) == expected, kind.__name__
        built.append(kind.__name__)
    print(f"{len(built)} tokenizer classes; for want of packages not {lacking}")
    assert failed.keys() <= NOT_BUILT, failed
    assert len(built) >= 65, (built, lacking)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # SAM 3's code
def test_every_processor_class_saves_what_is_carried(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    built, lacking, failed = [], [], {}
    for kind in every.processor_classes():
        folder = tmp_path / kind.__name__
        try:
            every.write_processor(kind, folder)
        except Exception as error:
            (
                lacking.append(kind.__name__)
                if every.needs_a_package(error)
                else failed.update({kind.__name__: error})
            )
            continue
        saved = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert saved
        assert read_assets(str(folder)) == saved, kind.__name__
        built.append(kind.__name__)
        if (folder / "chat_template.jinja").is_file() and len(built) % 10 == 1:
            out = written(read_assets(str(folder)), tmp_path / f"{kind.__name__}-out")
            before, after = (every.ids_of(AutoTokenizer.from_pretrained(one)) for one in (folder, out))
            assert before == after
    print(
        f"{len(built)} processor classes; for want of packages not {lacking}; for other reasons not {sorted(failed)}"
    )
    assert len(built) >= 80, (len(built), {k: str(e)[:80] for k, e in failed.items()})


# ----------------------------------------------------------------------------------------------------
# The rule


def test_what_is_no_document() -> None:
    others = [
        *(
            "model.safetensors",
            "pytorch_model-00001-of-00002.bin",
            "model.safetensors.index.json",
            "consolidated.00.pth",
        ),
        *(
            "optimizer.pt",
            "rng_state_0.pth",
            "trainer_state.json",
            "training_args.bin",
            "scheduler.pt",
            "x.gguf",
            "tf_model.h5",
        ),
        *(
            "flax_model.msgpack",
            "model.onnx",
            ".env",
            ".gitattributes",
            "credentials.json",
            "id_rsa",
            "server.pem",
            "token",
            "gcp-credentials.json",
            "id_ed25519",
            "tls.key",
            "api_key.txt",
            "_netrc",
        ),
        *(
            "adapter_config.json",
            "manifest.json",
            "head.json",
            "latest",
            "figure.png",
            "talk.mp4",
            "data.zip",
            "a.tar.gz",
            "x.py",
        ),
        *("hf_quant_config.json", "events.out.tfevents.17.host.1.0", "quantize_config.json"),
    ]
    assert [name for name in others if is_document(name)] == []
    documents = [
        "README.md",
        "LICENSE",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.tsv",
        "x.yaml",
        "tokens.txt",
        "tokens.json",
        "token.json",
        "id_map.json",
        "x-key.json",
    ]
    assert [name for name in documents if not is_document(name)] == []


def test_which_folders_have_documents() -> None:
    names = [
        *("config.json", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/x.bin"),
        *(
            "qformer_tokenizer/tokenizer_config.json",
            "qformer_tokenizer/tokenizer.json",
            "qformer_tokenizer/x.safetensors",
        ),
        *(
            "checkpoint-5/config.json",
            "checkpoint-5/tokenizer_config.json",
            "runs/notes.txt",
            "original/params.json",
        ),
        *("2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/.hidden", "../x.json", "a\\b.json"),
    ]
    assert documents_among(names, ["2_Dense"]) == [
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "qformer_tokenizer/tokenizer.json",
        "qformer_tokenizer/tokenizer_config.json",
    ]


def test_files_in_folders_that_a_document_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other files in the folder, weights, keys and links out are not among them."""
    arrays = [
        f"speaker_embeddings/v2/en_{n}_{part}.npy"
        for n in range(2)
        for part in ("semantic_prompt", "fine_prompt")
    ]
    named = [*arrays, "speaker_embeddings/note.txt"]
    others = ["speaker_embeddings/v2/x.npy", "speaker_embeddings/w.safetensors", "speaker_embeddings/id_rsa"]
    listed = {"a": [{"b": named}], "c": [*others[1:], "speaker_embeddings/out.npy", "../x.npy", "no/x.npy"]}
    written(dict.fromkeys([*named, *others], b"x"), tmp_path / "m")
    (tmp_path / "secret").write_text("TOPSECRET")
    (tmp_path / "m" / "speaker_embeddings" / "out.npy").symlink_to(tmp_path / "secret")
    (tmp_path / "m" / "presets.json").write_text(json.dumps(listed))
    with caplog.at_level(logging.WARNING, "shardwise"):
        (tmp_path / "m" / "id_rsa").write_text("x")
        assert read_assets(str(tmp_path / "m")).keys() == {"presets.json", *named}
    assert "out.npy (a link out of the directory)" in caplog.text
    assert "id_rsa (its name is that of a key)" in caplog.text


def test_barks_presets_are_the_same_in_a_copy(tmp_path: Path) -> None:
    import numpy
    from transformers import BarkProcessor

    folder = tmp_path / "source"
    parts = {"semantic_prompt": 1, "coarse_prompt": 2, "fine_prompt": 2}
    for part, dims in parts.items():
        file = folder / "given" / f"{part}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(file, numpy.arange(4).reshape((2, 2) if dims == 2 else 4))
    every.write_processor(BarkProcessor, folder / "plain")
    tokenizer = BarkProcessor.from_pretrained(folder / "plain").tokenizer
    preset = {part: f"given/{part}.npy" for part in parts}
    made = BarkProcessor(tokenizer, {"repo_or_path": str(folder), "v2/en": preset})
    saved = tmp_path / "saved"
    made.save_pretrained(str(saved))
    files = {p.relative_to(saved).as_posix(): p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    assert "speaker_embeddings/v2/en_fine_prompt.npy" in files
    assert read_assets(str(saved)) == files
    out = written(read_assets(str(saved)), tmp_path / "out")
    again = BarkProcessor.from_pretrained(str(out))("the cat", voice_preset="v2/en")["history_prompt"]
    for part in parts:
        assert again[part].tolist() == made("the cat", voice_preset="v2/en")["history_prompt"][part].tolist()


def test_the_language_model_of_a_decoder(tmp_path: Path) -> None:
    """As pyctcdecode's ``save_to_dir`` writes it: the file of kenlm may have any name."""
    inner = {f"language_model/{name}": b"x" for name in ("attrs.json", "unigrams.txt", "4gram.bin")}
    content = {"alphabet.json": b"{}", "preprocessor_config.json": b"{}", **inner}
    assert read_assets(str(written(content, tmp_path / "with"))) == content
    assert "language_model/4gram.bin" in documents_among(content)
    assert read_assets(str(written(inner, tmp_path / "without"))) == {}


def test_what_a_hub_and_other_ranks_give_of_named_files(tmp_path: Path) -> None:
    files = {
        "p.json": b'{"a": "in/x.npy", "b": "in/gone.npy"}',
        "in/x.npy": b"x",
        "in/y.npy": b"y",
        "alphabet.json": b"{}",
        "language_model/4gram.bin": b"x",
    }
    written(files, tmp_path)
    assert _named_by_documents(str(tmp_path), "", files) == ["in/x.npy"]
    assert _documents(str(tmp_path), False).keys() == files.keys() - {"in/y.npy"}


def test_a_module_that_is_a_link_out_is_not_walked(tmp_path: Path) -> None:
    root = written({"m/modules.json": b'[{"path": "1_Out"}, {"path": "2_Deep"}]'}, tmp_path) / "m"
    written({"2_Deep/config.json": b"{}", "2_Deep/a/b/c/d/e/f.json": b"{}"}, root)
    (root / "1_Out").symlink_to("/", target_is_directory=True)
    assert _documents(str(root), False).keys() == {"modules.json", "2_Deep/config.json"}
    assert list(files_below_modules(str(root), ["1_Out"])) == []


def test_documents_through_load_save_export_and_convert(tmp_path: Path) -> None:
    """Of a model that has templates, a binary vocabulary, sentence-transformers' modules and a note."""
    source = tmp_path / "source"
    build_reference("qwen3-tied").save_pretrained(source)
    documents = {
        "spm.model": b"\x00\xffvocabulary",
        "tekken.json": b"{}",
        "NOTE": b"by hand",
        "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
        "modules.json": json.dumps(
            [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../.."}]
        ).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": b'{"in_features": 2}',
    }
    written(documents, source)
    save_file({"linear.weight": torch.ones(2, 2)}, source / "2_Dense" / "model.safetensors")
    documents["2_Dense/model.safetensors"] = (source / "2_Dense" / "model.safetensors").read_bytes()
    model = sw.load_pretrained(source)
    torch.save(torch.optim.SGD(model.parameters(), lr=0.1).state_dict(), source / "optimizer.pt")
    sw.export_hf(model, tmp_path / "live")
    sw.save(sw.TrainState(model=model), tmp_path / "step", step=1)
    sw.export_hf(tmp_path / "step", tmp_path / "stored")
    sw.convert(tmp_path / "step", tmp_path / "again")
    sw.convert(source, tmp_path / "converted")
    assert sw.verify(tmp_path / "step").ok
    for folder in ("live", "stored", "step/model", "again/model", "converted/model"):
        found = {name: (tmp_path / folder / name).read_bytes() for name in documents}
        assert found == documents, folder
        assert not (tmp_path / folder / "optimizer.pt").exists()
    assert (
        load_file(tmp_path / "live" / "model.safetensors").keys()
        == load_file(source / "model.safetensors").keys()
    )
    again, report = sw.load_pretrained(tmp_path / "step", return_report=True)
    assert report.unused == ()
    assert isinstance(again, nn.Module)


# ----------------------------------------------------------------------------------------------------
# Links


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build_reference("qwen3-tied").save_pretrained(tmp_path / "source")
    (tmp_path / "secret").write_text('{"key": "TOPSECRET"}')
    return tmp_path / "source"


def published(folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and b"TOPSECRET" in p.read_bytes()]


def test_links_out_of_a_directory_are_left_out_and_named(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "tokenizer.model").symlink_to(tmp_path / "secret")
    (source / "vocab.txt").symlink_to("../secret")
    (source / "loop.json").symlink_to("loop.json")
    (source / "additional_chat_templates").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "x.jinja").write_text("TOPSECRET")
    os.mkfifo(source / "pipe.json")
    (source / "inner.json").symlink_to("config.json")
    with caplog.at_level(logging.WARNING, "shardwise"):
        model = sw.load_pretrained(source)
        sw.export_hf(model, tmp_path / "live")
        sw.save(sw.TrainState(model=model), tmp_path / "step", step=1)
        sw.convert(source, tmp_path / "converted")
    for folder in ("live", "step", "converted"):
        assert published(tmp_path / folder) == []
    assert (tmp_path / "live" / "inner.json").is_file(), "a link in the directory is followed"
    for words in (
        "tokenizer.model (a link out",
        "vocab.txt (a link out",
        "pipe.json (not a regular file)",
        "loop.json",
    ):
        assert words in caplog.text
    (source / "additional_chat_templates").unlink()
    (source / "pipe.json").unlink()
    (source / "loop.json").unlink()
    with pytest.raises(SourceError, match="link to a file outside"):
        sw.copy_checkpoint(source, tmp_path / "copied")
    assert not (tmp_path / "copied").exists()


def link_farm(source: Path, folder: Path) -> Path:
    """A directory of links to the files of another."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_link_farm_loads_and_publishes_no_linked_document(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "tokenizer.json").write_text("TOPSECRET")
    generation = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(
        json.dumps({**generation, "max_new_tokens": 7, "auths": "TOPSECRET"})
    )
    farm = link_farm(source, tmp_path / "farm")
    expected = sw.load_pretrained(source)
    with caplog.at_level(logging.WARNING, "shardwise"):
        model, report = sw.load_pretrained(farm, return_report=True)
        sw.export_hf(model, tmp_path / "live")
    assert report.initialized == ()
    assert model.generation_config.max_new_tokens == 7
    stored = expected.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert "tokenizer.json (a link out of the directory)" in caplog.text
    assert "'auths'" in caplog.text
    sw.save(sw.TrainState(model=model), tmp_path / "step", step=1)
    sw.export_hf(farm, tmp_path / "stored")
    skipped = sw.convert(farm, tmp_path / "converted").skipped
    assert any(line.startswith("tokenizer.json (a link out") for line in skipped), skipped
    for folder in ("live", "step", "stored", "converted"):
        assert published(tmp_path / folder) == [], folder
    again = sw.load_pretrained(tmp_path / "stored")
    assert all(torch.equal(value, stored[name]) for name, value in again.state_dict().items())


def test_a_linked_config_that_is_no_models_is_refused(source: Path, tmp_path: Path) -> None:
    """transformers guesses the type of a config from the directory's name; what it says would be written for the model."""
    folder = source.rename(tmp_path / "qwen3-model")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config").write_text(json.dumps({**config, "key": "TOPSECRET"}))
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "config")
    for read in (sw.load_pretrained, read_assets):
        with pytest.raises(SourceError, match="link to a file outside"):
            read(folder)


def test_code_that_is_a_link_out_is_left_out(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tok.T", None]}})
    )
    (source / "tok.py").write_text("from .more import x\nimport .other\n")
    (source / "other.py").write_text("pass")
    (source / "unknown.py").write_text("pass")
    (source / "more.py").symlink_to(tmp_path / "secret")
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text("pass")
    found = read_assets(str(source))
    assert {n for n in found if n.endswith(".py")} == {"tok.py", "other.py", "custom_generate/generate.py"}


@pytest.mark.parametrize("name", ["models--a--b", "moved"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_links_of_the_hub_cache_are_followed(
    source: Path, tmp_path: Path, shared: bool, name: str
) -> None:
    """``snapshots/…`` has links to its repository's ``blobs``, which may be links to those of the whole cache."""
    repository = tmp_path / "cache" / name
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (source / "vocab.txt").write_text("a")
    for number, file in enumerate(sorted(source.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        if shared:
            store = tmp_path / "cache" / "blobs" / "00" / f"{number:064x}"
            store.parent.mkdir(parents=True, exist_ok=True)
            file.rename(store)
            blob.symlink_to(store)
        else:
            file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    outside = repository / "blobs" / "f"
    outside.symlink_to(tmp_path / "secret")
    (snapshot / "merges.txt").symlink_to(outside)
    found = read_assets(str(snapshot))
    assert {"config.json", "vocab.txt"} <= found.keys()
    assert "merges.txt" not in found
    assert sw.reports.load_report(sw.load_pretrained(snapshot)).initialized == ()
