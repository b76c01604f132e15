"""The share of the variance of second moments that lies between layers rather than within them (section 2.2).

Adam divides the step of every element by √v. If v differs mostly from layer to layer, a diagonal preconditioner is
mainly a learning rate per layer. The variance of log v measures this: it is the sum of the variance of the layers'
means and the mean of the variances within layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.accepted import choice
from gyroscope.errors import DynamicsError

Counting = Literal["elements", "layers"]

#: [layers, 3]: the 10th, 50th and 90th percentile of v.
Percentiles = npt.NDArray[np.float64]

# Distance of the 10th and 90th percentiles of a normal distribution, in standard deviations.
_APART = 2.5631
_NAMES = ("moment_p10", "moment_p50", "moment_p90")
KEYS = ("exp_avg_sq", "square_avg", "sum")  # Adam and variants; RMSprop and Adadelta; Adagrad


@dataclass(frozen=True)
class Shares:
    """The variance of log v, taken apart.

    Attributes:
        between: variance of the layers' means of log v.
        within: mean of the variances within layers.
        layers: number of layers with moments above zero.
        elements: number of moments above zero.
        zeros: number of moments that are zero and have no logarithm: elements that never had a gradient.
    """

    between: float
    within: float
    layers: int
    elements: int
    zeros: int

    @property
    def total(self) -> float:
        """The variance of log v; if elements count equally, that of all elements."""
        return self.between + self.within

    @property
    def share(self) -> float:
        """The share between layers, 0 to 1; NaN if all moments are equal."""
        return self.between / self.total if self.total > 0 else float("nan")


def variance_shares(moments: Iterable[Tensor], *, counting: Counting = "elements") -> Shares:
    """Split the variance of log v into the parts between and within layers, by the law of total variance.

        Var(log v) = Σ_l p_l (m_l − m)² + Σ_l p_l s_l²,        m = Σ_l p_l m_l

    with m_l and s_l² the mean and the variance of log v in layer l.

    Args:
        moments: v of each layer, tensors of any shape.
        counting: "elements" for p_l proportional to the layer's elements; "layers" for equal p_l.

    >>> variance_shares([torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0])]).share
    1.0
    >>> variance_shares([torch.tensor([1.0, 9.0]), torch.tensor([1.0, 9.0])]).share
    0.0
    """
    choice(counting, "counting", get_args(Counting), DynamicsError)
    means, variances, sizes, zeros = [], [], [], 0
    for v in moments:
        if not isinstance(v, Tensor):
            raise DynamicsError(f"`moments` must be tensors, got a {type(v).__name__}.")
        if bool((v < 0).any()) or not bool(torch.isfinite(v).all()):
            raise DynamicsError("`moments` must be finite numbers ≥ 0, got some that are not.")
        logs = v.detach()[v.detach() > 0].double().log()
        zeros += v.numel() - logs.numel()
        if logs.numel():
            means.append(float(logs.mean()))
            variances.append(float(logs.var(correction=0)))
            sizes.append(logs.numel())
    if not sizes:
        raise DynamicsError("No layer has second moments above zero. Take a step first.")
    m, s, n = np.array(means), np.array(variances), np.array(sizes)
    p = n / n.sum() if counting == "elements" else np.full(len(n), 1 / len(n))
    return Shares(float(p @ np.square(m - p @ m)), float(p @ s), len(n), int(n.sum()), zeros)


def optimizer_shares(
    optimizer: Optimizer, parameters: Sequence[Tensor] | None = None, *, counting: Counting = "elements"
) -> Shares:
    """Return `variance_shares` of the second moments of an optimizer: Adam and variants, RMSprop, Adadelta, Adagrad.

    Bias is not corrected: the correction multiplies all v of a step by one number, which leaves the variance of the
    logarithm unchanged.

    Args:
        optimizer: an optimizer that has taken a step.
        parameters: the layers' parameters (`[layer.parameter for layer in gyroscope.layers(model)]`); by default all of
            the optimizer's parameters, biases and gains included, each as a layer of its own.
        counting: as in `variance_shares`.

    >>> a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.Adam([a, b])
    >>> a.grad, b.grad = torch.tensor([1.0, 2.0]), torch.tensor([8.0, 16.0]); optimizer.step()
    >>> round(optimizer_shares(optimizer).share, 3)               # (3 log 2)² between the layers, (log 2)² within
    0.9
    """
    if not isinstance(optimizer, Optimizer):
        raise DynamicsError(f"`optimizer` must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    given: Any = parameters
    if given is not None and not (isinstance(given, Iterable) and not isinstance(given, Tensor)):
        given = [given]
    wanted = [p for group in optimizer.param_groups for p in group["params"]] if given is None else list(given)
    if not all(isinstance(p, Tensor) for p in wanted):
        raise DynamicsError(
            f"`parameters` must be a list of tensors, got a list of {type(wanted[0]).__name__}s. Try [layer.parameter "
            "for layer in gyroscope.layers(model)]."
        )
    found = [v for p in wanted if (v := _held(optimizer.state.get(p, {}), p)) is not None]
    if not found:
        raise DynamicsError(
            f"{type(optimizer).__name__} holds no second moments of these parameters: it has not taken a step, keeps "
            "none, or does not keep one number per element."
        )
    return variance_shares(found, counting=counting)


def _held(state: dict[str, Any], parameter: Tensor) -> Tensor | None:
    for key in KEYS:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel():
            return value
    return None


class _Recorded(Protocol):
    @property
    def quantities(self) -> Any: ...
    def where(self, name: str) -> npt.NDArray[np.int64]: ...
    def series(self, name: str, *, steps: Any = None) -> npt.NDArray[np.float32]: ...


class Course(NamedTuple):
    """The share between layers over the steps of a run; NaN if no layer's moments were above zero."""

    steps: npt.NDArray[np.int64]
    share: npt.NDArray[np.float64]


def recorded_shares(run: _Recorded) -> Course:
    """Return the share between layers at each step for which a run holds percentiles of second moments.

    A monitor records the 10th, 50th and 90th percentile of v per layer on sampled steps; `share_between` computes the
    share from them.

    >>> from types import SimpleNamespace
    >>> values = {"moment_p10": [[1.0, 5.0]], "moment_p50": [[1.0, 5.0]], "moment_p90": [[1.0, 5.0]]}
    >>> run = SimpleNamespace(quantities=values, where=lambda name: np.array([10]),
    ...                       series=lambda name, steps: np.array(values[name]))
    >>> recorded_shares(run)
    Course(steps=array([10]), share=array([1.]))
    """
    if not hasattr(run, "quantities"):
        raise DynamicsError(f"`run` must be a run, got a {type(run).__name__}. Try gyroscope.load(folder).")
    missing = [name for name in _NAMES if name not in run.quantities]
    if missing:
        raise DynamicsError(
            f"The run holds no {', '.join(missing)}: its optimizer keeps no second moments, or detail was not recorded."
        )
    steps = run.where(_NAMES[1])
    table = np.stack([run.series(name, steps=steps).astype(np.float64) for name in _NAMES], axis=-1)
    found = [share_between(row) if (row > 0).all(axis=1).any() else np.nan for row in table]
    return Course(steps, np.array(found))


def share_between(percentiles: Percentiles) -> float:
    """Return the share of the variance of log v that lies between layers, B / (B + W).

    B is the variance over layers of the median m_l of log v, and W the mean over layers of the variance s_l² within,
    which follows from the percentiles if log v is normal: s_l = (log p90 − log p10) / 2.5631. Layers count equally.

    >>> share_between(np.array([[1.0, 10.0, 100.0], [1.0, 10.0, 100.0]]))
    0.0
    >>> share_between(np.array([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]))
    1.0
    """
    logs = np.log(_positive(percentiles))
    between = float(logs[:, 1].var())
    within = float((((logs[:, 2] - logs[:, 0]) / _APART) ** 2).mean())
    return between / (between + within) if between + within > 0 else float("nan")


def spans(percentiles: Percentiles) -> tuple[float, float]:
    """Return the largest median over the smallest, between layers, and the median over layers of p90 / p10, within.

    >>> spans(np.array([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [100.0, 200.0, 400.0]]))
    (100.0, 4.0)
    """
    known = _positive(percentiles)
    return float(known[:, 1].max() / known[:, 1].min()), float(np.median(known[:, 2] / known[:, 0]))


def _positive(percentiles: Percentiles) -> Percentiles:
    """Return the layers in which at least nine of ten elements have had a gradient."""
    known: Percentiles = percentiles[(percentiles > 0).all(axis=1)]
    if not len(known):
        raise DynamicsError("No layer has second moments above zero in nine of ten elements. Was the network trained?")
    return known
