"""A small RL engine: sharded actor, critic and reference models, checkpoints, resume, and weights for an inference engine.

    torchrun --nproc-per-node 2 examples/rl_engine.py --out rl-out            # a tiny causal model
    torchrun --nproc-per-node 3 examples/rl_engine.py --out rl-out --steps 6  # resumes where it stopped, on 3 ranks
    torchrun --nproc-per-node 2 examples/rl_engine.py --out rl-vlm --model vlm           # with a frozen vision tower
    torchrun --nproc-per-node 2 examples/rl_engine.py --out rl-lora --lora               # adapters, without a second base
    torchrun --nproc-per-node 2 examples/rl_engine.py --out rl-new --from-scratch
    torchrun --nproc-per-node 4 examples/rl_engine.py --time-32b

There is one function for each way to create a model. All of them create parameters on the meta device, shard them, and
then load only this rank's bytes. No rank ever has a complete model, except rank 0 when it plays the inference engine. The reward
(small token numbers are good) and the update (one policy gradient step) are placeholders for yours. The script runs on
CPUs. On GPUs, use "cuda" for the mesh and the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import shardwise as sw

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CLASSES: dict[str, Any] = {"dense": Qwen3ForCausalLM, "vlm": LlavaForConditionalGeneration}


# ----------------------------------------------------------------------------------------------------
# Creating models


def load_actor(base: Path, mesh: DeviceMesh, kind: str, *, lora: bool) -> tuple[Any, Any]:
    """The policy: the model that ``from_pretrained`` would return, but sharded. With ``lora``, wrapped in a ``PeftModel``."""
    adapter = None
    if lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    actor, report = sw.load_pretrained(
        base, mesh, auto_class=CLASSES[kind], adapter=adapter, return_report=True
    )
    if kind == "vlm":
        actor.get_submodule("base_model.model.model" if lora else "model").vision_tower.requires_grad_(False)
    return actor, report


def new_actor(base: Path, mesh: DeviceMesh, kind: str) -> Any:
    """A policy from scratch, with the same values at every world size. Reads only the config of ``base``."""
    with sw.meta_init():
        actor = CLASSES[kind](AutoConfig.from_pretrained(base))
    sw.shard(actor, mesh)
    sw.init_weights(actor, seed=0)
    return actor


def critic_class(actor_class: type[Any]) -> type[Any]:
    """The policy's class, but with one value per token instead of logits."""

    class Critic(actor_class):  # type: ignore[misc]
        _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012  (there is no head to tie)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = nn.Identity()
            self.value_head = nn.Linear(config.get_text_config().hidden_size, 1)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = self.value_head(super().forward(input_ids=input_ids).logits)
            return values.sum(-1)  # not a view, because FSDP2 attaches hooks to the output of forward

    return Critic


def load_critic(base: Path, mesh: DeviceMesh, kind: str) -> tuple[Any, Any]:
    """The same base with a value head. Declares which tensors are missing from the files, and which are unused."""
    critic, report = sw.load_pretrained(
        base,
        mesh,
        auto_class=critic_class(CLASSES[kind]),
        allow_missing=("value_head.*",),  # initialized by the class, the same at every world size
        allow_unused=("*lm_head.weight",),
        return_report=True,
    )
    if kind == "vlm":
        critic.model.vision_tower.requires_grad_(False)
    return critic, report


# ----------------------------------------------------------------------------------------------------
# The update


def token_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log probability of every token except the first."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


class Engine:
    """Actor, critic, reference and their optimizers, with one update and one state to save."""

    def __init__(self, base: Path, mesh: DeviceMesh, kind: str, *, lora: bool, from_scratch: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.lora = lora
        with self._timed("actor"):
            if from_scratch:
                self.actor = new_actor(base, mesh, kind)
            else:
                self.actor, report = load_actor(base, mesh, kind, lora=lora)
        if not from_scratch:
            self.seconds["actor"] -= report.seconds_plan + report.seconds_read  # without the load itself
        with self._timed("critic"):
            self.critic, report = load_critic(base, mesh, kind)
        self.seconds["critic"] -= report.seconds_plan + report.seconds_read
        with self._timed("reference"):
            # clone copies the shards on the device; with LoRA, the reference is the actor's base
            self.reference = self.actor if lora else sw.clone(self.actor)
        models = {"actor": self.actor, "critic": self.critic}
        optimizers = {
            name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for name, model in models.items()
        }
        self.optimizers = optimizers
        # The reference isn't saved. A restarted run clones it from the base again before it resumes.
        self.state = sw.TrainState(model=models, optimizer=optimizers)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def step(self, ids: torch.Tensor) -> dict[str, float]:
        """Update actor and critic once on sequences of tokens."""
        reward = (ids[:, 1:] < ids.max() / 2).float()
        with torch.no_grad(), self.actor.disable_adapter() if self.lora else nullcontext():
            expected = token_logprobs(self.reference, ids)
        values = self.critic(input_ids=ids)[:, 1:].float()
        logprobs = token_logprobs(self.actor, ids)
        advantage = (reward - values).detach()
        losses = {
            "actor": (0.1 * (logprobs - expected).square() - logprobs * advantage).mean(),
            "critic": (values - reward).square().mean(),
        }
        for name, loss in losses.items():
            loss.backward()
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()
        return {name: loss.item() for name, loss in losses.items()}


# ----------------------------------------------------------------------------------------------------
# Passing the weights to an inference engine


def hand_over(engine: Engine, base: Path, kind: str, ids: torch.Tensor) -> int | None:
    """Rank 0 plays the inference engine: it receives the weights one by one, and returns the next token after ``ids``.

    Every rank must iterate, because every rank contributes its shards, but a rank can ignore the tensors. ``load_weights`` of
    vLLM and SGLang accepts the iterator with the default ``naming="hub"``. This example uses module names, because its
    engine is a plain model. With LoRA, only the adapter is transferred.
    """
    inference: Any = None
    if dist.get_rank() == 0:
        inference = CLASSES[kind](AutoConfig.from_pretrained(base)).eval()
        if engine.lora:
            from peft import get_peft_model

            inference = CLASSES[kind].from_pretrained(base)  # inference engines have the base already
            inference = get_peft_model(inference, engine.actor.peft_config["default"]).eval()
    if engine.lora:
        adapter = dict(sw.iter_full_tensors(engine.actor, naming="adapter"))
        if inference is not None:
            from peft import set_peft_model_state_dict

            unexpected = set_peft_model_state_dict(inference, adapter).unexpected_keys
            assert not unexpected, unexpected
    else:
        taken = set()
        for name, tensor in sw.iter_full_tensors(engine.actor, naming="module", bucket_bytes=64 * 1024**2):
            if inference is not None:
                result = inference.load_state_dict({name: tensor}, strict=False)
                assert not result.unexpected_keys, result.unexpected_keys
                taken.add(name)
        if inference is not None:
            inference.tie_weights()
            unfilled = {n for n, _ in inference.named_parameters()} - taken  # lists a tied weight once
            assert not unfilled, unfilled
    engine.actor.eval()
    with torch.no_grad():
        expected = engine.actor(input_ids=ids).logits  # on every rank: it gathers shards layer by layer
        if inference is None:
            return None
        logits = inference(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    return int(inference.generate(input_ids=ids, max_new_tokens=1, do_sample=False)[0, -1])


# ----------------------------------------------------------------------------------------------------
# The run


def write_base(directory: Path, kind: str) -> None:
    """Write a tiny random model in Hugging Face format. Called on rank 0 only."""
    torch.manual_seed(0)
    if kind == "dense":  # embedding and head are tied
        config: Any = Qwen3Config(
            **IDS, **BODY, vocab_size=101, head_dim=8, num_key_value_heads=2, tie_word_embeddings=True
        )
    else:
        text = LlamaConfig(**IDS, **BODY, vocab_size=101, num_key_value_heads=2)
        vision = CLIPVisionConfig(**BODY, image_size=12, patch_size=4)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=100)
    CLASSES[kind](config).save_pretrained(directory)


def time_32b() -> tuple[float, Any]:
    """Build Qwen3-32B on the meta device, with real buffers. Returns the CPU seconds and the model."""
    config = Qwen3Config(
        **{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    )
    AutoModelForCausalLM._model_mapping[Qwen3Config]  # don't count imports
    if dist.is_initialized():
        dist.barrier()  # all ranks at once, as at the start of a job
    started = time.process_time()
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return time.process_time() - started, model


def say(**facts: Any) -> None:
    """Print one line of JSON from this rank."""
    print(json.dumps({"rank": dist.get_rank(), **facts}) + "\n", end="", flush=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--base", type=Path, help="model directory; default: a tiny one, made in OUT/base")
    parser.add_argument("--model", choices=sorted(CLASSES), default="dense")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--time-32b", action="store_true")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if options.time_32b:
        seconds, model = time_32b()
        say(cpu_seconds_for_32b_on_meta=round(seconds, 3))
        return {"seconds": seconds, "model": model}
    if options.out is None:
        parser.error("--out is needed")
    base = options.base or options.out / "base"
    if dist.get_rank() == 0 and not base.exists():
        write_base(base, options.model)
    dist.barrier()
    if options.lora:
        import peft  # noqa: F401  (don't count imports)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    engine = Engine(base, mesh, options.model, lora=options.lora, from_scratch=options.from_scratch)
    say(seconds_of_model_creation={name: round(s, 3) for name, s in engine.seconds.items()})

    ids = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(7))
    losses: dict[int, dict[str, float]] = {}
    with sw.Checkpointer(options.checkpoints or options.out / "checkpoints", keep_last=2) as checkpoints:
        resumed = checkpoints.resume(engine.state)  # None on the first run; works at any world size
        first = resumed.step + 1 if resumed else 1
        for step in range(first, options.steps + 1):
            losses[step] = engine.step(ids)
            checkpoints.save(engine.state, step)
    token = hand_over(engine, base, options.model, ids[:1])
    if dist.get_rank() == 0:
        say(first_step=first, losses=losses, next_token=token)
    return {"engine": engine, "first_step": first, "losses": losses, "next_token": token}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    dist.destroy_process_group()
