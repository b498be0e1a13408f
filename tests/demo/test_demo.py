"""The demo from its first to its last line, on a small model with a head."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise.demo.course import clear_output, docstring_pairs, prepare_model, split
from shardwise.demo.run import run_demo
from shardwise.errors import ShardwiseError, SourceError
from tests.docs.blocks import ROOT
from tests.harness.object_store import BUCKET, SECRET, s3_server, use_store


@pytest.fixture(scope="module")
def masked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BertForMaskedLM: its base model is stored under a prefix, with a head and without a pooler."""
    from transformers import BertConfig, BertForMaskedLM

    directory = tmp_path_factory.mktemp("masked")
    words = save_tokenizer(directory)
    config = BertConfig(
        vocab_size=words,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> int:
    """One token per frequent word. Returns the number of tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Counter(
        w for pair in docstring_pairs(400) for text in pair for w in re.findall(r"\w+", text.lower())
    )
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", *(w for w, _ in words.most_common(1000))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # No pad token, as many causal models: the demo has to take another.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)
    return len(vocabulary)


def test_make_demo_installs_quietly_and_only_its_own_set(tmp_path: Path) -> None:
    """In a directory without an environment; nothing is run."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = done.stdout.splitlines()
    installs = [line for line in commands if " pip " in line]
    assert installs
    assert all(re.search(r" (-q+|--quiet) ", line) for line in installs), installs
    assert sum("[demo]" in line for line in installs) == 1
    extras = set(re.findall(r"\[([\w,]+)\]", " ".join(installs)))
    assert extras == {"demo"}, "torchao and the like come with [dev]"
    assert "shardwise demo" in commands[-1]


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_the_whole_demo(masked_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = StringIO()
    out = tmp_path / "out"

    report = run_demo(out, model=masked_model, ranks=2, steps=8, console=Console(file=text, width=150))

    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["model"]["class"] == "BertModel"
    assert all(name.startswith("cls.") for name in report["model"]["allow_unused"])
    assert sorted(report["model"]["allow_missing"]) == ["pooler.dense.bias", "pooler.dense.weight"]
    crash = report["crash"]
    assert (crash["rank"], crash["signal"], crash["step"]) == (1, "SIGKILL", 6)
    assert crash["torchrun_status"] != 0
    assert crash["published"] == ["step-00000003", "step-00000004", "step-00000005"]
    resume = report["resume"]
    assert (resume["step"], resume["saved_world_size"], resume["world_size"]) == (5, 2, 3)
    assert {"scheduler", "dataloader"} <= set(resume["documents"])
    assert report["digests"]["resume_equal"]
    assert report["digests"]["export_equal"]
    assert report["trained_twice"]["steps"] == [6]
    assert report["trained_twice"]["largest_difference"] < 1e-4
    assert [rank["rank"] for rank in report["load"]["ranks"]] == [0, 1]
    assert 0.9 <= report["load"]["bytes_read_ratio"] <= 1.02  # the pooler is not stored
    assert not report["after"]["missing_keys"]
    assert not report["before"]["shardwise_imported"]
    assert not report["after"]["shardwise_imported"]
    assert sorted(p.name for p in (out / "checkpoints").glob("*step-*")) == [
        f"step-0000000{k}" for k in (6, 7, 8)
    ]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    for said in (
        "Rank 1 died while saving step 6. The run resumed from step 5 on 3 ranks instead of 2; no saved step was lost. The last launch finished.",
        "died while saving step 6",
        "Launch 2: resume from step 5",
        "Plan of BertModel on 2 ranks",
        "Plan of BertModel on 3 ranks",
        "within the plan",
        "finished",
    ):
        assert said in page, said
    assert "ABOVE the plan" not in page
    for said in ("Resume report", "killed by SIGKILL", "retrieval accuracy", "DIFFERENT"):
        assert (said in text.getvalue()) == (said != "DIFFERENT")
    assert "".join(capfd.readouterr()) == "", "its ranks and other packages print nothing"


@pytest.mark.nightly
@pytest.mark.timeout(580)
def test_the_demo_with_its_checkpoints_in_a_store(
    masked_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, with the store's options in the environment alone: killed in a save, resumed on another number of ranks."""
    url = f"s3://{BUCKET}/demo"
    with s3_server(tmp_path) as server:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "AKID",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        command = [sys.executable, "-m", "shardwise", "demo", str(masked_model), "--out", url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        use_store(environment["AWS_ENDPOINT_URL"])  # other tests of this process have set another
        with pytest.raises(ShardwiseError, match="isn't empty"):
            run_demo(url, model=masked_model)
    assert (report["crash"]["signal"], report["crash"]["step"]) == ("SIGKILL", 24)
    assert [name[:13] for name in report["crash"]["published"]] == [f"step-000000{k}" for k in (12, 16, 20)]
    assert report["crash"]["unpublished_bytes"] > 0
    resume = report["resume"]
    assert (resume["step"], resume["saved_world_size"], resume["world_size"]) == (20, 2, 3)
    assert resume["path"].startswith(f"{url}/checkpoints/step-00000020.")
    assert report["digests"]["resume_equal"]
    assert report["digests"]["export_equal"]
    (out,) = tmp_path.glob("shardwise-demo-*")
    assert f"checkpoints: {url}/checkpoints; all else: {out}" in done.stderr.replace("\n", "")
    assert (out / "report.json").is_file()
    assert not (out / "checkpoints").exists()


def test_causal_models_need_no_declaration_but_their_head(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=save_tokenizer(tmp_path),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng():
        LlamaForCausalLM(config).save_pretrained(tmp_path)

    prepared = prepare_model(tmp_path)

    assert (prepared.kind, prepared.allow_unused, prepared.allow_missing) == (
        "LlamaModel",
        ("lm_head.weight",),
        (),
    )


def test_wrong_models_are_told_before_anything_starts(tmp_path: Path, masked_model: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SourceError, match="no such directory"):
        run_demo(out, model=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"config\.json"):
        run_demo(out, model=tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text((masked_model / "config.json").read_text())
    with pytest.raises(SourceError, match="safetensors"):
        run_demo(out, model=tmp_path / "empty")
    (tmp_path / "mute").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "mute" / name).write_bytes((masked_model / name).read_bytes())
    with pytest.raises(SourceError, match="tokenizer"):
        run_demo(out, model=tmp_path / "mute")
    with pytest.raises(ValueError, match="ranks"):
        run_demo(out, ranks=0)
    assert not out.exists()


def test_only_a_former_demos_directory_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ShardwiseError, match=r"thesis\.txt"):
        clear_output(tmp_path)
    out = tmp_path / "out"
    clear_output(out)
    (out / "run-1").mkdir()
    (out / "run-1/loss.jsonl").write_text("")
    (out / "notes.txt").write_text("mine")
    clear_output(out)
    assert not (out / "run-1").exists()
    assert (out / "notes.txt").exists()


def test_pairs_are_the_same_each_time_and_held_out_ones_are_not_trained_on() -> None:
    pairs = docstring_pairs(200)
    assert pairs == docstring_pairs(200)
    train, held_out = split(pairs, 50)
    assert len(held_out) == 50
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(pairs)
