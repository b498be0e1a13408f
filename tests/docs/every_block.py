"""Which test runs a block of the site. A page's blocks are run by the page's test, but for those that the other two tables name by words in them."""

from __future__ import annotations

from tests.docs.blocks import Block
from tests.harness.versions import lacking

__all__ = ["ALONE", "CONSOLE", "ELSEWHERE", "INTEGRATED", "NOT_RUN", "RUN_BY", "can_run", "is_code", "runner"]

ALONE = "test_pages.py::test_blocks_run"
INTEGRATED = "test_pages.py::test_blocks_of_integrations_run"
CONSOLE = "test_console.py::test_commands_run"
PROGRAMS = "test_programs.py::test_run_again_and_after_a_kill"
TUTORIAL = "test_tutorial.py::test_the_page_shows_what_is_printed"


def _pages(test: str, folder: str, *names: str) -> dict[str, str]:
    return {f"{folder}{name}.md": test for name in names}


#: By page, the test of its Python blocks and diffs.
RUN_BY = {
    "README.md": ALONE,
    **_pages(ALONE, "docs/", "index", "install", "state", "troubleshooting", "reference/api/index"),
    **_pages(ALONE, "docs/concepts/", "digests", "exactness", "proof", "strategies"),
    **_pages(ALONE, "docs/cases/", "3-rl-engines", "4-unified-memory"),
    **_pages(ALONE, "docs/howto/", "does-it-fit", "from-pretrained", "logging", "memory-tier", "own-loop"),
    **_pages(ALONE, "docs/howto/", "peft", "qlora", "report", "rl", "sources", "tensor-parallel"),
    **_pages(ALONE, "docs/howto/stores/", "azure", "s3"),
    **_pages(ALONE, "docs/migrate/", "dcp", "deepspeed", "fsdp1"),
    **_pages(INTEGRATED, "docs/cases/", "1-device-mesh", "2-host-memory", "5-loss-spike"),
    **_pages(INTEGRATED, "docs/howto/", "accelerate", "object-stores", "preemption", "runs-in-a-store"),
    **_pages(INTEGRATED, "docs/howto/", "several-hosts", "trainer"),
    "docs/migrate/accelerate.md": "test_migrate.py::test_accelerate",
    "docs/migrate/lightning.md": "test_migrate.py::test_lightning",
    "docs/tutorial.md": TUTORIAL,
}
#: Blocks that another test runs, by page and words in them.
ELSEWHERE = {
    ("README.md", "while step < total_steps"): PROGRAMS,
    ("docs/howto/preemption.md", "checkpoints.stop(state, step)"): PROGRAMS,
    ("docs/howto/running-for-weeks.md", "while step < total_steps"): PROGRAMS,
    ("docs/troubleshooting.md", "ShardwiseAccelerator"): INTEGRATED,
    ("docs/howto/metrics.md", "print(metrics)"): "test_metrics.py::test_print",
    ("docs/howto/metrics.md", "import wandb"): "test_metrics.py::test_wandb",
    ("docs/howto/metrics.md", "SummaryWriter"): "test_metrics.py::test_tensorboard",
    ("docs/howto/metrics.md", "import mlflow"): "test_metrics.py::test_mlflow",
    ("docs/howto/metrics.md", "trainer.train()"): INTEGRATED,
    ("docs/tutorial.md", "$ "): TUTORIAL,
}
#: Blocks that no test runs, and why.
NOT_RUN = {
    (
        "README.md",
        "shardwise explain ERROR ",
    ): "a list of commands; test_commands_and_options_exist checks each",
    ("docs/index.md", "pip install shardwise"): "installs from PyPI",
    ("docs/install.md", "pip install shardwise\n"): "installs from PyPI",
    ("docs/install.md", "git clone"): "clones a repository; make dist builds and installs the wheel",
    ("docs/howto/object-stores.md", "pip install"): "installs from PyPI",
    ("docs/howto/runs-in-a-store.md", "pip install"): "installs from PyPI",
    ("docs/howto/stores/gcs.md", "gcloud storage"): "needs a Google account",
    ("docs/howto/stores/s3.md", "aws s3api"): "needs an AWS account",
    ("docs/howto/launchers.md", "sbatch"): "needs SLURM; tests/launchers runs examples/slurm.sbatch",
    (
        "docs/howto/preemption.md",
        "scontrol requeue",
    ): "needs SLURM; tests/launchers requeues jobs of examples/slurm.sbatch",
    ("docs/howto/several-hosts.md", "rsync"): "needs two hosts; tests/hosts merges and verifies such steps",
    ("docs/howto/tensor-parallel.md", "titan_loop.py"): "needs 4 ranks; tests/examples runs the script",
    ("docs/migrate/deepspeed.md", "zero_to_fp32.py"): "needs DeepSpeed, whose script it is",
    ("docs/howto/doctor.md", "torchrun --nnodes 4"): "needs four hosts; tests/doctor runs it on ranks of one",
    ("docs/state.md", "EMAModel"): "needs diffusers, which the development environment lacks",
    ("docs/figures.md", "make bench"): "half an hour",
    ("docs/figures.md", "make phases"): "45 minutes",
    ("docs/figures.md", "benchmarks.host_memory\n"): "minutes, for a measurement",
    ("docs/figures.md", "benchmarks.crash_curves"): "minutes, for a measurement",
    ("README.md", "make demo"): "minutes; these are what CI and tests/demo run",
}
#: Blocks that need more than the oldest packages, by page and words in them, and the gate.
GATED = {
    ("docs/howto/qlora.md", "quantized=four_bits"): "integers",
    ("docs/howto/sources.md", 'quantized="keep"'): "kept-fp8",
    ("docs/howto/does-it-fit.md", "--ep "): "plans",
    ("", "Trainer("): "trainer",
    ("", "trainer."): "trainer",
}


def is_code(block: Block) -> bool:
    """Whether a block is meant to be run: not an output, a drawing or a file."""
    if block.language in ("python", "diff", "console", "sh"):
        return True
    first = block.text.split(maxsplit=1)[0]
    return block.language == "" and first in ("pip", "shardwise", "make", "aws", "gcloud")


def runner(block: Block) -> str | None:
    """The test that runs a block; None where none does."""
    for table in (ELSEWHERE, NOT_RUN):
        for (page, words), test in table.items():
            if block.page == page and words in block.text:
                return test if table is ELSEWHERE else None
    if block.language in ("python", "diff"):
        return RUN_BY.get(block.page)
    return CONSOLE


def can_run(block: Block) -> bool:
    """Whether the packages installed here are new enough for a block."""
    gates = {gate for (page, words), gate in GATED.items() if page in block.page and words in block.text}
    return all(lacking(gate) is None for gate in gates)
