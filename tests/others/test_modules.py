"""Modules that are hard to shard: parametrizations, batch norms, RNNs, a model of two sources. With torch and transformers alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import shardwise as sw
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_whole


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 1), nn.BatchNorm1d(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x.movedim(-1, 0))[0])[0]


class Parametrized(nn.Module):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = parametrize(nn.Linear(7, 9)), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Convolutions,
    "rnn": Recurrent,
    "weight_norm": lambda: Parametrized(weight_norm),
    "spectral_norm": lambda: Parametrized(spectral_norm),
    "orthogonal": lambda: Parametrized(orthogonal),
}


@pytest.mark.parametrize("kind", MODULES)
@on_ranks(2)
def test_a_module_from_its_state_dict(tmp_path: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    inputs = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(dist.get_rank())
    theirs = MODULES[kind]()
    theirs.train()(inputs)  # buffers that are not those of construction
    file = tmp_path / "model.pth"
    if dist.get_rank() == 0:
        # a column-major tensor (orthogonal's base) is refused by name
        torch.save({name: t.contiguous() for name, t in theirs.state_dict().items()}, file)
    dist.barrier()
    theirs.load_state_dict(torch.load(file, weights_only=True))
    # orthogonal computes a buffer from the weight when it is built
    with nullcontext() if kind == "orthogonal" else sw.meta_init():
        model = MODULES[kind]()
    sw.shard(model, mesh)
    sw.load(model, file)
    assert_same_whole(model, theirs)
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), theirs.eval()(inputs))


def wav2vec2() -> transformers.PreTrainedModel:
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_kernel=(4, 3),
            conv_stride=(3, 2),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
    )


def whisper() -> transformers.PreTrainedModel:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=40,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=10,
            max_target_positions=12,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


@pytest.mark.parametrize("make", [wav2vec2, whisper])
@on_ranks(2)
def test_speech(tmp_path: Path, make: Callable[[], transformers.PreTrainedModel]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        make().save_pretrained(tmp_path / "speech")
    dist.barrier()
    theirs = type(make()).from_pretrained(tmp_path / "speech")
    model = sw.load_pretrained(tmp_path / "speech", mesh)
    if make is whisper:  # its class freezes them, which from_pretrained forgets
        theirs.model.encoder.embed_positions.requires_grad_(False)
    assert_same_whole(model, theirs)
    sw.export_hf(model, tmp_path / "out")
    again = type(theirs).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], t) for name, t in theirs.state_dict().items())


class Policy(nn.Module):
    """As in LeRobot: a backbone of transformers, and heads of one's own."""

    def __init__(self, config: transformers.Qwen2Config) -> None:
        super().__init__()
        self.backbone = transformers.Qwen2Model(config)
        self.action = nn.Sequential(nn.Linear(config.hidden_size, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.action(self.backbone(tokens).last_hidden_state[:, -1])


@pytest.mark.parametrize("head", ["head.pth", "new"])
@on_ranks(2)
def test_a_policy_of_two_sources(tmp_path: Path, head: str) -> None:
    """The backbone from a folder of transformers; the head from a file, or new, with the same values on any number of ranks."""
    mesh = init_device_mesh("cpu", (2,))
    config = transformers.Qwen2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=50,
    )
    torch.manual_seed(dist.get_rank())
    theirs = Policy(config)
    if dist.get_rank() == 0:
        theirs.backbone.save_pretrained(tmp_path / "backbone")
        torch.save(theirs.action.state_dict(), tmp_path / "head.pth")
    dist.barrier()
    theirs.backbone = transformers.Qwen2Model.from_pretrained(tmp_path / "backbone")
    theirs.action.load_state_dict(torch.load(tmp_path / "head.pth", weights_only=True))

    with sw.meta_init():
        policy = Policy(transformers.AutoConfig.from_pretrained(tmp_path / "backbone"))
    for block in policy.backbone.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    sw.load(policy.backbone, tmp_path / "backbone")
    if head == "new":
        sw.init_weights(policy.action, seed=0)
        with sw.meta_init():
            other = Policy(config)
        sw.init_weights(other.action, seed=0)
        theirs.action = other.action
    else:
        sw.load(policy.action, tmp_path / head)
    assert_same_whole(policy, theirs)
    tokens = torch.arange(6).reshape(2, 3)
    theirs.eval()
    with torch.no_grad():
        assert torch.equal(policy.eval()(tokens), theirs(tokens))
    sw.save(sw.TrainState(policy), tmp_path / "step")
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_()
    sw.restore(sw.TrainState(policy), tmp_path / "step")
    assert_same_whole(policy, theirs)
