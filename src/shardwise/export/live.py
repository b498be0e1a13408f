"""Export of a live model: every rank writes the elements that it owns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ..checkpoint.snapshot import Live
from ..errors import CheckpointError
from ..format.slices import SliceTensor, assign_owners, owner_ranks
from ..internals.peft import has_adapters, peft_model
from ..internals.transformers import ignored_on_save
from ..layout.live import LiveModel
from ..layout.model import wanted_of
from ..layout.spec import TensorSpec
from ..models.assets import asset_files
from ..planning.build import transfers_of
from ..ranks.ranks import Ranks
from ..recipe.origin import recall
from ..recipe.tiles import Tile
from ..recipe.transformers import is_transformers_model, meta_instance
from ..transfer.copy import Destination, Filler, Staging, write_back
from .adapters import adapter_assets, chosen_adapters, lay_out_adapters
from .files import HubFiles, lay_out
from .from_devices import write_from_devices
from .job import bytes_in
from .live_windows import LiveWindows, Piece, by_hub, pieces_by
from .tensors import HubTensors, as_named, inverted, reverted

__all__ = ["LiveJob"]


class LiveJob:
    """Export of a live model, or of its adapters: every rank writes the boxes that it owns."""

    def __init__(
        self,
        live: LiveModel,
        adapters: str | Sequence[str] | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        """``only``: names of the tensors to write; the caller then lays out the files itself."""
        self.live = live
        self._peft = peft_model(live.root)
        self._adapters = chosen_adapters(self._peft, adapters) if self._peft is not None else []
        ignored = ignored_on_save(live.unwrapped)
        self._named = {
            t.name: t for t in live.stored if t.name not in ignored and (only is None or t.name in only)
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is exported, by module name."""
        return {n: t.tensor for n, t in self._named.items()}

    def _specs(self) -> dict[str, TensorSpec]:
        return {n: TensorSpec.of(t.tensor) for n, t in self._named.items()}

    def lay_out(self, dtype: str | None, max_shard_bytes: int) -> tuple[HubTensors, HubFiles]:
        """What each tensor of the model becomes, and where in which file it lies."""
        if self._peft is not None:
            return lay_out_adapters(self.live, self._adapters, dtype)
        contents = self.contents()
        return contents, lay_out(contents.hub, dtype, max_shard_bytes)

    def contents(self) -> HubTensors:
        """Hub tensors and tiles of the whole model. Raises :class:`CheckpointError` if it has adapters."""
        if has_adapters(self.live.root):
            raise CheckpointError(
                "adapters were injected into this model, which is not a PeftModel: it can't be exported in Hugging Face format. Wrap it with "
                "peft.get_peft_model(), and export_hf writes the adapters"
            )
        origin = recall(self.live.root)
        if origin is not None:
            return inverted(self._specs(), origin.recipes, origin.shapes)
        if is_transformers_model(self.live.unwrapped):
            return reverted(meta_instance(self.live.unwrapped), self._specs())
        return as_named(self._specs())

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> list[int]:
        destination = Destination(self.live.local_tensors())
        on_devices = []
        for t, tensor, tiles in self._owned(contents, ranks.rank):
            if tensor.device.type != "cpu":
                on_devices.append((Live(t, tensor), tiles))
                continue
            wanted = wanted_of(t.name, tensor, t.geometry)
            for tile in tiles:
                write_back(transfers_of(tile, wanted, output.tensors), filler, destination, staging)
        write_from_devices(on_devices, output, filler, staging, ranks.rank)
        return []

    def _owned(
        self, contents: HubTensors, rank: int
    ) -> Iterator[tuple[SliceTensor, torch.Tensor, Sequence[Tile]]]:
        """What a rank writes its boxes of, and the tiles that say where."""
        geometries = self.live.geometries
        owned = assign_owners([SliceTensor(n, *spec, geometries[n]) for n, spec in self._specs().items()])
        for t in owned:
            tiles = contents.tiles.get(t.name, ())
            if tiles and rank in owner_ranks(t.geometry, t.owner):
                yield t, self._named[t.name].tensor, tiles

    def share_bytes(self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks) -> int:
        """What this rank writes."""
        owned = self._owned(contents, ranks.rank)
        return sum(bytes_in(tiles, wanted_of(t.name, x, t.geometry), output) for t, x, tiles in owned)

    def together(self, output: HubFiles) -> tuple[()]:
        """Nothing: each rank writes alone."""
        return ()

    def windows(self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks) -> LiveWindows:
        """The same, for files that are written from front to back."""
        local = Destination(self.live.local_tensors())
        brought = by_hub(self.pieces(contents, ranks.rank))
        return LiveWindows(lambda wanted, _: ((wanted, local),), brought, output, staging)

    def pieces(self, contents: HubTensors, rank: int) -> list[Piece]:
        """What a rank brings: each element comes from one rank. Rank-local."""
        return pieces_by(rank, self.live, self.tensors, contents.tiles)

    def check(self, sums: Sequence[int]) -> None:
        """Does nothing: a live model has no recorded digests."""

    def assets(self) -> Mapping[str, bytes]:
        if self._peft is not None:
            return adapter_assets(self._peft, self._adapters)
        return asset_files(self.live.root)

    def close(self) -> None:
        """Does nothing: no file is open."""
