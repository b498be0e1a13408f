"""Features that need newer packages than the lowest that shardwise installs with: one table.

A row makes the error that refuses the feature, the rows of docs/compatibility.md and a note of ``shardwise doctor``. Importing
this module imports neither torch nor transformers.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from .errors import LayoutError, ShardError, ShardwiseError, UnsupportedConversionError
from .objects import frozen


@frozen
class Gate:
    """A feature, and the releases of a package that have what it needs."""

    feature: str
    package: str
    needs: str
    """The releases, as in requirements."""
    why: str
    """What older releases lack, or do otherwise. A sentence."""
    instead: str
    """What to do with an older release. A sentence."""
    error: type[ShardwiseError] | None = None
    """Raised by shardwise; None: the other package refuses, or takes another way, and says so itself."""

    def is_open(self, installed: str) -> bool:
        """Whether the feature is there with this release of the package."""
        from packaging.specifiers import SpecifierSet  # transformers and huggingface_hub require it

        return SpecifierSet(self.needs).contains(installed, prereleases=True)

    def missing(self, installed: str) -> str:
        """The feature, and what it lacks with this release. A sentence."""
        return f"{self.feature}: this needs {self.package} {self.needs.lstrip('>=')} or newer, but {installed} is installed."

    @property
    def update(self) -> str:
        """The command that opens the gate."""
        return f"pip install '{self.package}{self.needs}'"


#: Name → row. Raising a minimum of pyproject.toml to what a row needs deletes the row.
GATES = {
    "packed": Gate(
        "packed weights whose blocks don't divide evenly under tensor parallelism",
        "torch",
        ">=2.10",
        "torch 2.9 splits such blocks differently from later releases, which would then read the wrong rows from a checkpoint.",
        "Choose sizes that are divisible by the number of ranks, or store gate and up (or q, k and v) as separate weights.",
        LayoutError,
    ),
    "integers": Gate(
        "integer parameters under FSDP2",
        "torch",
        ">=2.12",
        "fully_shard needs gradients for each parameter, and integers have none.",
        "Register them as buffers, leave them unsharded (ShardPolicy(exclude=...)), or dequantize the weights on load.",
        ShardError,
    ),
    "plans": Gate(
        "tensor and expert parallelism with the model's own plan",
        "transformers",
        ">=5.22",
        "Older releases can't apply the model's plan to DTensors.",
        "For tensor parallelism, call parallelize_module before you load.",
        ShardError,
    ),
    "model-directory": Gate(
        "calling from_pretrained on a checkpoint's model/",
        "transformers",
        ">=5.20",
        "from_pretrained in older releases looks for different file names.",
        "Use shardwise export, or the model that Trainer.save_model writes.",
    ),
    "kept-fp8": Gate(
        "FP8 weights kept as they are (load_pretrained with quantized='keep')",
        "transformers",
        ">=5.7",
        "Older releases lack the modules for these weights, or can't import them without Triton.",
        "Leave out that option; the weights are then dequantized.",
        UnsupportedConversionError,
    ),
    "trainer": Gate(
        "the Trainer and TRL integrations",
        "transformers",
        ">=5.3",
        "Older releases lack the methods that these integrations override.",
        "Use your own loop or Accelerate (shardwise.integrations.accelerate).",
        ShardError,
    ),
    "fsdp-version": Gate(
        "FSDP in the Trainer without fsdp_config['version']",
        "transformers",
        ">=5.10",
        "Without a version, older releases use FSDP1, and shardwise rejects its flat parameters.",
        'Set fsdp_config={"version": 2}.',
        ShardError,
    ),
    "added-adapters": Gate(
        "adapters that are added to a sharded model (model.add_adapter)",
        "peft",
        ">=0.21",
        "Older releases give adapters the sizes of this rank's shards.",
        "Load the model with adapter=.",
        ShardError,
    ),
}


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(name: str, *, where: str = "") -> None:
    """Raise the error of a row of :data:`GATES` where the installed release lacks what the feature needs. ``where``: begins its text."""
    gate = GATES[name]
    installed = _version(gate.package)
    if installed is None or gate.is_open(installed):
        return
    assert gate.error is not None
    raise gate.error(
        f"{where}{': ' if where else ''}{gate.missing(installed)} {gate.why} {gate.instead} Or update: {gate.update}"
    )
