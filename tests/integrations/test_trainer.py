"""HF Trainer and TRL's SFTTrainer with FSDP2: models loaded here, ``checkpoint-N`` whole, resume, rotation, export."""

from __future__ import annotations

import signal
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from shardwise.gates import GATES
from shardwise.integrations._folders import LOCK_NAME
from shardwise.publish.lock import DirectoryLock
from tests.harness.launch import Launch
from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.integrations import _trainer_fns as fns

pytestmark = pytest.mark.needs("trainer")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    build_reference("qwen3-tied").save_pretrained(path)
    return path


def test_resume_rotation_export(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = ranks.run_ranks(2, fns.resume, str(hub), str(tmp_path), {}, timeout_s=200)
    for rank in found:
        assert [step for step, *_ in rank["whole"]] == list(range(1, 13))
        assert rank["first"] == rank["whole"][:10]
        assert rank["stopped"] == ["checkpoint-6", "checkpoint-9"]
        assert rank["exact"], rank["differences"]
        assert rank["resumed"] == rank["whole"], "a resume goes on bitwise"
        assert rank["not given"] == (), "Trainer finds its place in the data"
        assert rank["replaced"] == tuple(
            f"optimizer.param_groups[{k}].initial_lr: this program's 0.5 was replaced by the checkpoint's 0.01"
            for k in (0, 1)
        )
        for name, tensor in rank["after"].items():
            assert torch.equal(rank["resumed after"][name], tensor), name
        left = rank["at the end"]
        assert left[0].startswith("_damaged-checkpoint-11-")
        assert left[1:] == ["checkpoint-12", "checkpoint-9"], "a leftover of a killed save is gone"
    assert any(
        "exact: yes; optimizer.param_groups[0].initial_lr: this" in line for line in found[0]["warned"]
    )
    for folder in (tmp_path / "export", tmp_path / "run"):
        assert not list(folder.glob(".tmp-*"))
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, found[0]["after"][name]), name
        assert AutoTokenizer.from_pretrained(folder).encode("w7 w9") == [7, 9]
        saved = torch.load(folder / "training_args.bin", weights_only=False)
        assert saved.output_dir == str(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint-12" / "model" / "tokenizer.json").is_file()
    assert _pushed(tmp_path / "run") == _pushed(tmp_path / "export"), (
        "the hub gets the export and nothing else"
    )
    sole = ranks.run_ranks(1, fns.elsewhere, str(hub), str(tmp_path), timeout_s=100)
    both = ranks.run_ranks(2, fns.elsewhere, str(hub), str(tmp_path), timeout_s=100)
    assert sole[0]["worlds"] == (2, 1)
    assert [step for step, *_ in sole[0]["steps"]] == list(range(1, 13))
    assert not any("batch" in line for line in sole[0]["differences"])
    for one, other in zip(sole[0]["steps"], both[0]["steps"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    others = ranks.run_ranks(2, fns.other_batch, str(hub), str(tmp_path), timeout_s=100)
    for name, words in {
        "larger": "8 when saved, 16 now. Trainer finds its place in the data by steps: about 72 samples are skipped",
        "no skip": "ignore_data_skip",
    }.items():
        assert all(not rank[name][0] and words in rank[name][1] for rank in others)
        assert words in others[0][name][2], "rank 0 warns"
    assert not any("batch" in rank["as large"][1] for rank in others), "ranks share one batch: split_batches"


def _pushed(folder: Path) -> set[str]:
    """What ``Trainer.push_to_hub`` uploads of a folder; the patterns are its own."""
    from huggingface_hub.utils import filter_repo_objects

    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return set(filter_repo_objects(names, ignore_patterns=["_*", "checkpoint-*"]))


def test_activation_checkpointing_of_fsdp_config(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """Each block has it, once, and before FSDP2 shards it."""
    for wrapped, is_asked_again in ranks.run_ranks(
        2, fns.checkpointed, str(hub), str(tmp_path), timeout_s=100
    ):
        assert {name.split(".")[2] for name in wrapped} == {
            "0",
            "1",
        }  # or its parts, with Accelerate before 1.15
        assert not any("_checkpoint_wrapped_module" in name for name in wrapped), wrapped
        assert not is_asked_again


def test_an_fsdp_config_without_version(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """An error only where transformers takes FSDP1 then."""
    gate = GATES["fsdp-version"]
    for errors in ranks.run_ranks(2, fns.version_left_out, str(hub), str(tmp_path), timeout_s=100):
        if gate.is_open(version("transformers")):
            assert errors == []
        else:
            assert len(errors) == 2
            assert all(
                text.startswith(f"ShardError: {gate.feature}: this needs transformers 5.10")
                for text in errors
            )


def test_best_model_and_a_second_line(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for rank in ranks.run_ranks(2, fns.best, str(hub), str(tmp_path / "run"), timeout_s=100):
        assert rank["best"] == "checkpoint-1"
        for name, tensor in rank["at 1"].items():
            assert torch.equal(rank["loaded"][name], tensor), name
        assert any(not torch.equal(rank["at 4"][n], t) for n, t in rank["at 1"].items())
        assert [n.rsplit("-", 1)[0] for n in rank["then"][:2]] == [
            "_superseded-checkpoint-1",
            "_superseded-checkpoint-4",
        ]
        assert rank["then"][2:] == ["checkpoint-1"]


@pytest.mark.needs("transformers>=5.4", "save_strategy='best' keeps no best_global_step")
def test_the_best_is_a_step_that_is_saved_already(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for name in ranks.run_ranks(
        2, fns.best_at_the_end_of_an_epoch, str(hub), str(tmp_path / "epoch"), timeout_s=100
    ):
        assert name == str(tmp_path / "epoch" / "checkpoint-6")


@pytest.mark.needs("accelerate!=1.14.*", "shards a tied head apart from its embedding")
def test_plain_trainers_run_is_the_same_and_taken_up(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for rank in ranks.run_ranks(2, fns.plain, str(hub), str(tmp_path / "run"), timeout_s=100):
        assert len(rank["plain"]) == 10
        assert rank["taken up"][:10] == rank["plain"]
        assert len(rank["taken up"]) == 12
        report = rank["reported"]
        assert (report.step, report.saved_world_size, report.exact) == (9, 2, False)
        assert (report.tensors, report.optimizer_tensors > 0) == (rank["tensors"], True)
        assert report.rng == "those of the save, by Trainer"
        assert rank["names"] == ["checkpoint-12", "checkpoint-9"]


def test_a_model_that_is_whole_on_every_rank_is_a_warning(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    (alone,) = ranks.run_ranks(1, fns.warned, str(hub), str(tmp_path), timeout_s=100)
    first, second = ranks.run_ranks(2, fns.warned, str(hub), str(tmp_path), timeout_s=100)
    assert [*alone.values(), *second.values()] == [[]] * 2 * len(alone), "rank 0 of several"
    for name, words in {
        "no FSDP": "fsdp_version: 2",
        "from_pretrained": "trainer.load_pretrained(args",
    }.items():
        (line,) = first.pop(name)
        assert "every rank holds the whole Qwen3ForCausalLM: 2 ranks × " in line
        assert "GiB of host memory" in line
        assert words in line
    assert first == {"sharded": [], "one rank reads": [], "meta": []}


def test_why_a_whole_model_can_not_be_sharded(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for text in ranks.run_ranks(2, fns.one_rank_reads, str(hub), str(tmp_path), timeout_s=100):
        assert text.startswith("ShardError: the model was loaded unsharded"), text
        assert "trainer.load_pretrained(args" in text


def test_what_cannot_be_honored_is_named(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path / "locked"), name=LOCK_NAME)  # as another run would
    try:
        results = ranks.run_ranks(
            2, fns.refused, str(hub), str(tmp_path / "run"), str(tmp_path / "locked"), timeout_s=100
        )
    finally:
        lock.release()
    for found in results:
        plans = GATES["plans"]  # tp_size means the model's plan
        assert ("tp_size" if plans.is_open(version("transformers")) else plans.feature) in found["tp"]
        assert found["locked"].startswith("LockedError")
        assert "another run" in found["locked"]
        assert "save_on_each_node" in found["each node"]
        assert "enable_jit_checkpoint" in found["jit"]
        assert "adapter=peft_config" in found["wrapped"]
        assert found["damaged"].startswith("NoCheckpointError")
        assert "trainer_state.json" in found["damaged"]
        assert found["by hand"] == "trained"


@pytest.mark.slow
def test_trl_sft_with_lora_is_killed_and_resumed(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """Killed while it wrote the third checkpoint: the second is the newest then."""
    with Launch(2, fns.sft_killed, str(hub), str(tmp_path / "run"), {"bf16": True}, 9) as life:
        assert life.wait(120, ranks=[1]) == [-signal.SIGKILL]
        life.kill(0)
    assert [path.name[:17] for path in (tmp_path / "run").glob(".tmp-*")] == [".tmp-checkpoint-9"]
    found = ranks.run_ranks(2, fns.lora, str(hub), str(tmp_path), {"bf16": True}, timeout_s=200)
    for rank in found:
        assert [name for name in rank["left"] if name[0] != "."] == ["checkpoint-3", "checkpoint-6"]
        assert rank["exact"]
        assert rank["step"] == 6
        assert rank["resumed"] == rank["whole"], "a resume goes on bitwise"
        assert len(rank["whole"]) == rank["verified"] == 12
        for name, tensor in rank["after"].items():
            assert torch.equal(rank["resumed after"][name], tensor), name
    assert not list((tmp_path / "run").glob(".tmp-*"))
    for folder in ("adapter", "checkpoint-12"):
        _check_adapter(hub, tmp_path / "run" / folder, found[0]["after"])


def _check_adapter(base: Path, adapter: Path, expected: dict[str, torch.Tensor]) -> None:
    """Plain PEFT on one process reads what was exported."""
    import peft
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft 0.21
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert any(t.abs().max() > 0 for n, t in found.items() if "lora_B" in n)
