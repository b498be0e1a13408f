"""Adapters that PEFT computes when it stores them: a Trainer's checkpoints hold them as the model does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from shardwise.errors import UnsupportedConversionError
from tests.harness.versions import lacking

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer

pytestmark = pytest.mark.needs("trainer")

_KINDS: list[tuple[type, dict[str, Any]]] = [
    (PromptTuningConfig, {}),
    (PrefixTuningConfig, {}),
    (PromptEncoderConfig, {"encoder_hidden_size": 8}),
]


def _base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_hidden_layers=1,
            intermediate_size=16,
        )
    )


def _trainer(kind: type, options: dict[str, Any], folder: Path) -> ShardwiseTrainer:
    model = get_peft_model(_base(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4, **options))
    rows = [torch.arange(i, i + 8) for i in range(8)]
    data = [{"input_ids": r, "attention_mask": torch.ones_like(r), "labels": r} for r in rows]
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return ShardwiseTrainer(model, args, train_dataset=data)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume:UserWarning")  # PEFT 0.20
@pytest.mark.parametrize(
    ("kind", "options"), [_KINDS[0], *(pytest.param(*k, marks=pytest.mark.nightly) for k in _KINDS[1:])]
)
def test_a_run_with_a_learned_prompt_resumes_exactly(
    kind: type, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _trainer(kind, options, tmp_path)
    begun = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    first.train()
    assert "no copy of the adapters for PEFT" in caplog.text
    assert not os.path.exists(tmp_path / "checkpoint-2" / "adapter_config.json")
    trained = dict(first.model.named_parameters())
    assert any(not torch.equal(p, begun[name]) for name, p in trained.items())

    second = _trainer(kind, options, tmp_path)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.resume_report is not None
    assert second.resume_report.exact
    assert all(torch.equal(p, trained[name]) for name, p in second.model.named_parameters())
    with pytest.raises(UnsupportedConversionError, match="PEFT stores other tensors"):
        second.save_model(str(tmp_path / "export"))

    second.model.save_pretrained(tmp_path / "by-peft")
    opened = PeftModel.from_pretrained(_base(), tmp_path / "by-peft").eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, second.model.eval()(tokens).logits)
