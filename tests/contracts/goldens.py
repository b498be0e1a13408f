"""Goldens at the public boundary: what loads read, what saves, exports and conversions write, bit by bit, on 1, 2 and 3 ranks.

``python -m tests.contracts.goldens`` rewrites them. Run it only after a change that is meant to change what is read or written; the commit
says why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tests.contracts import _goldens_fns
from tests.harness.models import hub_model
from tests.harness.pool import RankPool

FILE = Path(__file__).with_name("goldens.json")
WORLD_SIZES = (1, 2, 3)
KINDS = ("dense", "experts")

_EXPERTS = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


def write_model(kind: str, directory: Path) -> None:
    """A model as ``save_pretrained`` stores it, with values that no generator and no kernel makes: by their place in the tensor."""
    import transformers

    if kind == "dense":
        name, config = hub_model("qwen3-tied")
    else:
        name, config = "Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**_EXPERTS)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_((((torch.arange(parameter.numel()) + k) % 509) - 254).view(parameter.shape) / 256)
    model.save_pretrained(directory, max_shard_size=40_000)


def found(ranks: RankPool, directory: Path) -> dict[str, Any]:
    """What is found now, by kind of model and number of ranks: the answers of all ranks."""
    answers: dict[str, Any] = {}
    for kind in KINDS:
        hub = directory / kind / "hub"
        write_model(kind, hub)
        for world_size in WORLD_SIZES:
            answers[f"{kind}, {world_size} ranks"] = ranks.run_ranks(
                world_size, _goldens_fns.everything, str(hub), str(directory / kind)
            )
    return answers


def different(now: Mapping[str, Any], then: Mapping[str, Any], name: str = "") -> list[str]:
    """Each value that differs, with its place."""
    lines = []
    for key in sorted(now.keys() | then.keys()):
        one, other, here = now.get(key), then.get(key), f"{name}/{key}"
        if isinstance(one, list) and isinstance(other, list):
            one, other = ({str(k): value for k, value in enumerate(values)} for values in (one, other))
        if isinstance(one, dict) and isinstance(other, dict):
            lines += different(one, other, here)
        elif one != other:
            lines.append(f"{here}: {other!r} became {one!r}")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as name, closing(RankPool(Path(name))) as ranks:
        answers = found(ranks, Path(name))
    FILE.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
