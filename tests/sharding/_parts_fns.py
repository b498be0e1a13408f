"""Runs whose ranks each hold a part of one model: stages of a Llama, and a MoE with experts of its own on each rank."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.tensors.live import describe

#: Where no directory can be made.
NOWHERE = "/dev/null/step"
VOCAB, ROWS, LENGTH, LAYERS = 32, 6, 6, 3


class Nothing(nn.Module):
    """In place of a module of other stages."""

    def forward(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        return x


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
            base.layers[index] = Nothing()
    if not is_first and not (tied and is_last):
        base.embed_tokens = Nothing()
    if not is_last:
        base.norm = Nothing()
        model.lm_head = Nothing()

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
        if not isinstance(layer, Nothing):
            parallelize_module(layer, mesh, plan)


class Gloo(PipelineStage):
    """Without the first messages between neighbors, which only NCCL needs: torch 2.9 sends int64 to a float32, and gloo aborts."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


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
                if not isinstance(layer, Nothing):
                    fully_shard(layer, mesh=self.mesh["dp"])
            fully_shard(model, mesh=self.mesh["dp"])
        sw.declare_part(model)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = sw.TrainState(model, self.optimizer, scheduler=self.scheduler)
        part = Gloo(model, self.stage, pp, torch.device("cpu"), group=self.mesh.get_group("pp"))
        self.schedule = ScheduleGPipe(part, n_microbatches=3, loss_fn=_loss)

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
    layout: tuple[int, int, int],
    steps: tuple[int, int],
    saves: dict[int, str],
    resume: str = "",
    **options: Any,
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
    if steps[0] in saves:
        sw.save(run.state, saves[steps[0]], step=steps[0])
    found = sw.digest(run.model)
    assert isinstance(found, dict)
    return found


# ----------------------------------------------------------------------------------------------------
# Experts that each rank makes for itself.

WIDTH, EXPERTS = 8, 4


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, and back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], take: list[int], group: Any) -> torch.Tensor:
        ctx.of = send, take, group
        found = rows.new_empty((sum(take), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), take, send, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        send, take, group = ctx.of
        return _Exchange.apply(grads[0], take, send, group), None, None, None


class _Slice(torch.autograd.Function):
    """This rank's rows. All ranks of the group hold all rows, and the same gradient of them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return rows.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gathered(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].clone(), None


def _gathered(rows: torch.Tensor, group: Any) -> torch.Tensor:
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, rows.contiguous(), group=group)
    return torch.cat(found)


class Packed(nn.Module):
    """Experts as 3-D parameters, with no names of their own."""

    def __init__(self, weights: torch.Tensor, first: int, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(weights[first : first + count, 0].clone())
        self.down = nn.Parameter(weights[first : first + count, 1].clone())

    def run(self, k: int, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.up[k]).relu() @ self.down[k]


class Listed(nn.ModuleList):
    """Experts as modules, which each rank counts from 0."""

    def __init__(self, weights: torch.Tensor, first: int, count: int) -> None:
        super().__init__(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)) for _ in range(count)
        )
        for k, pair in enumerate(self):
            for j, layer in enumerate(pair):
                layer.weight.data.copy_(weights[first + k, j])

    def run(self, k: int, rows: torch.Tensor) -> torch.Tensor:
        up, down = self[k]
        return down(up(rows).relu())


class Block(nn.Module):
    """A router, and experts over the ranks of a group. No sum is over ranks: the bits are those of one rank."""

    def __init__(self, kind: type, group: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        weights = torch.randn(EXPERTS, 2, WIDTH, WIDTH) / 3
        self.group, self.count = group, EXPERTS // dist.get_world_size(group)
        self.experts = kind(weights, dist.get_rank(group) * self.count, self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.norm(x)
        own, scores = (_Slice.apply(rows, self.group) for rows in (whole, self.router(whole).softmax(-1)))
        weight, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        of_all = _gathered(counts, self.group).view(-1, EXPERTS)
        mine = dist.get_rank(self.group)
        take = of_all.view(len(of_all), -1, self.count)[:, mine]  # by rank and local expert
        send = counts.view(-1, self.count).sum(1).tolist()
        rows = _Exchange.apply(own[order], send, take.sum(1).tolist(), self.group)
        where = torch.arange(self.count).repeat(len(of_all)).repeat_interleave(take.flatten())
        by_expert = where.argsort(stable=True)  # in the order of ranks, and so of rows
        parts = rows[by_expert].split(take.sum(0).tolist())
        done = torch.cat([self.experts.run(k, part) for k, part in enumerate(parts)])
        back = _Exchange.apply(done[by_expert.argsort()], take.sum(1).tolist(), send, self.group)
        return x + _Gather.apply(back[order.argsort()] * weight[:, None], self.group)


class MoE(nn.Module):
    def __init__(self, kind: type, group: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, group) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens.flatten())
        for block in self.blocks:
            x = block(x)
        return self.head(x).view(*tokens.shape, VOCAB)


def experts_run(
    kind: str, layout: tuple[int, int], steps: tuple[int, int], saves: dict[int, str], resume: str = ""
) -> dict[str, str]:
    """:func:`staged_run` for a MoE whose experts are spread over ``ep`` ranks, each as often as there are ``dp`` ranks."""
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("dp", "ep"))
    model = MoE({"packed": Packed, "listed": Listed}[kind], mesh.get_group("ep"))
    count = EXPERTS // layout[1]
    first = mesh.get_local_rank("ep") * count
    if kind == "packed":
        sw.declare_part(model, boxes={"*.experts.*": ((EXPERTS, WIDTH, WIDTH), (first, 0, 0))})
    else:
        sw.declare_part(
            model,
            rename=lambda name: re.sub(r"(?<=experts\.)\d+", lambda found: str(int(found[0]) + first), name),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    state = sw.TrainState(model, optimizer)
    if resume:
        report = sw.restore(state, resume)
        strange = [d for d in report.differences if not d.startswith(("world size", "mesh or placements"))]
        assert [*strange, *report.skipped] == []
    for step in range(*steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (ROWS * 2, LENGTH), generator=generator).chunk(layout[0])
        own = tokens[mesh.get_local_rank("dp")]
        _loss(model(own), own).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in saves:
            sw.save(state, saves[step + 1], step=step + 1)
    found = sw.digest(model)
    assert isinstance(found, dict)
    return found


# ----------------------------------------------------------------------------------------------------


def loaded_and_exported(
    source: str, out: str, *, tied: bool, by_transformers: bool
) -> tuple[dict[str, str], int, int]:
    """A stage per rank is loaded, and the whole model exported; its digests, this rank's bytes, and the bytes that it read."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if by_transformers:
        from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism

        model = apply_pipeline_parallelism(llama(tied=tied), init_device_mesh("cpu", (size,)))
    else:
        model = cut(llama(tied=tied), rank, size, tied=tied)
    for parameter in model.parameters():
        parameter.data.zero_()
    sw.declare_part(model)
    report = sw.load(model, source)
    sw.export_hf(model, out)
    whole = dict(sw.iter_full_tensors(model))
    expected = LlamaForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert expected.keys() - whole.keys() <= {"lm_head.weight"}
    found = sw.digest(model)
    assert isinstance(found, dict)
    return found, report.local_bytes, report.bytes_read


def virtual_stages(path: str) -> dict[str, str]:
    """Two ranks with several stages each: layers 0 and 2, and layer 1."""
    rank = dist.get_rank()
    parts = [cut(llama(), stage, 3) for stage in range(3)][rank::2]
    model = nn.ModuleList(parts)
    sw.declare_part(model, rename=lambda name: name.partition(".")[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = sw.TrainState(model, optimizer)
    memory = sw.InMemoryCheckpoints(every=1, copies=1, directory=os.path.dirname(path))
    with sw.Checkpointer(path, mode="async", memory=memory) as checkpoints:
        _stepped(optimizer)
        checkpoints.save(state, 1)
        checkpoints.wait()
        _stepped(optimizer)
        found = dict(sw.digest(model))
        checkpoints.remember(state, 2)
        _stepped(optimizer)
        resumed = checkpoints.resume(state)
    assert resumed is not None
    assert resumed.step == 2, resumed
    assert sw.digest(model) == found
    return found


def lost_layer(source: str) -> str:
    """What a load says if no rank holds layer 1."""
    model = cut(llama(), 2 * dist.get_rank(), 3)
    sw.declare_part(model)
    try:
        sw.load(model, source)
    except sw.errors.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sharded_experts(path: str, shape: tuple[int, int], resume: str = "") -> dict[str, str]:
    """Packed experts of each rank, which FSDP2 shards over the ranks that hold the same ones; stages of AdamW."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = MoE(Packed, mesh.get_group("ep"))
    if shape[0] > 1:
        for block in model.blocks:
            fully_shard(block.experts, mesh=mesh["dp"])
    first = mesh.get_local_rank("ep") * EXPERTS // shape[1]
    sw.declare_part(model, boxes={"*.experts.*": ((EXPERTS, WIDTH, WIDTH), (first, 0, 0))})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    state = sw.TrainState(model, optimizer)
    if resume:
        sw.restore(state, resume)
    _stepped(optimizer)
    sw.save(state, path, step=1 + bool(resume))
    return dict(sw.digest(model))


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that follow from the weights, however they are spread."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def whole_after(path: str) -> dict[str, str]:
    """The digests of a whole Llama that takes a checkpoint of parts, with its optimizer, after one more step."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if path:
        report = sw.restore(sw.TrainState(model, optimizer), path)
        assert report.optimizer_tensors == len(list(model.parameters()))
    else:
        _stepped(optimizer)
    _stepped(optimizer)
    return dict(sw.digest(model))


class Few(nn.Module):
    """What a rank of a wrong declaration holds."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def _box(start: int, shape: tuple[int, ...] = (8, 2)) -> dict[str, Any]:
    return {"boxes": {"w": (shape, (start, 0))}}


def wrong(case: str) -> str:
    """What a wrong declaration of two ranks says."""
    rank = dist.get_rank()
    model, given = Few(w=(4, 2)), _box(4 * rank)
    if case == "hole":
        given = _box(4 * rank, (12, 2))
    elif case == "overlap":
        given = _box(2 * rank)
    elif case == "outside":
        given = _box(5 * rank)
    elif case == "sizes":
        model, given = Few(w=(3 + 2 * rank, 2)), _box(3 * rank)
    elif case == "copies":
        model, given = Few(w=(4, 2)), _box(0)
    elif case == "dims":
        given = {"boxes": {"w": ((8,), (4 * rank,))}}
    elif case == "global shape":
        given = _box(4 * rank, (8 + 4 * rank, 2))
    elif case == "dtype":
        model = model.to(torch.bfloat16 if rank else torch.float32)
    elif case == "kind" and rank:
        model = nn.Module()
        model.register_buffer("w", torch.ones(4, 2))
    elif case == "frozen":
        model.w.requires_grad_(not rank)
    elif case == "no such name":
        given = {"boxes": {"w": _box(4 * rank)["boxes"]["w"], "x.*": ((8, 2), (0, 0))}}
    elif case == "one name":
        model, given = Few(w=(4, 2), v=(4, 2)), {"rename": lambda _: "w"}
    elif case == "mesh":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        given = {"boxes": {"w": ((8, 2), (4 * rank, 0))}}
    elif case == "tie":
        if rank:
            model, given = Few(v=(4, 2)), {}
        else:
            model.v, given = model.w, {}
    elif case == "uneven copies":
        given = _box(4 * (rank // 2))
    elif case == "differing buffers":
        model, given = Few(v=(4, 2)), {}
        if rank < 2:
            model = nn.Module()
            model.register_buffer("w", torch.full((4, 2), float(rank)))
    elif case == "two patterns":
        given["boxes"]["*"] = ((16, 2), (4 * rank, 0))
    elif case == "not text":
        given = {"rename": lambda _: rank}
    elif case == "blocks":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("boxes", "own"))["own"]
        _placed(model, mesh, _StridedShard(0, split_factor=2))
        given = {"boxes": {"w": ((4, 4), (0, 2 * rank))}}
    try:
        sw.declare_part(model, **given)
        if case == "changed":
            model.to(torch.bfloat16)
            sw.digest(model)
        elif case == "differing buffers":
            sw.digest(model)
        elif case == "bytes":
            model = Few(w=(4, 2))
            model.w.data.add_(rank)
            sw.declare_part(model)
            sw.digest(model)
        elif case == "groups":
            groups = [{"params": [model.w]}, {"params": []}][: 1 + rank]
            sw.save(sw.TrainState(model, torch.optim.SGD(groups, lr=1.0)), NOWHERE, step=1)
        else:
            _later(case, model, rank)
    except sw.errors.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _placed(model: Few, mesh: DeviceMesh, placement: Any) -> None:
    model.w = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [placement], run_check=False))


def _later(case: str, model: Few, rank: int) -> None:
    """What is wrong after a declaration."""
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    state = sw.TrainState(model, sgd)
    if case == "mesh order":
        for order in ([0, 1], [1, 0]):
            _placed(model, DeviceMesh("cpu", order), Shard(0))
            if order[0] == 0:
                sw.declare_part(model)
        sw.digest(model)
    elif case == "frozen later":
        model.w.requires_grad_(False)
        sw.digest(model)
    elif case == "drawn":
        sw.init_weights(model)
    elif case == "drawn renamed":
        listed = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        sw.declare_part(listed, rename=lambda name: name.replace("0", str(rank)))
        sw.init_weights(listed)
    elif case == "optimizers":
        sw.save(sw.TrainState(model, {f"sgd{rank}": sgd}), NOWHERE, step=1)
    elif case == "options":
        sgd.param_groups[0]["lr"] = 1.0 + rank
        sw.save(state, NOWHERE, step=1)
    elif case == "steps":
        if rank:
            model.w.grad = torch.ones(4, 2)
            sgd.step()
        sw.save(state, NOWHERE, step=1)
    elif case == "no parameters":
        empty = torch.optim.SGD([{"params": list(model.parameters())[rank:]}], lr=1.0)
        sw.save(sw.TrainState({"model": model, "other": Few(v=(1,))}, {"model": empty}), NOWHERE, step=1)
    elif case == "refer":
        sw.save(sw.TrainState(model, sgd, frozen="refer"), NOWHERE, step=1)
    elif case == "sharded extra":
        copies = Few(w=(4, 2))
        _placed(copies, DeviceMesh("cpu", [0, 1]), Shard(0))
        sw.save(sw.TrainState(model, sgd, extra={"ema": copies}), NOWHERE, step=1)


class Stage(nn.Module):
    """With a parameter and a buffer that have no dims."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked.fill_(int(number))
        self.scale = nn.Parameter(torch.tensor(number))


class Counter:
    """An object of the program's own, equal on all ranks."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def small_stages(path: str) -> tuple[list[str], str]:
    """Two small stages are saved, and restored into the same layout, and with the stages swapped: the differences reported of the
    first, and the error of the second."""
    rank = dist.get_rank()
    whole = nn.ModuleDict({f"s{k}": Stage(k + 2.0) for k in range(2)})

    def state_of(own: int, **extra: Any) -> sw.TrainState:
        part = nn.ModuleDict({f"s{own}": whole[f"s{own}"]})
        with torch.device("meta"):
            sw.declare_part(part)
            describe(part)
        optimizer = torch.optim.AdamW(part.parameters(), foreach=False)
        _stepped(optimizer)
        return sw.TrainState(part, optimizer, extra=extra)

    state = state_of(rank, counter=Counter())
    dist.barrier()
    whole[f"s{1 - rank}"].load_state_dict(_swapped(whole[f"s{rank}"]))
    part = state.models["model"]
    assert sw.digest(part) == sw.digest(whole)
    for name, tensor in sw.iter_full_tensors(part):
        torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=0, atol=0)
    sw.save(state, path, step=1)
    report = sw.restore(state, path)
    assert sw.digest(part) == sw.digest(whole)
    sw.save(state_of(rank, ema=[torch.full((2,), 1.0 + rank)]), f"{path}-ema", step=1)
    taken = sw.restore(state_of(1 - rank), f"{path}-ema")
    assert [line for line in taken.skipped if line.startswith("extra.ema")], taken
    try:
        sw.restore(state_of(1 - rank, ema=[torch.zeros(2)]), f"{path}-ema")
    except sw.errors.ShardwiseError as error:
        return [*report.differences, *report.skipped], str(error)
    return [*report.differences, *report.skipped], "nothing"


def _swapped(own: nn.Module) -> dict[str, torch.Tensor]:
    """What the other rank of two has."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, own.state_dict())
    return found[1 - dist.get_rank()]


def two_models(path: str) -> None:
    """A stage, and an average of it as a model of its own, both sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def state(value: float) -> sw.TrainState:
        found = {}
        for name in ("model", "ema"):
            stage = nn.Sequential(OrderedDict({f"s{mesh.get_local_rank('pp')}": nn.Linear(4, 4)}))
            fully_shard(stage, mesh=mesh["dp"])
            sw.declare_part(stage)
            for parameter in stage.parameters():
                nn.init.constant_(parameter, value)
            found[name] = stage
        return sw.TrainState(found, torch.optim.AdamW(found["model"].parameters(), foreach=False))

    saved, now = state(1.0), state(2.0)
    _stepped(next(iter(saved.optimizers.values())))
    sw.save(saved, path, step=1)
    assert sw.restore(now, path).exact
    assert sw.digest(now.models["ema"]) == sw.digest(saved.models["ema"]) != sw.digest(now.models["model"])


def digest_of_whole(*, tied: bool) -> dict[str, str]:
    return dict(sw.digest(llama(tied=tied)))
