"""What the ranks run in the tests of what PEFT models can't do."""

from __future__ import annotations

import os
from typing import Any

import peft
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.checkpoint._checkpointer_fns import failure
from tests.loading._load_fns import nothing_else_changes
from tests.loading._peft_fns import known_warnings, mesh_of, on_meta


def refusals(base: str, directories: dict[str, str]) -> dict[str, tuple[str, str]]:
    """What each directory gives, loaded into a model that has the adapter "lora" of ``_peft_fns.KINDS``."""
    found = {}
    for case, directory in directories.items():
        model = on_meta("lora", base)
        sw.shard(model, mesh_of())
        dist.barrier()  # ranks that fail seconds apart can't tell that they fail alike
        with nothing_else_changes():
            found[case] = failure(lambda: sw.load(model, base, adapter=directory))  # noqa: B023
        assert all(p.is_meta for p in model.parameters()), "nothing was read"
    return found


def refused_configs(base: str, given: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """load_pretrained with configs that can't be initialized, or loaded, in shards."""
    found = {}
    for case, settings in given.items():
        settings = dict(settings)
        kind = getattr(peft, settings.pop("kind", "LoraConfig"))
        dist.barrier()
        with known_warnings():
            found[case] = failure(lambda: sw.load_pretrained(base, mesh_of(), adapter=kind(**settings)))  # noqa: B023
    return found


def refused_adapter(base: str, adapter: str) -> tuple[str, str]:
    mesh = mesh_of()
    dist.barrier()
    with known_warnings():
        return failure(lambda: sw.load_pretrained(base, mesh, adapter=adapter))


def other_refusals(root: str, out: str) -> dict[str, str]:
    """Wrong arguments, and an export that has no format."""
    base = f"{root}/base"
    model = on_meta("two", base)
    sw.shard(model, mesh_of())
    found = {
        "one directory for two": _words(lambda: sw.load(model, base, adapter=f"{root}/adapter")),
        "no such adapter": _words(lambda: sw.load(model, base, adapter={"stile": f"{root}/adapter"})),
        "not PEFT's": _words(lambda: sw.load(nn.Linear(2, 2), base, adapter=f"{root}/adapter")),
        "not a config": _words(lambda: sw.load_pretrained(base, mesh_of(), adapter={"default": 3})),
    }
    sw.load(model, base, adapter=model.peft_config)
    other = peft.LoraConfig(r=5, target_modules=["q_proj"])
    found["other settings"] = _words(lambda: sw.load(model, base, adapter={"style": other}))
    found["nothing said of adapters"] = _words(lambda: sw.load(model, base))
    injected = peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(2, 2))
    )
    found["export"] = _words(lambda: sw.export_hf(injected, out))
    found["no adapters"] = _words(lambda: sw.export_hf(nn.Linear(2, 2), out, adapters="default"))
    found["save"] = _words(lambda: sw.export_hf(model, out, adapters="stile"))
    assert not os.path.exists(out)
    sw.export_hf(model, out, adapters="style")
    found["again"] = _words(lambda: sw.export_hf(model, out))
    return found


def _words(call: Any) -> str:
    dist.barrier()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
