"""Files of torch.save and checkpoints of other programs in a store: what is read from there is what is read from a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.catalog.dcp import read_dcp
from shardwise.catalog.open import open_catalog
from shardwise.cli.render import contents_of, to_json
from shardwise.engine.objects import SourceReader
from shardwise.errors import IntegrityError, ShardwiseError, SourceError
from shardwise.storage import exists
from tests.catalog._dcp_fns import Lines
from tests.harness import models
from tests.harness.object_store import BUCKET, Do, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.runs import _third_party_fns as third_party
from tests.runs._zero_fns import Net, groups_of
from tests.runs.test_zero import differences, made
from tests.storage._states import without_staging

ROOT = f"s3://{BUCKET}/third"


def lines(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Lines()


def same(found: nn.Module, expected: nn.Module) -> bool:
    mine, theirs = found.state_dict(), expected.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def contents_below(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ----------------------------------------------------------------------------------------------------
# One process


def test_files_of_torch_save(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    """One file, a directory of one, and a directory of several with an index."""
    expected = lines(1)
    state = expected.state_dict()
    torch.save({"model": state, "epoch": 3}, tmp_path / "last.pt")
    single, several = tmp_path / "single", tmp_path / "several"
    single.mkdir()
    several.mkdir()
    torch.save(state, single / "pytorch_model.bin")
    parts = {"a.bin": sorted(state)[::2], "b.bin": sorted(state)[1::2]}
    for name, held in parts.items():
        torch.save({n: state[n] for n in held}, several / name)
    weight_map = {n: name for name, held in parts.items() for n in held}
    (several / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    server.put_directory(tmp_path, "third/files")
    for source in ("last.pt", "single", "several"):
        url = f"{ROOT}/files/{source}"
        found = lines(2)
        report = sw.load(found, url)
        assert same(found, expected), source
        assert report.source == url
        assert to_json(contents_of(url))["tree"] == to_json(contents_of(str(tmp_path / source)))["tree"]


def test_an_object_is_read_in_the_version_that_was_described(
    proxy: Proxy, server: S3Server, tmp_path: Path
) -> None:
    torch.save({"a": torch.zeros(8)}, tmp_path / "a.pt")
    server.put("third/replaced.pt", (tmp_path / "a.pt").read_bytes())
    catalog = open_catalog(f"{ROOT}/replaced.pt")
    torch.save({"a": torch.ones(8)}, tmp_path / "a.pt")
    server.put("third/replaced.pt", (tmp_path / "a.pt").read_bytes())
    (chunk,) = catalog.tensors["a"].chunks
    with SourceReader(files=catalog.files) as reader, pytest.raises(IntegrityError, match="was replaced"):
        reader.read_into(chunk.path, chunk.offset_bytes, memoryview(bytearray(32)))


def test_what_is_damaged_or_lost(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(8)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    server.put("third/cut.pt", content[:-100])
    server.put("third/empty.pt", b"")
    for name in ("cut", "empty"):
        with pytest.raises(SourceError, match=r"not a torch\.save file"):
            open_catalog(f"{ROOT}/{name}.pt")
    with pytest.raises(SourceError, match="no such file"):
        open_catalog(f"{ROOT}/none.pt")
    with pytest.raises(SourceError, match=r"no \.metadata"):
        read_dcp(f"{ROOT}/none")
    server.put("third/denied.pt", content)
    proxy.reset(lambda asked: Do(status=403) if asked.method == "GET" else None)
    with pytest.raises(SourceError, match="403"):
        open_catalog(f"{ROOT}/denied.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_zero(proxy: Proxy, server: S3Server, tmp_path: Path, stage: int) -> None:
    expected = made(tmp_path / "run", stage, "bf16")
    server.put_directory(tmp_path, f"third/zero-{stage}")
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model))
    assert sw.restore(sw.TrainState(model=model, optimizer=optimizer), f"{ROOT}/zero-{stage}/run").step == 2
    assert differences(model.state_dict(), expected["model"]) == []
    moments = {
        f"{n}.exp_avg": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p.requires_grad
    }
    assert differences(expected["moments"], moments) == []


# ----------------------------------------------------------------------------------------------------
# On ranks


def resume_both(endpoint: str, url: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    use_store(endpoint)
    return third_party.takes_over(url, 2), third_party.takes_over(path, 2)


def convert_both(endpoint: str, url: str, path: str, out: str) -> list[str]:
    use_store(endpoint)
    first, second = sw.convert(url, f"{url}-converted/step-00000003"), sw.convert(path, out)
    assert {**first.to_json(), "path": 0, "source": 0, "seconds": 0, "bytes_read": 0} == {
        **second.to_json(), "path": 0, "source": 0, "seconds": 0, "bytes_read": 0
    }  # fmt: skip
    again = sw.convert(first.path, f"{url}-again/step-00000003")
    digests = []
    for report in (first, second, again):
        state = third_party.run_of(len(digests))
        state.scheduler = None
        digests.append(sw.restore(state, report.path).digest)
    return digests


def error_of(endpoint: str, url: str) -> str:
    use_store(endpoint, retry_config={"max_retries": 2})
    try:
        sw.restore(third_party.run_of(1), url, io=sw.IOOptions(timeout_s=60))
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "restored"


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_of_another_program(
    proxy: Proxy, server: S3Server, ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """Restored, and converted into the store; and a chunk that can't be read is one error."""
    path, url = tmp_path / "titan" / "step-3", f"{ROOT}/titan-{world_size}/step-3"
    ranks.run_ranks(2, third_party.titan_saves, folder=str(path))
    server.put_directory(path, f"third/titan-{world_size}/step-3")
    for there, here in ranks.run_ranks(
        world_size, resume_both, endpoint=proxy.endpoint, url=url, path=str(path)
    ):
        assert there == {**here, "read": there["read"]}
        assert there["step"] == 3
    found = ranks.run_ranks(
        world_size,
        convert_both,
        endpoint=proxy.endpoint,
        url=url,
        path=str(path),
        out=str(tmp_path / "step-00000003"),
    )
    assert len({digest for digests in found for digest in digests}) == 1
    assert sw.verify(f"{url}-converted/step-00000003").ok
    assert not exists(f"{url}-converted/step-00000003.claim")
    proxy.reset(lambda asked: Do(status=403) if "__1_0" in asked.path else None)
    (error,) = {*ranks.run_ranks(world_size, error_of, endpoint=proxy.endpoint, url=url)}
    assert "403" in error


def test_a_full_state_and_a_hub_directory(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    """FSDP's full state in files, restored; a hub directory with its config, converted as from a path."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, rate = lines(1), 0.25
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    folder = tmp_path / "full"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
    torch.save(get_optimizer_state_dict(model, optimizer, options=full), folder / "optimizer.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    server.put_directory(folder, "third/full")
    again = lines(2)
    second = torch.optim.AdamW(again.parameters(), lr=1.0)
    report = sw.restore(sw.TrainState(model=again, optimizer=second), f"{ROOT}/full")
    assert report.step == 5
    assert same(again, model)
    assert second.param_groups[0]["lr"] == rate
    first = next(iter(model.parameters())), next(iter(again.parameters()))
    assert torch.equal(optimizer.state[first[0]]["exp_avg"], second.state[first[1]]["exp_avg"])


def test_hub_directories(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    """Converted with its config, as from a path; and, in files of torch.save, planned and loaded."""
    models.write_hub_directory("qwen3-tied", tmp_path / "hub", torch.float32)
    server.put_directory(tmp_path / "hub", "third/hub")
    sw.convert(f"{ROOT}/hub", tmp_path / "there")
    sw.convert(tmp_path / "hub", tmp_path / "here")
    there, here = (contents_below(tmp_path / name) for name in ("there", "here"))
    assert there.keys() == here.keys()
    assert all(there[n] == here[n] for n in there if n.startswith("model/"))
    (weights,) = (tmp_path / "hub").glob("*.safetensors")
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    server.put_directory(tmp_path / "hub", "third/bin")
    sources = (f"{ROOT}/bin", tmp_path / "hub")
    planned = [sw.plan(source, ranks=2).to_json() for source in sources]
    assert without_staging({**planned[0], "path": "", "store": None}) == without_staging(
        {**planned[1], "path": ""}
    )
    assert same(*(sw.load_pretrained(source, None) for source in sources))
