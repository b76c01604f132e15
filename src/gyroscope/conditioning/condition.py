"""`condition`: the layer-wise conditioning of any network, from one forward and one backward pass a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from gyroscope.base import accepted
from gyroscope.conditioning import ranks
from gyroscope.conditioning.passes import Labels, Passes
from gyroscope.conditioning.result import Conditioning
from gyroscope.conditioning.solve import Spectrometer
from gyroscope.conditioning.spectra import P, check_p
from gyroscope.errors import ConditioningError
from gyroscope.layers.layer import Layer
from gyroscope.layers.layer import layers as find_layers
from gyroscope.passes.batches import is_pair
from gyroscope.passes.losses import Loss, Reduction, check_reduction


def condition(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    p: Sequence[float] = P,
    labels: Labels = "true",
    patches: bool = False,
    layers: Sequence[Layer] | str | Iterable[str] | None = None,
    spectra: bool = False,
    units: bool = True,
    reduction: Reduction = "auto",
    group: Any = "auto",
    seed: int = 0,
) -> Conditioning:
    """Analyse how well each layer of a network is conditioned: how steep the loss is in its weight, and how uneven.

    For a layer h = Wx the Fisher information of W is approximated by F ≈ Σx ⊗ Σ∇h, the uncentred covariances of its
    input and of the loss's gradient at its output (equation 4 of Huang et al., 2020). λmax(F) = λmax(Σx) λmax(Σ∇h) says
    how steep the loss is, κ_p(F) = λmax/λ_p how hard the layer is to train; both come from the spectra of the two
    factors, without forming F (proposition 1). docs/conditioning.md has all conventions.

    One forward and one backward pass a batch, in the mode the model is in. Weights, gradients, buffers, random numbers
    and modes are left as they were found.

    Args:
        model: any module; also compiled (it is run uncompiled), data-parallel or sharded with FSDP2: then all ranks
            call together, each with its part of the batch.
        loss: `loss(output, target)`: a mean over the batch, a sum, or one value a sample.
        batch: (inputs, targets), or an iterable of these; inputs are a tensor, a tuple of positional arguments or a
            dict of keyword arguments.
        p: which κ_p, shares in (0, 1] of the dimension; none at all for λmax alone, which is cheaper.
        labels: "true" for the targets as given; "sampled" to draw them from the model's own distribution, which is
            known for the usual losses; or a function (output, generator) → targets.
        patches: read convolutions by the patches they see, as K-FAC does, and not by their channels alone.
        layers: which layers, from `gyroscope.layers`; or glob patterns on their names.
        spectra: keep the full spectra of both factors.
        units: also look for dying and full units.
        reduction: "mean" or "sum" for a loss that gives one number; "auto" finds out.
        group: the process group whose ranks share the batch; "auto" is that of DDP or FSDP2, None is this rank alone.
        seed: of the generator that labels are drawn with.

    Returns:
        The analysis: print it, or ask for `rows()`, `to_pandas()`, `spectra`.

    Raises:
        ConditioningError: nothing could be treated, or an argument cannot be; the model is as it was.

    Example:
        >>> import gyroscope, torch, torch.nn.functional as F
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = gyroscope.condition(net, F.cross_entropy, (torch.randn(64, 5), torch.arange(64) % 3), p=(0.5, 1.0))
        >>> row = found.rows()[1]
        >>> row["layer"], row["rank_x"], row["kappa_f"][1.0] >= row["kappa_f"][0.5] >= 1
        ('2.weight', 8, True)
        >>> abs(row["lambda_f"] - row["lambda_x"] * row["lambda_g"]) < 1e-12
        True
    """
    chosen = _layers(model, layers)
    shares = check_p(p)
    check_reduction(reduction)
    if not callable(loss):
        raise ConditioningError(f"The loss is a {type(loss).__name__}; accepted is a function of (output, target).")
    if not callable(labels) and not (isinstance(labels, str) and labels in ("true", "sampled")):
        raise ConditioningError(
            f"labels is {labels!r}; accepted are 'true', 'sampled' or a function (output, generator) → targets."
        )
    spectra = accepted.flag(spectra, "spectra", ConditioningError)
    units = accepted.flag(units, "units", ConditioningError)
    seed = accepted.seed(seed, ConditioningError)
    groups = ranks.groups_given(model, group)
    spectrometer = None
    if not groups and is_pair(batch):
        # No further samples will come: factors can be decomposed as soon as they are read.
        spectrometer = Spectrometer(full=bool(shares) or spectra)
    passes = Passes(
        model,
        chosen,
        loss,
        labels,
        groups,
        reduction=reduction,
        patches=patches,
        units=units,
        seed=seed,
        spectrometer=spectrometer,
    )
    problem: Exception | None = None
    try:
        passes.run(batch)
    except Exception as error:
        problem = error
    if groups:
        ranks.agree(problem, groups)
    elif problem is not None:
        raise problem
    return passes.result(p=shares, spectra=spectra)


def _layers(model: Any, chosen: Sequence[Layer] | str | Iterable[str] | None) -> list[Layer]:
    if not isinstance(model, nn.Module):
        raise ConditioningError(f"The model is a {type(model).__name__}; accepted is a torch.nn.Module.")
    some = None if chosen is None else accepted.listed(chosen)
    found: list[Layer]
    if some and all(isinstance(one, Layer) for one in some):
        found = list({id(one.parameter): one for one in some}.values())
    elif some is None or (some and all(isinstance(one, str) for one in some)):
        found = find_layers(model, include=some)
    else:
        raise ConditioningError(
            "layers must be a list from gyroscope.layers(model), or glob patterns on the layers' names; given "
            f"{[type(one).__name__ for one in some][:3] or 'an empty list'}."
        )
    for layer in found:
        if layer.parameter.is_meta:
            raise ConditioningError(f"{layer.name!r} is on the meta device and has no values yet.")
    return found
