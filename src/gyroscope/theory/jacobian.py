"""The norm that weight decay penalizes under Gauss-Newton, and the input-output Jacobian (section 5.3).

Under a preconditioner C⁻¹ weight decay penalizes ‖w‖²_C = wᵀCw (equation 27). For C = G = E[J_wᵀ H J_w], with J_w the
Jacobian of the outputs z by the weights and H the loss's Hessian at them,

    ‖w‖²_G = E[(J_w w)ᵀ H (J_w w)],

one forward product. A network of L layers with ReLU or no activations, without biases and normalizers, is
homogeneous of degree L in w and piecewise linear in x, so J_w w = L z and z = J_zx x. For squared errors, H = I,
exactly

    ‖w‖²_G = L² E‖z‖² = L² E‖J_zx x‖²        = L² σ² E‖J_zx‖²_F    if E[xxᵀ] = σ²I on each linear piece:

always for linear networks on whitened inputs; for ReLU networks to the extent that J_zx and x xᵀ are uncorrelated.
K-FAC's matrix in place of G gives L E‖z‖² for linear networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from gyroscope.base.accepted import choice, real, whole
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import generator
from gyroscope.theory.per_sample import buffers, check_inputs, outside, parts, passing, refuse_mixing

OutputHessian = Literal["identity", "softmax"]


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes, and its standard error."""

    value: float
    error: float
    probes: int


def gauss_newton_norm(model: nn.Module, inputs: Tensor, *, hessian: OutputHessian = "identity") -> Tensor:
    """Return ‖w‖²_G = wᵀGw over all parameters that require gradients, by one product J_w w; G is never formed.

    Args:
        model: any module from [N, ...] to outputs [N, ...], run in the mode it is in.
        inputs: one batch; the mean is over its samples.
        hessian: H: "identity" for ½‖z − t‖², "softmax" for the cross-entropy, diag p − ppᵀ.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> gauss_newton_norm(net, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))     # the mean of z² = 4 and 16
    tensor(10.)
    """
    choice(hessian, "hessian", get_args(OutputHessian), DynamicsError)
    z, moved = (one.flatten(1) for one in _along_weights(model, inputs))
    if hessian == "identity":
        return moved.square().sum(1).mean()
    # dᵀ(diag p − ppᵀ)d is the variance of d under p.
    p = z.softmax(1)
    return (p * (moved - (p * moved).sum(1, keepdim=True)).square()).sum(1).mean()


def jacobian_norm(model: nn.Module, inputs: Tensor, *, limit: int = 10_000_000) -> Tensor:
    """Return E‖J_zx‖²_F, the mean over samples of the squared norm of the input-output Jacobian, exactly.

    Args:
        model: any module that treats samples independently; in eval mode if it has batch normalization or dropout.
        inputs: one batch [N, ...].
        limit: the largest number of elements of all Jacobians together; `estimated_jacobian_norm` has no limit.

    >>> net = nn.Linear(2, 3)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> jacobian_norm(net, torch.zeros(5, 2))
    tensor(24.)
    """
    most = real(limit)
    if not most >= 0:
        raise DynamicsError(f"`limit` must be a number ≥ 0, got {limit!r:.80}. Try 10_000_000.")
    f = _per_sample(model, inputs)
    with passing(undrawn=inputs.device), torch.no_grad():
        outputs = _output(f(inputs), inputs)
    size = outputs.numel() * inputs[0].numel()
    if size > most:
        raise DynamicsError(
            f"The Jacobians have {size:,} elements, above `limit` = {most:,.15g}. Give fewer samples, a larger limit, "
            "or use estimated_jacobian_norm."
        )
    with passing():
        jacobians: Tensor = vmap(jacrev(lambda x: f(x[None])[0]))(inputs)
    return jacobians.detach().flatten(1).square().sum(1).mean()


def estimated_jacobian_norm(model: nn.Module, inputs: Tensor, *, probes: int = 32, seed: int = 0) -> Estimate:
    """Estimate E‖J_zx‖²_F by Hutchinson's method: E_v‖J_zxᵀ v‖² with random signs v, one backward pass per probe.

    Each sample has its own signs in every probe, so that a few probes suffice for many samples. The standard error is
    that of the mean over probes; it says nothing about samples that were not given.

    Args:
        model: any module that treats samples independently, of any size.
        inputs: one batch [N, ...].
        probes: number of probes, at least 2.
        seed: seed of the signs.

    >>> net = nn.Linear(3, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> estimated_jacobian_norm(net, torch.ones(4, 3), probes=8)           # with one output the signs cancel
    Estimate(value=12.0, error=0.0, probes=8)
    """
    many = whole(probes, 2)
    if many is None:
        raise DynamicsError(
            f"`probes` must be a whole number ≥ 2, got {probes!r:.80}: a standard error needs two. Try 32."
        )
    drawn = generator(seed)
    f = _per_sample(model, inputs)
    with passing(undrawn=inputs.device), torch.enable_grad():
        x = outside(inputs).requires_grad_()
        z = _output(f(x), inputs)
    found = []
    for _ in range(many):
        signs = torch.randint(0, 2, z.shape, generator=drawn).to(z) * 2 - 1
        [g] = torch.autograd.grad(z, x, signs, retain_graph=True, materialize_grads=True)
        found.append(g.flatten(1).double().square().sum(1).mean())
    values = torch.stack(found)
    return Estimate(float(values.mean()), float(values.std() / many**0.5), many)


def kfac_norm(weight: Tensor, A: Tensor, S: Tensor) -> Tensor:
    """vec(W)ᵀ (A ⊗ S) vec(W) = tr(S W A Wᵀ): the contribution of one layer to ‖w‖²_C under K-FAC.

    >>> kfac_norm(torch.tensor([[1.0, 2.0]]), torch.eye(2), torch.tensor([[3.0]]))
    tensor(15.)
    """
    outputs, inputs = weight.shape
    if A.shape != (inputs, inputs) or S.shape != (outputs, outputs):
        raise DynamicsError(
            f"`weight`, `A` and `S` must have shapes [o, i], [i, i] and [o, o], got {tuple(weight.shape)}, "
            f"{tuple(A.shape)} and {tuple(S.shape)}."
        )
    return ((S @ weight @ A) * weight).sum()


def weight_degree(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Return the degree k for which J_w w is nearest to k z (Euler's theorem, equation 16), and its relative error.

    Bias-free networks of L layers with ReLUs have degree L exactly. The error is ‖J_w w − k z‖/‖J_w w‖: if it is not
    zero, ‖w‖²_G is not a multiple of E‖z‖².

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)).double()
    >>> degree, off = weight_degree(net, torch.randn(5, 3, dtype=torch.float64))
    >>> round(degree, 9), off < 1e-12
    (2.0, True)
    """
    z, moved = _along_weights(model, inputs)
    square = float(z.square().sum())
    if square == 0:
        raise DynamicsError("All outputs are zero, so the degree is undefined. Give other inputs.")
    degree = float((z * moved).sum()) / square
    length = float(moved.norm())
    return degree, float((moved - degree * z).norm()) / length if length > 0 else 0.0


def _along_weights(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return z and J_w w over the parameters that require gradients.

    J_w w is the derivative of u → J_wᵀu along w, two backward passes: torch's forward mode supports fewer operations.
    """
    trained, others = parts(model)
    check_inputs(inputs)
    if not trained:
        raise DynamicsError("No parameter of `model` requires a gradient. Call requires_grad_() on some.")
    with passing(), torch.enable_grad():
        weights = {name: p.detach().requires_grad_() for name, p in trained.items()}
        by = list(weights.values())
        z = _output(functional_call(model, {**weights, **others, **buffers(model)}, (outside(inputs),)), inputs)
        u = torch.zeros_like(z, requires_grad=True)
        pulled = torch.autograd.grad(z, by, u, create_graph=True, materialize_grads=True)
        kept = [i for i, one in enumerate(pulled) if one.requires_grad]
        [moved] = torch.autograd.grad([pulled[i] for i in kept], u, [by[i].detach() for i in kept])
    return z.detach(), moved.detach()


def _per_sample(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the model as a function of samples [N, ...]."""
    trained, others = parts(model)
    refuse_mixing(model, "Per-sample Jacobians")
    check_inputs(inputs, real=True)

    def f(x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, {**trained, **others, **buffers(model)}, (x,))
        return result

    return f


def _output(output: object, inputs: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() < 1 or len(output) != len(inputs):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise DynamicsError(f"`model` must return one tensor [N, ...], got {shape} for {len(inputs)} samples.")
    return output
