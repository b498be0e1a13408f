"""What the ranks of test_trainer_prompt.py run: prompt tuning, whose tensors PEFT computes when it stores them."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.harness.versions import lacking
from tests.integrations._trainer_fns import whole
from tests.integrations._trainer_parts import Rows, arguments

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "prompt": (PromptTuningConfig, {}),
    "prefix": (PrefixTuningConfig, {}),
    "encoder": (PromptEncoderConfig, {"encoder_hidden_size": 8}),
}


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _trainer(path: str, kind: str, args: Any) -> ShardwiseTrainer:
    torch.manual_seed(0)
    made, options = KINDS[kind]
    base = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model = get_peft_model(base, made(task_type="CAUSAL_LM", num_virtual_tokens=4, **options))
    return ShardwiseTrainer(model, args, train_dataset=Rows())


def train(path: str, root: str, kind: str, fsdp: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    heard = _Heard()
    logging.getLogger("shardwise").addHandler(heard)
    try:
        with arguments(f"{root}/run", fsdp=fsdp, max_steps=4, save_steps=2, save_total_limit=None) as args:
            trainer = _trainer(path, kind, args)
            trainer.train()
            dist.barrier()  # rank 0 takes its lock away when it leaves train
            found["trained"] = whole(trainer.model)
            again = _trainer(path, kind, args)
            again.train(resume_from_checkpoint=f"{root}/run/checkpoint-2")
            found["exact"] = again.resume_report.exact, again.resume_report.differences
            found["resumed"] = whole(again.model)
            try:
                again.save_model(f"{root}/export")
            except Exception as error:
                found["refused"] = type(error).__name__, str(error)
            if not fsdp:  # else PEFT can't run the prompt's module on shards
                own = f"{root}/by-peft-{dist.get_rank()}"
                again.model.save_pretrained(own)
                base = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
                found["by PEFT"] = whole(PeftModel.from_pretrained(base, own))
            found["beside"] = sorted(os.listdir(f"{root}/run/checkpoint-4"))
    finally:
        logging.getLogger("shardwise").removeHandler(heard)
    found["warnings"] = [text for text in heard.texts if "no copy of the adapters for PEFT" in text]
    return found
