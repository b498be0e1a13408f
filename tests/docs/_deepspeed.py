"""One step of DeepSpeed's ZeRO-3 on the CPU, and its checkpoint in ``old-run``: ``python -m tests.docs._deepspeed PORT``.

``expected.safetensors`` has the trained weights as DeepSpeed gathers them.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
from safetensors.torch import save_file

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def main(port: str) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from transformers import AutoModelForCausalLM

    deepspeed = importlib.import_module("deepspeed")  # a dependency of nothing
    model = AutoModelForCausalLM.from_pretrained("path/to/base")
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    ids = torch.arange(8)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint("old-run")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}
    save_file(weights, "expected.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
