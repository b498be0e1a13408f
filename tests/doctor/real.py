"""What the tests of real pathologies share: what is found, and what must be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.doctor.examine import collect, findings_of
from shardwise.doctor.facts import Finding

ROOT = Path(__file__).resolve().parents[2]
#: What depends on where the tests run: a container's own layer, or /tmp in memory.
WHERE = {"storage.overlay", "storage.memory"}
#: What a machine has while others use it, too.
BUSY = {"storage.slow-write", "storage.slow-fsync", "storage.slow-read"}


def found(*paths: Path, outputs: Iterable[Path] = (), ranks: int = 1) -> list[Finding]:
    return findings_of(collect([str(p) for p in paths], outputs=map(str, outputs), ranks=ranks))


FSDP2 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    "fsdp_version": 2,
}
NOISE = """\
[2026-11-24 10:00:01] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
[2026-11-24 10:00:02] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000
[2026-11-24 10:00:03] loading optimizer.state, saved 400 files, device_mesh=DeviceMesh((8,))
{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'epoch': 0.1}
"""


def check(findings: Iterable[Finding], here: set[str], *rules: str, words: str = "") -> None:
    """These rules and no others name it; one of their sentences has the words."""
    new = [f for f in findings if f.rule not in (here | BUSY) - {*rules}]
    assert {f.rule for f in new} == {*rules}, [f.bites for f in new]
    assert any(words in text for f in new for text in (f.bites, f.why, f.where)) or not words, [
        f.bites for f in new
    ]


def arguments(path: Path, **changes: Any) -> Path:
    """TrainingArguments as the HF Trainer writes them."""
    from transformers import TrainingArguments

    own = json.loads(
        TrainingArguments(output_dir=str(path.parent), use_cpu=True, report_to=[]).to_json_string()
    )
    fsdp = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2},
        "bf16": True,
        "gradient_checkpointing": False,
    }
    path.write_text(json.dumps({**own, **fsdp, **changes}))
    return path
