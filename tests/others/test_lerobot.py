"""LeRobot's policies, from the folders that they save. LeRobot 0.6 needs Python 3.12 and transformers older than 5.6:

    python3.12 -m venv build/lerobot
    build/lerobot/bin/pip install 'lerobot[smolvla,diffusion]==0.6.1' xxhash pytest pytest-timeout pytest-xdist hypothesis psutil
    build/lerobot/bin/pip install --no-deps --editable .
    build/lerobot/bin/python -m pytest tests/others/test_lerobot.py
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

import shardwise as sw
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_whole

pytest.importorskip("lerobot", reason="lerobot is not installed")
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.factory import get_policy_class, make_policy_config  # noqa: E402

#: Small ones, which download nothing.
POLICIES: dict[str, dict[str, Any]] = {
    "act": {
        "chunk_size": 4,
        "n_action_steps": 4,
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 24,
        "n_encoder_layers": 2,
        "n_vae_encoder_layers": 1,
        "latent_dim": 4,
    },
    "diffusion": {
        "horizon": 8,
        "down_dims": (16, 32),
        "diffusion_step_embed_dim": 8,
        "n_groups": 4,
        "spatial_softmax_num_keypoints": 4,
        "num_inference_steps": 2,
        "crop_shape": None,
    },
}


def made(kind: str) -> Any:
    state = PolicyFeature(FeatureType.STATE, (6,))
    image = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    config = make_policy_config(
        kind,
        input_features={"observation.state": state, "observation.images.top": image},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        pretrained_backbone_weights=None,
        device="cpu",
        **POLICIES[kind],
    )
    return get_policy_class(kind)(config)


def batch_for(policy: Any) -> dict[str, torch.Tensor]:
    """Two samples, as its dataset would have them."""
    generator = torch.Generator().manual_seed(1)
    steps = len(policy.config.action_delta_indices)
    seen = () if policy.config.observation_delta_indices is None else (policy.config.n_obs_steps,)
    return {
        "observation.state": torch.randn(2, *seen, 6, generator=generator),
        "observation.images.top": torch.rand(2, *seen, 3, 64, 64, generator=generator),
        "action": torch.randn(2, steps, 3, generator=generator),
        "action_is_pad": torch.zeros(2, steps, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", POLICIES)
@on_ranks(2)
def test_a_policy_from_its_folder(tmp_path: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    folder = tmp_path / "policy"
    if dist.get_rank() == 0:
        made(kind).save_pretrained(folder)
    dist.barrier()
    theirs = get_policy_class(kind).from_pretrained(folder)

    config = PreTrainedConfig.from_pretrained(folder)
    # a diffusion policy runs its image encoder when it is built
    with nullcontext() if kind == "diffusion" else sw.meta_init():
        policy = get_policy_class(config.type)(config)
    sw.shard(policy, mesh)
    sw.load(policy, folder)
    assert_same_whole(policy, theirs)

    losses = []
    for one in (policy, theirs):
        torch.manual_seed(2)  # noise
        losses.append(one.train()(batch_for(one))[0])
        losses[-1].backward()
    assert torch.equal(losses[0], losses[1])
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for name, parameter in policy.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], msg=name)

    register_fsdp_forward_method(policy, "select_action")
    actions = []
    for one in (policy, theirs):
        one.eval().reset()
        torch.manual_seed(2)
        seen = {n: t for n, t in batch_for(one).items() if "action" not in n}
        if kind == "diffusion":
            seen = {name: t[:, 0] for name, t in seen.items()}  # it collects them itself
        actions.append(one.select_action(seen))
    assert torch.equal(actions[0], actions[1])
