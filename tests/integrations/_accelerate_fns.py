"""What the ranks of test_accelerate.py run: Accelerate's real classes with FSDP2 on CPU."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.integrations import accelerate as swa
from tests.harness.errors import error_of
from tests.harness.models import Block


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """What ``accelerate launch`` sets for a rank, on what is taken for several GPUs: on CPU Accelerate chooses neither FSDP
    nor a mesh. The shared state's distributed type is all that is set by hand; it is gone afterwards."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, ACCELERATE_USE_CPU="true")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo looks at things that warn
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def accelerator_with(
    parallelism: Any = None, plugin: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """A real accelerator that chooses FSDP2 by its plugin, as on GPUs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with launched():
        os.environ["FSDP_VERSION"] = "2"
        made = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            **{
                "auto_wrap_policy": "transformer_based_wrap",
                "transformer_cls_names_to_wrap": ["Block"],
                **(plugin or {}),
            },
        )
        yield Accelerator(cpu=True, fsdp_plugin=made, parallelism_config=parallelism, **options)


class Gate(nn.Module):
    """Holds a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class Tied(nn.Module):
    """Blocks with persistent buffers, an ignored plain parameter, tied embedding and head: case 1's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.gate = Gate()
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gate.weight.to(x.dtype))


def batch(step: int) -> torch.Tensor:
    """Every rank its own rows."""
    return torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): (
            t.full_tensor() if isinstance(t, DTensor) else t
        )
        .detach()
        .clone()
        for name, t in model.state_dict().items()
    }


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = batch(step)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def case_1(source: str, root: str, plugin: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Load, prepare, train 5 steps, save, go on 3; then a second life: load_state, the same 3."""
    found: dict[str, Any] = {}
    settings = {"cpu_ram_efficient_loading": True, "ignored_modules": "gate", **plugin}
    with accelerator_with(plugin=settings, **options) as accelerator:
        with sw.meta_init():
            model: nn.Module = Tied()
        rng = torch.get_rng_state()
        swa.load(accelerator, model, source)
        found["rng untouched"] = bool(torch.equal(rng, torch.get_rng_state()))
        found["loaded"] = whole(model)
        found["tied"] = model.head.weight is model.embed.weight
        found["plain"] = not isinstance(model.gate.weight, DTensor)
        found["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
        found["efficient loading still set"] = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if isinstance(p, DTensor)], lr=1e-2, foreach=False
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        found["first"] = train(accelerator, model, optimizer, range(5))
        swa.save_state(accelerator, root)
        found["on"] = train(accelerator, model, optimizer, range(5, 8))
        found["after"] = whole(model)
    with accelerator_with(plugin=settings, **options) as accelerator:
        torch.manual_seed(99)
        with sw.meta_init():
            model = Tied()
        swa.load(accelerator, model, source)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if isinstance(p, DTensor)], lr=7.0, foreach=False
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        report = swa.load_state(accelerator, root)
        found["exact"] = report.exact
        found["resumed"] = train(accelerator, model, optimizer, range(5, 8))
        found["resumed after"] = whole(model)
    return found


def loaded_whole(ours: bool) -> str:
    """Case 1 with Accelerate's own loading, and our prepare or Accelerate's."""
    with accelerator_with(
        plugin={"cpu_ram_efficient_loading": True, "ignored_modules": "gate"}
    ) as accelerator:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            swa.prepare(accelerator, model, optimizer) if ours else accelerator.prepare(model, optimizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def refused(source: str) -> dict[str, str]:
    """What can't be honored is a named error, alike on all ranks."""
    found = {}

    def attempt(name: str, plugin: dict[str, Any], model: Any, **options: Any) -> None:
        try:
            with accelerator_with(plugin=plugin, **options) as accelerator, sw.meta_init():
                swa.load(accelerator, model(), source)
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("containers", {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}, Tied)
    attempt("class", {"transformer_cls_names_to_wrap": ["Absent"]}, Tied)
    with accelerator_with() as accelerator:
        try:
            swa.train_state(accelerator)
        except ShardwiseError as error:
            found["unprepared"] = f"{type(error).__name__}: {error}"
    return found


def hooks(source: str, root: str) -> dict[str, Any]:
    """What hooks of save_state and load_state are given by Accelerate and here, and what a load hook finds that draws random numbers."""
    found: dict[str, Any] = {}

    def save_hook(models: list[Any], weights: list[Any], directory: str) -> None:
        found[f"{way} saved"] = [type(model).__name__ for model in models], len(weights)
        if dist.get_rank() == 0:
            Path(directory, "ema").mkdir()
            Path(directory, "ema", "note.bin").write_bytes(bytes(range(256)))
            Path(directory, "note.txt").write_text(way)

    def load_hook(models: list[Any], directory: str) -> None:
        torch.rand(5)
        note = Path(directory, "ema", "note.bin").read_bytes()
        found[f"{way} loaded"] = len(models), note, Path(directory, "note.txt").read_text()

    for way in ("accelerate", "shardwise"):
        with accelerator_with(plugin={"state_dict_type": "SHARDED_STATE_DICT"}) as accelerator:
            with sw.meta_init():
                model: nn.Module = Tied()
            swa.load(accelerator, model, source)
            model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False))
            accelerator.register_save_state_pre_hook(save_hook)
            accelerator.register_load_state_pre_hook(load_hook)
            if way == "accelerate":
                accelerator.save_state(f"{root}/{way}")
                accelerator.load_state(f"{root}/{way}")
                continue
            torch.manual_seed(3)
            swa.save_state(accelerator, f"{root}/{way}")
            report = swa.load_state(accelerator, f"{root}/{way}")
            found["exact"], found["draws"] = report.exact, torch.rand(3)
            ours = found[f"{way} loaded"]
            swa.load_state(accelerator, f"{root}/accelerate")
            found["from accelerate"], found[f"{way} loaded"] = found[f"{way} loaded"], ours
    return found


ADAPTERS = [f"a{number}" for number in range(8)]


def adapters_on_one_rank(path: str, root: str) -> dict[str, torch.Tensor]:
    """The adapters of :func:`adapters_alone`, resumed on another number of ranks."""
    from peft import LoraConfig

    adapter = {name: LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) for name in ADAPTERS}
    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}) as accelerator:
        model = swa.load_pretrained(accelerator, path, adapter=adapter, seed=3)
        chosen = [p.requires_grad_() for n, p in model.named_parameters() if "lora_" in n]
        model, _ = swa.prepare(accelerator, model, torch.optim.AdamW(chosen, lr=1e-2, foreach=False))
        swa.load_state(accelerator, f"{root}/alone")
        return {n: t for n, t in whole(model).items() if "lora_" in n}


def adapters_alone(path: str, root: str) -> dict[str, Any]:
    """Eight adapters, trained in turn; their checkpoint without the base, resumed and exported, and some with the base."""
    from peft import LoraConfig

    adapter = {name: LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) for name in ADAPTERS}
    found: dict[str, Any] = {}

    def life(frozen: Any, seed: int) -> Any:
        model = swa.load_pretrained(accelerator, path, adapter=adapter, seed=seed)
        chosen = [p for n, p in model.named_parameters() if "lora_" in n]
        for parameter in chosen:
            parameter.requires_grad_(True)
        if frozen != "auto":  # the default
            accelerator.frozen = frozen
        return swa.prepare(accelerator, model, torch.optim.AdamW(chosen, lr=1e-2, foreach=False))

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for number in steps:
            model.set_adapter(ADAPTERS[number % 8])
            for name, parameter in model.named_parameters():  # FSDP2 has no gradients of the other adapter
                if "lora_" in name:
                    parameter.requires_grad_(True)
            rows = batch(number)
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            optimizer.step()
            optimizer.zero_grad()

    def adapters(model: Any) -> dict[str, torch.Tensor]:
        return {n: t for n, t in whole(model).items() if "lora_" in n}

    plugin = {"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}
    with accelerator_with(plugin=plugin) as accelerator:
        model, optimizer = life("auto", 0)
        train(model, optimizer, range(10))
        swa.save_state(accelerator, f"{root}/alone")
        found["saved"] = adapters(model)
        sw.export_hf(model, f"{root}/live")
        sw.export_hf(f"{root}/alone", f"{root}/stored")
        train(model, optimizer, range(10, 13))
        found["on"] = adapters(model)
        found["bytes"] = sum(
            t.numel() * t.element_size() * 3 for n, t in whole(model).items() if "lora_" in n
        )
    with accelerator_with(plugin=plugin) as accelerator:
        model, optimizer = life("auto", 7)
        found["exact"] = swa.load_state(accelerator, f"{root}/alone").exact
        found["loaded"] = adapters(model)
        train(model, optimizer, range(10, 13))
        found["resumed"] = adapters(model)
    with accelerator_with(plugin=plugin) as accelerator:
        model, optimizer = life("hold", 7)
        swa.save_state(accelerator, f"{root}/whole")
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if n.endswith("embed_tokens.weight")).add_(1)
        found["another base"] = ": ".join(error_of(lambda: swa.load_state(accelerator, f"{root}/alone")))
        accelerator.frozen = "auto"  # whose base is no longer what the load read
        swa.save_state(accelerator, f"{root}/merged")
        found["merged"] = swa.load_state(accelerator, f"{root}/merged").exact
        model, optimizer = life("refer", 7)
        accelerator._models, accelerator._optimizers = [model], [optimizer]
        swa.save_state(accelerator, f"{root}/before")
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if n.endswith("embed_tokens.weight")).add_(1)
        found["changed base"] = ": ".join(error_of(lambda: swa.save_state(accelerator, f"{root}/changed")))
    return found


def _added(model: Any) -> Any:
    """A model with adapters, and their optimizer."""
    import peft
    from transformers.integrations.peft import MIN_PEFT_VERSION

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    torch.manual_seed(dist.get_rank())  # the first rank's values count
    model.requires_grad_(False)
    if Version(peft.__version__) < Version(
        MIN_PEFT_VERSION
    ):  # transformers 5.24 wants one that isn't released yet
        peft.inject_adapter_in_model(config, model)  # as add_adapter does
    else:
        model.add_adapter(config)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def added_later(path: str) -> dict[str, Any]:
    """Adapters that are added to a loaded model: sharded by prepare, and trained."""
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {}
    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}) as accelerator:

        def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> Any:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        tokens = [batch(k) for k in range(3)]
        model, optimizer = swa.prepare(accelerator, *_added(swa.load_pretrained(accelerator, path)))
        found["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
        found["optimized"] = [p for g in optimizer.param_groups for p in g["params"]] == [
            p for p in model.parameters() if p.requires_grad
        ]
        before = {n: t for n, t in whole(model).items() if "lora_" in n}
        for rows in tokens:
            step(model, optimizer, rows)
        found["after"] = {n: t for n, t in whole(model).items() if "lora_" in n}

        # One process that sees all ranks' rows.
        alone = AutoModelForCausalLM.from_pretrained(path)
        alone, optimizer = _added(alone)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                if "lora_" in name:
                    parameter.copy_(before[name])
        for rows in tokens:
            every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
            dist.all_gather(every, rows)
            step(alone, optimizer, torch.cat(every))
        found["alone"] = {n: t.detach() for n, t in alone.named_parameters() if "lora_" in n}
    return found


def added_wrongly(path: str) -> dict[str, str]:
    """What is said of adapters that prepare can't shard."""
    from peft import LoraConfig, get_peft_model

    found = {}
    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}) as accelerator:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        inner = get_peft_model(swa.load_pretrained(accelerator, path), config)
        found["inner"] = ": ".join(error_of(lambda: swa.prepare(accelerator, inner)))

        late = swa.load_pretrained(accelerator, path)
        late(input_ids=batch(0))
        found["late"] = ": ".join(error_of(lambda: swa.prepare(accelerator, *_added(late))))

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        cut = sw.load_pretrained(path, mesh)
        found["cut"] = ": ".join(error_of(lambda: swa.prepare(accelerator, *_added(cut))))
    return found


def hub_model(path: str, root: str, shard_size: int, plugin: dict[str, Any]) -> dict[str, Any]:
    """HSDP or FSDP of a transformers model; automatic names and their limit; Accelerate's own state taken up."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    world = dist.get_world_size()
    parallelism = ParallelismConfig(dp_replicate_size=world // shard_size, dp_shard_size=shard_size)
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    found: dict[str, Any] = {}
    with accelerator_with(
        parallelism if world > shard_size else None,
        plugin,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    ) as accelerator:
        if world > shard_size:
            found["mesh"] = tuple(accelerator.torch_device_mesh.shape)
        model, report = swa.load_pretrained(accelerator, path, return_report=True)
        found["read"] = report.bytes_read
        found["loaded"] = whole(model)
        found["groups"] = sum(type(m).__name__.startswith("FSDP") for m in model.modules())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(list(range(101)), batch_size=3, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        model.train()

        def steps(batches: Any, count: int) -> list[Any]:
            seen = []
            for _ in range(count):
                numbers = next(batches)
                with accelerator.accumulate(model):
                    loss = model(
                        input_ids=numbers[:, None].expand(-1, 5) % 101, labels=numbers[:, None].expand(-1, 5)
                    ).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                seen.append((numbers.tolist(), float(loss.detach()), scheduler.get_last_lr()))
            return seen

        batches = iter(loader)
        steps(batches, 2)
        swa.save_state(accelerator)
        steps(batches, 1)
        swa.save_state(accelerator)
        found["step"] = accelerator.step
        swa.save_state(accelerator)
        found["names"] = sorted(os.listdir(f"{root}/checkpoints"))
        found["on"] = steps(batches, 3)
        found["after"] = whole(model)
        report = swa.load_state(accelerator)
        found["exact"], found["resumed step"] = report.exact, accelerator.step
        found["resumed"] = steps(iter(loader), 3)
        found["resumed after"] = whole(model)
    return found


class Small(nn.Module):
    """Two parameters of which the last rank holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.b = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def empty_shards(source: str, root: str, ours: bool) -> dict[str, Any]:
    """Trained and saved with our prepare, or Accelerate's own."""
    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Linear"]}) as accelerator:
        with sw.meta_init():
            model: Any = Small()
        swa.load(accelerator, model, source)
        optimizer: Any = torch.optim.AdamW(
            [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters()}], lr=0.01
        )
        own = [list(group["params"]) for group in optimizer.param_groups]
        if ours:
            model, optimizer = swa.prepare(accelerator, model, optimizer)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        now = [list(group["params"]) for group in optimizer.param_groups]
        same = all(a is b for x, y in zip(own, now, strict=True) for a, b in zip(x, y, strict=True))
        try:
            swa.save_state(accelerator, root)
        except ShardwiseError as error:
            return {"same": same, "error": str(error)}
        report = swa.load_state(accelerator, root)
        return {"same": same, "error": "", "exact": report.exact}


def masters(path: str) -> dict[str, Any]:
    """The trainable parameters of a model stored in bf16, when it is loaded and after a step."""

    def dtypes(model: nn.Module) -> list[str]:
        return sorted({str(p.dtype) for p in model.parameters() if p.requires_grad})

    plugin = {"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}
    with accelerator_with(plugin=plugin, mixed_precision="bf16") as accelerator:
        model = swa.load_pretrained(accelerator, path)
        found = {"loaded": whole(model), "dtypes": dtypes(model)}
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        tokens = torch.arange(6)[None]
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        return {**found, "after": whole(model), "then": dtypes(model)}


def tensor_parallel(path: str, root: str) -> dict[str, Any]:
    """Tensor parallelism of ``parallelism_config``: trained, saved, gone on with, resumed."""
    from accelerate import Accelerator, ParallelismConfig

    found: dict[str, Any] = {}
    with launched():
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size())
        )
        model, report = swa.load_pretrained(accelerator, path, return_report=True)
        found["read"] = report.bytes_read
        found["cut"] = sum(
            isinstance(p, DTensor) and any(q.is_shard() for q in p.placements) for p in model.parameters()
        )
        found["loaded"], found["tied"] = whole(model), model.lm_head.weight is model.model.embed_tokens.weight
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        model, optimizer = accelerator.prepare(model, optimizer)

        def steps(numbers: range) -> list[float]:
            losses = []
            for step in numbers:
                tokens = torch.randint(0, 101, (4, 6), generator=torch.Generator().manual_seed(step))
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        model.train()
        found["first"] = steps(range(3))
        swa.save_state(accelerator, root)
        found["on"], found["after"] = steps(range(3, 6)), whole(model)
        found["exact"] = swa.load_state(accelerator, root).exact
        found["resumed"], found["resumed after"] = steps(range(3, 6)), whole(model)
        sw.export_hf(model, f"{root}-export")
    return found


def tensor_parallel_beside_fsdp(path: str) -> str:
    from accelerate import ParallelismConfig

    with accelerator_with(ParallelismConfig(tp_size=2, dp_shard_size=2)) as accelerator:
        try:
            swa.load_pretrained(accelerator, path)
        except ShardwiseError as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def wrapped_by_size(source: str) -> tuple[list[str], list[str]]:
    """Names of the modules that FSDP wraps: here, and in Accelerate's own ``prepare``."""
    names = []
    for ours in (True, False):
        with accelerator_with(
            plugin={"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
        ) as accelerator:
            model: Any = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 2))
            if ours:
                swa.load(accelerator, model, source)
            model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            names.append(
                [n for n, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
            )
    return names[0], names[1]
