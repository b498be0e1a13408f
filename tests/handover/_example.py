"""One rank of examples/rl_handover.py."""

from __future__ import annotations

import torch.distributed as dist

from examples import rl_handover


def main(rank: str, world: str, store: str, *arguments: str) -> int:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    rl_handover.main(list(arguments))
    dist.destroy_process_group()
    return 0
