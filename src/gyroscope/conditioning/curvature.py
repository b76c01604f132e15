"""λmax of curvature matrices too large to form, by Lanczos iteration on products with vectors.

λmax bounds the learning rate: gradient descent on a quadratic diverges above 2/λmax and is fastest around 1/λmax
(section 2 of Huang et al., 2020).

A product with a vector takes a few passes through the network. With f the outputs of the whole batch and J = ∂f/∂θ, all
matrices but the Hessian are Jᵀ A J with one small matrix A per sample:

    Gauss-Newton            A = ∂²L/∂f²
    Fisher, second moment   A = E(s sᵀ)/N, s = ∂ℓ/∂f

Jᵀw is a backward pass. It is linear in w, and its derivative along v at any w is Jv: backward through backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gyroscope.base.accepted import choice, real
from gyroscope.conditioning.fisher import Labels, Scores, mean_of, parameters, scores_of
from gyroscope.errors import ConditioningError, MissingExtraError
from gyroscope.passes.batches import batches
from gyroscope.passes.likelihood import Loss
from gyroscope.passes.network import (
    Network,
    borrowed,
    cast_loss,
    check_run,
    first_output,
    network,
)

Matrix = Literal["fisher", "second_moment", "gauss_newton", "hessian"]

_MATRICES = ("fisher", "second_moment", "gauss_newton", "hessian")
_ENDS = {"largest": "LA", "magnitude": "LM"}

# Vectors of a Lanczos iteration; fewer where each is large.
_VECTORS = 20
_VECTORS_LARGE = 10
_LARGE = 1 << 22

Product = Callable[[Tensor], Tensor]


def top_eigenvalue(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    matrix: Matrix = "fisher",
    layer: str | Iterable[str] | None = None,
    labels: Labels | None = None,
    which: Literal["largest", "magnitude"] = "largest",
    tolerance: float = 1e-4,
    iterations: int = 1000,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> float:
    """Return the largest eigenvalue of a curvature matrix of the mean loss, for networks of any size.

    The matrix is never formed: a product with a vector takes two or three passes through the network, and 10 to 20
    vectors as long as the parameters are held on the host. Modes, batch statistics, random networks and labels are
    treated as in `fisher`, with no extra cost for batch statistics. The model is left as it was.

    Args:
        model: any module whose output is one tensor [N, ...].
        loss: `loss(output, target)`: a mean over the batch, a sum, or one value per sample.
        batch: one pair (inputs, targets), as in `fisher`.
        matrix: "fisher" F, in expectation over the model's labels; "second_moment" M, with those of the batch;
            "gauss_newton" Jᵀ(∂²L/∂f²)J; "hessian" ∂²L/∂θ². For the cross-entropy, F and Gauss-Newton are the same; for
            the NLL loss of log-probabilities, which is linear in f, Gauss-Newton is zero.
        layer: a name or glob patterns of layers, for the block of their weights instead of the whole matrix.
        labels: for "fisher", "model" (the default), "sampled", or a function (output, generator) → targets.
        which: "largest", or the eigenvalue of largest "magnitude", which may be negative for the Hessian. The other
            matrices have no negative eigenvalues.
        tolerance: the relative accuracy.
        iterations: the largest number of products with a vector.
        seed: the seed of the first vector and of labels that are drawn.
        dtype: the dtype that the network is run in; by default its own, or float32 if that is narrower.

    Raises:
        ConditioningError: an argument is invalid, the network cannot be treated, or the iteration did not converge.
        MissingExtraError: scipy, which has the Lanczos iteration, is not installed.

    Example:
        The Hessian of ‖y − Wx‖² is 2 E(xxᵀ) ⊗ I (equation 1, where the text drops the 2).

        >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> net = nn.Linear(2, 4, bias=False)
        >>> round(top_eigenvalue(net, nn.MSELoss(reduction="sum"), (x, torch.zeros(2, 4)), matrix="hessian"), 4)
        9.0
    """
    _check(matrix, labels, which)
    accuracy, most = real(tolerance), real(iterations)
    if not (0 < accuracy < 1 and most >= 1 and most.is_integer()):
        raise ConditioningError(
            "`tolerance` must be a number between 0 and 1 and `iterations` a whole number ≥ 1, got "
            f"tolerance={tolerance!r} and iterations={iterations!r}. Try 1e-4 and 1000."
        )
    seed = check_run(loss, dtype, seed)
    chosen = parameters(model, only=layer)
    device = dict(chosen.model.named_parameters())[next(iter(chosen.names))].device
    given = list(islice(batches(batch, device), 2))
    if len(given) > 1:
        raise ConditioningError("`batch` must be one pair (inputs, targets), got several. Pass one of them.")
    kind = _wide(chosen.model) if dtype is None else dtype
    with borrowed(chosen.model):
        f = network(chosen.model, chosen.names, given[0], kind)
        times = _product(f, cast_loss(loss, kind), matrix, labels or "model", seed)
        return _extreme(times, sum(chosen.sizes), _ENDS[which], accuracy, int(most), seed)


def _product(f: Network, loss: Loss, matrix: Matrix, labels: Labels, seed: int) -> Product:
    output = first_output(f)
    if matrix == "hessian":
        return hessian_product(f, loss)
    if matrix == "gauss_newton":
        return gauss_newton_product(f, loss)
    generator = torch.Generator(output.device).manual_seed(seed)
    meant: Labels = "true" if matrix == "second_moment" else labels
    return fisher_product(f, scores_of(loss, output, f.batch.target, meant, generator))


def _extreme(times: Product, size: int, end: str, tolerance: float, iterations: int, seed: int) -> float:
    """Return the eigenvalue at one end of the spectrum of a symmetric matrix given by its products."""
    # float32 takes half the memory, and is enough for this tolerance.
    kind = np.float32 if tolerance >= 1e-5 else np.float64
    start = np.random.default_rng(seed).standard_normal(size, dtype=kind)
    start /= np.linalg.norm(start)
    first = _apply(times, start)
    scale = float(np.linalg.norm(first))
    if not np.isfinite(scale):
        raise ConditioningError("A product with the matrix is not finite: the loss or a derivative of it is not.")
    if scale == 0:
        return 0.0
    # Second derivatives that a custom function lacks are silently zero; then the matrix is not symmetric.
    if abs(float(start @ _apply(times, first)) / scale**2 - 1) > 0.02:
        raise ConditioningError(
            "Products with the matrix are not symmetric: a function in the network or loss cannot be differentiated "
            "twice, such as one marked once_differentiable."
        )
    if size <= _VECTORS:
        whole = np.stack([_apply(times, row) for row in np.eye(size)])
        values = np.linalg.eigvalsh((whole + whole.T) / 2)
        return float(values[-1] if end == "LA" else max(values, key=abs))
    try:
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
    except ImportError:
        raise MissingExtraError(
            "`top_eigenvalue` needs scipy, which is not installed: pip install 'gyroscope[curvature]'"
        ) from None
    vectors = min(size, _VECTORS if size < _LARGE else _VECTORS_LARGE)
    # ARPACK's tolerance is absolute for eigenvalues far below one, so the matrix is scaled to size one.
    scaled = LinearOperator((size, size), matvec=lambda v: _apply(times, v.reshape(-1)) / kind(scale), dtype=kind)
    try:
        (found,) = eigsh(
            scaled, k=1, which=end, v0=first, tol=tolerance, ncv=vectors, maxiter=max(1, iterations // (vectors - 1)),
            return_eigenvectors=False,
        )  # fmt: skip
    except ArpackNoConvergence:
        raise ConditioningError(
            f"λmax was not found to {tolerance:g} in {iterations} products. Raise `iterations` or `tolerance`."
        ) from None
    return float(found) * scale


def _apply(times: Product, v: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return times(torch.from_numpy(np.ascontiguousarray(v))).cpu().numpy().astype(v.dtype, copy=False)


def _wide(model: nn.Module) -> torch.dtype | None:
    """Return float32 if a network has a narrower dtype; None otherwise."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    return torch.float32 if any(t.dtype.itemsize < 4 for t in tensors) else None


def _check(matrix: Any, labels: Any, which: Any) -> None:
    choice(matrix, "matrix", _MATRICES, ConditioningError)
    choice(which, "which", _ENDS, ConditioningError)
    drawn = callable(labels) or (isinstance(labels, str) and labels in ("model", "sampled"))
    if labels is not None and (matrix != "fisher" or not drawn):
        raise ConditioningError(
            "`labels` must be 'model', 'sampled' or a function (output, generator) → targets with matrix='fisher', and "
            f"None with the others, which use the labels of the batch, got {labels!r} with matrix={matrix!r}."
        )


def hessian_product(f: Network, loss: Loss) -> Product:
    """Return v ↦ (∂²L/∂θ²) v for the mean loss L, over the parameters of `f` concatenated.

    >>> from gyroscope.passes import Batch, network
    >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> f = network(net, ["weight"], Batch((x,), {}, torch.zeros(2, 1)), torch.float64)
    >>> hessian_product(f, nn.functional.mse_loss)(torch.ones(2, dtype=torch.float64))  # (2/N) XᵀX v
    tensor([1., 9.], dtype=torch.float64)
    """
    theta = _leaves(f)
    value = mean_of(loss, f(dict(zip(f.theta, theta, strict=True))), f.batch.target)
    first = _derivatives([value], theta, None, twice=True)

    def times(v: Tensor) -> Tensor:
        return _flat(_derivatives(first, theta, _split(v, theta)))

    return times


def fisher_product(f: Network, scores: Scores) -> Product:
    """Return v ↦ (1/N) Σ_i J_iᵀ E(s sᵀ) J_i v.

    >>> from gyroscope.passes import Batch, network
    >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> f = network(net, ["weight"], Batch((x,), {}, torch.zeros(2, 1)), torch.float64)
    >>> scores = scores_of(nn.functional.mse_loss, first_output(f), f.batch.target, "model", torch.Generator())
    >>> fisher_product(f, scores)(torch.ones(2, dtype=torch.float64)).round(decimals=6)
    tensor([1., 9.], dtype=torch.float64)
    """
    return _sandwich(f, lambda output: lambda t: scores.times(t) / scores.samples)


def gauss_newton_product(f: Network, loss: Loss) -> Product:
    """Return v ↦ Jᵀ (∂²L/∂f²) J v.

    >>> from gyroscope.passes import Batch, network
    >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> f = network(net, ["weight"], Batch((x,), {}, torch.zeros(2, 1)), torch.float64)
    >>> gauss_newton_product(f, nn.functional.mse_loss)(torch.ones(2, dtype=torch.float64))  # the Hessian of a linear f
    tensor([1., 9.], dtype=torch.float64)
    """

    def middle(output: Tensor) -> Product:
        leaf = output.detach().requires_grad_()
        first = _derivatives([mean_of(loss, leaf, f.batch.target)], [leaf], None, twice=True)
        return lambda t: _derivatives(first, [leaf], [t])[0]

    return _sandwich(f, middle)


def _sandwich(f: Network, middle: Callable[[Tensor], Product]) -> Product:
    theta = _leaves(f)
    output = f(dict(zip(f.theta, theta, strict=True)))
    w = torch.zeros_like(output, requires_grad=True)
    pulled = _derivatives([output], theta, [w], twice=True)
    inner = middle(output)

    def times(v: Tensor) -> Tensor:
        pushed = _derivatives(pulled, [w], _split(v, theta))[0]
        return _flat(_derivatives([output], theta, [inner(pushed)]))

    return times


def _leaves(f: Network) -> list[Tensor]:
    return [p.detach().requires_grad_() for p in f.theta.values()]


def _derivatives(
    of: Sequence[Tensor], by: Sequence[Tensor], along: Sequence[Tensor] | None, *, twice: bool = False
) -> list[Tensor]:
    """Return derivatives along vectors, zero if there is no dependence; `twice` makes them differentiable again."""
    kept = [i for i, one in enumerate(of) if one.requires_grad]
    if not kept:
        return [torch.zeros_like(one) for one in by]
    outward = None if along is None else [along[i] for i in kept]
    try:
        found = torch.autograd.grad(
            [of[i] for i in kept], by, outward, retain_graph=True, create_graph=twice, allow_unused=True
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConditioningError(
            f"The network or the loss cannot be differentiated twice, which products with its curvature need: {error}"
        ) from error
    return [torch.zeros_like(one) if g is None else g for one, g in zip(by, found, strict=True)]


def _split(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(v, [p.numel() for p in like])
    return [piece.reshape(p.shape).to(p.dtype).to(p.device) for piece, p in zip(pieces, like, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).to(tensors[0].device) for t in tensors])
