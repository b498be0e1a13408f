"""Plain transformers: embed sentences with a model directory, and measure retrieval of their other half.

    python embed.py MODEL_DIR PAIRS.json

The demo runs this file by its path, in a separate process, on its first model and on the exported one. Nothing here
needs shardwise, and the result says whether it was imported. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

TEMPERATURE = 0.05
MAX_TOKENS = 32
_BATCH = 32


def load_tokenizer(model_dir: str) -> Any:
    """The tokenizer of a local directory, with a padding token: causal models often name none."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no token to pad with: neither pad, nor eos, nor unk")
    tokenizer.padding_side = "right"
    return tokenizer


def embed(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """One unit vector per text: the mean of its tokens' last hidden states."""
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    mask = tokens["attention_mask"]
    hidden = model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1), dim=-1)


def retrieval(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """The share of first lines whose nearest rest is their own, and the contrastive loss."""
    with torch.inference_mode():
        firsts, rests = (
            torch.cat([embed(model, tokenizer, side[i : i + _BATCH]) for i in range(0, len(side), _BATCH)])
            for side in ([first for first, _ in pairs], [rest for _, rest in pairs])
        )
    scores = firsts @ rests.T
    own = torch.arange(len(pairs))
    return {
        "accuracy": (scores.argmax(1) == own).float().mean().item(),
        "loss": cross_entropy(scores / TEMPERATURE, own).item(),
    }


def main(model_dir: str, pairs_file: str) -> None:
    """Load with plain transformers, measure, print."""
    with open(pairs_file, encoding="utf-8") as stream:
        pairs = [(first, rest) for first, rest in json.load(stream)]
    model, info = AutoModel.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    result: dict[str, Any] = dict(retrieval(model, load_tokenizer(model_dir), pairs))
    result["pairs"] = len(pairs)
    result["missing_keys"] = sorted(info["missing_keys"])
    result["shardwise_imported"] = "shardwise" in sys.modules
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
