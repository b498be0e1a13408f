"""Requests that are counted before they are made, and those that reports count: both are what goes through the proxy."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.render import size
from shardwise.engine.objects import PART_BYTES
from shardwise.fit import plan as planning
from shardwise.loading import strategies as choosing
from shardwise.publish.write import ObjectWriter
from shardwise.storage import bytes_below, counted_here, counting, files_below, stat_of, store_of
from tests.harness import models
from tests.harness.command import runner
from tests.harness.object_store import BUCKET, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows
from tests.planning import _fallback_fns as conversions

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/object-stores.md"
ROOT = f"s3://{BUCKET}/requests"
#: A dense model, experts that are fused, ties, one of several parts, and one whose tensors are converted whole.
KINDS = ("gpt2", "qwen3-moe", "qwen3-tied", "large", "converted")


@pytest.fixture(scope="module")
def hub(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for kind in ("gpt2", "qwen3-moe", "qwen3-tied"):
        models.write_hub_directory(kind, root / kind, torch.float32, max_shard_size="20KB")
    config = transformers.GPT2Config(n_embd=192, n_layer=3, n_head=4, vocab_size=20_000, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(root / "large")
    conversions.make_checkpoint(root / "converted")
    for kind in KINDS:
        server.put_directory(root / kind, f"requests/{kind}")
    return root


# ----------------------------------------------------------------------------------------------------
# On ranks


@conversions.registered()
def load(
    endpoint: str, kind: str, strategy: Any = "auto", dtype: str = "auto", ranks_per_host: int = 8
) -> dict[str, int]:
    use_store(endpoint)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    io = sw.IOOptions(strategy=strategy)
    host = str(dist.get_rank() // ranks_per_host)
    with mock.patch.object(choosing, "host_key", return_value=host):
        _, report = sw.load_pretrained(f"{ROOT}/{kind}", mesh, dtype=dtype, io=io, return_report=True)
    return {"requests": report.requests, "nbytes": report.bytes_read}


def trained(path: str) -> sw.TrainState:
    model = sw.load_pretrained(path, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(2, 4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def save(endpoint: str, path: str, url: str) -> dict[str, int]:
    use_store(endpoint)
    report = sw.save(trained(path), url)
    return {"requests": report.requests, "nbytes": report.bytes_written}


def restore(endpoint: str, path: str, url: str) -> dict[str, int]:
    use_store(endpoint)
    report = sw.restore(trained(path), url)
    return {"requests": report.requests, "nbytes": report.bytes_read}


# ----------------------------------------------------------------------------------------------------
# Loads


@pytest.mark.parametrize(
    ("world_size", "strategy", "dtype", "ranks_per_host"),
    [
        (1, "auto", "auto", 8),
        (2, "auto", "bfloat16", 8),
        *nightly_rows(
            (2, "own", "auto", 8),
            (3, "auto", "auto", 2),
            (4, "auto", "auto", 8),
            (4, "own", "bfloat16", 8),
            (4, "node", "auto", 2),
        ),
    ],
)
@conversions.registered()
def test_a_load_makes_the_requests_of_its_plan(
    hub: Path,
    proxy: Proxy,
    ranks: RankPool,
    world_size: int,
    strategy: Any,
    dtype: str,
    ranks_per_host: int,
) -> None:
    """To the request and to the byte, on each rank."""
    io = sw.IOOptions(strategy=strategy)
    for kind in KINDS:
        url = f"{ROOT}/{kind}"
        proxy.reset()
        store = sw.plan(
            url, ranks=world_size, nodes=-(-world_size // ranks_per_host), dtype=dtype, io=io
        ).store
        assert store is not None
        assert store.looks == len(proxy.log)
        look_bytes = proxy.counts.bytes_out  # with the listings themselves
        proxy.reset()
        options = {"kind": kind, "strategy": strategy, "dtype": dtype, "ranks_per_host": ranks_per_host}
        found = ranks.run_ranks(world_size, load, endpoint=proxy.endpoint, **options)
        expected = [{"requests": one.requests, "nbytes": one.nbytes} for one in store.per_rank]
        expected[0]["requests"] += store.looks
        assert found == expected, kind
        assert len(proxy.log) == store.total == sum(one["requests"] for one in found), kind
        assert store.nbytes is not None
        assert proxy.counts.bytes_out == look_bytes + store.nbytes, kind


def test_many_ranks_are_counted_where_few_are_planned(
    hub: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where each needs its own plan for it, they are not."""

    def planned(strategy: Any, ranks_per_host: int) -> Any:
        io = sw.IOOptions(strategy=strategy, staging_bytes=1024**2)
        return sw.plan(f"{ROOT}/large", ranks=6, nodes=-(-6 // ranks_per_host), io=io).store

    asked = [("auto", 6), ("auto", 2), ("own", 6), ("node", 2)]
    every = [planned(*one) for one in asked]
    assert [one.strategy.partition(":")[0] for one in every] == ["node", "once", "own", "node"]
    monkeypatch.setattr(planning, "EVERY_RANK_UP_TO", 1)
    two = [planned(*one) for one in asked]
    counts = [(one.requests, one.nbytes) for one in every[:2]]
    assert [(one.requests, one.nbytes) for one in two] == [*counts, (None, None), (None, None)]
    assert [one.per_rank for one in two] == [(one.per_rank[0], one.per_rank[-1]) for one in every]


def test_a_local_source_asks_for_nothing(hub: Path) -> None:
    assert sw.plan(hub / "gpt2", ranks=2).store is None
    with pytest.raises(ValueError, match="nodes must be from 1 to the 2 ranks"):
        sw.plan(hub / "gpt2", ranks=2, nodes=0)


def costs_line(plan: sw.reports.PlanReport) -> str:
    store = plan.store
    assert store is not None
    assert store.nbytes is not None
    asked_for = size(store.nbytes + store.look_bytes)
    inspecting = f"{store.looks} by rank 0 to inspect the source"
    return f"{store.total} requests ({inspecting}), {asked_for}, in parts of at most 16 MiB"


def test_the_command_says_it(hub: Path, proxy: Proxy) -> None:
    plan = sw.plan(f"{ROOT}/large", ranks=2, nodes=2)
    store = plan.store
    assert store is not None
    ask = ["plan", f"{ROOT}/large", "--ranks", "2", "--nodes", "2"]
    shown = runner().invoke(main, ask, env={"COLUMNS": "300"})
    assert shown.exit_code == 0, shown.output
    assert costs_line(plan) in shown.stdout
    assert "once: request latency outweighs transfer time, so all ranks share reads" in shown.stdout
    found = json.loads(runner().invoke(main, [*ask, "--json"]).stdout)["store"]
    assert (found["requests"], found["looks"], found["nbytes"]) == (store.requests, store.looks, store.nbytes)


# ----------------------------------------------------------------------------------------------------
# Saves, resumes


def written(nbytes: int) -> int:
    """The requests that write an object of a checkpoint."""
    return 1 if nbytes < PART_BYTES else 2 + math.ceil(nbytes / PART_BYTES)


def test_what_it_costs(hub: Path, proxy: Proxy, ranks: RankPool) -> None:
    """The page's formula of a save, and its example."""
    url, model = f"{ROOT}/step", str(hub / "large")
    costs = {}
    for what, options in (
        (load, {"kind": "large"}),
        (save, {"path": model, "url": url}),
        (restore, {"path": model, "url": url}),
    ):
        proxy.reset()
        found = ranks.run_ranks(2, what, endpoint=proxy.endpoint, **options)
        requests, nbytes = (sum(one[key] for one in found) for key in ("requests", "nbytes"))
        assert requests == len(proxy.log), [(one.method, one.path) for one in proxy.log]
        costs[what.__name__] = requests, f"{nbytes / 1e6:.1f} MB"
    files = {name: stat.nbytes for name, stat in files_below(url).items() if stat is not None}
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert costs["save"][0] == sum(map(written, files.values())) + 8 + len(folders)
    assert bytes_below(url) == (len(files), sum(files.values()))
    page = PAGE.read_text()
    assert costs_line(sw.plan(f"{ROOT}/large", ranks=2)) in page
    for name, (requests, nbytes) in costs.items():
        assert f"`{name.replace('load', 'load_pretrained')}` | {requests} | {nbytes} |" in page, costs


@pytest.mark.parametrize("nbytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_an_object_that_is_written(proxy: Proxy, nbytes: int) -> None:
    """By both ways: one request, or parts between two more."""
    content = bytes(nbytes)
    with counting() as asked, ObjectWriter(f"{ROOT}/object") as file:
        file.write(content)
    assert (asked.total, asked.bytes_written) == (len(proxy.log), nbytes)
    assert asked.total == written(nbytes)
    proxy.reset()
    with counting() as asked:
        store_of(f"s3://{BUCKET}").write("requests/object", iter([memoryview(content)]), nbytes)
    assert (asked.total, asked.bytes_written) == (len(proxy.log), nbytes)
    assert asked.total == (1 if nbytes == PART_BYTES else written(nbytes))


@pytest.mark.nightly
def test_a_long_listing_takes_several_requests(proxy: Proxy, server: S3Server) -> None:
    for k in range(1001):
        server.put(f"requests/long/{k}", b"12")
    with counting() as asked:
        assert bytes_below(f"{ROOT}/long") == (1001, 2002)
    assert asked.lists == len(proxy.log) == 2


def test_counts_of_blocks_and_threads(proxy: Proxy) -> None:
    """A block counts what is asked for in it, on its thread and on those that it gives work to."""

    def look() -> None:
        stat_of(f"{ROOT}/nothing")

    with counting() as outer:
        look()
        with counting() as inner:
            work, other = counted_here(look), threading.Thread(target=look)
            other.start()
            with ThreadPoolExecutor(4) as pool:
                for one in [pool.submit(work) for _ in range(20)]:
                    one.result()
            other.join()
    look()
    assert (inner.heads, inner.total) == (20, 20)
    assert (outer.heads, outer.total) == (21, 21)
    assert len(proxy.log) == 23


def test_bytes_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"4")
    assert bytes_below(str(tmp_path)) == (2, 4)
    assert bytes_below(str(tmp_path / "none")) == (0, 0)
