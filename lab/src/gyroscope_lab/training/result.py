"""The numbers of a training, and their file.

`result.json` comes in two forms, and `Result.from_json` reads both. The full form has every digit. The small form is
for results in a repository: a training of 100 epochs and 25 layers takes about 7 kB instead of 58 kB.

| in the small form | resolution |
|---|---|
| accuracies, final rotation | 1e-6 |
| `loss`, `test_losses`, `norms` | 5 significant digits |
| `seconds` | 1e-3 |
| `rotation` before the last epoch | 1e-4, packed |

Packed rotation is `{"shape": [epochs, layers], "scale": 10000, "packed": "...", "last": [...]}`. `last` is the final
row, as plain numbers. The rows before it are integers, value × scale, and nan is the smallest 64-bit integer. Their
differences from epoch to epoch are zigzag-coded (0, -1, 1, -2 become 0, 1, 2, 3), written as little-endian 64-bit
integers with all lowest bytes first, then all second bytes, and so on, compressed by zlib, and written in base85.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from gyroscope_lab.errors import LabError

# The packed rows of `rotation` are multiples of 1 / _SCALE; fewer rows than _FEW stay a plain list.
_SCALE = 10_000
_FEW = 4
_NAN = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Result:
    """The numbers of one trial. Lists have one entry per epoch; `rotation` has one more, for the start.

    Attributes:
        train_accuracy: the accuracy of the tested weights on the training examples, in evaluation mode.
        test_accuracy: the accuracy of the tested weights on the test examples.
        loss: the mean training loss of each epoch, measured during training.
        layers: the names of the layers, in forward order.
        rotation: rotation[t][l] is layer l's cosine distance to its initialization after t epochs.
        accuracy: the training accuracy of each epoch, measured during training.
        validation: the validation accuracy after each epoch; empty if no examples were held out.
        test_losses: the loss on the test examples after each epoch; empty unless the task asks for it.
        test_accuracies: the accuracy on the test examples after each epoch; empty unless the task asks for it.
        norms: ‖w‖ of each layer, at the start and at the end.
        tested: the epoch whose weights were tested, counted from 1.
        ended: the reason why training stopped before its last epoch; None if it did not.
        seconds: the wall time of the training, on the device that ran it.

    >>> Result(0.5, 0.4, loss=[2.3], layers=["fc"], rotation=[[0.0], [0.1]]).final_rotation
    [0.1]
    """

    train_accuracy: float
    test_accuracy: float
    loss: list[float]
    layers: list[str]
    rotation: list[list[float]]
    accuracy: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    tested: int = 0
    ended: str | None = None
    seconds: float = field(default=0.0, compare=False)
    test_losses: list[float] = field(default_factory=list)
    test_accuracies: list[float] = field(default_factory=list)

    @property
    def final_rotation(self) -> list[float]:
        """Each layer's rotation at the end."""
        return self.rotation[-1]

    @property
    def learned(self) -> float:
        """Training accuracy of the last epoch; the tested weights may be those of an earlier one.

        >>> Result(0.81, 0.59, loss=[1.0, 0.1], layers=[], rotation=[], accuracy=[0.81, 0.997], tested=1).learned
        0.997
        """
        return self.accuracy[-1] if self.accuracy and 0 < self.tested < len(self.loss) else self.train_accuracy

    @property
    def diverged(self) -> bool:
        """True if the loss was not finite."""
        return self.ended is not None and self.ended.startswith("diverged")

    @property
    def best_validation(self) -> float:
        """The best validation accuracy, used to choose rates; the test accuracy if no examples were held out."""
        known = [value for value in self.validation if isfinite(value)]
        return max(known) if known else self.test_accuracy

    @property
    def best_test_loss(self) -> float:
        """The lowest of `test_losses`; infinite if none is finite.

        >>> Result(0.5, 0.4, loss=[], layers=[], rotation=[], test_losses=[2.1, 1.9, float("nan")]).best_test_loss
        1.9
        """
        return min((value for value in self.test_losses if isfinite(value)), default=inf)

    def as_json(self, *, small: bool = False) -> dict[str, Any]:
        """Return the result as strict JSON: None replaces numbers that are not finite.

        Args:
            small: round the numbers and pack the rotation, as described in the module's docstring.

        >>> Result(0.5, 0.4, loss=[2.302585093], layers=["fc"], rotation=[[0.0], [0.1]]).as_json(small=True)["loss"]
        [2.3026]
        """
        values = asdict(self)
        if small:
            for name in ("train_accuracy", "test_accuracy", "accuracy", "validation", "test_accuracies", "rotation"):
                values[name] = _rounded(values[name], lambda value: round(value, 6))
            for name in ("loss", "norms", "test_losses"):
                values[name] = _rounded(values[name], lambda value: float(f"{value:.5g}"))
            values["seconds"] = round(self.seconds, 3)
        cleaned: dict[str, Any] = {key: _finite(value) for key, value in values.items()}
        if small and len(self.rotation) >= _FEW:
            cleaned["rotation"] = _packed(self.rotation) | {"last": cleaned["rotation"][-1]}
        return cleaned

    @classmethod
    def from_json(cls, values: dict[str, Any], where: Path | str = "the result") -> Result:
        """Read a result of `as_json`, in either form.

        Raises:
            LabError: the values are not those of a result, or the packed values are damaged.
        """
        try:
            known = {key: _number(value) for key, value in values.items() if key in cls.__dataclass_fields__}
            known["ended"] = values.get("ended")
            if isinstance(known["rotation"], dict):
                known["rotation"] = _unpacked(known["rotation"], epochs=len(known["loss"]))
            found = cls(**known)
            rows = [found.loss, found.accuracy, found.validation, found.test_losses, found.test_accuracies]
            rows += [*found.rotation, *found.norms]
            # A sum raises TypeError for rows that are not numbers.
            _ = [sum(row, start=found.train_accuracy + found.test_accuracy) for row in rows]
            return found
        except (TypeError, ValueError, AttributeError, KeyError, zlib.error) as error:
            raise LabError(f"{where} does not hold the result of a trial ({error})") from error

    def write(self, path: Path, trial: dict[str, Any], *, small: bool = False) -> None:
        """Write the result and the trial's description to a file, which is replaced atomically.

        Args:
            path: the file, usually `result.json` in the trial's folder.
            trial: the description of the trial.
            small: write the small form (see the module's docstring). Writing a small result again changes nothing.
        """
        if small:
            dense = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
            lines = ",\n".join(f'"{key}": {dense(value)}' for key, value in self.as_json(small=True).items())
            text = f'{{"trial": {dense(trial)},\n"result": {{\n{lines}}}}}\n'
        else:
            text = json.dumps({"trial": trial, "result": self.as_json()}, allow_nan=False) + "\n"
        new = path.with_suffix(".new")
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def _packed(rows: list[list[float]]) -> dict[str, Any]:
    """Return all rows except the last in packed form (see the module's docstring)."""
    values = np.array(rows[:-1], dtype=np.float64)
    known = np.isfinite(values)
    levels = np.where(known, np.rint(np.where(known, values, 0.0) * _SCALE).astype(np.int64), _NAN)
    # Integers wrap around, here and in `_unpacked`, so differences from nan are exact too.
    steps = np.diff(levels, axis=0, prepend=np.zeros_like(levels[:1]))
    coded = ((steps << 1) ^ (steps >> 63)).astype("<i8")
    planes = coded.reshape(-1, 1).view(np.uint8).T.tobytes()
    text = base64.b85encode(zlib.compress(planes, 9)).decode("ascii")
    return {"shape": list(values.shape), "scale": _SCALE, "packed": text}


def _unpacked(values: dict[str, Any], *, epochs: int) -> list[list[float]]:
    """Return the packed rows, one per epoch, and the last row.

    Raises:
        Exception: the values are damaged; a KeyError, TypeError, ValueError or zlib.error.
    """
    last, shape, scale = _number(values["last"]), values["shape"], values["scale"]
    if shape != [epochs, len(last)] or type(scale) is not int or scale < 1:
        said = f"its rotation has shape {shape}, scale {scale} and a last row of {len(last)}"
        raise ValueError(f"{said}, for {epochs} epochs")
    size = 8 * epochs * len(last)
    # Limited to one byte more than expected: a few bytes may unpack to gigabytes.
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(base64.b85decode(values["packed"]), size + 1)
    if len(unpacked) > size:
        raise ValueError(f"its rotation has more than {size} bytes")
    if len(unpacked) < size or not unpacker.eof:
        raise ValueError("its rotation is cut off")
    planes = np.frombuffer(unpacked, dtype=np.uint8)
    coded = np.ascontiguousarray(planes.reshape(8, -1).T).view("<u8").astype(np.uint64).reshape(shape)
    steps = (coded >> np.uint64(1)).astype(np.int64) ^ -(coded & np.uint64(1)).astype(np.int64)
    levels = np.cumsum(steps, axis=0, dtype=np.int64)
    return [*np.where(levels == _NAN, np.nan, levels / scale).tolist(), last]


def _rounded(value: Any, by: Callable[[float], float]) -> Any:
    if isinstance(value, list):
        return [_rounded(one, by) for one in value]
    return by(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _number(value: Any) -> Any:
    """Return the value with nan in place of JSON's None."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float("nan") if value is None else value
