"""What the ranks run in the tests of PEFT models, and the kinds of adapters that are tried."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.internals.peft import base_of
from shardwise.names import canonical_name
from tests.checkpoint._checkpointer_fns import failure
from tests.harness import models
from tests.loading._load_fns import bits, nothing_else_changes, tensors_of, tied_names, whole

#: Kind of adapter → base (a kind of tests.harness.models), its dtype, and the settings of each adapter.
KINDS: dict[str, tuple[str, torch.dtype, dict[str, dict[str, Any]]]] = {
    "lora": ("qwen3", torch.bfloat16, {"default": {"target_modules": ["q_proj", "down_proj"]}}),
    "dora": ("qwen3", torch.float32, {"default": {"target_modules": "all-linear", "use_dora": True}}),
    "dora-bf16": ("qwen3", torch.bfloat16, {"default": {"target_modules": ["o_proj"], "use_dora": True}}),
    "dora-transposed": (
        "gpt2",
        torch.float32,
        {"default": {"target_modules": ["c_attn", "wte"], "use_dora": True, "fan_in_fan_out": True}},
    ),
    "biases": ("bert", torch.float32, {"default": {"target_modules": ["query"], "bias": "all"}}),
    "saved-head": (
        "qwen3",
        torch.float32,
        {"default": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}},
    ),
    "tied-saved-head": (
        "qwen3-tied",
        torch.float32,
        {"default": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}},
    ),
    "tied-embedding": (
        "qwen3-tied",
        torch.float32,
        {"default": {"target_modules": ["embed_tokens", "q_proj"]}},
    ),
    "two": (
        "qwen3",
        torch.float32,
        {
            "default": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "style": {"target_modules": ["q_proj", "up_proj"], "r": 3, "init_lora_weights": "gaussian"},
        },
    ),
    "experts-beside": ("qwen3-moe", torch.bfloat16, {"default": {"target_modules": ["q_proj"]}}),
    "experts": (
        "mixtral",
        torch.float32,
        {
            "default": {
                "target_modules": ["q_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            }
        },
    ),
    "renamed-base": ("llava", torch.float32, {"default": {"target_modules": ["q_proj"]}}),
}

#: Parts of names of what PEFT draws at random, where it does not set it to zero.
DRAWN = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@contextmanager
def known_warnings() -> Iterator[None]:
    """What PEFT and transformers say of each other, and PEFT of ties that it can't keep."""
    with warnings.catch_warnings():
        for message in (
            "`is_gradient_checkpointing` is deprecated",
            "Model has `tie_word_embeddings=True`",
            "Model with `tie_word_embeddings=True`",
            "Setting `save_embedding_layers` to `True`",
            "The following rank_pattern keys did not match",
            "The following alpha_pattern keys did not match",
            "Unsupported layer type .*Experts",  # PEFT 0.18-0.19, of target_parameters
        ):
            warnings.filterwarnings("ignore", message)
        yield


def configs(kind: str) -> dict[str, Any]:
    """Fresh PEFT configs of each adapter."""
    return {name: peft.LoraConfig(**{"r": 4, **given}) for name, given in KINDS[kind][2].items()}


def base_class(kind: str) -> Any:
    return getattr(transformers, models.hub_model(KINDS[kind][0])[0])


# ----------------------------------------------------------------------------------------------------
# Plain PEFT on one process


def plain_peft(kind: str, base: str) -> Any:
    """The ordinary way: everything on one process, initialized by PEFT."""
    with known_warnings():
        model: Any = base_class(kind).from_pretrained(base)
        for k, (name, config) in enumerate(configs(kind).items()):
            if k == 0:
                model = peft.get_peft_model(model, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    return model


def opened(kind: str, base: str, adapter: str) -> Any:
    """What plain PEFT makes of a base and a directory of adapters, ready to train."""
    with known_warnings():
        model: Any = base_class(kind).from_pretrained(base)
        for k, name in enumerate(configs(kind)):
            folder = adapter if name == "default" else os.path.join(adapter, name)
            if k == 0:
                model = peft.PeftModel.from_pretrained(model, folder, adapter_name=name, is_trainable=True)
            else:
                before = [(p, p.requires_grad) for p in model.parameters()]
                model.load_adapter(folder, name)
                for parameter, trained in before:  # PEFT 0.18-0.19 would freeze the first adapter
                    parameter.requires_grad_(trained)
    return model


def write_reference(kind: str, root: str) -> None:
    """A base, trained-looking adapters as PEFT saves them, and every value of what PEFT opens again."""
    source, dtype, _ = KINDS[kind]
    models.write_hub_directory(source, os.path.join(root, "base"), dtype)  # type: ignore[arg-type]
    model = plain_peft(kind, f"{root}/base")
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and any(f".{adapter}" in name for adapter in configs(kind)):
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + 0.3)
            elif parameter.requires_grad:  # biases
                parameter.add_(0.25)
    with known_warnings():
        model.save_pretrained(f"{root}/adapter")
    expected = opened(kind, f"{root}/base", f"{root}/adapter")
    values = {n: t.detach().clone().contiguous() for n, t in tensors_of(expected).items()}
    save_file(values, f"{root}/expected.safetensors")


# ----------------------------------------------------------------------------------------------------
# Sharded


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def directories(kind: str, root: str) -> dict[str, str]:
    return {name: f"{root}/adapter" + ("" if name == "default" else f"/{name}") for name in configs(kind)}


def assert_values(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = tensors_of(model)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        mine = whole(found[name]).detach()
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), (name, mine.dtype, mine.shape)
        assert torch.equal(bits(mine), bits(tensor)), name


def on_meta(kind: str, base: str) -> Any:
    """A PeftModel as a user builds it for sharding: nothing allocated, nothing drawn."""
    source, dtype, _ = KINDS[kind]
    name, config = models.hub_model(source)
    config = transformers.AutoConfig.from_pretrained(base)
    with known_warnings(), nothing_else_changes(), sw.meta_init():
        model: Any = getattr(transformers, name)._from_config(config, dtype=dtype)
        for k, (adapter, given) in enumerate(configs(kind).items()):
            if k == 0:
                model = peft.get_peft_model(model, given, adapter_name=adapter)
            else:
                model.add_adapter(adapter, given)
    assert all(p.is_meta for p in model.parameters())
    return model


def equals_plain_peft(kind: str, root: str, out: str) -> None:
    """Both ways in; the values, ties, flags and outputs of plain PEFT; and out again."""
    expected = load_file(f"{root}/expected.safetensors")
    ordinary = opened(kind, f"{root}/base", f"{root}/adapter")
    with known_warnings(), nothing_else_changes():
        model, report = sw.load_pretrained(
            f"{root}/base", mesh_of(), adapter=directories(kind, root), return_report=True
        )
    assert isinstance(model, type(ordinary))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_values(model, expected)
    assert tied_names(tensors_of(model)) == tied_names(tensors_of(ordinary))
    flags = {n: p.requires_grad for n, p in ordinary.named_parameters()}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert report.initialized == ()
    brought = {d.name for d in report.unused}
    assert {d.declared_by for d in report.unused} <= {"adapter 'default' (has its own copy)"}
    assert all(n.endswith(("bias", "embed_tokens.weight")) for n in brought), brought
    assert bool(brought) == (kind in ("biases", "tied-embedding")), "PEFT stores these with the adapter"
    assert_outputs(model, ordinary)
    with known_warnings():
        sw.export_hf(model, out)

    own = on_meta(kind, f"{root}/base")
    sw.shard(own, mesh_of())
    before = {n: (id(p), p.requires_grad) for n, p in own.named_parameters()}
    given = directories(kind, root)
    with nothing_else_changes():
        sw.load(own, f"{root}/base", adapter=given if len(given) > 1 else given["default"])
    assert_values(own, expected)
    assert {n: (id(p), p.requires_grad) for n, p in own.named_parameters()} == before


def assert_outputs(model: Any, ordinary: Any) -> None:
    ids = torch.arange(12).reshape(2, 6) % 90 + 3
    with torch.no_grad():
        found, expected = (m.eval()(input_ids=ids)[0].float() for m in (model, ordinary))
    torch.testing.assert_close(
        found, expected, rtol=1e-2 if model.dtype == torch.bfloat16 else 1e-4, atol=1e-3
    )


# ----------------------------------------------------------------------------------------------------
# Seeds


def seeded(kind: str, base: str) -> dict[str, torch.Tensor]:
    """Every value after a load without adapter files, the same by each way in; from rank 0."""
    with known_warnings(), nothing_else_changes():
        model, report = sw.load_pretrained(base, mesh_of(), adapter=configs(kind), seed=5, return_report=True)
    values = {n: whole(t).detach().clone() for n, t in tensors_of(model).items()}
    drawn = {d.name for d in report.initialized}
    assert all(d.declared_by.startswith("PEFT (init_lora_weights of '") for d in report.initialized)
    assert drawn == {n for n, _ in model.named_parameters() if ".lora_" in n}

    own = on_meta(kind, base)
    sw.shard(own, mesh_of())
    with nothing_else_changes():
        sw.load(own, base, adapter=own.peft_config, seed=5)
    assert_values(own, values)

    plain = on_meta(kind, base)
    sw.shard(plain, mesh_of())
    with nothing_else_changes():
        sw.load(plain, base, allow_missing=("*.lora_*",))
        sw.init_weights(plain, 5, only=["*.lora_*"])
    assert_values(plain, values)
    assert (failure(lambda: sw.load(plain, base))[0]) == "PlanError"
    if any(".lora_magnitude" in n for n in values):
        error, words = failure(lambda: sw.init_weights(plain, only=["*.lora_magnitude_vector.*"]))
        assert error == "PlanError"
        assert "follows from lora_B, which is not initialized along with it" in words
    return values if dist.get_rank() == 0 else {}


# ----------------------------------------------------------------------------------------------------
# Training


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Training steps on one batch, the same on every rank; the losses before each."""
    ids = torch.arange(12).reshape(2, 6) % 90 + 3
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_as_plain_peft(kind: str, root: str) -> None:
    """Gradients of plain PEFT on one process; a step changes what is trainable and nothing else."""
    ordinary = opened(kind, f"{root}/base", f"{root}/adapter").eval()  # dropout would draw elsewhere
    with known_warnings():
        model = sw.load_pretrained(f"{root}/base", mesh_of(), adapter=directories(kind, root))
    before = {n: whole(t).detach().clone() for n, t in tensors_of(model).items()}
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    losses = [
        steps(m, o, 1)[0]
        for m, o in ((ordinary, torch.optim.SGD(trainable(ordinary), lr=0.1)), (model, optimizer))
    ]
    coarse = model.dtype == torch.bfloat16
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2 if coarse else 1e-5, atol=0)
    expected = {n: p.grad for n, p in ordinary.named_parameters() if p.grad is not None}
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close = (found[name] - gradient).norm() <= (0.1 if coarse else 1e-4) * gradient.norm() + 1e-7
        assert close, (name, found[name].norm(), gradient.norm())
    for name, tensor in tensors_of(model).items():
        if name not in expected:
            assert torch.equal(whole(tensor).detach(), before[name]), name
        elif expected[name].abs().max() > 1e-5:  # less is lost beside the values
            assert not torch.equal(whole(tensor).detach(), before[name]), name


def build_run(kind: str, base: str, seed: int) -> sw.TrainState:
    with known_warnings():
        model = sw.load_pretrained(base, mesh_of(), adapter=configs(kind), seed=seed)
    model.train()
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(trainable(model), lr=0.02))


def resumes_exactly(kind: str, base: str, runs: str) -> dict[str, str]:
    """Two steps, a save, two more; then the same from the save, with other seeds. Returns digests at the save."""
    first = build_run(kind, base, 1)
    steps(first.model, first.optimizer, 2)  # type: ignore[arg-type]
    with sw.Checkpointer(runs) as checkpoints:
        checkpoints.save(first, 2)
        saved = sw.digest(first.model)
        losses = steps(first.model, first.optimizer, 2)  # type: ignore[arg-type]
        torch.manual_seed(1234)
        second = build_run(kind, base, 99)
        assert sw.digest(second.model) != saved
        report = checkpoints.resume(second)
    assert report is not None
    assert (report.step, report.exact) == (2, True), report.differences
    assert sw.digest(second.model) == saved
    assert steps(second.model, second.optimizer, 2) == losses  # type: ignore[arg-type]
    assert sw.digest(second.model) == sw.digest(first.model)
    assert isinstance(saved, dict)
    return saved


def resumes_elsewhere(kind: str, base: str, runs: str) -> tuple[dict[str, str], float]:
    """Digests after resuming, and the loss of the next step."""
    state = build_run(kind, base, 7)
    with sw.Checkpointer(runs) as checkpoints:
        assert checkpoints.resume(state) is not None
    digests = sw.digest(state.model)
    assert isinstance(digests, dict)
    return digests, steps(state.model, state.optimizer, 1)[0]  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------
# Wrapped and built in other ways


def wrapped_in_other_ways(kind: str, root: str, out: str) -> None:
    """Compiled, checkpointed activations, HSDP, groups of the user's own: the same names, values and files."""
    expected = load_file(f"{root}/expected.safetensors")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for k, how in enumerate(("compiled", "compiled blocks", "checkpointed", "by hand")):
        model = on_meta(kind, f"{root}/base")
        blocks = base_of(model).model.layers
        if how == "checkpointed":
            for i, block in enumerate(blocks):
                blocks[i] = checkpoint_wrapper(block)
        elif how == "compiled blocks":
            for i, block in enumerate(blocks):
                blocks[i] = torch.compile(block, backend="eager")
        if how == "by hand":
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            sw.shard(model, mesh)
        outer: nn.Module = torch.compile(model, backend="eager") if how == "compiled" else model  # type: ignore[assignment]
        sw.load(outer, f"{root}/base", adapter=f"{root}/adapter")
        values = {canonical_name(n): whole(t).detach() for n, t in tensors_of(outer).items()}
        assert values.keys() == expected.keys()
        assert all(torch.equal(bits(values[n]), bits(t)) for n, t in expected.items()), how
        report = sw.export_hf(outer, f"{out}/{k}")
        stored = [load_file(f"{d}/adapter_model.safetensors") for d in (f"{out}/{k}", f"{root}/adapter")]
        assert stored[0].keys() == stored[1].keys(), how
        assert all(torch.equal(bits(stored[0][n]), bits(t)) for n, t in stored[1].items()), how
        written = torch.tensor(report.bytes_written)
        dist.all_reduce(written)
        assert written == report.total_bytes == sum(t.nbytes for t in stored[1].values())
        assert report.bytes_written < report.total_bytes


def base_from_a_checkpoint(kind: str, root: str, runs: str) -> None:
    """The base as a shardwise checkpoint, and a checkpoint of the whole model, which brings its adapters."""
    expected = load_file(f"{root}/expected.safetensors")
    base = sw.load_pretrained(f"{root}/base", mesh_of())
    sw.save(sw.TrainState(model=base), f"{runs}/base")
    model = on_meta(kind, f"{root}/base")
    sw.shard(model, mesh_of())
    sw.load(model, f"{runs}/base", adapter=f"{root}/adapter")
    assert_values(model, expected)
    with known_warnings():
        model = sw.load_pretrained(f"{runs}/base", mesh_of(), adapter=f"{root}/adapter")
    assert_values(model, expected)
    sw.save(sw.TrainState(model=model), f"{runs}/whole")
    sw.export_hf(model, f"{runs}/live")
    with known_warnings():
        sw.export_hf(f"{runs}/whole", f"{runs}/out")
    files = {path.name: path.read_bytes() for path in Path(runs, "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in Path(runs, "live").iterdir()}
    assert len(files) == 2
    again = on_meta(kind, f"{root}/base")
    sw.shard(again, mesh_of())
    report = sw.load(again, f"{runs}/whole")
    assert report.verified == "digest"
    assert_values(again, expected)


class Plain(nn.Module):
    """No transformers: two layers that LoRA adapts, a convolution, and a head that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 10)) for _ in range(2)
        )
        self.mix = nn.Conv1d(10, 7, 3, padding=1)
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


def plain_config() -> Any:
    return peft.LoraConfig(r=3, target_modules=r"blocks\.\d\.0|mix", modules_to_save=["head"], use_dora=True)


def base_of_the_hub(kind: str, root: str, out: str) -> None:
    """A base that is a name on the hub: the hub is not asked for it (PEFT would ask, and warn)."""
    with known_warnings():
        model = sw.load_pretrained(f"{root}/base", mesh_of(), adapter=f"{root}/adapter")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`")
        sw.export_hf(model, out)


def plain_module(base: str, adapter: str, out: str) -> None:
    """A base of no library, from an adapter's directory and without."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        ordinary = Plain()
    ordinary.load_state_dict(load_file(base))
    fresh = peft.get_peft_model(copy.deepcopy(ordinary), plain_config())
    ordinary = peft.PeftModel.from_pretrained(ordinary, adapter, is_trainable=True)
    with sw.meta_init():
        model = peft.get_peft_model(Plain(), plain_config())
    sw.shard(model, mesh_of())
    sw.load(model, base, adapter=adapter)
    assert_values(model, {n: t.detach() for n, t in tensors_of(ordinary).items()})
    x = torch.linspace(-1, 1, 2 * 6 * 10).reshape(2, 6, 10)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), ordinary.eval()(x))
    sw.export_hf(model, out)
    sw.load(model, base, adapter=model.peft_config)
    for name, tensor in tensors_of(fresh).items():
        if "lora_A" not in name:
            assert torch.equal(bits(whole(tensors_of(model)[name])), bits(tensor)), name


def a_new_head(base: str) -> dict[str, torch.Tensor]:
    """A classifier on a base that has none: its head is initialized, and PEFT's trained copy begins as the head."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    options: dict[str, Any] = {
        "auto_class": transformers.AutoModelForSequenceClassification,
        "adapter": config,
        "allow_missing": ("score.*",),
        "allow_unused": ("lm_head.weight",),
    }
    with known_warnings(), nothing_else_changes():
        model, report = sw.load_pretrained(base, mesh_of(), **options, return_report=True)
    assert config.base_model_name_or_path is None, "the caller's config was written"
    declared = {
        d.name.rpartition("score.")[2]: d.declared_by for d in report.initialized if "score" in d.name
    }
    assert declared == {"original_module.weight": "caller", "modules_to_save.default.weight": "caller"}
    head, copied = (m.weight for m in (model.score.original_module, model.score.modules_to_save["default"]))
    assert (head.requires_grad, copied.requires_grad) == (False, True)
    assert torch.equal(whole(head), whole(copied))
    ids = torch.arange(12).reshape(2, 6) % 90 + 3
    model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
    return {n: whole(p).detach().clone() for n, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------------
# Case 10


def start_a_run(base: str, adapter: str | None, out: str) -> dict[str, Any]:
    """One rank's part of a run: load, one look at the outputs, save the adapter. Digests and outputs."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16)
    with known_warnings():
        model = sw.load_pretrained(base, mesh_of(), adapter=adapter or config, seed=3)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(6)[None] + 3).logits
    sw.export_hf(model, out)
    return {"digests": sw.digest(model), "logits": logits}
