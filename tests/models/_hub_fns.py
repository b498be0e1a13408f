"""Functions that ranks run for test_hub.py."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import ShardwiseError


def fetched() -> dict[str, int]:
    """What the server was asked for until now, the same on all ranks."""
    dist.barrier()
    with urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/log") as answer:
        found: dict[str, int] = json.load(answer)
    dist.barrier()
    return found


def load(path: str, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return sw.load_pretrained(path, mesh, **options)


def equals(path: str, origin: str, **options: Any) -> str:
    """Load a hub model, compare it bitwise with that of a directory; returns the snapshot's folder."""
    model, other = load(path, **options), load(origin)
    own, expected = model.state_dict(), other.state_dict()
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor.to_local(), expected[name].to_local()), name
    assert model.name_or_path == model.config.name_or_path == path
    return str(sw.reports.load_report(model).source)


def refusal(path: str, **options: Any) -> str:
    try:
        load(path, **options)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{path} was loaded")


def plans() -> dict[str, Any]:
    """Plans of hub models, in a process without ranks: what each read and held."""

    def plan(path: str, **options: Any) -> dict[str, Any]:
        report = sw.plan(path, ranks=2, **options)
        names = ("path", "model_bytes", "source_bytes", "from_config", "dtypes")
        return {name: getattr(report, name) for name in names}

    return {
        "one": plan("tiny/one"),
        "large": plan("tiny/large"),
        "files": plan("tiny/good", dtype=torch.bfloat16),
        "old": plan("tiny/good", revision="v1"),
        "pickled": plan("tiny/pickled"),
        "no weights": plan("tiny/empty"),
        "inner": plan("tiny/variants", subfolder="inner"),
    }


def online(root: str, caches: str) -> dict[str, Any]:
    """Everything that needs the server, in one go; what was fetched is noted after each."""
    origin = Path(root, "tiny")
    log: dict[str, Any] = {}
    main = str(origin / "good" / "main")
    log["folder"] = equals("tiny/good", main)
    log["first"] = fetched()
    assert equals("tiny/good", main) == log["folder"]
    log["second"] = fetched()
    assert os.path.basename(
        equals("tiny/good", str(origin / "good" / "v1"), revision="v1")
    ) != os.path.basename(log["folder"])
    commit = os.path.basename(log["folder"])
    assert equals("tiny/good", main, revision=commit, local_files_only=True) == log["folder"]
    log["others"] = fetched()
    equals("tiny/variants", main, variant="fp16", dtype="float32")
    equals("tiny/variants", main, subfolder="inner")
    equals("tiny/pickled", main)
    log["variants"] = fetched()
    mine = os.path.join(caches, str(dist.get_rank()))
    equals("tiny/good", main, cache_dir=mine)
    log["own caches"] = fetched()
    equals("tiny/slow-1", main, io=sw.IOOptions(timeout_s=2.0))
    log["gated"] = refusal("tiny/gated-1")
    log["wrong token"] = refusal("tiny/gated-1", token="hf_wrong")
    equals("tiny/gated-1", main, token="hf_right")
    log["no such"] = refusal("tiny/nothing")
    log["no such revision"] = refusal("tiny/good", revision="v9")
    log["no weights"] = refusal("tiny/empty")
    log["broken"] = refusal("tiny/broken-1")
    log["broken, offline"] = refusal("tiny/broken-1", local_files_only=True)
    return log


def offline(root: str) -> dict[str, Any]:
    """With HF_HUB_OFFLINE=1, after ``online`` in the same cache."""
    folder = equals("tiny/good", str(Path(root, "tiny", "good", "main")))
    return {"folder": folder, "no such": refusal("tiny/never"), "partly": refusal("tiny/stalls-1")}


def load_for_ever(path: str) -> None:
    load(path)
