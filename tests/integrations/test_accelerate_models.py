"""Accelerate's plugin and models of one's own: no dims, few rows, from scratch; and what is no FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.integrations import _accelerate_models_fns as fns


@pytest.mark.parametrize("compiled", [True, *nightly(False)], ids=["compiled", "plain"])
def test_no_dims_and_few_rows(ranks: RankPool, tmp_path: Path, compiled: bool) -> None:
    """A 0-d parameter and three one-row ones, through ``accelerator.prepare``, as one process trains them."""
    torch.manual_seed(0)
    save_file(dict(fns.Scaled().state_dict()), tmp_path / "model.safetensors")
    found = ranks.run_ranks(2, fns.loaded, str(tmp_path), str(tmp_path / "saved"), compiled, timeout_s=150)
    for rank in found:
        assert [name.removeprefix("_orig_mod.") for name in rank["plain"]] == ["scale"]
        for name, tensor in rank["alone"].items():
            torch.testing.assert_close(rank["trained"][name], tensor, rtol=1e-4, atol=1e-5)
            assert torch.equal(rank["trained"][name], found[0]["trained"][name]), "alike on all ranks"
        assert rank["exact"]
        assert rank["second"][0] == rank["first"][0]
        assert all(torch.equal(rank["second"][1][name], tensor) for name, tensor in rank["first"][1].items())


def test_from_scratch(ranks: RankPool, tmp_path: Path) -> None:
    """The same values at every world size, whatever was drawn before; a resume goes on bitwise."""
    values = []
    for world_size in (1, 2, 3):
        found = ranks.run_ranks(world_size, fns.from_scratch, str(tmp_path / str(world_size)), timeout_s=100)
        for rank in found:
            values.append(rank["values"])
            assert rank["exact"]
            assert rank["second"][0] == rank["first"][0]
            assert all(torch.equal(rank["second"][1][n], tensor) for n, tensor in rank["first"][1].items())
    for other in values:
        assert all(torch.equal(other[name], tensor) for name, tensor in values[0].items())
    assert float(values[0]["scale"]) == 1.5
    assert "reset_parameters" in ranks.run_ranks(2, fns.bare_parameter, timeout_s=60)[0]


def test_what_is_no_fsdp2_is_named(ranks: RankPool, tmp_path: Path) -> None:
    save_file(dict(fns.Scaled().state_dict()), tmp_path / "model.safetensors")
    for found in ranks.run_ranks(2, fns.other_kinds, str(tmp_path), str(tmp_path / "saved"), timeout_s=60):
        assert len(found) == 12
        for name, error in found.items():
            kind = {"FSDP": "FSDP1", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}[name.split()[0]]
            assert kind in error, name
            assert "fsdp_version: 2" in error, name


def test_a_deletion_that_is_cut_off_leaves_no_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.limited, str(tmp_path), timeout_s=60):
        assert (found["published"], found["remains"]) == (["checkpoint_1"], 1)
        assert found["refused"] == ["checkpoint_1", "checkpoint_2"], "a save does not fail for it"
        assert found["newest"]
