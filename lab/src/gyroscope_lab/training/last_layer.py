"""Measurements of the last linear layer at every step. Very deep residual networks stall there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gyroscope.conditioning import largest_by_squaring
from gyroscope.diagnosis import LAST_LAYER_FILE, read_last_layer
from gyroscope.layers import layers
from gyroscope_lab.errors import LabError

#: The file of these measurements; the monitor reads it to find stalls.
FILE = LAST_LAYER_FILE
_COLUMNS = ("loss", "accuracy", "lambda_x", "lambda_g", "lambda_m", "weight_norm", "gradient_norm")


@dataclass(frozen=True)
class Followed:
    """The last layer h = Wx over time: one number per step and quantity, measured before the step is taken.

    Attributes:
        loss: the loss of the batch.
        accuracy: the accuracy of the batch.
        lambda_x: λmax of Σx = E[xxᵀ].
        lambda_g: λmax of Σ∇h = E[ggᵀ], with g = ∂ℓ/∂h of each example.
        lambda_m: λmax of the second moment of the weight gradient, E[vec(gxᵀ)vec(gxᵀ)ᵀ].
        weight_norm: ‖W‖.
        gradient_norm: ‖∂L/∂W‖.
    """

    loss: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]
    lambda_x: npt.NDArray[np.float64]
    lambda_g: npt.NDArray[np.float64]
    lambda_m: npt.NDArray[np.float64]
    weight_norm: npt.NDArray[np.float64]
    gradient_norm: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.loss)


def followed(folder: Path | str) -> Followed:
    """Read the measurements that a trial with `follows=True` kept in its folder."""
    path = Path(folder) / FILE
    try:
        return Followed(**dict(zip(_COLUMNS, read_last_layer(path, _COLUMNS), strict=True)))
    except FileNotFoundError as error:
        raise LabError(f"{path} does not exist. Train with follows=True to follow the last layer.") from error
    except Exception as error:
        # A damaged file can raise any of many errors.
        raise LabError(f"{path} cannot be read ({error}). Delete the trial's folder to train it again.") from error


class LastLayer:
    """A table on the device, [steps, quantities], filled during training; nothing here waits for the device.

    The gradient of the cross-entropy at the outputs h is softmax(h) − y, so one hook, for x, is enough. The
    second moment of B weight gradients gxᵀ has the eigenvalues of their Gram matrix, (xᵢ·xⱼ)(gᵢ·gⱼ)/B, which is used
    where it is the smaller matrix.

    Args:
        model: the model whose last layer is followed; that layer must be linear.
        steps: the number of steps of the training.
        device: the device of the model.
    """

    def __init__(self, model: nn.Module, steps: int, device: torch.device) -> None:
        last = layers(model)[-1].module
        if not isinstance(last, nn.Linear):
            raise LabError(
                f"The last layer must be linear to be followed, got a {type(last).__name__}. Leave follows=True out."
            )
        self._weight = last.weight
        self._x: Tensor | None = None
        self._table = torch.zeros(steps, len(_COLUMNS), dtype=torch.float64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        last.register_forward_pre_hook(self._seen)

    def _seen(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.training:
            self._x = args[0].detach()

    @torch.no_grad()
    def note(self, outputs: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Record a step, after its backward pass and before the weights change."""
        assert self._x is not None
        x, h = self._x.double(), outputs.detach().double()
        g = h.softmax(dim=1)
        g.scatter_add_(1, labels[:, None], torch.full_like(g[:, :1], -1.0))
        gradient = torch.zeros_like(self._weight) if self._weight.grad is None else self._weight.grad
        row = [
            loss.detach().double(),
            (h.argmax(dim=1) == labels).double().mean(),
            largest_by_squaring(_moment(x)[None])[0],
            largest_by_squaring(_moment(g)[None])[0],
            largest_by_squaring(_product_moment(x, g)[None])[0],
            torch.linalg.vector_norm(self._weight.detach(), dtype=torch.float64),
            torch.linalg.vector_norm(gradient, dtype=torch.float64),
        ]
        self._table.index_copy_(0, self._at, torch.stack(row)[None])
        self._at += 1
        self._x = None

    def write(self, folder: Path) -> None:
        """Write the measurements to a file (waits for the device)."""
        table = self._so_far().numpy()
        with (folder / FILE).open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{name: table[:, i] for i, name in enumerate(_COLUMNS)})

    def state(self) -> Tensor:
        """Return the state for a checkpoint."""
        return self._so_far()

    def load(self, state: Tensor) -> None:
        """Resume from a checkpoint."""
        self._at.fill_(len(state))
        self._table[: len(state)] = state.to(self._table.device)

    def _so_far(self) -> Tensor:
        return self._table[: int(self._at)].clone().cpu()


def _moment(rows: Tensor) -> Tensor:
    """E[rrᵀ], or the Gram matrix with the same nonzero eigenvalues if it is smaller."""
    count, size = rows.shape
    return (rows.T @ rows if size <= count else rows @ rows.T) / count


def _product_moment(x: Tensor, g: Tensor) -> Tensor:
    count = len(x)
    if count <= x.shape[1] * g.shape[1]:
        return (x @ x.T) * (g @ g.T) / count
    return _moment((g[:, :, None] * x[:, None, :]).flatten(1))
