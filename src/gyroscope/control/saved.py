"""The state of a controller as it was saved: whether it belongs to the layers there are, and their radii in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.refusals import unlike
from gyroscope.control.roster import Roster
from gyroscope.control.torch_contract import check_state, check_whole
from gyroscope.errors import ControlError


def check_saved(state_dict: dict[str, Any], inner: Optimizer, roster: Roster) -> None:
    """Refuse a state that is damaged, or that is of other layers than those of the roster."""
    check_whole(state_dict)
    saved, shapes = state_dict.get("layers"), state_dict.get("shapes")
    listed = [saved, shapes, *(shapes if isinstance(shapes, list | tuple) else ())]
    if not all(given is None or isinstance(given, list | tuple) for given in listed):
        raise ControlError("The state is damaged: 'layers' and 'shapes' must be lists. Load another checkpoint.")
    if saved is not None and list(saved) != (layers := [e.name for e in roster.in_order()]):
        raise ControlError(
            f"The state is of a model with other layers than this one: {unlike(list(saved), layers)}. Build the model "
            "and the optimizer as they were when the state was saved."
        )
    if shapes is not None and (theirs := [list(shape) for shape in shapes]) != (
        mine := roster.shapes(inner.param_groups)
    ):
        raise ControlError(
            f"The state is of a model whose layers have other shapes than this one's: {unlike(theirs, mine)}. Build "
            "the model as it was when the state was saved."
        )
    check_state(inner, state_dict)
    for g, j, e in roster.places():
        radius = _radius_in(state_dict, g, j)
        if isinstance(radius, Tensor) and radius.numel() != e.segments:
            raise ControlError(
                f"The state has {radius.numel()} radii for layer {e.name}, which has {e.segments} segments; use the "
                "granularity it was saved with."
            )
        if radius is not None and not isinstance(radius, Tensor | float | int):
            raise ControlError(f"The state's radius of layer {e.name} is a {type(radius).__name__}, and no number.")
    radii = radii_in(state_dict, roster)
    if radii and not bool(torch.isfinite(torch.cat([r.reshape(-1).cpu() for r in radii.values()])).all()):
        raise ControlError("The state holds radii that are not finite; it is damaged. Load another checkpoint.")


def radii_in(state_dict: dict[str, Any], roster: Roster) -> dict[int, Tensor]:
    """The radii of a state by layer, as they were saved; copies, for the state may hold views of our own."""
    found = {}
    for g, j, e in roster.places():
        radius = _radius_in(state_dict, g, j)
        if radius is not None:
            found[e.index] = torch.as_tensor(radius, dtype=torch.float64).detach().clone()
    return found


def _radius_in(state_dict: dict[str, Any], g: int, j: int) -> Any:
    """The radius that a state holds for parameter j of group g, or None."""
    key = state_dict["param_groups"][g]["params"][j]
    return state_dict["state"].get(key, {}).get("radius")
