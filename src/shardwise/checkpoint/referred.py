"""Frozen tensors of which a checkpoint holds only digests: the live ones must be those that were saved."""

from __future__ import annotations

from collections.abc import Mapping

from ..digests.live import differing_digests
from ..dtypes import code_of
from ..errors import IntegrityError, StateError
from ..format.manifest import Manifest, TensorEntry
from ..layout.live import LiveModel
from ..ranks.ranks import Ranks

__all__ = ["compare_referred", "referred_by"]


def referred_by(manifest: Manifest, model: str, live: LiveModel) -> dict[str, TensorEntry]:
    """The entries of a model's tensors that the checkpoint only refers to, by the names of the live model."""
    entries = manifest.models[model].items()
    return {live.first_names.get(name, name): t for name, t in entries if t.refers}


def compare_referred(expected: Mapping[str, TensorEntry], live: LiveModel, path: str, ranks: Ranks) -> None:
    """Prove that the live tensors are those of the base that the run was saved with. Collective; changes nothing.

    Raises :class:`StateError`, naming the tensors: the checkpoint is whole, but this is not its base.
    """
    tensors = {t.name: t.tensor for t in live.stored}
    with ranks.agree("look for the base"):
        unlike = [
            f"{name}: {entry.dtype} {list(entry.shape)} when saved, {_held(tensors.get(name))} now"
            for name, entry in expected.items()
            if _held(tensors.get(name)) != f"{entry.dtype} {list(entry.shape)}"
        ]
        _refuse(unlike, path)
    try:
        held = {name: tensors[name] for name in expected}
        digests = {name: entry.digest for name, entry in expected.items()}
        found = differing_digests(held, live.geometries, ranks, digests)
    except IntegrityError as error:  # the replicas differ: the checkpoint is not at fault
        raise StateError(f"{path}: refers to frozen tensors of a base, but here {error}") from error
    with ranks.agree("compare the base"):
        _refuse(
            [
                f"{name}: digest {digests[name]:016x} when saved, {digest:016x} now"
                for name, digest in found.items()
            ],
            path,
        )


def _held(tensor: object) -> str:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return "nothing"
    if tensor.is_meta:
        return "no content (it is on meta)"
    return f"{code_of(tensor.dtype)} {list(tensor.shape)}"


def _refuse(unlike: list[str], path: str) -> None:
    if unlike:
        raise StateError(
            f"{path}: holds only digests of its base, which is not the one of this run: {'; '.join(unlike[:5])}"
            f"{f'; and {len(unlike) - 5} more' if len(unlike) > 5 else ''}. Load the base that the saved run began with, "
            f"quantized the same way, before the restore"
        )
