"""What ``sw.plan(…, training=…)`` says that each phase of a run takes, against what CPU ranks really take.

    OMP_NUM_THREADS=1 python benchmarks/phases.py
    OMP_NUM_THREADS=1 python benchmarks/phases.py --short
    OMP_NUM_THREADS=1 python benchmarks/phases.py --only moe hsdp

Real transformers models train two steps under gloo, save in both modes, resume and export, in fresh processes. ``measured``: the most
anonymous memory of any rank in the phase, beside what its process held before it had a model; looked at every 2 ms. glibc would keep
freed memory for later, at most a few tens of MiB, so the ranks run with MALLOC_MMAP_THRESHOLD_=65536 and MALLOC_TRIM_THRESHOLD_=0, which
give it back at once. The exit status is 1 if a phase took more than the upper end of its prediction's error bar; ``--short`` tells of it
alone, because noise counts for much in tiny models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from benchmarks.fresh import from_fresh_process, in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled

MIB = 2**20
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
PHASES = ("load", "first step", "steady step", "save, sync", "save, async", "resume", "export")


@dataclass(frozen=True)
class Case:
    """One configuration of a run."""

    name: str
    model: str = "dense"
    ranks: int = 2
    replicas: int = 1
    dtype: str = "float32"
    batch: int = 2
    tokens: int = 256
    policy: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    lora: bool = False
    optimizer: str = "adamw"

    def training(self) -> sw.Training:
        return sw.Training(
            batch_size=self.batch,
            sequence_length=self.tokens,
            checkpointing=self.checkpointing,
            device="cpu",
            optimizer=self.optimizer,  # type: ignore[arg-type]
        )

    def sharding(self) -> sw.ShardPolicy:
        given = dict(self.policy)
        if precision := given.pop("mixed", None):
            given["mixed_precision"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, precision[0]), reduce_dtype=getattr(torch, precision[1])
            )
        return sw.ShardPolicy(**given)

    def adapter(self) -> Any:
        if not self.lora:
            return None
        return peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


_MIXED = {"mixed": ("bfloat16", "float32")}
CASES = (
    Case("dense"),
    Case("dense, bf16", dtype="bfloat16"),
    Case("dense, fp32 masters", policy=_MIXED),
    Case("dense, checkpointing", checkpointing=True, batch=4),
    Case("dense, long", batch=4, tokens=512),
    Case("dense, 3 ranks", ranks=3),
    Case("dense, 4 ranks", ranks=4),
    Case("dense, HSDP 2 x 2", ranks=4, replicas=2),
    Case("dense, HSDP 2 x 2, fp32 masters", ranks=4, replicas=2, policy=_MIXED),
    Case("dense, kept gathered", policy={"reshard_after_forward": False}),
    Case("dense, LoRA", lora=True),
    Case("dense, LoRA, checkpointing", lora=True, checkpointing=True, batch=4),
    Case("dense, SGD", optimizer="sgd"),
    Case("dense, momentum", optimizer="momentum"),
    Case("tied", model="tied"),
    Case("tied, checkpointing", model="tied", checkpointing=True),
    Case("tied, bf16, 3 ranks", model="tied", dtype="bfloat16", ranks=3),
    Case("tied, LoRA", model="tied", lora=True),
    Case("moe", model="moe"),
    Case("moe, bf16", model="moe", dtype="bfloat16"),
    Case("moe, fp32 masters", model="moe", policy=_MIXED),
    Case("moe, checkpointing", model="moe", checkpointing=True),
    Case("moe, HSDP 2 x 2", model="moe", ranks=4, replicas=2),
    Case("moe, LoRA", model="moe", lora=True),
    Case("vlm", model="vlm"),
    Case("vlm, bf16", model="vlm", dtype="bfloat16"),
    Case("vlm, checkpointing", model="vlm", checkpointing=True),
    Case("vlm, 3 ranks", model="vlm", ranks=3),
    Case("encoder", model="encoder"),
    Case("gpt2", model="gpt2"),
)
_SHORT = ("dense", "moe, checkpointing")


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="two tiny models")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="cases of these names, or whose names contain one",
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _GLIBC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_GLIBC})
    wanted = [c for c in CASES if not args.short or c.name in _SHORT]
    if args.only:
        wanted = [c for text in args.only for c in CASES if text == c.name]
        wanted = wanted or [c for c in CASES if any(text in c.name for text in args.only)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        for case in wanted:
            rows += _rows(case, root, short=args.short)
    print(_summary(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    broken = [r for r in rows if r["measured"] > r["upper"]]
    sys.exit(1 if broken and not args.short else 0)


def _rows(case: Case, root: str, *, short: bool) -> list[dict[str, Any]]:
    """Plan and run one case; prints a line for each phase."""
    path = f"{root}/{case.model}"
    if not os.path.isdir(path):
        in_fresh_process(_write, path, case.model, short)
    planned = from_fresh_process(_plan, path, case)
    ranks = on_fresh_ranks(case.ranks, _run, path, case, f"{root}/run")
    shutil.rmtree(f"{root}/run", ignore_errors=True)
    rows = []
    for phase in PHASES:
        measured = max(rank[phase] for rank in ranks)
        row = {"case": case.name, "phase": phase, "measured": measured, **planned[phase]}
        row["error"] = row["planned"] / measured - 1
        rows.append(row)
        note = "  TOO LOW" if measured > row["upper"] else ""
        print(
            f"{case.name:32} {phase:12} planned {row['planned'] / MIB:7.0f}  at most {row['upper'] / MIB:7.0f}  "
            f"measured {measured / MIB:7.0f} MiB  {row['error']:+6.1%}{note}",
            flush=True,
        )
    return rows


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = [f"{len({r['case'] for r in rows})} configurations"]
    for phase in PHASES:
        errors = sorted(abs(r["error"]) for r in rows if r["phase"] == phase)
        exceeded = sum(r["measured"] > r["upper"] for r in rows if r["phase"] == phase)
        within = sum(e <= 0.05 for e in errors)
        lines.append(
            f"{phase:12} |error|: median {errors[len(errors) // 2]:5.1%}, largest {errors[-1]:5.1%}; within 5 %: "
            f"{within} of {len(errors)}; measured above the bar: {exceeded}"
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------
# Models


def _write(path: str, model: str, short: bool) -> None:
    torch.manual_seed(0)
    _MODELS[model](1 if short else 4).save_pretrained(path)


def _dense(scale: int, tie: bool = False) -> Any:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=192 * scale,
            intermediate_size=512 * scale,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32 * scale,
            vocab_size=4096 * scale,
            tie_word_embeddings=tie,
        )
    )


def _moe(scale: int) -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=128 * scale,
            intermediate_size=256 * scale,
            moe_intermediate_size=64 * scale,
            num_experts=16,
            num_experts_per_tok=4,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32 * scale,
            vocab_size=2048 * scale,
        )
    )


def _vlm(scale: int) -> Any:
    vision = {
        "depth": 4,
        "hidden_size": 64 * scale,
        "intermediate_size": 128 * scale,
        "num_heads": 4,
        "out_hidden_size": 160 * scale,
        "fullatt_block_indexes": [3],
    }
    text = {
        "hidden_size": 160 * scale,
        "intermediate_size": 448 * scale,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096 * scale,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [5 * scale] * 4},
    }
    text["rope_parameters"]["mrope_section"] = [4 * scale, 8 * scale, 8 * scale]  # type: ignore[index]
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )


def _encoder(scale: int) -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=128 * scale,
            intermediate_size=512 * scale,
            num_hidden_layers=6,
            num_attention_heads=4,
            vocab_size=4096 * scale,
        )
    )


def _gpt2(scale: int) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=128 * scale, n_layer=6, n_head=4, vocab_size=4096 * scale)
    )


_MODELS: dict[str, Any] = {
    "dense": _dense,
    "tied": lambda scale: _dense(scale, tie=True),
    "moe": _moe,
    "vlm": _vlm,
    "encoder": _encoder,
    "gpt2": _gpt2,
}


# ----------------------------------------------------------------------------------------------------
# Planned, measured


def _plan(path: str, case: Case) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    report = sw.plan(
        path,
        ranks=case.ranks,
        replicas=case.replicas,
        dtype=case.dtype,
        policy=case.sharding(),
        training=case.training(),
        adapter=case.adapter(),
    )
    assert report.run is not None
    found = {}
    for phase in report.run.phases:
        amounts = [a for a in phase.amounts if a.where == "host" and a.what != "process"]
        found[phase.name] = {
            "planned": sum(a.nbytes for a in amounts),
            "upper": sum(a.upper_bytes for a in amounts),
            "parts": {a.what: a.nbytes for a in amounts},
        }
    return found


def _run(rank: int, world_size: int, path: str, case: Case, root: str) -> dict[str, int]:
    """One rank: all phases, with the peak of each above what the process held before."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    if case.replicas > 1:
        shape = (case.replicas, world_size // case.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    _train_tiny(mesh)
    run, peaks = _Run(mesh, path, case), {}
    gc.collect()
    before = anonymous_bytes()

    def phase(name: str, work: Any) -> None:
        gc.collect()
        dist.barrier()
        with sampled() as peak:
            work()
            dist.barrier()
        peaks[name] = max(1, peak.nbytes - before)

    phase("load", run.load)
    phase("first step", run.step)
    phase("steady step", run.step)
    phase("save, sync", lambda: sw.save(run.state(), f"{root}/sync"))
    with sw.Checkpointer(f"{root}/async", mode="async") as run.checkpoints:
        phase("save, async", run.save_and_step)
    run.checkpoints = None  # and its staging
    phase("export", lambda: sw.export_hf(run.model, f"{root}/export"))
    run.model = run.optimizer = None
    gc.collect()
    before = anonymous_bytes()  # as a process that begins with the resume: without what kernels keep
    phase("resume", lambda: run.resume(f"{root}/sync"))
    return peaks


class _Run:
    def __init__(self, mesh: Any, path: str, case: Case) -> None:
        self.mesh, self.path, self.case = mesh, path, case
        self.model: Any = None
        self.optimizer: Any = None
        self.checkpoints: Any = None
        self.ids = torch.randint(0, 1000, (case.batch, case.tokens))

    def load(self) -> None:
        options = {"policy": self.case.sharding(), "dtype": self.case.dtype, "adapter": self.case.adapter()}
        self.model, _ = sw.load_pretrained(self.path, self.mesh, **options)  # type: ignore[arg-type]
        self.model.train()
        if self.case.checkpointing:
            if self.case.lora:
                self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = {
            "adamw": lambda: torch.optim.AdamW(trained),
            "sgd": lambda: torch.optim.SGD(trained, lr=1e-3),
            "momentum": lambda: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
        }[self.case.optimizer]()

    def state(self) -> sw.TrainState:
        return sw.TrainState(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids, **self._more()).loss
        loss.backward()
        self.optimizer.step()

    def save_and_step(self) -> None:
        self.checkpoints.save(self.state(), 1)
        self.step()
        self.checkpoints.wait()

    def _more(self) -> dict[str, Any]:
        return {} if self.case.model == "encoder" else {"use_cache": False}

    def resume(self, path: str) -> None:
        self.load()
        sw.restore(self.state(), path)


def _train_tiny(mesh: Any) -> None:
    """All phases once, so that what is imported and started only once is there before."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as own:
        found = [own]
        dist.broadcast_object_list(found, src=0)
        root = found[0]
        if dist.get_rank() == 0:
            config = transformers.Qwen3Config(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=1024,
            )
            transformers.Qwen3ForCausalLM(config).save_pretrained(f"{root}/tiny")
        dist.barrier()
        run = _Run(mesh, f"{root}/tiny", Case("tiny", batch=1, tokens=8))
        run.load()
        run.step()
        sw.save(run.state(), f"{root}/sync")
        with sw.Checkpointer(f"{root}/async", mode="async") as checkpoints:
            checkpoints.save(run.state(), 1)
            run.step()
        sw.export_hf(run.model, f"{root}/export")
        run.resume(f"{root}/sync")
        dist.barrier()


if __name__ == "__main__":
    main()
