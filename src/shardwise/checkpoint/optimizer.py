"""The stored state of an optimizer: what a load fills, and whether this run's optimizer can take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ..catalog.checkpoint import catalog_of_optimizer, packed_name
from ..catalog.records import Catalog
from ..dtypes import torch_dtype
from ..errors import FormatError, StateError
from ..format.manifest import document_of
from ..format.slices import StateKey, by_name
from ..limits import brief
from ..loading.load import Filling, FillOptions
from ..objects import frozen
from ..planning.match import Grow, Rules, renamed
from ..planning.plan import IOOptions
from ..state.low_bit import PARTS, PLAIN, Form, StoredForm, part_name, state_by_rank
from ..state.optimizer import TrainedBy, check_groups, check_stored
from ..tensors.live import HostMemory, LiveModel, absent, elsewhere_in, world_size
from ..tensors.placements import fitting_ranks, mesh_text, replicated
from .joined import trained_model
from .stored import StoredCheckpoint

# ----------------------------------------------------------------------------------------------------
# The stored states of an optimizer, of our checkpoints and of other programs', as a load takes them.


def trained_by(name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> TrainedBy:
    """An optimizer with the model that :func:`trained_model` finds for it. Raises :class:`StateError` for parameters that it lacks."""
    model = trained_model(name, optimizer, lives)
    return TrainedBy.of(name, optimizer, model, lives[model])


@frozen(kw_only=True)
class StoredStates:
    """The stored state of an optimizer. Parameters have their names in this run, except in ``catalog``."""

    catalog: Catalog
    """The stored tensors, by stored name."""
    renames: Mapping[str, str]
    """Stored name → the same tensor's name in this run, where it is another."""
    groups: list[dict[str, Any]]
    """``names`` and ``options`` of each parameter group."""
    spread: Mapping[str, Mapping[str, str]]
    """Parameter → state → dtype of each tensor that is spread over ranks like its parameter."""
    whole: Mapping[str, torch.Tensor]
    """Room for the other tensors, by name: every rank reads them whole."""
    scalars: Mapping[str, Mapping[str, torch.Tensor]]
    """Parameter → state → element of ``whole``, as a 0-d view: filled once ``whole`` is."""
    values: Mapping[str, Mapping[str, Any]]
    """Parameter → state → value that is in no catalog: not a tensor, or this rank's own tensor."""
    low_bit: Mapping[str, Mapping[str, StoredForm]] = field(default_factory=dict)
    """Parameter → state → form of each state of few bits, whose parts are spread over ranks like its parameter."""

    def filling(
        self,
        live: LiveModel,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        memory: HostMemory,
        io: IOOptions,
        *,
        grow: Grow,
    ) -> Filling:
        """What a load needs to fill ``tensors`` and :attr:`whole`. ``grow``: as in :class:`.Rules`.

        ``tensors``: parameter → state → tensor allocated from ``memory``, spread like its parameter in ``live``.
        """
        everywhere = replicated(world_size())
        elsewhere = elsewhere_in(live.tensors)
        shapes = {t.name: live.spec(t).shape for t in live.parameters if t.name in elsewhere}
        others = {
            n: {s: absent(shapes[n], live.geometries[n], torch_dtype(code)) for s, code in of.items()}
            for n, of in self.spread.items()
            if n in elsewhere
        }
        tensors = {
            n: others[n] if n in others else tensors[n] for n in self.spread if n in others or n in tensors
        } | {n: states for n, states in tensors.items() if n not in self.spread}
        of_parameters = {n: dict.fromkeys(states, live.geometries[n]) for n, states in tensors.items()}
        geometries = by_name(of_parameters) | dict.fromkeys(self.whole, everywhere)
        rename = renamed(lambda names: {n: self.renames.get(n, n) for n in names})
        states = live.of_states(by_name(tensors) | dict(self.whole), geometries)
        return Filling(states, self.catalog, Rules(rename, grow=grow), FillOptions(io=io), memory)


# ----------------------------------------------------------------------------------------------------
# The state of an optimizer in our checkpoints: whether this run's optimizer can take it, and what a load fills.


class OptimizerInCheckpoint:
    """The state of an optimizer in one of our checkpoints, for the optimizer of this run. Reads no tensors.

    ``stored`` is under the names of this run's models.
    """

    def __init__(self, part: TrainedBy, stored: StoredCheckpoint) -> None:
        self._part, self._stored, self._live = part, stored, part.live.geometries
        self._entries = stored.manifest.models[part.model_name]
        settings, self._opaque_name, self._low_bit_name = (
            document_of("optimizer", part.name, *what) for what in ((), ("opaque",), ("low_bit",))
        )
        self._settings = stored.documents[settings]
        self._opaque = stored.documents.get(self._opaque_name, {})
        """Tensors that only this rank can interpret."""
        forms = stored.documents.get(self._low_bit_name, {"books": {}, "states": {}, "by_rank": {}})
        self._books: Mapping[str, torch.Tensor] = forms["books"]
        self._forms, self._forms_by_rank = _forms_in(forms["states"]), _forms_in(forms["by_rank"])
        """Forms of states of few bits by parameter and state: stored as tensors of the whole parameter, and by rank."""

    def check(self) -> None:
        """Raise :class:`StateError` or :class:`FormatError` for state that this run's optimizer can't take. Changes nothing."""
        part = self._part
        check_groups(part, self._settings["groups"])
        check_stored(part, (n for n, e in self._entries.items() if e.states.get(part.name)))
        check_stored(part, self._settings["values"])
        self.check_cuts()

    def check_cuts(self) -> None:
        """Raise :class:`StateError` for states that the cuts of this run do not fit. Changes nothing.

        :class:`FormatError` for a stored tensor that is not shaped like its parameter and that no document explains.
        """
        for name, t in self._entries.items():
            known = {part_name(s, p) for s in self._forms.get(name, {}) for p in PARTS}
            for state, e in t.states.get(self._part.name, {}).items():
                if e.shape is not None and state not in known:
                    raise FormatError(
                        f"the state {brief(state)} of {brief(name)} has a different shape than its parameter, and {self._low_bit_name} "
                        f"does not say what it is",
                        path=self._stored.path,
                    )
        shapes = {t.name: self._part.live.spec(t).shape for t in self._part.live.parameters}
        kept = [
            n
            for n in (*self._forms, *self._forms_by_rank, *self._opaque)
            if n in shapes and n in self._entries
        ]
        if grown := [n for n in kept if self._entries[n].shape != shapes[n]]:
            raise StateError(
                f"the optimizer state of {', '.join(grown[:5])} is stored in few bits, or isn't shaped like its parameter, which has another "
                f"shape in this run. Only states of the parameter's own shape can grow. Restore without this optimizer, and start with a new one"
            )
        bad = [
            (name, state, one)
            for name, states in self._whole_forms().items()
            for state, one in states.items()
            if name in self._live and not one.grid.falls_on(self._live[name])
        ]
        if bad:
            self._refuse_cuts(bad)
        moved = [
            (name, state, form)
            for name, states in self._forms_by_rank.items()
            for state, form in states.items()
            if name in self._live and self._is_moved(name)
        ]
        if moved:
            name, state, form = moved[0]
            raise StateError(
                f"{self._stored.path}: the optimizer state {name}.{state} ({form.text}) and {len(moved) - 1} others were stored by rank, "
                f"because cuts of the saved run ({self._saved_mesh}) lay inside their blocks, or some of its "
                f"ranks kept short shards in full. They fit that mesh only; this run has {mesh_text(self._live.values())}. Resume on the "
                f"saved mesh, or with a new optimizer"
            )
        if lost := [n for n in self._opaque if n not in self._entries or n not in self._live]:
            raise FormatError(
                f"the checkpoint holds optimizer state of {brief(lost[0])}, which is not a tensor of its model"
            )
        if others := [n for n in self._opaque if self._is_moved(n)]:
            raise StateError(
                f"optimizer state of {', '.join(others[:5])} has a different shape than its parameter, and was stored per rank; "
                f"the parameter is now sharded differently, so the state can't be carried over"
            )

    def states(self) -> StoredStates:
        """The stored state, with room for its packs. Moves the documents' tensors to their devices. Raises as :meth:`check_cuts`."""
        part, manifest, as_saved = self._part, self._stored.manifest, self._stored.as_saved
        self._move_documents()
        self.check_cuts()
        states = {n: t.states[part.name] for n, t in self._entries.items() if t.states.get(part.name)}
        packs = manifest.packed[part.name]
        whole = {packed_name(k): torch.empty(p.count, dtype=torch_dtype(p.dtype)) for k, p in packs.items()}
        values, own = self._settings["values"], self._by_rank()
        first, low_bit = part.live.first_names, self._whole_forms()
        parts = {n: {part_name(s, p) for s in of for p in PARTS} for n, of in low_bit.items()}
        return StoredStates(
            catalog=catalog_of_optimizer(self._stored.path, as_saved, part.name, part.model_name),
            renames={
                StateKey(n, s).name: StateKey(first[n], s).name
                for n, t in as_saved.models[part.model_name].items()
                if first.get(n, n) != n
                for s in t.states.get(part.name, {})
            },
            groups=self._settings["groups"],
            spread={
                n: {s: e.dtype for s, e in of.items() if e.packed is None and s not in parts.get(n, ())}
                for n, of in states.items()
            },
            low_bit=low_bit,
            whole=whole,
            scalars={
                n: {s: whole[packed_name(e.packed)][e.index] for s, e in of.items() if e.packed is not None}
                for n, of in states.items()
            },
            values={n: {**values.get(n, {}), **own.get(n, {})} for n in {**values, **own}},
        )

    @property
    def _saved_mesh(self) -> str:
        return mesh_text(self._stored.manifest.geometries)

    def _is_moved(self, name: str) -> bool:
        """Whether a parameter is spread over ranks otherwise than it was."""
        saved = self._stored.manifest.geometries[self._entries[name].geometry]
        return not saved.is_same_place(self._live[name])

    def _whole_forms(self) -> dict[str, dict[str, StoredForm]]:
        """The states of few bits whose parts are tensors of the whole parameter, by parameter and state."""
        found: dict[str, dict[str, StoredForm]] = {}
        for name, states in self._forms.items():
            for state, form in states.items():
                grid = form.grid(self._entries[name].shape)
                assert grid is not None, "the form of the document was checked"
                book = self._books[form.book] if form.book else None
                found.setdefault(name, {})[state] = StoredForm(form, grid, book)
        return found

    def _by_rank(self) -> dict[str, dict[str, Any]]:
        """What this rank stored by itself, ready to be placed, by parameter and state; states of few bits are put together.

        Raises :class:`FormatError` if the parts of one are not there, or do not make it up.
        """
        found = {n: dict(states) for n, states in self._opaque.items()}
        for name, states in self._forms_by_rank.items():
            of_one = found.get(name, {})
            for state, form in states.items():
                held = {p: of_one.pop(part_name(state, p), None) for p in (*PARTS, PLAIN)}
                try:
                    parameter, book = self._part.parameters[name], self._books.get(form.book)
                    of_one[state] = state_by_rank(held, parameter, form, book)
                except ValueError as error:
                    raise FormatError(
                        f"{self._opaque_name}: {brief(name)}.{brief(state)}: {error}", path=self._stored.path
                    ) from error
        return found

    def _refuse_cuts(self, bad: list[tuple[str, str, StoredForm]]) -> NoReturn:
        name, state, first = bad[0]
        pairs = set()
        for n, of in self._whole_forms().items():
            cuts = self._live[n].cuts if n in self._live else ()
            pairs |= {(one.grid, cut.dim) for one in of.values() for cut in cuts if cut.kind != "replicate"}
        fitting = ", ".join(map(str, fitting_ranks(pairs)))
        raise StateError(
            f"{self._stored.path}: the optimizer state {name}.{state} is {first.form.text} elements, and this run's cuts of {name} "
            f"(shape {list(first.grid.shape)}, {mesh_text([self._live[name]])}) fall inside blocks: expected cuts of dim "
            f"{first.grid.dim} at multiples of {first.grid.rows}, and none of later dims. So it is with {len(bad) - 1} other states. "
            f"Resume on the saved mesh ({self._saved_mesh})"
            + (f", or cut these dims over one of these numbers of ranks: {fitting}" if fitting else "")
        )

    def _move_documents(self) -> None:
        """Move the documents' tensors: hyper-parameters to the devices of the live ones, states to their parameter's."""
        places, parameters = self._stored.places, self._part.parameters
        groups = self._part.optimizer.param_groups
        places.put(self._settings["groups"], lambda: [{"options": group} for group in groups])
        for states in (self._settings["values"], self._opaque):
            for name, of_one in states.items():
                places.put(of_one, lambda o=of_one, n=name: dict.fromkeys(o, parameters.get(n)))  # type: ignore[misc]


def _forms_in(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Form]]:
    return {name: {state: Form(**form) for state, form in of_one.items()} for name, of_one in states.items()}
