"""What the fresh process of test_nothing_is_patched.py runs. Shardwise must not be imported here at first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integrations._trainer_parts import Rows, arguments, dataset, tokenizer

ROOTS = ("accelerate", "peft", "torch", "transformers", "trl")
#: What torch itself counts: handles of hooks, and calls on fake tensors.
COUNTERS = {
    "torch.utils.hooks.RemovableHandle (class).next_id",
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch._subclasses.fake_tensor.FakeTensorMode (class).cache_hits",
    "torch._subclasses.fake_tensor.FakeTensorMode (class).cache_misses",
}


def _is_theirs(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in ROOTS


def holders() -> dict[str, Any]:
    """Their modules that are loaded, and the classes in them."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not _is_theirs(name) or not isinstance(module, ModuleType):
            continue
        found[name] = module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and _is_theirs(value.__module__):  # no proxies are asked
                found[f"{value.__module__}.{value.__qualname__} (class)"] = value
    return found


def snapshot() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every attribute of every holder; what is referenced here keeps its identity."""
    return {name: (holder, dict(vars(holder))) for name, holder in holders().items()}


def changes(before: dict[str, tuple[Any, dict[str, Any]]]) -> list[str]:
    """Attributes that are another object than they were, or gone, or new."""
    found = []
    for name, (holder, old) in before.items():
        new = dict(vars(holder))
        for key in sorted(old.keys() | new.keys(), key=str):
            was, now = old.get(key, "absent"), new.get(key, "absent")
            where = f"{name}.{key}"
            if was is now or where in COUNTERS or _is_their_own_doing(key, was, now):
                continue
            found.append(f"{where}: {was!r:.80} -> {now!r:.80}")
    return found


def _is_their_own_doing(key: str, was: Any, now: Any) -> bool:
    """Modules and names that are imported late, and what copyreg notes on a class that is copied."""
    is_late = was == "absent" and _is_theirs(getattr(now, "__module__", None))
    return isinstance(now, ModuleType) or is_late or key == "__slotnames__"


def use_trainers(
    path: str, root: str, trainer: Any, sft: Any, load: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    """Train, save, evaluate, resume and export with both trainers."""
    from trl import SFTConfig

    sizes = {"max_steps": 2, "save_steps": 1, "save_total_limit": 1, "num_train_epochs": 1}
    for resume in (None, True):
        with arguments(f"{root}/full", **sizes) as args:
            made = trainer(load(args), args, train_dataset=Rows(), eval_dataset=Rows())
            made.train(resume_from_checkpoint=resume)
            made.evaluate()
            made.save_model(f"{root}/export")
        with arguments(f"{root}/lora", SFTConfig, max_length=16, **sizes) as args:
            made = sft(lora(args), args, train_dataset=dataset(), processing_class=tokenizer())
            made.train(resume_from_checkpoint=resume)
            made.save_model(f"{root}/adapter")


def use_the_rest(path: str, root: str, lora: Any) -> None:
    """What no trainer comes by: an accelerator of one's own, models that one builds oneself, a clone, full tensors."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise as sw
    from shardwise.integrations import accelerate as swa
    from tests.integrations._accelerate_fns import accelerator_with
    from tests.loading._peft_fns import known_warnings

    def built() -> Any:
        with sw.meta_init():
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))

    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}) as accelerator:
        model, own = swa.load_pretrained(accelerator, path), built()
        swa.load(accelerator, own, path)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = swa.prepare(accelerator, model, optimizer)
        tokens = torch.arange(8)[None] + 3
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        swa.save_state(accelerator, f"{root}/rest")
        swa.load_state(accelerator, f"{root}/rest")
        second = sw.clone(model)
        assert [name for name, _ in sw.iter_full_tensors(second)] == [
            name for name, _ in sw.iter_full_tensors(own)
        ]
    with known_warnings():
        adapted = peft.get_peft_model(built(), lora)
    sw.shard(adapted, init_device_mesh("cpu", (dist.get_world_size(),)))
    sw.load(adapted, path, adapter=f"{root}/again")
    sw.export_hf(adapted, f"{root}/rest-adapter")


def remove(directory: str) -> None:
    """On one rank, when all are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()


def patched(path: str, root: str) -> dict[str, Any]:
    """What importing and using the integrations changes in the libraries, after they were used without them."""
    import peft
    from transformers import AutoModelForCausalLM, Trainer
    from trl import SFTTrainer

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")

    def plain(_: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path)

    use_trainers(
        path, f"{root}/plain", Trainer, SFTTrainer, plain, lambda a: peft.get_peft_model(plain(a), config)
    )
    assert "shardwise" not in sys.modules
    before = snapshot()

    import shardwise as sw
    from shardwise.integrations import accelerate as swa
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained

    class MyTrainer(ShardwiseTrainer, SFTTrainer):
        def train(self, *args: Any, **options: Any) -> Any:
            done = super().train(*args, **options)
            remove(f"{root}/state")
            swa.save_state(self.accelerator, f"{root}/state")
            swa.load_state(self.accelerator, f"{root}/state")
            remove(f"{root}/again")
            sw.export_hf(self.model, f"{root}/again")
            return done

    use_trainers(
        path,
        f"{root}/ours",
        ShardwiseTrainer,
        MyTrainer,
        lambda args: load_pretrained(args, path),
        lambda args: load_pretrained(args, path, adapter=config),
    )
    assert list(Path(root, "ours/full").glob("checkpoint-*/rank")), "it was ours that ran"
    use_the_rest(path, root, config)
    found = {"changes": changes(before), "looked at": len(before)}
    Trainer.floating_point_ops = lambda *_: 0  # type: ignore[method-assign]
    torch.serialization.DEFAULT_PROTOCOL += 1
    return {**found, "patched on purpose": changes(before)}
