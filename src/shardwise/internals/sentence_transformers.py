"""What shardwise uses of sentence-transformers that is private, or moves between releases. sentence-transformers 6.2.

Importing this does not import sentence-transformers, and asking whether a class or a model is one of its own doesn't either.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from .transformers import is_transformers_model


def is_sentence_class(kind: Any) -> bool:
    """Whether something is a class of models that consist of modules: ``SentenceTransformer``, ``CrossEncoder``, ``SparseEncoder``.

    sentence-transformers 6.2: they derive from ``nn.Sequential``. Without it, such a class would be taken for one of transformers.
    """
    return (
        isinstance(kind, type)
        and issubclass(kind, nn.Sequential)
        and any(one.__module__.partition(".")[0] == "sentence_transformers" for one in kind.__mro__)
    )


def on_meta(kind: Any, folder: str, dtype: torch.dtype | str, *, trust_remote_code: bool) -> Any:
    """The model in a local folder, with its own tokenizer and settings, and with all tensors on meta.

    sentence-transformers 6.2 passes ``model_kwargs`` to transformers' ``from_pretrained``, moves all other modules to the same device,
    and notes the device map, by which it would ignore ``device=`` of ``encode``. Without it, every rank would read all weights.
    """
    model = kind(
        folder,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        model_kwargs={"device_map": "meta", "dtype": dtype},
    )
    model._device_map = None
    return model


def transformer_in(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The transformers model of a module, and its attribute there; None for a module without one.

    sentence-transformers 6.2: ``Transformer.model``. Without it, names in files would not be those of the model.
    """
    return next(((n, child) for n, child in module.named_children() if is_transformers_model(child)), None)


def put_transformer(module: nn.Module, attribute: str, loaded: nn.Module) -> None:
    """Replace the transformers model of a module.

    sentence-transformers 6.2: ``Transformer.forward`` calls methods of the model that ``modality_config`` names, such as ``forward``, and
    not the model. Without it, FSDP2's hooks of the root wouldn't run, and its parameters would stay sharded.
    """
    setattr(module, attribute, loaded)
    for method in sorted({one["method"] for one in module.modality_config.values()}):  # type: ignore[operator]
        register_fsdp_forward_method(loaded, method)


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has weights; pooling and normalization have none. Without it, files would be sought that nobody wrote."""
    return next(module.parameters(), None) is not None


def weighted_modules(model: Any) -> dict[str, nn.Module]:
    """What is exported of each module that has weights, by the folder that ``save`` writes it into; the first one's may be empty.

    sentence-transformers 6.2: ``BaseModel.save``. A module with a transformers model has no other weights. Without it, weights would be
    written where nothing finds them.
    """
    found: dict[str, nn.Module] = {}
    for k, module in enumerate(model.children()):
        if has_parameters(module):
            in_root = k == 0 and getattr(module, "save_in_root", False)
            inner = transformer_in(module)
            found["" if in_root else f"{k}_{type(module).__name__}"] = inner[1] if inner else module
    return found


def save_without_weights(model: Any, folder: str) -> None:
    """Save everything of a model except its weights and the configs of its transformers models, as its ``save`` does.

    sentence-transformers 6.2: each module's ``save`` writes its ``state_dict()``, and that of a ``Transformer`` calls ``save_pretrained`` of
    the model, which gathers it on all ranks. Without it, an export would lack the pooling, the prompts and the tokenizer.
    """
    twin = copy.copy(model)
    twin.__dict__["_modules"] = {name: _without_weights(module) for name, module in model.named_children()}
    twin.save(folder)


def _without_weights(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__["state_dict"] = dict
    if (inner := transformer_in(module)) is not None:
        twin.__dict__["_modules"] = {**module._modules, inner[0]: _Config(inner[1].config)}
    return twin


class _Config(nn.Module):
    """The config of a transformers model, without the model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save_pretrained(self, folder: str, **_: Any) -> None:
        """Write nothing."""
