"""Commands of the pages run as they are written, on files as the pages describe them; outputs that the pages show are compared."""

from __future__ import annotations

import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from tests.docs import _readers
from tests.docs._run_blocks import write_base
from tests.docs.blocks import DOCS, ROOT, Block, blocks
from tests.docs.every_block import CONSOLE, SHOWN, is_code, output_of, rows, runner, site
from tests.docs.shown import check
from tests.harness import command, models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT's call
]

BLOCKS = [block for block, _ in site() if is_code(block) and runner(block) == CONSOLE]
COMMANDS = {block: command for block, command in site() if command is not None}
CONFIGS = ROOT / "tests/fit/configs"
LLAVA = "PATH --ranks 8 --auto-class"
LORA = "PATH --ranks 8 --adapter"
#: What stands for a reader's path.
INSTEAD = {
    "plan PATH --fit": f"plan {CONFIGS}/llama-3-8b.json --fit",
    "inspect PATH": "inspect runs/a",
    "verify PATH": "verify runs/a/step-00000100",
    "diff A B": "diff base plain",
    "export CHECKPOINT OUT": "export runs/a/step-00000100 trained",
    "convert PATH OUT --to checkpoint|hf": "convert old/step-1200 converted --to hf --config path/to/base",
    "copy PATH OUT": "copy base copied",
    "report RUN": "report runs/a --out report.html",
    "doctor PATH…": "doctor base",
    "explain ERROR": "explain PlanError",
    "Qwen/Qwen3-0.6B": "base",
    "/scratch/": "scratch/",
    "PATH_OR_HUB_ID": "base",
    "MODEL_DIRECTORY": "base",
    "CHECKPOINT_DIRECTORY": "runs/a",
    LLAVA: LLAVA.replace("PATH", "llava"),
    LORA: LORA.replace("PATH", "base"),
    "PATH --ranks 8": f"{CONFIGS}/llama-3-8b.json --ranks 8",
    "PATH --ranks 16": f"{CONFIGS}/qwen3-30b-a3b.json --ranks 16",
}
#: What the commands write.
WRITTEN = (
    "trained ",
    "converted ",
    "copied ",
    "trained-fp8",
    "report.html",
    "runs/a/step-00001200",
    "scratch/qwen3-8b",
)
#: Not run here: cloning and pip need a network, and the demo has tests of its own.
LEFT_OUT = ("git clone ", "pip install ", "shardwise demo")


def write_stored() -> None:
    """The model of the page about requests to a store."""
    import transformers

    config = transformers.GPT2Config(n_embd=192, n_layer=3, n_head=4, vocab_size=20_000, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained("stored")


def write_log() -> None:
    """A run whose loss jumps where it resumes."""
    losses = [2.0 - step / 100 for step in range(20)]
    lines = [f"{{'loss': {loss:.4f}}}" for loss in losses]
    again = [f"{{'loss': {loss + 1:.4f}}}" for loss in losses]
    Path("run.log").write_text("\n".join([*lines, "resuming from checkpoint-20", *again]) + "\n")


def write_checkpoints() -> None:
    """Of shardwise, and of Accelerate and DCP."""
    import torch.distributed.checkpoint as dcp
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("base")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.save(sw.TrainState(model, optimizer), "runs/a/step-00000100", step=100)
    sw.save(sw.TrainState(sw.load_pretrained("deepseek-v3-fp8")), "runs/a/step-00001000", step=1000)
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no process group
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="old/step-1200")
    plain_accelerator = Accelerator(cpu=True)
    plain_accelerator.prepare(model, optimizer)
    plain_accelerator.save_state("old/checkpoint_12")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_readers.Store]:
    """A store, in the reader's directory."""
    made = tmp_path_factory.mktemp("console")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        write_base()
        _readers.write_quantized()
        write_checkpoints()
        write_log()
        models.write_hub_directory("llava", Path("llava"), torch.float32)
        Path("runs/lora").mkdir()
        Path("runs/lora/adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}'
        )
        (base,) = (b for b in blocks(DOCS / "tutorial.md") if b.title == "base.py")
        exec(base.text.replace('"base"', '"small"'), {})
        Path("examples").mkdir()
        for name in ("config.yaml", "examples/accelerate_fsdp.yaml"):
            shutil.copy(ROOT / "examples/accelerate_fsdp.yaml", name)
        write_stored()
        with _readers.store() as store:
            store.fill()
            for file in Path("stored").iterdir():
                store.server.call("PUT", f"/models/small/{file.name}", file.read_bytes())
            yield store


@pytest.fixture(scope="module")
def folder(stored: _readers.Store) -> Path:
    """The reader's directory."""
    return Path.cwd()


def commands(block: Block) -> list[str]:
    """The block's lines that are run, with paths that exist. In lists of commands a remark stands three spaces after each."""
    lines = [re.split(" {3,}", line)[0] for line in block.text.splitlines()]
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    kept = [line for line in lines if line and not line.startswith(LEFT_OUT)]
    for before, after in INSTEAD.items():
        kept = [line.replace(before, after) for line in kept]
    return kept


def run(line: str) -> str:
    """What a command prints. Under torchrun, one rank."""
    words = shlex.split(re.sub(r"^torchrun \S+ -m ", "", line), comments=True)
    assert words[0] == "shardwise", f"how is this run? {line}"
    done = command.runner().invoke(main, words[1:], prog_name="shardwise", env={"COLUMNS": "400"})
    refuses = words[1] in ("doctor", "diff") or done.output.startswith("Does not fit")
    assert done.exit_code in ((0, 1) if refuses else (0,)), f"{line}\n{done.output}"
    assert "error: " not in done.output[:20], done.output
    return str(done.stdout)


@pytest.fixture(scope="module")
def printed(folder: Path) -> Callable[[Block], str]:
    """What the commands of a block print, which are run once."""

    @cache
    def of(block: Block) -> str:
        lines = commands(block)
        assert lines, "nothing of it is run"
        outputs = [run(line).replace(f"{folder}/", "") for line in lines]
        for line, output in zip(lines, outputs, strict=True):
            if "run.log" in line:
                assert "The loss jumped at a resume" in output
        for name in WRITTEN:
            if any(f" {name}" in f"{line} " for line in lines):
                path = Path(name.strip())
                assert path.exists(), name
                (shutil.rmtree if path.is_dir() else Path.unlink)(path)
        return "".join(outputs)

    return of


def marks(block: Block) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs("plans")] if "--ep " in block.text else []


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b), marks=marks(b)) for b in BLOCKS])
def test_commands_run(block: Block, printed: Callable[[Block], str]) -> None:
    output = printed(block)
    if block.language == "console":
        shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
        if shown:
            check(block, "\n".join(shown), output)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(row.block, id=str(row.block), marks=marks(COMMANDS.get(row.block, row.block)))
        for row in rows()
        if row.why == SHOWN and not is_code(row.block)
    ],
)
def test_the_page_shows_what_is_printed(block: Block, printed: Callable[[Block], str], folder: Path) -> None:
    own = output_of(block)
    output = run(own).replace(f"{folder}/", "") if own else printed(COMMANDS[block])
    check(block, block.text, output.replace(f"{CONFIGS}/", ""))


def test_objects_of_a_run(stored: _readers.Store) -> None:
    (block,) = (b for b in blocks(DOCS / "howto/runs-in-a-store.md") if "head.json" in b.text)
    with sw.Checkpointer("s3://runs/b") as checkpoints:
        checkpoints.save(sw.TrainState(torch.nn.Linear(2, 2)), 1000)
    listed = stored.server.call("GET", "/runs?list-type=2&prefix=b/").decode()
    keys = re.findall("<Key>b/([^<]*)</Key>", listed)
    places = sorted({re.sub(r"^([^/]*/).*", r"\1", key) for key in keys})
    shown = [line.split()[0] for line in block.text.splitlines()]
    check(block, "\n".join(shown), "\n".join(f"s3://runs/a/{place}" for place in places))
