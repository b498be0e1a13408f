"""Exports into a store: the files of an export into a directory, byte for byte; all of them or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import CheckpointError, IntegrityError, LockedError, ShardwiseError
from shardwise.export import again as requantized
from shardwise.export import write as job
from shardwise.storage import exists, files_below, read_whole
from tests.export._as_source_fns import touch
from tests.harness import models
from tests.harness.command import runner
from tests.harness.object_store import BUCKET, Do, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.loading._peft_fns import known_warnings
from tests.quantized import _qlora_fns as qlora
from tests.quantized._made import fp8_directory

ROOT = f"s3://{BUCKET}/exports"
SHARDS = {"max_shard_bytes": 8_000}


def use(endpoint: str) -> None:
    use_store(endpoint, retry_config={"max_retries": 2})


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use(found.endpoint)
        yield found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for kind in ("qwen3", "qwen3-moe"):
        models.write_hub_directory(kind, root / kind, torch.float32)
    return root


def below(place: str) -> dict[str, bytes]:
    """The files of a directory or a URL."""
    if "://" in place:
        return {name: read_whole(f"{place}/{name}", 2**30) for name in files_below(place)}
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in Path(place).rglob("*") if p.is_file()}


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


# ----------------------------------------------------------------------------------------------------
# On ranks


def export_each(endpoint: str, hub: str, url: str, path: str, options: dict[str, Any]) -> list[list[Any]]:
    """A live model and its checkpoint, into the store and into directories. The reports, without place and time."""
    use(endpoint)
    own, job.WINDOW_BYTES = job.WINDOW_BYTES, 4096
    try:
        return _export_each(hub, url, path, options)
    finally:
        job.WINDOW_BYTES = own


def _export_each(hub: str, url: str, path: str, options: dict[str, Any]) -> list[list[Any]]:
    model = sw.load_pretrained(hub, init_device_mesh("cpu", (dist.get_world_size(),)))
    sw.save(sw.TrainState(model=model), f"{path}/step", step=1)
    found = []
    for name, source in (("live", model), ("stored", f"{path}/step")):
        there, here = (sw.export_hf(source, f"{place}/{name}", **options) for place in (url, path))
        assert (there.files, there.tensors, there.total_bytes) == (here.files, here.tensors, here.total_bytes)
        found.append([there.bytes_written, there.total_bytes])
    return found


def export_one(endpoint: str, hub: str, url: str) -> str:
    use(endpoint)
    model = sw.load_pretrained(hub, init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        sw.export_hf(model, url, io=sw.IOOptions(timeout_s=60), **SHARDS)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "exported"


@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, "qwen3-moe"), *[pytest.param(3, "qwen3", marks=pytest.mark.nightly)]]
)
def test_ranks_export_the_files_of_a_directory(
    hub: Path, proxy: Proxy, ranks: RankPool, tmp_path: Path, world_size: int, kind: str
) -> None:
    """Fused experts, which the files hold one by one; several files, and windows that cut tensors."""
    url = f"{ROOT}/{kind}"
    given = {"endpoint": proxy.endpoint, "hub": str(hub / kind), "url": url, "path": str(tmp_path)}
    found = ranks.run_ranks(world_size, export_each, **given, options={**SHARDS, "dtype": "bfloat16"})
    for name, reports in zip(("live", "stored"), zip(*found, strict=True), strict=True):
        assert sum(written for written, _ in reports) == reports[0][1]
        assert all(written for written, _ in reports)
        expected = below(str(tmp_path / name))
        assert len([n for n in expected if n.endswith(".safetensors")]) > world_size
        assert below(f"{url}/{name}") == expected
        assert not exists(f"{url}/{name}.claim")
    last = [
        asked.path.rpartition("/")[2]
        for asked in proxy.log
        if asked.method == "PUT" and "/stored/" in asked.path
    ]
    assert last[-2:] == ["config.json", "model.safetensors.index.json"]


def export_merged(endpoint: str, hub: str, places: list[str]) -> None:
    """A base in 4-bit codes with adapters, merged."""
    use(endpoint)
    model, _ = qlora.sharded(hub, qlora.four_bits())
    qlora.set_adapters(model, 1)
    own, job.WINDOW_BYTES = job.WINDOW_BYTES, 4096
    try:
        with known_warnings():
            for place in places:
                sw.export_hf(model, place, merge=True, **SHARDS)
    finally:
        job.WINDOW_BYTES = own


@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3), 3))
def test_merged_weights_are_the_files_of_a_directory(
    proxy: Proxy, ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """Which a test of QLoRA compares with PEFT's. Windows cut the weights, and the blocks of codes."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 72}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    url, here = f"{ROOT}/merged-{world_size}", tmp_path / "here"
    ranks.run_ranks(world_size, export_merged, proxy.endpoint, str(tmp_path / "plain"), [url, str(here)])
    expected = below(str(here))
    assert len([n for n in expected if n.endswith(".safetensors")]) > world_size
    assert below(url) == expected


def export_as_source(endpoint: str, source: str, places: list[str]) -> list[dict[str, Any]]:
    """A quantized source, loaded and changed, in its own format: from the model, the last one from its checkpoint. The reports."""
    use(endpoint)
    own, job.WINDOW_BYTES, requantized._WINDOW_BYTES = (
        (job.WINDOW_BYTES, requantized._WINDOW_BYTES),
        4096,
        1000,
    )
    try:
        model = sw.load_pretrained(source, init_device_mesh("cpu", (dist.get_world_size(),)))
        touch(model)
        reports = [sw.export_hf(model, p, quantize="as-source", **SHARDS).to_json() for p in places[:-1]]
        step = f"{ROOT}/step-{source.rpartition('-')[2]}"
        sw.save(sw.TrainState(model=model), step)
        last = sw.export_hf(step, places[-1], quantize="as-source", source=source, **SHARDS)
        return [*reports, last.to_json()]
    finally:
        job.WINDOW_BYTES, requantized._WINDOW_BYTES = own


@pytest.mark.parametrize("kind", nightly_but(("qwen3-moe", "qwen3"), "qwen3-moe"))
def test_as_source_from_a_store_into_a_store(
    hub: Path, proxy: Proxy, server: S3Server, ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """The files of an export into a directory: copies, changed tensors as the model has them, and quantized again."""
    fp8_directory(hub / kind, tmp_path / "source", (4, 8))
    for name, content in below(str(tmp_path / "source")).items():
        server.put(f"exports/source-{kind}/{name}", content)
    places = [f"{ROOT}/as-source-{kind}", str(tmp_path / "out"), f"{ROOT}/again-{kind}"]
    found = ranks.run_ranks(2, export_as_source, proxy.endpoint, f"{ROOT}/source-{kind}", places)
    expected = below(places[1])
    assert len([n for n in expected if n.endswith(".safetensors")]) > 2
    assert below(places[0]) == expected == below(places[2])
    for reports in zip(*found, strict=True):
        assert sum(r["bytes_written"] for r in reports) == reports[0]["total_bytes"]
        origin = reports[0]["as_source"]
        assert origin["requantized"]
        assert origin["written"] == ("model.norm.weight",)
        assert origin["copied"] > 10


@pytest.mark.parametrize("failing", nightly_but(("00002-of", "index.json", "config.json"), "00002-of"))
def test_a_write_that_fails_on_one_rank(hub: Path, proxy: Proxy, ranks: RankPool, failing: str) -> None:
    url = f"{ROOT}/failing/{failing.strip('.')}"
    proxy.reset(
        lambda asked: Do(status=403) if asked.method in ("PUT", "POST") and failing in asked.path else None
    )
    found = ranks.run_ranks(2, export_one, endpoint=proxy.endpoint, hub=str(hub / "qwen3"), url=url)
    assert len(set(found)) == 1
    assert "403" in found[0]
    assert not exists(url)
    assert not exists(f"{url}.claim")


# ----------------------------------------------------------------------------------------------------
# One process


def test_one_process_and_the_command_line(proxy: Proxy, tmp_path: Path) -> None:
    model = small()
    for place in (f"{ROOT}/small/live", str(tmp_path / "live")):
        sw.export_hf(model, place)
    assert below(f"{ROOT}/small/live") == below(str(tmp_path / "live"))
    sw.save(sw.TrainState(model=model), f"{ROOT}/small/step")
    for place in (f"{ROOT}/small/stored", str(tmp_path / "stored")):
        done = runner().invoke(main, ["export", f"{ROOT}/small/step", place, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["path"] == place
    assert below(f"{ROOT}/small/stored") == below(str(tmp_path / "stored"))


def test_adapters(hub: Path, proxy: Proxy, tmp_path: Path) -> None:
    url = f"{ROOT}/adapters"
    with known_warnings():
        model = sw.load_pretrained(str(hub / "qwen3"), None)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        adapted.add_adapter("other", config)
        for place in (url, str(tmp_path / "adapters")):
            sw.export_hf(adapted, place)
    expected = below(str(tmp_path / "adapters"))
    assert {"adapter_config.json", "other/adapter_model.safetensors"} <= expected.keys()
    assert below(url) == expected


def test_tensors_without_elements_and_scalars(proxy: Proxy, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("codes", torch.arange(5, dtype=torch.int8))

    for place in (f"{ROOT}/odd", str(tmp_path / "odd")):
        sw.export_hf(Odd(), place)
    assert below(f"{ROOT}/odd") == below(str(tmp_path / "odd"))


def test_what_is_there_already(proxy: Proxy, server: S3Server) -> None:
    server.put("exports/taken/notes.txt", b"1")
    with pytest.raises(CheckpointError, match="exists already; export to a new or empty prefix"):
        sw.export_hf(small(), f"{ROOT}/taken")
    assert below(f"{ROOT}/taken") == {"notes.txt": b"1"}
    server.put("exports/claimed.claim", b'{"nonce": "1", "began": "2026-01-02 03:04:05 UTC"}')
    with pytest.raises(LockedError, match="since 2026-01-02 03:04:05 UTC"):
        sw.export_hf(small(), f"{ROOT}/claimed")


def test_a_damaged_checkpoint(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    """Nothing appears in the store."""
    sw.save(sw.TrainState(model=small()), tmp_path / "step")
    (file,) = (tmp_path / "step" / "model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="differs from what was saved"):
        sw.export_hf(tmp_path / "step", f"{ROOT}/damaged")
    assert not exists(f"{ROOT}/damaged")
    assert not exists(f"{ROOT}/damaged.claim")
