"""On ranks: QLoRA whose base is sharded, beside the same model and adapters whole in one process."""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from tests.loading._load_fns import whole
from tests.loading._peft_fns import known_warnings

STEPS = 10


def four_bits(**more: Any) -> Any:
    given = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, **more}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **given)


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more})


def sharded(source: str, quantized: Any, **options: Any) -> tuple[Any, sw.reports.LoadReport]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with known_warnings():
        return sw.load_pretrained(
            source, mesh, adapter=lora(), quantized=quantized, return_report=True, **options
        )


def unsharded(source: str, quantized: Any) -> Any:
    """As users load it on one process: transformers and PEFT alone."""
    options = {} if isinstance(quantized, str) else {"quantization_config": quantized}
    with known_warnings():
        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, device_map="cpu", **options
        )
        return peft.get_peft_model(plain, lora())


def copy_adapters(of: Any, to: Any) -> None:
    full = {n: whole(p.detach()) for n, p in of.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in to.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(full.pop(name))
    assert not full


def set_adapters(model: Any, seed: int) -> None:
    """Values for all adapters, which are zero in part at the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                values = torch.randn(parameter.shape, generator=generator) / 8
                if isinstance(parameter, DTensor):
                    parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
                else:
                    parameter.copy_(values)


def trainable(model: Any) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model).values(), lr=1e-2)


def batch(step: int) -> torch.Tensor:
    return (torch.arange(48).view(2, 24) * (step + 3)) % 72


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    model.train()
    losses = []
    for step in range(first, last):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _averaged(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """What FSDP2 makes of equal gradients on so many ranks over gloo."""
    total = gradient.clone()
    for _ in range(ranks - 1):
        total += gradient
    return total / ranks


def like_unsharded(source: str, quantized: Any, unsharded_as: Any = None) -> int:
    """Ten steps beside the unsharded model: losses and gradients of adapters, bit for bit. Returns the gradients compared."""
    ranks = dist.get_world_size()
    model, _ = sharded(source, quantized)
    reference = unsharded(source, unsharded_as or quantized)
    copy_adapters(model, reference)
    both = [(model, optimizer_of(model)), (reference, optimizer_of(reference))]
    compared = 0
    for step in range(STEPS):
        losses = []
        for one, _ in both:
            one.train()
            loss = one(input_ids=batch(step), labels=batch(step)).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1], (step, losses)
        expected = trainable(reference)
        for name, parameter in trainable(model).items():
            of_reference = expected[name]
            of_reference.grad = _averaged(of_reference.grad, ranks)
            assert torch.equal(whole(parameter.grad), of_reference.grad), (step, name)
            compared += 1
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return compared


def held_bytes(source: str, quantized: Any) -> tuple[int, int, int]:
    """Bytes of the base's codes on this rank and of all, and the most that a block of each layer takes; nothing else is held of it."""
    model, report = sharded(source, quantized)
    codes = [p for n, p in model.named_parameters() if n.endswith("base_layer.weight")]
    assert codes
    assert all(p.dtype == torch.uint8 and isinstance(p, DTensor) for p in codes)
    assert all("kept" in one.format or "quantized to" in one.format for one in report.dequantized)
    own = sum(p.to_local().nbytes for p in codes)
    return own, sum(p.numel() for p in codes), sum(p.shape[1] for p in codes)


def run(
    source: str, quantized: Any, root: str, first: int, last: int, **state: Any
) -> tuple[list[float], dict[str, str], dict[str, str]]:
    """Resume if there is a step, train, save. Returns the losses, and the digests before and after."""
    model, _ = sharded(source, quantized)
    optimizer = optimizer_of(model)
    with sw.Checkpointer(root) as checkpoints:
        given = sw.TrainState(model=model, optimizer=optimizer, **state)
        report = checkpoints.resume(given)
        assert (report is None) == (first == 0)
        before = digests(model)
        losses = train(model, optimizer, first, last)
        checkpoints.save(given, last)
        checkpoints.wait()
    return losses, before, digests(model)


def digests(model: Any) -> dict[str, str]:
    found = sw.digest(model)
    assert isinstance(found, dict)
    return found


def merged(source: str, quantized: Any, out: str) -> None:
    model, _ = sharded(source, quantized)
    set_adapters(model, 1)
    with known_warnings():
        report = sw.export_hf(model, out, merge=True)
    assert report.tensors


def merged_by_peft(source: str, quantized: Any) -> dict[str, torch.Tensor]:
    """PEFT's own merge of the dequantized base."""
    with known_warnings():
        base = unsharded(source, quantized).unload()
        if quantized != "dequantize":
            base = base.dequantize().to(torch.bfloat16)
        model = peft.get_peft_model(base, lora())
        set_adapters(model, 1)
        found: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
        return found


def odd_blocks(source: str, root: str) -> None:
    """Two steps, a checkpoint that refers to the base and one that holds it, and a merged export."""
    model, _ = sharded(source, four_bits())
    set_adapters(model, 1)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 2)
    for frozen in ("refer", "hold"):
        sw.save(sw.TrainState(model=model, optimizer=optimizer, frozen=frozen), f"{root}/{frozen}")  # type: ignore[arg-type]
        again, _ = sharded(source, four_bits())
        sw.restore(
            sw.TrainState(model=again, optimizer=optimizer_of(again), frozen=frozen), f"{root}/{frozen}"
        )  # type: ignore[arg-type]
        assert digests(again) == digests(model)
    with known_warnings():
        sw.export_hf(model, f"{root}/merged", merge=True)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/merged")
    with torch.no_grad():
        found, expected = (one.eval()(input_ids=batch(0)).logits for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
