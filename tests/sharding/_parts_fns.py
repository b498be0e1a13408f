"""Runs whose ranks each hold a part of one model: stages of a Llama, and a MoE with experts of its own on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

import shardwise as sw

VOCAB, ROWS, LENGTH, LAYERS = 32, 4, 6, 3


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    """The same weights on every rank, and in every layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def cut(model: LlamaForCausalLM, stage: int, stages: int, *, tied: bool = False) -> LlamaForCausalLM:
    """Leave only the layers of a stage, as transformers' ``apply_pipeline_parallelism`` does, and give it a stage's forward."""
    base, each = model.model, LAYERS // stages
    is_first, is_last = stage == 0, stage == stages - 1
    own = range(stage * each, LAYERS if is_last else (stage + 1) * each)
    for index in range(LAYERS):
        if index not in own:
            base.layers[index] = PipelineIdentityLayer()
    if not is_first and not (tied and is_last):
        base.embed_tokens = PipelineIdentityLayer()
    if not is_last:
        base.norm = PipelineIdentityLayer()
        model.lm_head = PipelineIdentityLayer()

    def forward(x: torch.Tensor) -> torch.Tensor:
        found = base(**{"input_ids" if is_first else "inputs_embeds": x}, use_cache=False)
        return model.lm_head(found.last_hidden_state)

    model.forward = forward
    return model


def _tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        if not isinstance(layer, PipelineIdentityLayer):
            parallelize_module(layer, mesh, plan)


class Staged:
    """A rank of a run with pipeline stages; FSDP2 and tensor parallelism inside each stage."""

    def __init__(self, pp: int, dp: int, tp: int, *, tied: bool = False) -> None:
        self.mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.stage, self.stages = self.mesh.get_local_rank("pp"), pp
        self.dp, self.dp_rank = dp, self.mesh.get_local_rank("dp")
        self.model = model = cut(llama(tied=tied), self.stage, pp, tied=tied)
        if tp > 1:
            _tensor_parallel(model, self.mesh["tp"])
        if dp > 1:
            for layer in model.model.layers:
                if not isinstance(layer, PipelineIdentityLayer):
                    fully_shard(layer, mesh=self.mesh["dp"])
            fully_shard(model, mesh=self.mesh["dp"])
        sw.declare_part(model)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = sw.TrainState(model, self.optimizer, scheduler=self.scheduler)
        part = PipelineStage(model, self.stage, pp, torch.device("cpu"), group=self.mesh.get_group("pp"))
        self.schedule = ScheduleGPipe(part, n_microbatches=2, loss_fn=_loss)

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        rows = ROWS // self.dp
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator).chunk(self.dp)[self.dp_rank]
        assert tokens.shape[0] == rows
        first = (tokens,) if self.stage == 0 else ()
        target = tokens if self.stage == self.stages - 1 else None
        self.schedule.step(*first, target=target)
        self._add_tied()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def _add_tied(self) -> None:
        """The first and the last stage hold one embedding: add its gradients."""
        if self.stages > 1 and self.model.config.tie_word_embeddings:
            ends = self.mesh.mesh[[0, -1]].flatten().tolist()
            group = dist.new_group(ends)
            if self.stage in (0, self.stages - 1):
                dist.all_reduce(self.model.model.embed_tokens.weight.grad, group=group)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def staged_run(
    layout: tuple[int, int, int], steps: tuple[int, int], saves: dict[int, str], resume: str = "", **options: Any
) -> dict[str, str]:
    """Train from one step to another, with saves, perhaps after a resume; the digests of the whole model."""
    run = Staged(*layout, **options)
    if resume:
        report = sw.restore(run.state, resume)
        assert report.tensors == len(sw.digest(run.model)), report
        assert not report.skipped, report.skipped
        strange = [d for d in report.differences if not d.startswith(("world size", "mesh or placements"))]
        assert not strange, strange
    for step in range(*steps):
        run.step(step)
        if step + 1 in saves:
            sw.save(run.state, saves[step + 1], step=step + 1)
    found = sw.digest(run.model)
    assert isinstance(found, dict)
    return found
