"""What the fresh process of test_nothing_is_patched.py runs. Shardwise must not be imported here at first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.dist._trainer_parts import Rows, arguments, dataset, tokenizer

ROOTS = ("accelerate", "peft", "torch", "transformers", "trl")


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
            if was is now or _is_their_own_doing(key, was, now):
                continue
            found.append(f"{name}.{key}: {was!r:.80} -> {now!r:.80}")
    return found


def _is_their_own_doing(key: str, was: Any, now: Any) -> bool:
    """Modules and names that are imported late, counters, and what copyreg notes on a class that is copied."""
    is_late = was == "absent" and _is_theirs(getattr(now, "__module__", None))
    is_counter = type(was) is int and type(now) is int
    return isinstance(now, ModuleType) or is_late or is_counter or key == "__slotnames__"


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

    from shardwise.integrations import accelerate as swa
    from shardwise.integrations.peft import save_adapter
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained

    class MyTrainer(ShardwiseTrainer, SFTTrainer):
        def train(self, *args: Any, **options: Any) -> Any:
            done = super().train(*args, **options)
            shutil.rmtree(f"{root}/state", ignore_errors=True)
            swa.save_state(self.accelerator, f"{root}/state")
            swa.load_state(self.accelerator, f"{root}/state")
            shutil.rmtree(f"{root}/again", ignore_errors=True)
            save_adapter(self.model, f"{root}/again")
            return done

    use_trainers(
        path,
        f"{root}/ours",
        ShardwiseTrainer,
        MyTrainer,
        lambda args: load_pretrained(args, path)[0],
        lambda args: load_pretrained(args, path, adapter=config)[0],
    )
    assert list(Path(root, "ours/full").glob("checkpoint-*/rank")), "it was ours that ran"
    found = {"changes": changes(before), "looked at": len(before)}
    Trainer.floating_point_ops = lambda *_: 0  # type: ignore[method-assign]
    return {**found, "patched on purpose": changes(before)}
