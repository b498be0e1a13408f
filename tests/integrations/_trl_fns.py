"""What the ranks of test_trl.py run: TRL's real trainers with FSDP2 on CPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.tensors.live import reshard
from tests.harness.versions import lacking
from tests.integrations._trainer_fns import checkpoints, history, stop_at, whole
from tests.integrations._trainer_parts import arguments, tokenizer

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


@contextlib.contextmanager
def known_warnings() -> Iterator[None]:
    """What TRL, PEFT and transformers say of themselves."""
    with warnings.catch_warnings():
        for message in ("`is_gradient_checkpointing` is deprecated", "None of the inputs have requires_grad"):
            warnings.filterwarnings("ignore", message)
        yield


def words(count: int, seed: int) -> str:
    tokens = torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(token)}" for token in tokens)


def rows(kind: str) -> Any:
    """32 rows as DPO, KTO and GRPO take them."""
    from datasets import Dataset

    made = []
    for i in range(32):
        prompt = {"prompt": words(4, i) + " "}
        if kind == "dpo":
            made.append(prompt | {"chosen": words(5, 100 + i), "rejected": words(3, 200 + i)})
        elif kind == "kto":
            made.append(prompt | {"completion": words(5, 100 + i), "label": i % 3 == 0})
        else:
            made.append(prompt)
    return Dataset.from_list(made)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Different words, and short."""
    return [len(set(text.split())) - 0.1 * len(text) for text in completions]


def config_and_trainer(kind: str, ours: bool) -> tuple[Any, Any]:
    import trl

    config, trainer = getattr(trl, f"{kind.upper()}Config"), getattr(trl, f"{kind.upper()}Trainer")
    return config, type("MyTrainer", (ShardwiseTrainer, trainer), {}) if ours else trainer


def settings(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no"}
    if kind in ("dpo", "kto"):
        found["max_length"] = 16
    else:
        found |= {"num_generations": 2, "max_completion_length": 6}
    return found | options


def run(
    kind: str,
    load: Any,
    folder: str,
    *,
    ours: bool = True,
    resume: Any = None,
    stop: int = 99,
    **options: Any,
) -> Any:
    """One life of a trainer of TRL, with the model that ``load`` gives for the arguments."""
    config, trainer_class = config_and_trainer(kind, ours)
    model_options = options.pop("with_model", lambda model: {})
    with known_warnings(), arguments(folder, config, **settings(kind, options)) as args:
        model = load(args)
        if kind == "grpo":
            # Many ids end a completion: those of one rank are done before the other's.
            model.generation_config.eos_token_id = list(range(1, 30))
        trainer = trainer_class(
            model,
            args=args,
            train_dataset=rows(kind),
            processing_class=tokenizer(),
            callbacks=[stop_at(stop)],
            **({"reward_funcs": reward} if kind in ("grpo", "rloo") else {}),
            **model_options(model),
        )
        assert args.model_init_kwargs is None, "a trainer's arguments stay as they were"
        trainer.train(resume_from_checkpoint=resume)
        if options.get("save_strategy"):
            trainer.save_model(f"{folder}/export")
    return trainer


def plain(path: str, adapter: str | None = None) -> Any:
    """A model as plain TRL is given it."""
    from transformers import AutoModelForCausalLM

    def load(args: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path)
        if adapter is None:
            return model
        import peft

        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)

    return load


def sharded(path: str, **options: Any) -> Any:
    return lambda args: load_pretrained(args, path, **options)


def alone(path: str, adapter: str, root: str, beta: float) -> dict[str, Any]:
    """On one rank: plain TRL, which loads references whole, and ours."""
    found: dict[str, Any] = {}
    for kind, options in (("dpo", {}), ("grpo", {"beta": beta})):
        found[kind] = history(run(kind, plain(path), f"{root}/alone", ours=False, max_steps=6, **options))
        ours = run(kind, sharded(path), f"{root}/alone", max_steps=6, **options)
        found[f"ours {kind}"] = history(ours)
    found["lora"] = history(run("dpo", plain(path, adapter), f"{root}/alone", ours=False, max_steps=6))
    return found


def is_copy(reference: Any, path: str) -> None:
    """Sharded, frozen, and bit for bit what is stored."""
    from transformers import AutoModelForCausalLM

    reshard(reference.modules())  # a forward leaves the head gathered
    assert all(isinstance(p, DTensor) and not p.requires_grad for p in reference.parameters())
    assert not reference.training
    stored = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, tensor in whole(reference).items():
        assert torch.equal(tensor, stored[name]), name


def references(path: str, root: str) -> None:
    """Nothing is read for a reference: the weights are gone by the time that it is made."""
    for kind, options in (("dpo", {}), ("kto", {}), ("grpo", {"beta": 0.1}), ("rloo", {"beta": 0.1})):
        copy = f"{root}/copy-{kind}"
        if dist.get_rank() == 0:
            shutil.copytree(path, copy)
        dist.barrier()

        def load(args: Any, copy: str = copy) -> Any:
            model = load_pretrained(args, copy)
            dist.barrier()
            if dist.get_rank() == 0:
                os.unlink(f"{copy}/model.safetensors")
            dist.barrier()
            return model

        trainer = run(kind, load, f"{root}/{kind}", max_steps=2, **options)
        is_copy(trainer.ref_model, path)
        first, second = whole(trainer.model), whole(trainer.ref_model)
        assert any(not torch.equal(first[name], tensor) for name, tensor in second.items()), (
            "nothing was trained"
        )


def lives(
    kind: str, load: Any, folder: str, *, stop: int, **options: Any
) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """An uninterrupted run, and one that is stopped and resumed."""
    every = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **options}
    trainer = run(kind, load, f"{folder}/whole", **every)
    run(kind, load, f"{folder}/run", stop=stop, **every)
    assert checkpoints(f"{folder}/run") == ["checkpoint-3"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/run", f"{folder}/copy")
    dist.barrier()
    resumed = run(kind, load, f"{folder}/run", resume=True, **every)
    report = resumed.resume_report
    assert report.step == 3
    assert report.exact, (report.differences, report.skipped)
    assert len(history(trainer)) == 6
    assert history(resumed) == history(trainer), "a resume goes on bitwise"
    after = whole(resumed.model)
    for name, tensor in whole(trainer.model).items():
        assert torch.equal(after[name], tensor), name
    return trainer, resumed, history(trainer)


def dpo(path: str, root: str) -> dict[str, Any]:
    """Full fine-tuning: reference left to the trainer, cloned, or loaded; a policy sharded by ``sw.shard``."""
    trainer, _, losses = lives("dpo", sharded(path), f"{root}/dpo", stop=5)
    found: dict[str, Any] = {"left out": losses, "after": whole(trainer.model)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    by_mesh = lambda args: sw.load_pretrained(path, mesh)  # noqa: E731
    for name, load, reference in (
        ("cloned", sharded(path), sw.clone),
        ("loaded", sharded(path), lambda model: sw.load_pretrained(path, mesh)),
        ("by mesh", by_mesh, None),
    ):
        with_model = (lambda m, made=reference: {"ref_model": made(m)}) if reference else (lambda m: {})
        found[name] = history(run("dpo", load, f"{root}/other", max_steps=6, with_model=with_model))
    return found


def lora(path: str, adapter: str, root: str) -> dict[str, Any]:
    """A trained adapter trained on: its copy is the reference, not the base."""
    trainer, _, losses = lives("dpo", sharded(path, adapter=adapter), f"{root}/lora", stop=5)
    for name, parameter in trainer.model.named_parameters():
        if ".ref." in name:
            assert not isinstance(parameter, DTensor)
            assert not parameter.requires_grad
        elif ".default." in name:
            assert isinstance(parameter, DTensor)
    grpo = run("grpo", sharded(path, adapter=adapter), f"{root}/lora-grpo", max_steps=3, beta=0.1)
    kl = [row["kl"] for row in grpo.state.log_history if "kl" in row]
    return {"losses": losses, "after": whole(trainer.model), "kl": kl}


def grpo(path: str, root: str, beta: float) -> dict[str, Any]:
    """Saved where completions wait for their steps: a round of generation is of two steps, checkpoint-3 between."""
    trainer, _, _ = lives("grpo", sharded(path), f"{root}/grpo", stop=5, beta=beta, steps_per_generation=4)
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    lengths = {row.get("completions/mean_length") for row in trainer.state.log_history}
    return {"kl": kl, "lengths": lengths - {None}}


def elsewhere(path: str, root: str, beta: float) -> dict[str, Any]:
    """The same checkpoint, by another number of ranks: what waited is generated anew, and that is said."""
    trainer = run(
        "grpo", sharded(path), f"{root}/elsewhere", resume=f"{root}/grpo/copy/checkpoint-3",
        max_steps=6, beta=beta, steps_per_generation=4,
    )  # fmt: skip
    report = trainer.resume_report
    return {
        "exact": report.exact,
        "left": report.skipped,
        "steps": len(history(trainer)),
        "step": trainer._step,
    }


def refused(path: str, root: str) -> dict[str, str]:
    import peft
    from trl import GRPOConfig

    found = {}

    def attempt(name: str, kind: str, load: Any, **options: Any) -> None:
        try:
            run(kind, load, f"{root}/refused", max_steps=1, **options)
            found[name] = "nothing"
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("precompute", "dpo", sharded(path), precompute_ref_log_probs=True)
    attempt("sync", "grpo", sharded(path), beta=0.1, sync_ref_model=True)
    attempt("cast", "grpo", sharded(path), cast_lm_head_to_fp32=True)
    names = ("use_transformers_continuous_batching", "use_transformers_paged")
    name = next(name for name in names if name in GRPOConfig.__dataclass_fields__)  # paged before TRL 1.8
    attempt("batching", "grpo", sharded(path), **{name: True})
    attempt("unsharded dpo", "dpo", plain(path))
    attempt("unsharded grpo", "grpo", plain(path), beta=0.1)
    for name, config in (("saved", {"modules_to_save": ["embed_tokens"]}), ("dora", {"use_dora": True})):
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **config)
        attempt(name, "dpo", sharded(path, adapter=adapter))
    return found
