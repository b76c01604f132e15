"""Uncentered activations and the outliers of the curvature, predicted and measured (section 3 of Grosse's chapter 5).

If a layer's activations a have the mean m and unit covariance, their second moment A = I + mmᵀ has one outlier,
ν = ‖m‖² + 1, with eigenvector m. So the Gauss-Newton matrix of its weights, G ≈ A ⊗ S (equation 5), has the outliers
ν λ_i with eigenvectors m ⊗ v_i, where λ_i and v_i are those of S = E[Ds Dsᵀ]: the ICS conditioning hypothesis.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gyroscope.base.accepted import real, whole
from gyroscope.conditioning.fisher import Labels, fisher
from gyroscope.errors import DynamicsError
from gyroscope.layers.class_names import unwrapped
from gyroscope.passes.batches import batches
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.per_sample import refuse_valueless


def outlier(mean: Tensor) -> Tensor:
    """Return ν = ‖m‖² + 1, the outlier of the second moment of activations with mean m and unit covariance.

    >>> outlier(torch.full((100,), 0.1))
    tensor(2.)
    """
    return mean.square().sum() + 1


def predicted_outliers(mean: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outliers ν λ_i(S), largest first, and their eigenvectors m ⊗ v_i / ‖m‖ as matrices v_i mᵀ / ‖m‖.

    Args:
        mean: m, [inputs].
        S: the second moment of the gradients at the layer's output, [outputs, outputs].

    Returns:
        [outputs] eigenvalues and [outputs, outputs, inputs] eigenvectors, each of the shape of the layer's weight.

    >>> values, vectors = predicted_outliers(torch.tensor([3.0, 0.0]), torch.diag(torch.tensor([1.0, 2.0])))
    >>> values
    tensor([20., 10.])
    >>> vectors[0].abs()
    tensor([[0., 0.],
            [1., 0.]])
    """
    values, v = torch.linalg.eigh(S)
    direction = mean / mean.norm()
    return outlier(mean) * values.flip(0), torch.einsum("ok,i->koi", v.flip(1), direction)


@dataclass(frozen=True, eq=False)
class Outliers:
    """Outliers of a layer's curvature, predicted from the means of its activations and measured.

    Attributes:
        layer: the name of the module.
        mean: m, the mean activations.
        nu: ν = ‖m‖² + 1.
        predicted: ν λ_i(S) for the k largest, largest first.
        measured: the k largest eigenvalues of the layer's exact block of the Fisher matrix.
        cosines: |cos| between the i-th predicted and the i-th measured eigenvector. Equal eigenvalues may have any
            vectors of their common space; see `within`. NaN if the mean is 0, which has no direction.
        within: the length of the i-th predicted unit eigenvector's projection on the span of the k measured ones.
        spectrum: all eigenvalues of the block, largest first.

    >>> x = torch.tensor([[2.0, 0.0]]) + torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> found = outliers(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, (x, torch.zeros(4, 2)), "0")
    >>> found.layer, found.nu, round(found.rows()[0]["measured"], 6)
    ('0', 5.0, 5.0)
    """

    layer: str
    mean: Tensor = field(repr=False)
    nu: float
    predicted: Tensor
    measured: Tensor
    cosines: Tensor
    within: Tensor
    spectrum: Tensor = field(repr=False)

    def rows(self) -> list[dict[str, float]]:
        """Return one dict per outlier: `predicted`, `measured`, `cosine` and `within`."""
        columns = (self.predicted, self.measured, self.cosines, self.within)
        names = ("predicted", "measured", "cosine", "within")
        return [dict(zip(names, one, strict=True)) for one in zip(*(c.tolist() for c in columns), strict=True)]


def outliers(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    layer: str,
    *,
    count: int | None = None,
    labels: Labels = "model",
    limit: int = 5_000,
    seed: int = 0,
) -> Outliers:
    """Compare the predicted outliers of a linear layer's curvature with its exact spectrum.

    The block of the layer's weights in F = E[∇ℓ ∇ℓᵀ] is formed and decomposed in float64, on a copy of the model. S is
    the block of its bias (a bias of zeros if it has none), whose gradient is Ds. If the loss is the negative
    log-likelihood of one prediction per sample, F is the Gauss-Newton matrix.

    Args:
        model: the model, in the mode to analyze it in.
        loss: `loss(output, target)`.
        batch: (inputs, targets), or an iterable of these.
        layer: the name of an `nn.Linear` in the model that is applied once to each sample.
        count: k, the number of outliers; by default one for each output of the layer.
        labels: "model" for the Fisher matrix, "sampled" for one label per sample drawn from the model, "true" for the
            empirical one.
        limit: the largest number of weights and biases of the layer.
        seed: the seed of the generator that draws labels.

    Example:
        Activations of mean (2, 0) and unit covariance, and a squared error: ν = 5 and S = I.

        >>> x = torch.tensor([[2.0, 0.0]]) + torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> found = outliers(net, nn.functional.mse_loss, (x, torch.zeros(4, 2)), "0")
        >>> found.nu, found.predicted.tolist(), found.measured.round(decimals=9).tolist()
        (5.0, [5.0, 5.0], [5.0, 5.0])
    """
    with torch.inference_mode(False):
        return _outliers(
            _copied(_unwrapped(model)), loss, batch, layer, count=count, labels=labels, limit=limit, seed=seed
        )


def _outliers(
    own: nn.Module,
    loss: Loss,
    batch: Any,
    layer: str,
    *,
    count: int | None,
    labels: Labels,
    limit: int,
    seed: int,
) -> Outliers:
    module = _linear(own, layer)
    size = module.weight.numel() + module.out_features
    most = real(limit)
    if not most >= 0:
        raise DynamicsError(f"`limit` must be a number of weights ≥ 0, got {limit!r}. Try 5000.")
    if size > most:
        raise DynamicsError(
            f"The layer {layer!r} has {size:,} weights and biases, above the limit of {most:,.15g}: its curvature "
            f"would take {8 * size**2 / 1e9:,.1f} GB. Choose a smaller layer, or raise `limit`."
        )
    k = module.out_features if count is None else whole(count, 1)
    if k is None or k > module.out_features:
        raise DynamicsError(
            f"`count` must be a whole number from 1 to {module.out_features}, the outputs of the layer, got {count!r}."
        )
    own.requires_grad_(False)
    if "bias" not in dict(module.named_parameters()):
        module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    module.requires_grad_(True)
    given = list(batches(batch, module.weight.device))
    mean = _mean_activations(own, module, [(_doubled(one.args), _doubled(one.kwargs)) for one in given])
    pairs = [(_doubled(one.kwargs) or _doubled(one.args), one.target) for one in given]
    found = fisher(own, loss, pairs, labels=labels, limit=size, seed=seed)
    assert found.matrix is not None
    weight, bias = (found.slices[name] for name in found.parameters)
    measured, vectors = torch.linalg.eigh(found.matrix[weight, weight])
    measured, vectors = measured.flip(0), vectors.flip(1)
    predicted, directions = predicted_outliers(mean, found.matrix[bias, bias])
    # [k, k]: the i-th predicted on the j-th measured.
    cosines = directions[:k].flatten(1) @ vectors[:, :k]
    return Outliers(
        layer,
        mean,
        float(outlier(mean)),
        predicted[:k],
        measured[:k],
        cosines.diagonal().abs(),
        cosines.norm(dim=1),
        measured,
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise DynamicsError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    return unwrapped(model)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy in float64."""
    refuse_valueless(model)
    try:
        return deepcopy(model).double()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise DynamicsError(
            f"The model cannot be copied: {type(error).__name__}: {error}. One cause is weights computed by hooks, as "
            "in torch.nn.utils.weight_norm; use torch.nn.utils.parametrizations instead."
        ) from error


def _linear(model: nn.Module, layer: str) -> nn.Linear:
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    if not isinstance(layer, str) or layer not in linears:
        raise DynamicsError(
            f"`layer` must be the name of a linear layer, got {layer!r}. The model's are "
            f"{', '.join(map(repr, linears)) or 'none'}."
        )
    found = linears[layer]
    if is_parametrized(found) or "weight" not in found._parameters:
        raise DynamicsError(
            f"The weights of {layer!r} are computed from other parameters, which have another curvature. Choose a "
            "layer whose weight is a parameter, or use torch.nn.utils.parametrize.remove_parametrizations."
        )
    own = {id(p) for p in found.parameters(recurse=False)}
    for name, other in model.named_modules(remove_duplicate=False):
        if name != layer and any(id(p) in own for p in other.parameters(recurse=False)):
            raise DynamicsError(
                f"{layer!r} shares parameters with {name!r}, so its curvature is of both uses. Choose a layer that is "
                "applied once."
            )
    return found


@torch.no_grad()
def _mean_activations(model: nn.Module, module: nn.Linear, given: list[tuple[Any, Any]]) -> Tensor:
    """Return m, the mean over the samples of all batches."""
    seen: list[Tensor] = []

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["input"])

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        for args, kwargs in given:
            model(*args, **kwargs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise DynamicsError(
            f"The forward pass in float64 failed with {type(error).__name__}: {error}. `batch` must be (inputs, "
            "targets), with inputs a tensor, a tuple of positional arguments or a dict of keyword arguments."
        ) from error
    finally:
        handle.remove()
    if len(seen) != len(given) or any(x.dim() != 2 for x in seen):
        raise DynamicsError(
            f"The layer was applied {len(seen)} times in {len(given)} batches, to inputs of shapes "
            f"{[list(x.shape) for x in seen]}. Choose a layer that is applied once, to [samples, features]."
        )
    return torch.cat(seen).mean(0)


def _doubled(given: Any) -> Any:
    """Return the argument with its real tensors in float64."""
    if isinstance(given, Tensor):
        return given.double() if given.is_floating_point() else given
    if isinstance(given, tuple | list):
        return type(given)(_doubled(one) for one in given)
    return {key: _doubled(one) for key, one in given.items()} if isinstance(given, dict) else given
