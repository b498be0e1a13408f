"""LeRobot's policies, from the folders that they save. LeRobot 0.6 needs Python 3.12 and transformers older than 5.6:

python3.12 -m venv build/lerobot
build/lerobot/bin/pip install --editable . 'lerobot[smolvla,diffusion]==0.6.1' accelerate peft obstore
build/lerobot/bin/pip install pytest pytest-timeout pytest-xdist hypothesis psutil
build/lerobot/bin/python -m pytest tests/others/test_lerobot.py
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import shardwise as sw
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_whole

pytest.importorskip("lerobot", reason="lerobot is not installed")
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config

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
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "horizon": 8,
        "down_dims": (16, 32),
        "diffusion_step_embed_dim": 8,
        "n_groups": 4,
        "spatial_softmax_num_keypoints": 4,
        "num_inference_steps": 2,
        "crop_shape": None,
        "pretrained_backbone_weights": None,
    },
    "smolvla": {
        "chunk_size": 4,
        "n_action_steps": 4,
        "num_vlm_layers": 2,
        "num_steps": 2,
        "resize_imgs_with_padding": (32, 32),
    },
}


def write_vlm(folder: Path) -> str:
    """The config and the processor that a SmolVLA needs to be built, as its model on the hub has them."""
    special = {
        "fake_image": "<fake>",
        "image": "<image>",
        "end_of_utterance": "<end>",
        "global_image": "<global>",
    }
    words = {word: number for number, word in enumerate(["<pad>", *special.values()])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        extra_special_tokens={f"{name}_token": token for name, token in special.items()},
    )
    images, videos = transformers.SmolVLMImageProcessor(), transformers.SmolVLMVideoProcessor()
    transformers.SmolVLMProcessor(images, tokenizer, videos).save_pretrained(folder)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    text = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 32,
    }
    vision = {"hidden_size": 16, "image_size": 32, "patch_size": 8, **sizes}
    config = transformers.SmolVLMConfig(text_config=text | sizes, vision_config=vision, scale_factor=2)
    config.save_pretrained(folder)
    return str(folder)


def made(kind: str, root: Path) -> Any:
    state = PolicyFeature(FeatureType.STATE, (6,))
    image = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    config = make_policy_config(
        kind,
        input_features={"observation.state": state, "observation.images.top": image},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        device="cpu",
        **POLICIES[kind],
        **({"vlm_model_name": write_vlm(root / "vlm")} if kind == "smolvla" else {}),
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
        "observation.language.tokens": torch.ones(2, 5, dtype=torch.long),
        "observation.language.attention_mask": torch.ones(2, 5, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", POLICIES)
@on_ranks(2)
def test_a_policy_from_its_folder(tmp_path: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    folder = tmp_path / "policy"
    if dist.get_rank() == 0:
        made(kind, tmp_path).save_pretrained(folder)
    dist.barrier()
    theirs = get_policy_class(kind).from_pretrained(folder)

    config = PreTrainedConfig.from_pretrained(folder)
    # a diffusion policy runs its image encoder when it is built
    with nullcontext() if kind == "diffusion" else sw.meta_init():
        policy = get_policy_class(config.type)(config)
    if kind == "smolvla":  # it calls parts of its layers, which FSDP2 doesn't see
        fully_shard(policy, mesh=mesh)
    else:
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
        if kind == "diffusion":  # it collects the last observations itself
            seen = {name: t[:, 0] for name, t in seen.items()}
        actions.append(one.select_action(seen))
    assert torch.equal(actions[0], actions[1])
