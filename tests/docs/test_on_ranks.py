"""Blocks of the pages that say something only on several ranks, on several hosts, or where files aren't in memory yet."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from examples import elastic
from shardwise.cli import main
from tests.cli import _parts_fns
from tests.docs.blocks import DOCS, Block, blocks
from tests.docs.shown import check, run_and_check
from tests.examples import _loops_fns
from tests.harness import models
from tests.harness.command import runner
from tests.harness.on_ranks import on_ranks
from tests.harness.page_cache import drop, drops_pages
from tests.harness.pool import RankPool
from tests.loading.test_plan_promises import make_model
from tests.loading.test_strategies import unseen


def block_of(page: str, words: str) -> Block:
    (found,) = (block for block in blocks(DOCS / page) if words in block.text)
    return found


@on_ranks(2)
def test_files_that_one_rank_does_not_see(tmp_path: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    if rank == 0:
        models.write_state(models.state_of(models.Plain()), tmp_path / "model")
    dist.barrier()
    with sw.meta_init():
        model = models.Plain()
    sw.shard(model, mesh, sw.ShardPolicy(exclude=("flags", "temperature")))
    block = block_of("concepts/strategies.md", "can't see the files")
    code = block.text.replace("/data/model", str(tmp_path / "model"))
    with unseen(tmp_path / "model", rank == 1):
        run_and_check(block, code, {"sw": sw, "model": model})


def test_files_that_are_not_in_memory(tmp_path: Path) -> None:
    if not drops_pages(tmp_path):
        pytest.skip("files here are in memory and have no other place")
    model = torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024) for _ in range(4))
    )  # more than the kernel reads with a header
    sw.export_hf(model, tmp_path / "model")
    drop(*(tmp_path / "model").glob("*.safetensors"))
    block = block_of("concepts/strategies.md", "print(report.reads)")
    run_and_check(
        block, block.text.replace("/data/model", str(tmp_path / "model")), {"sw": sw, "model": model}
    )


@pytest.mark.slow
def test_tensor_parallel_loop(ranks: RankPool, tmp_path: Path) -> None:
    """Both commands of the page, on as many ranks as they say: the second goes on where the first ended."""
    steps = []
    for line in block_of("howto/tensor-parallel.md", "titan_loop.py").text.splitlines():
        launcher, option, number, script, *arguments = shlex.split(line.removeprefix("$ "))
        assert (launcher, option, script) == ("torchrun", "--nproc-per-node", "examples/titan_loop.py")
        arguments[arguments.index("--out") + 1] = str(tmp_path / "titan-out")
        ((losses,), *_) = ranks.run_ranks(int(number), _loops_fns.titan, tuple(arguments))
        steps.append(list(losses))
    assert steps == [[1, 2, 3, 4], [5, 6, 7, 8]]


#: What the page asks of another host, of directories here.
RSYNC = 'rsync() { mkdir -p "$3" && cp -r "${2/:\\/scratch//}"/. "$3"; }; set -e; '


def test_parts_of_hosts_are_merged(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.run_ranks(2, _parts_fns.save, str(make_model(tmp_path / "qwen")), str(tmp_path))
    for number in range(2):
        (tmp_path / f"host-{number}").rename(tmp_path / f"node{number}")
    monkeypatch.chdir(tmp_path)
    lines = block_of("howto/several-hosts.md", "rsync").text.replace("step-00000100", "step-00000002")
    copy, verify = lines.splitlines()
    subprocess.run(["bash", "-c", RSYNC + copy], check=True, env={"PATH": os.environ["PATH"]})
    words = shlex.split(verify)
    assert words[0] == "shardwise"
    done = runner().invoke(main, words[1:])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "ok"


def print_of_elastic(out: str, steps: int) -> str:
    """What the example prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        elastic.train(Path(out), Path(out) / "checkpoints", steps, save_every=10, step_seconds=0.0)
    return printed.getvalue()


def test_output_in_an_example(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks take twelve steps, of which the last two are lost with one of them."""
    paragraphs = textwrap.dedent(str(elastic.__doc__).partition("\n")[2]).split("\n\n")
    (shown,) = (textwrap.dedent(text) for text in paragraphs if text.lstrip().startswith("running on"))
    first = ranks.run_ranks(2, print_of_elastic, str(tmp_path), 12)[0]
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")
    second = ranks.run_ranks(1, print_of_elastic, str(tmp_path), 11)[0]
    check("examples/elastic.py", shown.replace("...", "…"), first + second)
