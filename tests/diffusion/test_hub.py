"""Pipelines by their ids on a hub, against a server on this machine: what is fetched, once per host, and nothing offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.diffusion import _hub_fns as fns
from tests.diffusion.models import write_pipeline
from tests.harness.hub_server import HubServer
from tests.harness.launch import Launch

TIMEOUT_S = 170
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny/wan``, each model plain and as fp16, and files that no load needs."""
    root = tmp_path_factory.mktemp("hub")
    main = root / "tiny" / "wan" / "main"
    for half in (False, True):
        write_pipeline("wan", main, half=half)
    (main / "wan.safetensors").write_bytes(b"for another program")
    (main / "assets").mkdir()
    (main / "assets" / "cat.png").write_bytes(b"a cat")
    return root


@pytest.fixture
def server(repositories: Path) -> Iterator[HubServer]:
    with HubServer(repositories) as server:
        yield server


def _weights(log: dict[str, int]) -> Counter[str]:
    return Counter({name: count for name, count in log.items() if name.endswith(".safetensors")})


@pytest.mark.slow
def test_pipelines_of_the_hub(server: HubServer, repositories: Path, tmp_path: Path) -> None:
    """Once for both ranks, only the variant that is asked for, and nothing of a component that is left out."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    main = repositories / "tiny" / "wan" / "main"
    with Launch(2, fns.load, str(main), str(cache), env=server.environment(home)) as launch:
        assert launch.wait(TIMEOUT_S) == [0, 0], launch.output(0) + launch.output(1)
        log = launch.result(0)
        assert launch.result(1) == log

    def files(*, half: bool, left_out: str = "", only: str = "*") -> Counter[str]:
        found = (p for p in main.glob(f"{only}/*.safetensors") if (".fp16" in p.name) is half)
        return Counter(f"wan/{p.relative_to(main)}" for p in found if p.parent.name != left_out)

    expected = files(half=False)
    assert len(expected) == 8
    assert _weights(log["plain"]) == expected
    assert not any("assets" in name for name in log["plain"])
    expected += files(half=False, only="transformer")  # into a cache of its own
    assert _weights(log["plain, one"]) == expected
    assert log["plain, again"] == log["plain, one"], "fetched again from a cache that has it"
    expected += files(half=True, left_out="text_encoder")
    assert _weights(log["fp16"]) == expected
    expected += files(half=True, only="transformer")
    assert _weights(log["fp16, one"]) == expected
    assert log["fp16, again"] == log["fp16, one"]
    assert "no such directory here" in log["no such"]

    asked = len(server.log)
    with Launch(2, fns.load, str(main), str(cache), env=server.environment(home, offline=True)) as launch:
        assert launch.wait(TIMEOUT_S) == [0, 0], launch.output(0) + launch.output(1)
        assert "no such directory here" in launch.result(1)["no such"]
    assert len(server.log) == asked


def _commands(server: HubServer, home: Path, *commands: list[str], offline: bool = False) -> list[Any]:
    """The JSON documents of commands, run in a process of their own: huggingface_hub reads its environment once."""
    code = "import sys, json; from tests.diffusion import _hub_fns as fns; fns.run(json.loads(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        env={**os.environ, **server.environment(home, offline=offline)},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly  # each change runs test_pipelines_of_the_hub
def test_a_plan_downloads_no_weights(server: HubServer, repositories: Path, tmp_path: Path) -> None:
    """``plan`` reads configs, indexes and headers, and offline the configs that the cache has."""
    home, main = tmp_path / "home", str(repositories / "tiny" / "wan" / "main")
    more = ([], ["--variant", "fp16"])
    asked = [[words, "--ranks", "8", "--fit", "160KiB"] for words in ("tiny/wan", main)]
    plans = [["plan", *words, *given] for words in asked for given in more]
    *found, absent, inside = _commands(
        server,
        home,
        *plans,
        ["plan", "tiny/never", "--ranks", "2"],
        ["plan", "tiny/wan", "--subfolder", "vae", "--ranks", "2"],
    )
    for hub, local in zip(found[:2], found[2:], strict=True):
        assert (hub.pop("path"), local.pop("path")) == ("tiny/wan", main)
        assert hub == local
        assert hub["shard"]
    assert "tiny/never" in absent["error"]["message"]
    assert inside["model_class"] == "AutoencoderKLWan"
    assert not list(home.rglob("*.safetensors"))
    before = len(server.log)
    (offline,) = _commands(server, home, plans[0], offline=True)
    assert offline.pop("path") == "tiny/wan"
    assert offline == found[0]
    assert len(server.log) == before
