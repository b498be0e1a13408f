"""Case 10: a base and its LoRA adapter on any number of ranks; the adapter alone, whole, in PEFT's format."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.harness import models
from tests.harness.pool import RankPool
from tests.loading import _peft_fns as fns


def _plain(base: Path, adapter: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Values and outputs of what plain PEFT opens on one process."""
    with fns.known_warnings():
        model = transformers.Qwen3ForCausalLM.from_pretrained(base)
        opened = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        logits = opened(input_ids=torch.arange(6)[None] + 3).logits
    return {n: t.detach() for n, t in opened.state_dict().items()}, logits


@pytest.mark.parametrize("source", ["seeded", "from a directory"])
@pytest.mark.slow
def test_a_base_and_its_adapter(ranks: RankPool, tmp_path: Path, source: str) -> None:
    base = tmp_path / "base"
    models.write_hub_directory("qwen3", base, torch.float32)
    given = None
    if source == "from a directory":
        given = tmp_path / "given"
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16)
        with fns.known_warnings():
            trained = peft.get_peft_model(transformers.Qwen3ForCausalLM.from_pretrained(base), config)
        models.fill_with_noise(trained)
        trained.save_pretrained(given)
    found = []
    for world_size in (1, 2, 3):
        out = tmp_path / f"adapter-{world_size}"
        found += ranks.run_ranks(world_size, fns.start_a_run, str(base), given and str(given), str(out))
    assert all(f["digests"] == found[0]["digests"] for f in found), "depends on the number of ranks"

    adapters = [load_file(tmp_path / f"adapter-{n}" / "adapter_model.safetensors") for n in (1, 2, 3)]
    stored = load_file(base / "model.safetensors")
    for adapter in adapters:
        assert all(torch.equal(t, adapters[0][n]) for n, t in adapter.items())
        assert len(adapter) == 8, "two layers, two adapted parts, A and B: nothing of the base"
        assert {t.shape[0] for n, t in adapter.items() if "lora_A" in n} == {4}, "one rank's slice"
    if given is not None:
        assert all(
            torch.equal(t, adapters[0][n]) for n, t in load_file(given / "adapter_model.safetensors").items()
        )
    values, logits = _plain(base, tmp_path / "adapter-3")
    for name, tensor in values.items():
        inner = name.removeprefix("base_model.model.").replace(".base_layer", "")
        outer = name.replace(".default.weight", ".weight")
        assert torch.equal(tensor, stored[inner] if inner in stored else adapters[0][outer]), name
    for f in found:
        torch.testing.assert_close(f["logits"], logits)
