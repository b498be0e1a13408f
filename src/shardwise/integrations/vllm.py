"""Weights for vLLM from a :class:`~shardwise.handover.WeightSender`: the backend "shardwise" of vLLM's weight transfer.

vLLM finds it in each of its processes, if shardwise is installed there::

    llm = LLM(path, weight_transfer_config={"backend": "shardwise"})
    llm.init_weight_transfer_engine({"init_info": {"url": url}})  # also allow_unused, carry, timeout_s of WeightReceiver
    llm.start_weight_update()
    llm.update_weights({"update_info": {"wait_s": 60}})
    llm.finish_weight_update()

Each worker pulls the parts that its own ``load_weights`` takes: tensor, expert and pipeline parallelism, fused tensors and quantization on
load are vLLM's own. ``update_weights`` raises as :meth:`WeightReceiver.pull`.
"""

from __future__ import annotations


def register() -> None:
    """Make the backend known to vLLM. An entry point of ``vllm.general_plugins``; may be called again."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            "shardwise", "shardwise.integrations._vllm", "TransferEngine"
        )
    except ValueError:  # it's there: vLLM loads plugins more than once
        return
