"""Run the Python blocks of pages, one process, on the CPU: ``python -m tests.docs._run_blocks TEST PAGE…``.

A page's blocks share their names, as they do for its reader, but where each stands for itself (``ALONE``). Names that a page leaves to its reader (``MyModel``, ``path``,
``my_dataloader``) are made here. A device "cuda" becomes "cpu", a hub id a directory. Only blocks that ``TEST`` runs, by every_block.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import shardwise as sw
from tests.docs import _readers
from tests.docs.blocks import ROOT, Block, after_diff, blocks
from tests.docs.every_block import INTEGRATED, can_run, runner
from tests.docs.shown import run_and_check
from tests.runs._zero_layout import write

INSTEAD = {
    '"cuda:nccl,cpu:gloo"': '"gloo"',
    '"cuda"': '"cpu"',
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "",
    '"Qwen/Qwen3-0.6B"': "path",
    '"black-forest-labs/FLUX.1-dev"': '"flux"',
    '"Wan-AI/Wan2.2-T2V-A14B-Diffusers"': '"wan"',
    "ModelParallelStrategy()": 'ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1), accelerator="cpu", devices=1',
    "max_steps=1000": "max_steps=101, logger=False, enable_model_summary=False, enable_progress_bar=False",
}
#: Pages of blocks that have nothing to do with each other.
ALONE = (
    "docs/troubleshooting.md",
    "docs/concepts/",
    "docs/howto/does-it-fit.md",
    "docs/howto/object-stores.md",
)


class MyModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, config)
        self.head = nn.Linear(config, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


def train_one_step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    given = model(batch)
    (given if isinstance(given, torch.Tensor) else given.logits).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_base() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    Qwen3ForCausalLM(config).save_pretrained("base")
    shutil.copytree("base", "path/to/base")
    sw.export_hf(MyModel(8), "path/to/weights")


def write_old(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """What other programs have saved: one file of FSDP1, a run of DeepSpeed, and checkpoints of a Lightning Trainer."""
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    torch.save(weights, "old/full.pt")
    whole = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}
    torch.save(whole, "old/all.pt")
    by_key = {key: {n: of[key] for n, of in moments["state"].items()} for key in ("exp_avg", "exp_avg_sq")}
    trained = {n: weights[n] for n in moments["state"]}
    write(Path("old-run"), 3, 2, torch.bfloat16, [trained], by_key, frozen={}, buffers={}, shared={})
    module = nn.Module()
    module.model = model
    prefixed, theirs = get_state_dict(module, optimizer)
    dcp.save({"state_dict": prefixed, "optimizer_0": theirs}, checkpoint_id="old/lightning/step-4")
    torch.save({"global_step": 4, "lr_schedulers": []}, "old/lightning/step-4/meta.pt")
    torch.save({"state_dict": {f"model.{n}": t for n, t in weights.items()}}, "old/lightning.ckpt")


def fabric() -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=1, tensor_parallel_size=1)
    found = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    found.launch()
    return found


def names() -> dict[str, Any]:
    """What a page takes for granted."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model, report = sw.load_pretrained("base", mesh, return_report=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    samples = [torch.arange(start, start + 4) for start in range(101)]
    loader = sw.ResumableLoader(DataLoader(samples))
    train_one_step(model, optimizer, next(iter(loader))[None][0])
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    checkpoints = sw.Checkpointer("runs/before")
    checkpoints.save(state, 1)
    sw.save(sw.TrainState(model=model), "runs/stored/step-00000100", step=100)
    whole = get_state_dict(model, optimizer)
    theirs = {"model": whole[0], "optimizer": whole[1], "scheduler": scheduler.state_dict()}
    dcp.save(theirs, checkpoint_id="old/step-1200")
    write_old(model, optimizer, scheduler)
    found: dict[str, Any] = {"MyModel": MyModel, "config": 8, "path": "base", "epochs": 1}
    found |= {"my_dataloader": DataLoader(samples), "dataset": samples, "train_one_step": train_one_step}
    found |= {"shard_my_way": lambda model, mesh: fully_shard(model, mesh=mesh)}
    found |= {"fully_shard": fully_shard, "init_device_mesh": init_device_mesh, "DataLoader": DataLoader}
    found |= {
        "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
        "AutoConfig": AutoConfig,
    }
    found |= {"tokenizer": range(300)}  # of which a page wants the number of tokens
    found |= {
        "torch": torch,
        "dist": dist,
        "os": os,
        "sw": sw,
        "mesh": mesh,
        "model": model,
        "report": report,
    }
    found |= {"optimizer": optimizer, "scheduler": scheduler, "loader": loader, "state": state}
    return found | {"checkpoints": checkpoints}


def run(block: Block, namespace: dict[str, Any]) -> None:
    text = _readers.text_of(block)
    for before, after in INSTEAD.items():
        text = text.replace(before, after)
    text = text.replace('"runs/a/step-00000100"', '"runs/stored/step-00000100"')
    if ("init_process_group" in text or "sw.plan(" in text) and dist.is_initialized():
        dist.destroy_process_group()
    print(block, flush=True)
    exit_code = 0
    try:
        run_and_check(block, text, namespace, block.page, block.line)
    except SystemExit as end:
        exit_code = int(end.code or 0)
    assert exit_code == 0, f"{block} exits with {exit_code}"


def run_page(page: str, test: str, store: _readers.Store | None) -> None:
    namespace = names()
    if page.endswith("lightning.md"):
        namespace["fabric"] = fabric()
    namespace |= _readers.of_page(page, namespace)
    for block in blocks(ROOT / page):
        if runner(block) != test or block.language not in ("python", "diff") or not can_run(block):
            continue
        block = after_diff(block) if block.language == "diff" else block
        if store is None:
            run(block, dict(namespace) if page.startswith(ALONE) else namespace)
            continue
        with _readers.surroundings(block, namespace) as found:
            run(block, found)
        store.reset()
    namespace["checkpoints"].close()


def main(test: str, pages: list[str]) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(folder))
        store = stack.enter_context(_readers.store()) if test == INTEGRATED else None
        for number, page in enumerate(pages):
            (folder / str(number)).mkdir()
            os.chdir(folder / str(number))
            torch.manual_seed(number)
            write_base()
            if store is not None:
                store.fill()
            run_page(page, test, store)
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
