"""What the ranks run in the tests of recipes of wrapped models, and of what such models save later."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Qwen3ForCausalLM

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import ShardwiseError
from shardwise.loading.pretrained import build_meta
from shardwise.planning.hub_rules import HubRules, automatic_rules, hub_rules
from shardwise.tensors.live import describe, local_tensor
from tests.loading._load_fns import bits, mesh_of, ordinary_model, whole


def _is_block(module: nn.Module) -> bool:
    return type(module).__name__.removeprefix("FSDP").endswith(("DecoderLayer", "EncoderLayer"))


def _checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=_is_block)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    return model


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _sharded(model: nn.Module) -> nn.Module:
    return sw.shard(model, mesh_of((dist.get_world_size(),)))


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # PEFT's, which asks for what transformers renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        found: nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    return found


def _compiled(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="eager")
    return found


#: What people do to a model before its weights are loaded.
WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "sharded": _sharded,
    "compiled": _compiled,
    "compiled in place": _compiled_in_place,
    "checkpointed": _checkpointed,
    "checkpointed, sharded, compiled": lambda model: _compiled(_sharded(_checkpointed(model))),
    "sharded, checkpointed": lambda model: _checkpointed(_sharded(model)),
    "with adapters": _with_adapters,
    "with adapters, compiled": lambda model: _compiled(_with_adapters(model)),
}


def rules_of_wrapped(directory: str) -> dict[str, Any]:
    """The rules are those of the unwrapped model; how many tensors are renamed, and how many made of several."""
    stored = open_catalog(directory).tensors
    expected = hub_rules(build_meta(directory))
    made = expected.resolve(stored)
    for name, wrap in WRAPPED.items():
        model = wrap(build_meta(directory))
        found = automatic_rules(describe(model))
        assert isinstance(found, HubRules), name
        assert list(found.resolve(stored)) == list(made), name
        for field in ("unexpected", "missing", "non_persistent"):
            assert getattr(found, field) == getattr(expected, field), (name, field)
        assert list(map(repr, found.conversions)) == list(map(repr, expected.conversions)), name
        assert list(map(repr, found.used())) == list(map(repr, expected.used())), name
    return {
        "renamed": sum(m.sources != (m.target,) for m in made),
        "converted": sum(len(m.sources) > 1 for m in made),
        "used": len(expected.used()),
    }


class Narrow(Qwen3ForCausalLM):  # type: ignore[misc]
    """A class that wants more than a config, as people write them."""

    def __init__(self, config: Any, layers: int) -> None:
        config.num_hidden_layers = layers
        super().__init__(config)


def without_rules(directory: str, out: str) -> dict[str, str]:
    """A load of a class that can't be built again, and the errors where an instance of it is needed."""
    config = build_meta(directory).config

    def build() -> nn.Module:
        with sw.meta_init():
            return Narrow(config, config.num_hidden_layers)

    model, adapted = _sharded(build()), _sharded(_with_adapters(build()))
    found = {
        "load": _error_of(lambda: sw.load(adapted, directory)),
        "export": _error_of(lambda: sw.export_hf(model, out)),
    }
    assert all(local_tensor(p).is_meta for p in model.parameters()), "nothing was given memory"
    expected = ordinary_model(directory).state_dict()
    for names in (None, {}):
        model = _sharded(build())
        sw.load(model, directory, names=names)
        for key, tensor in model.state_dict().items():
            assert torch.equal(bits(whole(tensor)), bits(expected[key])), key
    return found


def _error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ----------------------------------------------------------------------------------------------------
# What a loaded model saves later


def _loaded(directory: str) -> Any:
    return sw.load_pretrained(directory, mesh_of((dist.get_world_size(),)))


def _filled(directory: str) -> Any:
    model = _sharded(build_meta(directory))
    sw.load(model, directory)
    return model


def _resumed(directory: str) -> Any:
    """From a checkpoint of the loaded model."""
    path = f"{directory}-checkpoint-{dist.get_world_size()}"
    sw.save(sw.TrainState(model=_loaded(directory)), path)
    return sw.load_pretrained(path, mesh_of((dist.get_world_size(),)))


LOADED: dict[str, Callable[[str], Any]] = {
    "load_pretrained": _loaded,
    "load": _filled,
    "load_pretrained from a checkpoint": _resumed,
}


def saved_alone(directory: str, out: str) -> None:
    """Without a mesh: the model's own ``save_pretrained``, which only rank 0 runs."""
    model = sw.load_pretrained(directory)
    model.save_pretrained(f"{out}/loaded")
    live = build_meta(directory)
    sw.load(live, directory)
    live.save_pretrained(f"{out}/filled")


def saved_gathered(directory: str, out: str, how: str) -> int:
    """Sharded: the gathered state dict, through ``save_pretrained`` on rank 0. How many conversions were inverted."""
    model = LOADED[how](directory)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(out, state_dict=state)
    return len(model._weight_conversions)


def exported(directory: str, out: str) -> None:
    """export_hf of the live model, and of a checkpoint of it."""
    model = _loaded(directory)
    sw.export_hf(model, f"{out}/live")
    sw.save(sw.TrainState(model=model), f"{out}/checkpoint")
    sw.export_hf(f"{out}/checkpoint", f"{out}/stored")
