"""Values at the edge of what is taken: long bytes in errors, a step that is a bool, names that are too long."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import FormatError, StateError, UnsupportedConversionError
from tests.harness.hostile import edit_manifest, run
from tests.harness.models import build_reference


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_an_error_does_not_print_all_bytes(kind: type) -> None:
    from shardwise.limits import brief

    value = kind(16 * 1024**2)
    tracemalloc.start()
    said = brief(value)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(said) < 400
    assert "16777216 bytes" in said
    assert most < 1024**2
    assert brief(kind(b"few")) == repr(kind(b"few"))


def test_a_step_is_no_bool(tmp_path: Path) -> None:
    """It was written whole, and refused when it was published."""
    with pytest.raises(StateError, match="step must be an integer"):
        sw.save(run(), tmp_path / "step", step=True)
    assert not list(tmp_path.iterdir())


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(2)))


def test_a_name_that_no_reader_takes_is_not_saved(tmp_path: Path) -> None:
    """1,024 characters at most (``shardwise.limits``)."""
    with pytest.raises(StateError, match="2000 characters, the limit is 1024"):
        sw.save(sw.TrainState(model=Named("w" * 2000)), tmp_path / "step")
    assert not list(tmp_path.iterdir())
    longest = Named("w" * 1024)
    sw.save(sw.TrainState(model=longest), tmp_path / "step")
    sw.load(Named("w" * 1024), tmp_path / "step" / "model")


def test_a_manifest_has_no_longer_names_than_slice_files(tmp_path: Path) -> None:
    sw.save(run(), tmp_path / "step")

    def lengthen(manifest: dict) -> None:  # type: ignore[type-arg]
        tensors = manifest["models"]["model"]
        tensors["w" * 2000] = tensors.pop("layer.bias")

    edit_manifest(tmp_path / "step", lengthen)
    with pytest.raises(FormatError, match="a name has 2000 characters, the limit is 1024"):
        sw.verify(tmp_path / "step")


def test_an_empty_quantization_is_not_dropped(tmp_path: Path) -> None:
    build_reference("qwen3-tied").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedConversionError, match="quantization_config= asks for a quantized model"):
        sw.load_pretrained(tmp_path, quantization_config={})
    sw.load_pretrained(tmp_path, quantization_config=None, load_in_8bit=False)


def test_a_conversion_names_the_files_that_it_leaves(tmp_path: Path) -> None:
    state = run()
    sw.save(sw.TrainState(model=state.model, files={"notes/run.txt": b"x"}), tmp_path / "step")
    skipped = sw.convert(tmp_path / "step", tmp_path / "out").skipped
    assert [line for line in skipped if "notes" in line] == ["notes/run.txt: a file next to the state"]
    assert not any("model/" in line or "state." in line for line in skipped)
