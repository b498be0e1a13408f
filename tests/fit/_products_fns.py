"""On a fresh rank: the matrix products that oneDNN compiles in training steps, by its own log."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["log_compiled"]


def log_compiled(model_class: Any, config: Any, batch: int, length: int, log: str) -> None:
    """Two steps of the model in bf16, with oneDNN's lines about what it compiles in the file ``log``."""
    torch.manual_seed(0)
    model = model_class(config).to(torch.bfloat16)
    model.train()
    sys.stdout.flush()
    output = os.dup(1)
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)  # oneDNN writes with printf
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
                for _ in range(2):
                    ids = torch.randint(0, 64, (batch, length))
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        finally:
            os.dup2(output, 1)
            os.close(output)
