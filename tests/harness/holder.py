"""A module whose own state is whatever it holds."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Holder"]


class Holder(nn.Linear):
    """Saves and takes whatever it holds."""

    def __init__(self, held: Any) -> None:
        super().__init__(2, 2)
        self.held = held

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}held"] = self.held

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.held = state_dict[f"{prefix}held"]
        super()._load_from_state_dict(state_dict, prefix, *rest)
