"""What ranks do in test_rl_engine.py: the functions of the example themselves, held against ordinary loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from examples import own_loop, rl_engine
from tests.loading._peft_fns import known_warnings


def run_engine(*arguments: str) -> dict[str, Any]:
    """The example from end to end; what can be sent of what it found."""
    with known_warnings():
        found = rl_engine.main(list(arguments))
    engine = found.pop("engine")
    return found | {
        "seconds": engine.seconds,
        "digests": {n: sw.digest(m) for n, m in _models(engine).items()},
    }


def _models(engine: Any) -> dict[str, Any]:
    return {"actor": engine.actor, "critic": engine.critic}


def run_loop(*arguments: str) -> dict[int, float]:
    with known_warnings():
        return own_loop.main(list(arguments))


def export_is_usable(base: str, export: str, mode: str) -> None:
    """Plain transformers and PEFT read what the loop exported, and it is what was trained, not the base."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if mode == "vlm" else AutoModelForCausalLM
    before = auto.from_pretrained(base)
    if mode == "lora":
        from peft import PeftModel

        with known_warnings():
            adapters = PeftModel.from_pretrained(before, export).state_dict()
        trained = {n: t for n, t in adapters.items() if "lora_B" in n}
        assert trained
        assert all(t.any() for t in trained.values()), "B is zero until it is trained"
        return
    after = auto.from_pretrained(export).state_dict()
    changed = {n for n, t in before.state_dict().items() if not t.equal(after[n])}
    untrained = ("vision_tower", "multi_modal_projector")
    assert changed == {n for n in after if not any(part in n for part in untrained)}


def time_32b() -> float:
    """CPU seconds that building it took this rank. It is the whole model: parameters on meta, buffers real."""
    found = rl_engine.main(["--time-32b"])
    parameters, buffers = list(found["model"].parameters()), list(found["model"].buffers())
    assert sum(p.numel() for p in parameters) == 32_762_123_264
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in parameters)
    assert buffers
    assert not any(b.is_meta for b in buffers)
    seconds: float = found["seconds"]
    return seconds


def as_ordinary(kind: str, lora: bool, base: str) -> dict[str, int]:
    """Actor, critic and reference of the example hold what ``from_pretrained`` gives, ties and buffers too."""
    path = Path(base)
    if dist.get_rank() == 0:
        rl_engine.write_base(path, kind)
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with known_warnings():
        engine = rl_engine.Engine(path, mesh, kind, lora=lora, from_scratch=False)
    plain = rl_engine.CLASSES[kind].from_pretrained(path)
    expected = sw.digest(plain)
    assert isinstance(expected, dict)
    compared = {}
    for name in ("actor", "critic", "reference"):
        model = getattr(engine, name)
        found = sw.digest(model)
        assert isinstance(found, dict)
        found = {n.removeprefix("base_model.model.").replace(".base_layer", ""): d for n, d in found.items()}
        common = expected.keys() & found.keys()
        head = {n for n in expected if n == "lm_head.weight"} if name == "critic" else set()
        assert expected.keys() - common == head, (name, expected.keys() - common)
        extra = {n for n in found if "lora_" not in n and "value_head" not in n} - common
        assert not extra, (name, extra)
        differing = [n for n in common if found[n] != expected[n]]
        assert not differing, (name, differing)
        _same_buffers(model, plain)
        compared[name] = len(common)
    if plain.config.get_text_config().tie_word_embeddings:
        actor = engine.actor.base_model.model if lora else engine.actor
        assert actor.lm_head.weight is actor.model.embed_tokens.weight
    assert not lora or any("lora_A" in n for n, _ in engine.actor.named_parameters())
    return compared


def _same_buffers(model: Any, plain: Any) -> None:
    """Also those that no file holds."""
    expected = dict(plain.named_buffers())
    found = {n.removeprefix("base_model.model."): b for n, b in model.named_buffers()}
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(found[name], buffer), name
