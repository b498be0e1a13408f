"""TRL support for sharded policies: reference models, the LM head's gradient, buffered completions.

Read at TRL 0.29-1.16; no class, module or function of TRL is changed. Its DPO, KTO, GRPO and RLOO trainers create the reference model while they
are created: for a model by loading it whole on every rank (``create_model_from_path``), for a ``PeftModel`` by a second adapter
"ref", whose plain tensors they fill from sharded ones. :class:`References` gives them shards instead.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..errors import ShardError
from ..format.manifest import read_manifest
from ..internals import trainers as trl
from ..internals.peft import adapter_configs, base_of
from ..internals.transformers import is_transformers_model
from ..loading.initialize import clone
from ..ranks.ranks import Ranks

if TYPE_CHECKING:
    from transformers import Trainer

LOAD = "shardwise.integrations.trainer.load_pretrained(args, path)"

_AT_ITS_OWN_PACE = (
    "each rank would generate at its own pace, and shards are gathered by all at once; leave it out"
)
#: Arguments that a sharded policy does not support, with the reason.
_REFUSED = {
    "precompute_ref_log_probs": "TRL hashes the reference whole. It takes its shards' room only; leave this out",
    "sync_ref_model": "TRL mixes shards with gathered parameters, and no checkpoint holds the reference; leave it out",
    "cast_lm_head_to_fp32": "FSDP2 computes a group in one dtype; leave it out, or train with bf16=False",
    "use_transformers_continuous_batching": _AT_ITS_OWN_PACE,
    "use_transformers_paged": _AT_ITS_OWN_PACE,  # its name before TRL 1.7
}


class References(TorchFunctionMode):
    """Makes references from the sharded policy, by shards, while a trainer is constructed.

    Instead of loading a second whole model TRL gets :func:`shardwise.clone` of the policy. When TRL copies an adapter's
    shards into plain tensors, they are gathered: only the reference adapter is whole on every rank.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._args: Any = None
        self._given: Any = None
        self._copies = ExitStack()

    def __enter__(self) -> References:
        if isinstance(self._model, nn.Module) and _is_sharded(self._model):
            self._copies.enter_context(trl.copied_by(self._model, clone))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def stand_in(self, args: Any, model: nn.Module) -> None:
        """Replace the class with which TRL loads a reference of ``model``. Does nothing for other trainers.

        Raises :class:`ShardError` for arguments that a sharded model does not support.
        """
        if not hasattr(args, "model_init_kwargs"):
            return
        if _is_sharded(model):
            _check(args, model)
        self._args, self._given = args, args.model_init_kwargs
        args.model_init_kwargs = {**(self._given or {}), "architecture": _Clones(model)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gather a sharded tensor, on all ranks of its mesh, before it is copied into a plain one."""
        kinds = [isinstance(found, DTensor) for found in args[:2]]
        if func is torch.Tensor.copy_ and kinds == [False, True]:
            args = (args[0], args[1].full_tensor(), *args[2:])
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Restore the arguments. Raises :class:`ShardError` if the trainer computed with shards as whole tensors."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._copies.close()
        if self._args is not None:
            self._args.model_init_kwargs = self._given
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            raise ShardError(
                "the trainer's constructor computes with the model's full tensors, but they are sharded. A reference adapter "
                "with use_dora in the LoraConfig causes this: leave it out, or train without a reference (GRPO and RLOO: beta=0)"
            ) from error


class _Clones:
    """Stands for the class whose ``from_pretrained`` TRL calls for a reference."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def from_pretrained(self, path: str, **_: Any) -> Any:
        """A clone of the present policy. Every rank must call it."""
        if not _is_sharded(self._model):
            raise ShardError(
                f"the reference model would be loaded whole on every rank, from {path!r}: the "
                f"{type(self._model).__name__} is not sharded yet. Give the trainer a model of {LOAD}"
            )
        return clone(self._model)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def _check(args: Any, model: nn.Module) -> None:
    for name, why in _REFUSED.items():
        if getattr(args, name, False):
            raise ShardError(f"args.{name} can't be had with a sharded model: {why}")
    config = adapter_configs(model).get("ref")
    whole = [name for name in ("modules_to_save", "trainable_token_indices") if getattr(config, name, None)]
    if whole:
        raise ShardError(
            f"TRL's reference adapter would need copies of whole modules in addition to the sharded ones ({whole[0]} in the LoraConfig). "
            f"Leave that out, or train without a reference (GRPO and RLOO: beta=0)"
        )


def gather_head(model: nn.Module) -> None:
    """Gather the head before TRL computes log-probabilities, which read its weight without calling the head.

    ``shard()`` makes the head a separate group, which only the head's forward gathers. TRL would gather the weight as a
    tensor, and no rank's gradient would be reduced. Existing groups (Accelerate's includes the last norm) stay.
    """
    base: Any = base_of(model)
    if not is_transformers_model(base) or base.base_model is base or not _is_sharded(base):
        return

    def gather(*_: Any) -> None:
        head = base.get_output_embeddings()
        if not torch.is_grad_enabled() or head is None or not _is_trained_shard(head.weight):
            return
        for module in head.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        if _is_trained_shard(head.weight):
            raise ShardError(
                f"the head of the {type(base).__name__} is sharded with modules that are not gathered when TRL uses it, and its "
                f"gradient would not be reduced. Give the trainer a model of {LOAD}"
            )

    base.base_model.register_forward_hook(gather)


def _is_trained_shard(weight: torch.Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.requires_grad


# ----------------------------------------------------------------------------------------------------
# State


def generation_state(trainer: Trainer, source: str | None) -> dict[str, Any]:
    """The state that a generating trainer must keep over a resume, as extras; empty for other trainers.

    Completions that wait for their steps differ between ranks: only the world size that wrote the checkpoint ``source``
    restores them. At another world size they are generated again, and the report says so. Collective with a
    ``source``.
    """
    if not trl.counts_as_grpo(trainer):
        return {}
    state: dict[str, Any] = {"generation": trl.Counters(trainer), "completions": trl.Completions(trainer)}
    if source is not None:
        ranks = Ranks.current()
        with ranks.agree("look for completions"):
            stored = read_manifest(source)
        if "extra.completions" in stored.local_documents and stored.world_size != ranks.world_size:
            del state["completions"]
    return state
