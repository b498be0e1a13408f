"""Scales that are NaN or infinite are one error, the same on every rank, before any weight is written; and are read once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import IntegrityError
from shardwise.quantized.open import dequantized
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows
from tests.quantized import _scales_fns as fns
from tests.quantized._layout_fns import build_meta_of
from tests.quantized._made import fp8_directory, quantized_directories

#: In the last element, which the last rank reads.
_NAN = {torch.uint8: 255, torch.float8_e4m3fn: float("nan")}


#: Bytes read of those stored, where cuts lie inside words: as many as without the check.
_SHARES = {"gptq": 1.62, "gptq by activation": 1.62, "awq": 1.63, "nested fp4": 1.07}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return quantized_directories(tmp_path_factory.mktemp("quantized"))


def _spoilt(directory: Path, out: Path) -> tuple[Path, str]:
    """A copy whose last scale of its last quantized tensor is NaN, and that tensor's name."""
    one = max(dequantized(open_catalog(directory)).coded.values(), key=lambda coded: coded.path)
    role = "nested" if "nested" in one.parts else "scales"
    out.mkdir(parents=True)
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        scales = tensors.get(one.parts[role].name)
        if scales is not None:
            scales.reshape(-1)[-1] = _NAN.get(scales.dtype, float("nan"))
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    return out, one.tensor.name


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, "own"), *nightly_rows((1, "own"), (2, "once"), (3, "node"))]
)
def test_named_before_any_weight(
    world_size: int, strategy: str, directories: list[Path], tmp_path: Path, ranks: RankPool
) -> None:
    spoilt = [_spoilt(directory, tmp_path / str(k)) for k, directory in enumerate(directories)]
    found = ranks.run_ranks(
        world_size, fns.messages, [str(path) for path, _ in spoilt], strategy, timeout_s=300
    )
    for k, (path, name) in enumerate(spoilt):
        said = [messages[k] for messages in found]
        assert all(f"{name}: a scale is NaN or infinite" in message for message in said), (
            directories[k],
            said,
        )
        assert path.exists()


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, "own"), *nightly_rows((1, "own"), (2, "once"), (3, "node"))]
)
@pytest.mark.parametrize("group", [-1, 10**6])
def test_groups_that_do_not_exist_are_named_before_any_weight(
    world_size: int, strategy: str, group: int, directories: list[Path], tmp_path: Path, ranks: RankPool
) -> None:
    spoilt = []
    for directory in (d for d in directories if d.name.startswith("gptq")):
        one = max(dequantized(open_catalog(directory)).coded.values(), key=lambda coded: coded.path)
        spoilt.append((out := Path(shutil.copytree(directory, tmp_path / directory.name)), one.tensor.name))
        file = Path(one.parts["groups"].chunks[0].path)
        tensors = load_file(file)
        tensors[one.parts["groups"].name][-1] = group
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    assert len(spoilt) == 2
    found = ranks.run_ranks(
        world_size, fns.messages, [str(path) for path, _ in spoilt], strategy, timeout_s=300
    )
    for k, (path, name) in enumerate(spoilt):
        said = [messages[k] for messages in found]
        assert all(f"{name}: " in message and "g_idx" in message for message in said), (path, said)


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, "own"), *nightly_rows((1, "own"), (2, "once"), (3, "node"))]
)
def test_are_read_once(
    world_size: int,
    strategy: str,
    directories: list[Path],
    ranks: RankPool,
) -> None:
    """Rows are cut on blocks here, but for GPTQ and AWQ, whose words of eight rows two ranks need."""
    found = ranks.run_ranks(world_size, fns.bytes_read, list(map(str, directories)), strategy, timeout_s=300)
    for k, directory in enumerate(directories):
        share = sum(one[k] for one in found) / dequantized(open_catalog(directory)).nbytes
        assert share <= _SHARES.get(directory.name, 1.02), (directory.name, share)


def test_without_room_to_keep_them(
    directories: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights; many scales are then checked while their codes are read, few ones before, and read twice."""
    monkeypatch.setattr("shardwise.engine.shared._KEPT_SHARE", 0)
    fp8_directory(directories[0].parent.parent / "llama", tmp_path / "few", (64, 64))
    for directory in (tmp_path / "few", *directories):
        read = sw.load(model := build_meta_of(str(directory), "bfloat16"), directory).bytes_read
        if directory.name == "few":
            assert 1 < read / open_catalog(directory).nbytes < 1.02
        expected = sw.load_pretrained(directory, dtype="bfloat16")
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (directory.name, name)
        path, name = _spoilt(directory, tmp_path / "spoilt" / directory.name)
        with pytest.raises(IntegrityError, match=f"{name}: a scale is NaN or infinite"):
            sw.load(build_meta_of(str(path), "bfloat16"), path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("staging_mib", [22, 32])
def test_decoding_stays_within_the_staging(tmp_path: Path, method: str, staging_mib: int) -> None:
    """Of a tensor whose codes and scales are larger than what may be read at a time."""
    rows, columns = 4096, 11008
    stored = {
        "up.scales": torch.ones(columns // 128, rows, dtype=torch.float16),
        "up.qzeros": torch.zeros(columns // 128, rows // 8, dtype=torch.int32),
    }
    if method == "gptq":
        stored["up.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        stored["up.g_idx"] = (torch.arange(columns) // 128).int()
    else:
        stored["up.qweight"] = torch.zeros(columns, rows // 8, dtype=torch.int32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = {"desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    settings = {"quant_method": method, "bits": 4, "group_size": 128, **own}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(columns, rows, bias=False, dtype=torch.float16)})
    report = sw.load(model, tmp_path, io=sw.IOOptions(staging_bytes=staging_mib * 2**20))
    assert 2**20 < report.staging_peak_bytes <= staging_mib * 2**20
    assert report.bytes_read <= 1.02 * sum(t.nbytes for t in stored.values())
    zero = -1.0 if method == "gptq" else 0.0  # GPTQ stores each zero point less one
    assert torch.equal(model["up"].weight, torch.full((rows, columns), zero, dtype=torch.float16))
