"""Ids of hub models, against a server on this machine: what is asked for, how often, and what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import SourceError
from shardwise.models.hub import HubOptions, find_model
from shardwise.ranks.ranks import Ranks
from tests.harness import models
from tests.harness.hub_server import HubServer
from tests.harness.launch import Launch
from tests.models import _hub_fns as fns

TIMEOUT_S = 170
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's models, ``tiny/NAME/REVISION``."""
    root = tmp_path_factory.mktemp("hub")
    tiny = root / "tiny"
    main = tiny / "good" / "main"
    models.write_hub_directory("qwen3", main, torch.float32, max_shard_size="20KB")
    assert (main / "model.safetensors.index.json").is_file()
    for name in (
        "README.md",
        "modeling_own.py",
        "original/consolidated.pth",
        "pytorch_model.bin",
        "tokenizer.json",
    ):
        (main / name).parent.mkdir(exist_ok=True)
        (main / name).write_text("{}" if name.endswith(".json") else name)  # equal contents are fetched once
    torch.manual_seed(3)
    changed = models.build_reference("qwen3")
    changed.save_pretrained(tiny / "good" / "v1")
    state = {n: t for f in main.glob("*.safetensors") for n, t in load_file(f).items()}
    one = _repository(tiny, "one", main, state)
    large = tiny / "large" / "main"
    large.mkdir(parents=True)
    config = json.loads((one / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "vocab_size": 10_000, "dtype": "bfloat16"}))
    vocabulary = config["vocab_size"]
    shapes = {name: [10_000 if n == vocabulary else n for n in t.shape] for name, t in state.items()}
    models.sparse_file(large / "model.safetensors", shapes)
    variants = tiny / "variants" / "main"
    shutil.copytree(one, variants / "inner")
    shutil.copy(one / "config.json", variants)
    shutil.copy(one / "model.safetensors", variants / "model.fp16.safetensors")
    save_file({"other": torch.ones(1)}, variants / "model.safetensors")
    pickled = tiny / "pickled" / "main"
    pickled.mkdir(parents=True)
    shutil.copy(one / "config.json", pickled)
    torch.save(state, pickled / "pytorch_model.bin")
    for name in ("slow-1", "gated-1", "broken-1", "stalls-1"):
        shutil.copytree(one.parent, tiny / name)
    (tiny / "empty" / "main").mkdir(parents=True)
    shutil.copy(one / "config.json", tiny / "empty" / "main")
    return root


def _repository(tiny: Path, name: str, like: Path, state: dict[str, torch.Tensor]) -> Path:
    folder = tiny / name / "main"
    folder.mkdir(parents=True)
    shutil.copy(like / "config.json", folder)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def server(repositories: Path) -> Iterator[HubServer]:
    with HubServer(repositories, pause_s=4.0) as server:
        yield server


def _planned(server: HubServer, home: Path, *, offline: bool = False) -> dict[str, Any]:
    code = "import json; from tests.models import _hub_fns as fns; print(json.dumps(fns.plans()))"
    env = {**os.environ, **server.environment(home, offline=offline)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_plan_of_a_hub_model_downloads_no_weights(
    server: HubServer, repositories: Path, tmp_path: Path
) -> None:
    """Configs, the index, and of each file of weights its beginning, which has the header; offline, what the cache has."""
    home = tmp_path / "home"
    found = _planned(server, home)
    assert found["large"]["source_bytes"] > 5 * 100_001
    assert server.sent["large/model.safetensors"] == 100_001, "what huggingface_hub asks for to get a header"
    assert server.sent["pickled/pytorch_model.bin"] == 0
    cached = {p.name for p in home.rglob("*") if p.is_file() or p.is_symlink()}
    assert {"config.json", "model.safetensors.index.json"} <= cached
    assert not any(name.endswith((".safetensors", ".bin", "tokenizer.json")) for name in cached), cached
    model_bytes = sum(t.nbytes for t in load_file(repositories / "tiny/one/main/model.safetensors").values())
    for name, source, is_config in (
        ("one", model_bytes, False),
        ("files", model_bytes, False),
        ("old", model_bytes, False),
        ("pickled", model_bytes, True),
        ("no weights", model_bytes, True),
        ("inner", model_bytes, False),
    ):
        assert (found[name]["source_bytes"], found[name]["from_config"]) == (source, is_config), name
    assert found["one"]["path"] == "tiny/one"
    assert found["files"]["model_bytes"] == model_bytes // 2
    asked = len(server.log)
    offline = _planned(server, home, offline=True)
    assert len(server.log) == asked
    assert offline == {name: {**one, "from_config": True} for name, one in found.items()}


@pytest.mark.slow
def test_hub_models(server: HubServer, repositories: Path, tmp_path: Path) -> None:
    """Once per cache, only what is needed, and each failure is one error with the way on; offline afterwards."""
    home = tmp_path / "home"
    with Launch(2, fns.online, str(repositories), str(tmp_path), env=server.environment(home)) as launch:
        assert launch.wait(TIMEOUT_S) == [0, 0]
        logs, output = [launch.result(rank) for rank in (0, 1)], launch.output(0) + launch.output(1)
    assert logs[0] == logs[1]
    log = logs[0]
    assert Path(log["folder"]).is_relative_to(home)
    needed = {p.name for p in (repositories / "tiny/good/main").glob("model[.-]*")}
    assert len(needed) > 3
    needed |= {"config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert log["first"] == {f"good/{name}": 1 for name in needed}
    assert log["second"] == log["first"], "fetched again from a cache that has it"
    asked = {
        n: c - log["others"].get(n, 0) for n, c in log["variants"].items() if c != log["others"].get(n, 0)
    }
    assert asked == dict.fromkeys(
        (
            "variants/config.json",
            "variants/model.fp16.safetensors",
            "pickled/config.json",
            "pickled/pytorch_model.bin",
        ),
        1,
    ), "files of the subfolder have contents that the cache holds already"
    twice = {n for n, count in log["own caches"].items() if count - log["variants"].get(n, 0) == 2}
    assert twice == {f"good/{name}" for name in needed}, "one downloader for each cache"
    for case, words in {
        "gated": ["gated", "accept its conditions", "token="],
        "wrong token": ["refused the token"],
        "no such": ["no such directory here", "has no such model"],
        "no such revision": ["nothing at revision 'v9'"],
        "no weights": ["contains no model.safetensors"],
        "broken": ["download", "failed"],
        "broken, offline": ["Run once online"],
    }.items():
        for word in words:
            assert word in log[case], (case, log[case])
    assert "RankError" in log["broken"]
    for secret in ("hf_wrong", "hf_right"):
        assert secret not in repr(logs) + output
        assert all(secret.encode() not in p.read_bytes() for p in home.rglob("*") if p.is_file())

    # Without a network: from the cache, and not a half download of a rank that was killed.
    with Launch(1, fns.load_for_ever, "tiny/stalls-1", env=server.environment(home)) as killed:
        assert server.stalled.wait(60)
        killed.kill(0)
        killed.wait(30)
    asked_before = len(server.log)
    with Launch(2, fns.offline, str(repositories), env=server.environment(home, offline=True)) as launch:
        assert launch.wait(TIMEOUT_S) == [0, 0]
        found = launch.result(1)
    assert found["folder"] == log["folder"]
    assert "no such directory here" in found["no such"]
    assert "HF_HUB_OFFLINE" in found["no such"]
    assert "without the weights" in found["partly"]
    assert "Run once online" in found["partly"]
    assert len(server.log) == asked_before


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_cache_that_lacks_a_file_of_a_series(tmp_path: Path, lost: int) -> None:
    """Without an index only the names of the other files say that there is one more."""
    snapshot = tmp_path / "models--tiny--series" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--tiny--series" / "refs").mkdir()
    (tmp_path / "models--tiny--series" / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    names = [f"model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
    for name in names:
        save_file({name[6:11]: torch.ones(1)}, snapshot / name)
    options = HubOptions(cache_dir=tmp_path, local_files_only=True)
    assert find_model("tiny/series", options, Ranks()) == str(snapshot)
    (snapshot / names[lost - 1]).unlink()
    with pytest.raises(SourceError, match=f"a part of tiny/series only: {names[lost - 1]} is not there"):
        find_model("tiny/series", options, Ranks())
