"""init_weights(): the model's own rule, the same values at every world size, siblings untouched."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.loading.initialize import init_weights
from shardwise.models.meta import meta_init
from shardwise.sharding.fsdp import shard
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.sharding import _shard_fns as fns

KINDS = ["rules", "llama", "mixtral", "gpt2", "t5", "mamba"]


def _plain(kind: str, seed: int = 3) -> dict[str, torch.Tensor]:
    model = fns.build(kind)  # real, unlike on the ranks: what is there before must not count either
    init_weights(model, seed)
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", nightly_but(KINDS, "rules", "mixtral"))
def test_same_values_at_every_world_size(ranks: RankPool, kind: str) -> None:
    expected = _plain(kind)
    layouts: tuple[tuple[int, tuple[int, ...] | None], ...] = ((2, None), (3, None), (4, (2, 2)))
    for world_size, shape in layouts:
        for values in ranks.run_ranks(world_size, fns.initialized, kind, shape, 3):
            assert values.keys() == expected.keys()
            for name, value in values.items():
                assert torch.equal(value, expected[name]), (world_size, name)
    assert any(not torch.equal(v, expected[n]) for n, v in _plain(kind, seed=4).items())


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_as_ordinary_construction_draws(kind: str) -> None:
    torch.manual_seed(0)
    ordinary = dict(fns.build(kind).named_parameters())
    for name, value in _plain(kind).items():
        expected = ordinary[name].detach()
        if torch.equal(expected, torch.full_like(expected, expected.flatten()[0].item())):
            assert torch.equal(value, expected), f"{name}: a constant"
        elif value.numel() >= 48:
            # Standard error of a deviation is about 1/sqrt(2 n); five of both together.
            ratio = value.std() / expected.std()
            assert abs(math.log(ratio)) < 10 / math.sqrt(2 * value.numel()), (name, ratio)


def test_an_lstm_computes_with_its_own_weights_afterwards() -> None:
    """It has them in a list, too, which the copy that the rules run on shares with it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(3, 4, batch_first=True)
            self.again = self.inner

    model = Net()
    init_weights(model, 5)
    other = nn.LSTM(3, 4, batch_first=True)
    other.load_state_dict(model.inner.state_dict())
    x = torch.ones(2, 5, 3)
    assert torch.equal(model.inner(x)[0], other(x)[0])
    assert all(w is p for w, p in zip(model.inner._flat_weights, model.inner.parameters(), strict=True))


def test_rules_of_ancestors_count() -> None:
    found, theirs = (
        values["transformer.h.0.mlp.c_proj.weight"].std() / values["transformer.h.0.mlp.c_fc.weight"].std()
        for values in (_plain("gpt2"), dict(fns.build("gpt2").named_parameters()))
    )
    # 1/sqrt(2 n_layer), by the block's rule and not the layer's own. Older transformers has that rule, and applies it nowhere.
    assert abs(found - theirs) < 0.1
    rules = _plain("rules")
    assert not rules["attention.out_proj.bias"].any(), "set by the attention around it"
    assert not rules["embed.weight"][1].any(), "the padding row"


def test_a_rule_that_writes_to_a_copy_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.8 does for each model: ``float()`` is a copy of a weight in every other dtype."""

    def in_fp32(self: nn.Module, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.float().normal_(std=0.02)

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", in_fp32)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with meta_init():
            model = fns.build("llama").to(dtype)
        init_weights(model, 3, only=["*_proj.weight"], device="cpu")
        found.append({name: p for name, p in model.named_parameters() if "_proj" in name})
    assert len(found[0]) >= 7
    for name, value in found[0].items():
        assert 0.01 < value.std() < 0.03, name
        assert found[1][name].dtype is torch.bfloat16
        assert torch.equal(found[1][name], value.bfloat16()), name


def test_a_model_in_bf16_is_drawn_in_full() -> None:
    with meta_init():
        model = fns.build("llama").to(torch.bfloat16)
    init_weights(model, 3)
    for name, value in model.named_parameters():
        if value.ndim == 2:
            assert 0.01 < value.float().std() < 0.03, name


@pytest.mark.parametrize("kind", ["llama", "rules"])
def test_loaded_siblings_are_untouched(ranks: RankPool, kind: str) -> None:
    before, after = ranks.run_ranks(2, fns.initialized_in_part, kind, "*norm*.weight")[0]
    for name in before:
        if "norm" in name and name.endswith("weight"):
            assert torch.equal(after[name], torch.ones_like(after[name])), name
        else:
            assert torch.equal(after[name], before[name]), name


@on_ranks(2)
def test_a_model_that_has_run_forward() -> None:
    """Forward leaves the root's parameters gathered; what is filled must be the shards."""
    torch.manual_seed(0)
    model, plain = fns.Net(), fns.Net()
    shard(model, fns._mesh())
    model(torch.arange(3))
    assert not all(isinstance(p, DTensor) for p in model.parameters())
    init_weights(model, 5)
    init_weights(plain, 5)
    for name, value in fns._full(model).items():
        assert torch.equal(value, fns._full(plain)[name]), name
    torch.testing.assert_close(model(torch.arange(3)), plain(torch.arange(3)))


def test_a_plain_model_on_meta() -> None:
    with meta_init():
        model = fns.build("llama")
    init_weights(model, 3)
    expected = _plain("llama")
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_values_do_not_depend_on_what_else_is_filled() -> None:
    expected = _plain("gpt2")
    model = fns.build("gpt2")
    init_weights(model, 3, only=["*.h.1.*", "lm_head.weight"])
    for name, value in model.named_parameters():
        if ".h.1." in name or name == "transformer.wte.weight":
            assert torch.equal(value, expected[name]), name


def test_each_module_draws_values_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    init_weights(model, 3)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_a_frozen_plain_scalar_and_a_backbone_in_another_model() -> None:
    outer = nn.Module()
    outer.backbone = fns.build("llama")
    outer.value_head = nn.Linear(16, 1)
    init_weights(outer, 3)
    names = {n.removeprefix("backbone.") for n, _ in outer.named_parameters()}
    assert names == {*_plain("llama"), "value_head.weight", "value_head.bias"}
    assert outer.backbone.model.norm.weight.eq(1).all()
    assert outer.value_head.weight.abs().max() <= 1 / math.sqrt(16)


def test_a_model_with_its_own_init_weights() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(0.25)

    model = Own()
    with torch.no_grad():
        model.lin.bias.fill_(9)
    init_weights(model, only=["lin.*"])
    assert model.lin.weight.eq(0.25).all()
    assert model.lin.bias.abs().max() <= 0.5, "what _init_weights leaves, reset_parameters fills"


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(()))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight[:2])


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.weight.sum().item())


def test_without_a_rule_all_are_named_and_nothing_is_written() -> None:
    model = nn.Sequential(Bare(), Half(), Reads())
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(PlanError, match="reset_parameters") as caught:
        init_weights(model)
    problems = caught.value.problems
    assert [p.split(":")[0] for p in problems] == ["0.first", "0.second", "1.weight", "2.weight"]
    assert "2 of its 4" in problems[2]
    assert "on meta" in problems[3]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_patterns_without_a_match() -> None:
    with pytest.raises(PlanError) as caught:
        init_weights(nn.Linear(2, 2), only=["weight", "wieght"])
    assert caught.value.problems == ("wieght",)
