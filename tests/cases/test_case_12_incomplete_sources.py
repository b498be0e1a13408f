"""Case 12: a missing key, an unused key, a stray second copy: one error before payload, listing all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool

INDEX = "model.safetensors.index.json"


def test_one_error_lists_all(ranks: RankPool, tmp_path: Path) -> None:
    good = tmp_path / "good"
    models.write_hub_directory("qwen3", good, torch.float32, max_shard_size="8KB")
    weight_map = json.loads((good / INDEX).read_text())["weight_map"]
    name, other = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    assert weight_map[name] != weight_map[other]

    lost = tmp_path / "lost"
    shutil.copytree(good, lost)
    for key in (name, "model.layers.1.self_attn.q_norm.weight"):
        _rewrite(lost, weight_map[key], drop=key)
    _rewrite(lost, weight_map[other], add={"model.layers.2.extra.weight": torch.ones(2, 3)})

    stray = tmp_path / "stray"
    shutil.copytree(good, stray)
    values = load_file(good / weight_map[name])[name]
    _rewrite(stray, weight_map[other], add={name: values + 1}, index=False)

    loose = tmp_path / "loose"
    shutil.copytree(good, loose)
    (loose / INDEX).unlink()
    models.write_state({name: values + 1}, loose, "zz-other.safetensors")

    found = ranks.run_ranks(3, fns.outcomes, [str(lost), str(stray), str(loose)])
    assert found[0] == found[1] == found[2]
    incomplete, second, third = found[0]
    for part in (
        "PlanError",
        "3 problems",
        f"missing: parameter {name!r}",
        "missing: parameter 'model.layers.1.self_attn.q_norm.weight'",
        "unused: stored tensor 'model.layers.2.extra.weight'",
        weight_map[other],
    ):
        assert part in incomplete, incomplete
    for text, files in (
        (second, (weight_map[name], weight_map[other])),
        (third, (weight_map[name], "zz-other.safetensors")),
    ):
        for part in ("stored twice", repr(name), *files):
            assert part in text, text


def test_a_file_outside_the_index_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    good, more = tmp_path / "good", tmp_path / "more"
    models.write_hub_directory("qwen3", good, torch.float32, max_shard_size="8KB")
    shutil.copytree(good, more)
    models.write_state({"model.norm.weight": torch.full((24,), 7.0)}, more, "zz-old.safetensors")
    assert ranks.run_ranks(2, fns.ignored_files, str(more), str(good)) == [("zz-old.safetensors",)] * 2


def _rewrite(
    root: Path,
    file: str,
    *,
    drop: str | None = None,
    add: dict[str, torch.Tensor] | None = None,
    index: bool = True,
) -> None:
    """Change one file, and what the index says of it."""
    state = {n: t for n, t in load_file(root / file).items() if n != drop} | (add or {})
    models.write_state(state, root, file)
    if index:
        document = json.loads((root / INDEX).read_text())
        if drop is not None:
            del document["weight_map"][drop]
        document["weight_map"] |= dict.fromkeys(add or {}, file)
        (root / INDEX).write_text(json.dumps(document))
