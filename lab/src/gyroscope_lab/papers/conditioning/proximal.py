"""The link to proximal back-propagation (section 3.2 of the conditioning paper: equations 1, 2 and 5 to 7).

Auxiliary coordinates z_k turn the training of a network into one problem per layer: given a target
ẑ_k = z_k − η ∂L/∂z_k from the layer above, minimize ½‖ẑ_k − f_k(W_k, z_{k−1})‖². One gradient step on each of them is a
step of gradient descent on L (equation 6), also where z_k are pre-activations, so that each problem but the last is a
linear regression (equation 7). The Hessian of that regression is E[x xᵀ] ⊗ I (equation 1). That of the last layer, a
linear classification, is approximated by E[x xᵀ] ⊗ S, S = (I − 11ᵀ/c)/c (equation 2). The paper suggests that the
conditioning of the whole problem goes with that of the layers' problems. All of this is measured on small networks, in
float64.

Equation 5 penalizes the distance of z_k from its layer's output by λ/2 ‖z_k − f_k(W_k, z_{k−1})‖². Its minimum
approaches that of L as λ → ∞, "under mild conditions": a distance of O(1/λ) is left. One of the conditions is that
there is a minimum. Where all weights are free there is none: large weights above a layer and small z_k in it make the
penalty vanish for any λ. So the last layer is held here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning.fisher import fisher
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLASSES, _PIXELS = 10, 64
# Exact equalities hold up to this, an approximation within this share; a rank correlation has at most this p-value.
_SAME, _CLOSE, _P = 1e-9, 0.1, 0.05
# The fewest networks that a correlation may be taken over.
_FEWEST = 6
# "In proportion to 1/λ" is taken to mean: an exponent within this of −1.
_NEAR = 0.1
_RATE, _PENALTIES = 0.5, (10.0, 100.0, 1000.0, 10000.0)


@dataclass(frozen=True)
class Plan:
    """The networks of a scale.

    Attributes:
        width: the width of all of them.
        images: the number of digits.
        inits, depths, moved: the initializers, depths and shifts of the inputs, in all combinations.
        steps: steps of gradient descent before equation 2 is tested again.
    """

    width: int
    images: int
    inits: tuple[str, ...]
    depths: tuple[int, ...]
    moved: tuple[float, ...]
    steps: int


_INITS = ("uniform", "glorot_uniform", "he_normal")
PLANS = {
    "smoke": Plan(6, 60, ("uniform", "he_normal"), (3,), (0.0, 2.0), steps=200),
    "small": Plan(12, 200, _INITS, (3, 5), (0.0, 1.0, 3.0), steps=2000),
    "full": Plan(16, 1000, _INITS, (3, 4, 5, 6), (0.0, 1.0, 2.0, 3.0), steps=5000),
}


def layer_outputs(model: nn.Sequential, x: Tensor) -> list[tuple[nn.Linear, Tensor, Tensor]]:
    """Return for each layer its module, its input x_{k−1} and its output h_k; their gradients are kept.

    >>> model = mlp(0, depth=2, width=3, inputs=4)
    >>> [tuple(h.shape) for _, _, h in layer_outputs(model, torch.ones(5, 4))]
    [(5, 3), (5, 10)]
    """
    found = []
    for module in model:
        before, x = x, module(x)
        if x.requires_grad:
            x.retain_grad()
        if isinstance(module, nn.Linear):
            found.append((module, before, x))
    return found


def step_errors(model: nn.Sequential, x: Tensor, y: Tensor, *, rate: float) -> dict[str, float]:
    """Return how far gradients of the layers' problems are from η ∂L/∂W_k, relative, for equations 6 and 7.

    The last layer's problem is L itself, and is left out.
    """
    model.zero_grad()
    its = layer_outputs(model, x)
    losses = F.cross_entropy(its[-1][2], y, reduction="sum")
    losses.backward()  # type: ignore[no-untyped-call]
    errors: dict[str, list[float]] = {"6": [], "7": []}
    for (module, before, h), (_, z, _) in pairwise(its):
        assert module.weight.grad is not None
        wanted = rate * module.weight.grad
        own = module.weight.detach().clone().requires_grad_()
        out = F.linear(before.detach(), own)
        for name, there, here in (("6", z, F.relu(out)), ("7", h, out)):
            assert there.grad is not None
            target = there.detach() - rate * there.grad
            [gradient] = torch.autograd.grad((target - here).square().sum() / 2, own, retain_graph=True)
            errors[name].append(float((gradient - wanted).norm() / wanted.norm()))
    return {name: max(values) for name, values in errors.items()}


def regression_error(model: nn.Sequential, x: Tensor) -> float:
    """Return the distance of the Hessian of a layer's regression, per sample, from E[x xᵀ] ⊗ I (equation 1)."""
    module, before, h = layer_outputs(model, x)[1]
    before, target, rows = before.detach(), h.detach() + 1, len(x)

    def problem(weight: Tensor) -> Tensor:
        return (target - F.linear(before, weight)).square().sum() / 2 / rows

    hessian = torch.func.hessian(problem)(module.weight.detach())
    made = torch.kron(torch.eye(len(module.weight), dtype=x.dtype), before.T @ before / rows)
    return float((hessian.reshape(made.shape) - made).norm() / made.norm())


def classification_error(model: nn.Sequential, x: Tensor) -> float:
    """Return the distance of the Hessian of the last layer, E[(diag q − q qᵀ) ⊗ x xᵀ], from that of equation 2."""
    _, before, logits = layer_outputs(model, x)[-1]
    before, q = before.detach(), logits.detach().softmax(1)
    curvature = torch.diag_embed(q) - q.unsqueeze(2) * q.unsqueeze(1)
    exact = torch.einsum("nab,ni,nj->aibj", curvature, before, before) / len(x)
    S = (torch.eye(_CLASSES, dtype=x.dtype) - 1 / _CLASSES) / _CLASSES
    told = torch.einsum("ab,ij->aibj", S, before.T @ before / len(x))
    return float((told - exact).norm() / told.norm())


def descended(model: nn.Sequential, x: Tensor, y: Tensor, steps: int) -> float:
    """Train by gradient descent, and return the last loss."""
    sgd = torch.optim.SGD(model.parameters(), lr=_RATE)
    for _ in range(steps):
        sgd.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return float(loss.detach())


@dataclass(frozen=True)
class Conditions:
    """λmax and κ of a network's whole Fisher matrix, and the geometric means of those of Σx over its layers."""

    network: str
    largest: float
    kappa: float
    layers_largest: float
    layers_kappa: float


def conditions(name: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Conditions:
    """Return the conditioning of the whole problem and of the layers' problems."""
    largest, kappa = _spectrum(np.asarray(fisher(model, F.cross_entropy, (x, y)).spectrum().values))
    inputs = [before.detach() for _, before, _ in layer_outputs(model, x)]
    of_layers = [_spectrum(torch.linalg.eigvalsh(one.T @ one / len(x)).numpy()) for one in inputs]
    each_largest, each_kappa = zip(*of_layers, strict=True)
    return Conditions(name, largest, kappa, _geometric(each_largest), _geometric(each_kappa))


def _spectrum(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return λmax, and κ at half of the rank: pixels that are empty and units that are dead make κ infinite beyond it.

    >>> _spectrum(np.array([8.0, 2.0, 4.0, 1.0, 0.0]))
    (8.0, 2.0)
    """
    ordered = np.sort(values)[::-1]
    rank = int((ordered > len(ordered) * np.finfo(np.float64).eps * ordered[0]).sum())
    return float(ordered[0]), float(ordered[0] / ordered[max(0, rank // 2 - 1)])


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def violations(penalties: Sequence[float] = _PENALTIES) -> list[tuple[float, float, float]]:
    """Minimize equation 5 for growing λ, each from the minimum before: least squares, two layers, the last one held.

    Returns:
        For each λ: λ, the distance ‖z − f(W, x)‖ that is left, and L at these weights over its minimum.
    """
    from scipy.optimize import minimize

    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, n, generator=draw, dtype=torch.float64) for n in (4, 2))
    last = torch.randn(2, 3, generator=draw, dtype=torch.float64)
    sizes = [12, 60]

    def parts(flat: Tensor) -> tuple[Tensor, Tensor]:
        first, z = flat[: sizes[0]], flat[sizes[0] :]
        return torch.tanh(x @ first.view(3, 4).T), z.view(20, 3)

    def plain(flat: Tensor) -> Tensor:
        return (y - parts(flat)[0] @ last.T).square().sum() / 2

    def penalized(flat: Tensor, penalty: float) -> Tensor:
        f, z = parts(flat)
        return (y - z @ last.T).square().sum() / 2 + penalty / 2 * (z - f).square().sum()

    def least(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        def both(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
            flat = torch.tensor(values, requires_grad=True)
            loss = function(flat)
            loss.backward()  # type: ignore[no-untyped-call]
            assert flat.grad is not None
            return float(loss.detach()), flat.grad.numpy()

        options = {"maxiter": 20000, "maxfun": 40000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 50}
        return torch.tensor(minimize(both, start.numpy(), jac=True, method="L-BFGS-B", options=options).x)

    start = 0.5 * torch.randn(sum(sizes), generator=draw, dtype=torch.float64)
    found = []
    for penalty in penalties:
        start = least(partial(penalized, penalty=penalty), start)
        f, z = parts(start)
        found.append((penalty, float((z - f).norm()), float(plain(start))))
    minimum = float(plain(least(plain, start)))
    return [(penalty, distance, loss / minimum - 1) for penalty, distance, loss in found]


def conclude(lab: Lab) -> Report:
    """Report the equalities of equations 1, 6 and 7, the approximation of equation 2, and the correlations."""
    plan = PLANS[lab.scale]
    split = Source("digits", per_class=plan.images // _CLASSES).load()
    x, y = split.x_train.double().flatten(1)[: plan.images], split.y_train[: plan.images]

    def made(init: str, depth: int, seed: int = 0) -> nn.Sequential:
        return mlp(seed, depth=depth, width=plan.width, inputs=_PIXELS, init=init).double()

    exact = [made(init, depth) for init in plan.inits for depth in plan.depths]
    steps = [step_errors(model, x, y, rate=rate) for model in exact for rate in (0.01, 1.0)]
    regressions = [regression_error(model, x) for model in exact]
    trained = made(plan.inits[0], plan.depths[0])
    before = classification_error(trained, x)
    loss = descended(trained, x, y, plan.steps)
    after = classification_error(trained, x)
    networks = [
        conditions(f"{init}, {depth} layers, inputs + {moved:g}", made(init, depth), x + moved, y)
        for init in plan.inits
        for depth in plan.depths
        for moved in plan.moved
    ]
    return report(
        {name: max(one[name] for one in steps) for name in ("6", "7")} | {"1": max(regressions)},
        (before, after, loss),
        networks,
        violations(),
    )


def report(
    equal: dict[str, float],
    second: tuple[float, float, float],
    networks: Sequence[Conditions],
    left: Sequence[tuple[float, float, float]],
) -> Report:
    """The figure, the tables and the verdicts."""
    columns = ("network", "λmax of F", "λmax of Σx, layers", "κ of F", "κ of Σx, layers")
    rows = tuple(
        (one.network, *(f"{value:.3g}" for value in (one.largest, one.layers_largest, one.kappa, one.layers_kappa)))
        for one in networks
    )
    before, after, loss = second
    slope = float(np.polyfit(np.log([one[0] for one in left]), np.log([one[1] for one in left]), 1)[0])
    return Report(
        {"figure": _figure(networks)},
        (
            Table("The whole problem and the layers' problems", columns, rows),
            Table("Equation 5", ("λ", "‖z − f‖", "L over its minimum, − 1"),
                  tuple((f"{a:g}", f"{b:.3g}", f"{c:.2g}") for a, b, c in left)),
        ),
        (
            Verdict("the minimum of equation 5 approaches that of the network as λ grows", "λ → ∞",
                    f"‖z − f‖ falls as λ^{slope:.2f}; at λ = {left[-1][0]:g} the loss is {100 * left[-1][2]:.2g} % "
                    "above its minimum", abs(slope + 1) <= _NEAR and left[-1][2] < 0.01),
            Verdict("a gradient step on the layers' problems is one on the whole loss (equation 6)", "equivalent",
                    f"gradients differ by {equal['6']:.1g} of their length at most", equal["6"] < _SAME),
            Verdict("also with pre-activations as auxiliary variables (equation 7)", "equivalent",
                    f"by {equal['7']:.1g} at most", equal["7"] < _SAME),
            Verdict("the layers' problems are linear regressions with the Hessian E[x xᵀ] ⊗ I (equation 1)", "exactly",
                    f"to {equal['1']:.1g}", equal["1"] < _SAME),
            Verdict("the Hessian of the last layer is E[x xᵀ] ⊗ S, and does not change much (equation 2)",
                    "approximately",
                    f"{100 * before:.0f} % off at the start, {100 * after:.0f} % at a loss of {loss:.2g}",
                    max(before, after) <= _CLOSE),
            _correlated("steepness λmax", [(one.largest, one.layers_largest) for one in networks]),
            _correlated("conditioning κ", [(one.kappa, one.layers_kappa) for one in networks]),
        ),
        {"equal": equal, "equation 2": list(second), "networks": [vars(one) for one in networks],
         "equation 5": [list(one) for one in left]},
    )  # fmt: skip


def _correlated(what: str, pairs: Sequence[tuple[float, float]]) -> Verdict:
    from scipy.stats import spearmanr  # takes a while to load

    found = spearmanr(*zip(*pairs, strict=True))
    rho, p = float(found.statistic), float(found.pvalue)
    return Verdict(
        f"the {what} of the whole problem goes with that of the layers' problems",
        "well correlated",
        f"rank correlation {rho:+.2f} over {len(pairs)} networks (p = {p:.1g})",
        rho > 0 if p <= _P and len(pairs) >= _FEWEST else None,
    )


def _figure(networks: Sequence[Conditions]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    for ax, name, of in zip(figure.subplots(1, 2), ("largest", "kappa"), ("λmax", "κ"), strict=True):
        xs, ys = ([getattr(one, which) for one in networks] for which in (f"layers_{name}", name))
        ax.loglog(xs, ys, "o", color="C0", markersize=4)
        ax.set_xlabel(f"{of} of Σx, mean over layers", fontsize=9)
        ax.set_ylabel(f"{of} of the whole Fisher matrix", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("The whole problem and the layers' problems, network by network", fontsize=11)
    return figure


STUDIES = (
    Study(
        "conditioning/proximal",
        "Section 3.2: the link to proximal back-propagation, equations 1, 2 and 5 to 7",
        no_trials,
        conclude,
    ),
)
