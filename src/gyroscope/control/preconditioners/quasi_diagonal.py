"""The quasi-diagonal preconditioner: centered, standardized activations without changing the network (equation 10).

Its statistics are running means and variances of the layers' inputs and, with labels, mean squares of the gradients at
their outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.hooks import is_capturing
from gyroscope.control.preconditioners.affine_layers import (
    Parts,
    Place,
    Shelf,
    Windows,
    patch_moments,
    shelves,
    windows,
)
from gyroscope.control.preconditioners.observer import Labels
from gyroscope.control.preconditioners.preconditioner import Exchange, Preconditioner
from gyroscope.control.preconditioners.running import Averages, Spreads, mixed, noise, refuse_in_a_graph
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.domains import fraction, nonnegative
from gyroscope.vectors import backend

if TYPE_CHECKING:
    from gyroscope.control.preconditioners.direction_kernel import Directions
    from gyroscope.control.preconditioners.moment_kernels import Measured, MomentLaunches


def quasi_diagonal(gradient: Parts, mean: Tensor, variance: Tensor) -> Parts:
    """Apply R Rᵀ to the gradient of a layer s = W a + b (equation 10 of Grosse's chapter 5).

    Gradient descent on W̃ = W Σ^(1/2) and b̃ = b + W m (equation 9) is, on W and b, descent along

        P_W = (∇W − ∇b mᵀ) Σ⁻¹        P_b = ∇b − P_W m

    which is the inverse of [RRᵀ]⁻¹ = ((Σ + mmᵀ, m), (mᵀ, 1)) ⊗ I. Without a bias, which would take up the shift, it is
    the inverse of the block of the weights, (Σ + mmᵀ) ⊗ I. A coordinate whose variance is 0 does not move.

    Args:
        gradient: ∇W as [..., outputs, inputs] of one layer or several, and ∇b, or None if there is no bias.
        mean: m, [..., inputs].
        variance: the diagonal of Σ, [..., inputs].

    Returns:
        P_W and P_b.

    >>> quasi_diagonal((torch.tensor([[8.0]]), torch.tensor([2.0])), torch.tensor([3.0]), torch.tensor([4.0]))
    (tensor([[0.5000]]), tensor([0.5000]))
    """
    precision = _reciprocal(variance)
    scaled = precision * mean
    return _direction(gradient, mean, precision, scaled / (1 + (scaled * mean).sum(-1, keepdim=True)))


def _direction(gradient: Parts, mean: Tensor, precision: Tensor, back: Tensor) -> Parts:
    W, b = gradient
    m, precision = mean.unsqueeze(-2), precision.unsqueeze(-2)
    P = W * precision if b is None else torch.addcmul(W, b.unsqueeze(-1), m, value=-1).mul_(precision)
    # Products of several matrices with one vector each are slow on a CPU.
    along = P @ m.mT if P.is_cuda or len(P) == 1 else (P * m).sum(-1, keepdim=True)
    if b is not None:
        return P, b - along.squeeze(-1)
    return P.addcmul_(along, back.unsqueeze(-2), value=-1), None  # Sherman and Morrison's formula


def _beyond_rounding(variance: Tensor, mean: Tensor) -> Tensor:
    """Return variances, and 0 where they are only the rounding of equal numbers."""
    return torch.where(variance > (noise(mean.dtype) * mean).square(), variance, 0.0)


def _reciprocal(values: Tensor) -> Tensor:
    return torch.where(values > 0, values.reciprocal(), 0.0)


@dataclass(frozen=True, eq=False)
class Use:
    """A use of a layer: the mean and variance of its input, of rows or of pixels, and the norms of gradients."""

    index: int
    mean: Tensor
    variance: Tensor
    slopes: Tensor | None
    samples: int
    batch: object
    captured: bool


@dataclass(frozen=True, eq=False)
class Held:
    """The statistics of the layers on one device."""

    shelf: Shelf
    activations: Spreads
    slopes: Averages | None


class Moments:
    """The moments of layers, as of the last `fold`.

    Args:
        places: the layers.
        decay: the decay of the averages.
        scales: whether gradients are measured.
    """

    def __init__(self, places: Sequence[Place], decay: float, scales: bool) -> None:
        self.places, self.decay, self.scales = tuple(places), decay, scales
        self._held: list[Held] = []
        self._where: dict[int, tuple[Held, int]] = {}
        self._seen: set[int] = set()
        self._uses: list[Use] = []
        self._measured: list[Measured] = []
        self._launches: list[MomentLaunches] | None = None
        self._windows: dict[tuple[Any, ...], Windows] = {}

    @property
    def held(self) -> list[Held]:
        """The statistics, on the devices that the weights have at the first use."""
        self._make()
        return self._held

    @property
    def complete(self) -> bool:
        """True if there are statistics of all layers."""
        return len(self._seen) == len(self.places)

    def add(self, uses: Sequence[tuple[int, Tensor, Tensor | None]], samples: int, batch: object) -> None:
        """Add uses of layers; see `gyroscope.control.preconditioners.observer.Statistics`."""
        if len(uses) == len(self.places) and not self.scales:
            indices, xs = [i for i, _, _ in uses], [x for _, x, _ in uses]
            for launches in self._kernels():
                if (measured := launches.measure(indices, xs, samples, batch)) is not None:
                    self._measured.append(measured)
                    return
        captured = is_capturing()
        for index, x, g in uses:
            place = self.places[index]
            slopes = place.norms(g) if self.scales and g is not None else None
            self._uses.append(Use(index, *place.pixel_moments(x), slopes, samples, batch, captured))

    def fold(self) -> None:
        """Update the averages with the uses added."""
        # Uses outside of a graph are not part of it, and the other way round.
        captured = is_capturing()
        uses = [use for use in self._uses if use.captured == captured]
        measured = [one for one in self._measured if one.captured == captured]
        self._uses, self._measured = [], []
        if len(measured) == 1 and not uses:
            self._kernels()[0].fold(measured[0])
            self._seen.update(measured[0].indices)
            return
        for one in measured:
            found = zip(one.indices, one.plan.moments(one.partial), strict=True)
            uses += [Use(i, mean, variance, None, one.samples, one.batch, captured) for i, (mean, variance) in found]
        if not uses:
            return
        moments, slopes = self._moments(uses), self._slopes(uses)
        for held in self.held:
            order = held.shelf.order
            if any(i in moments for i in order):
                new = [moments.get(i, (None, None)) for i in order]
                held.activations.update([m for m, _ in new], [v for _, v in new])
                if held.slopes is not None:
                    held.slopes.update([slopes.get(i) for i in order])
        self._seen.update(moments)

    def known(self, index: int) -> bool:
        """Return whether there are statistics of a layer."""
        return index in self._seen

    def state(self, index: int) -> dict[str, Any]:
        """Return the statistics of a layer."""
        held, at = self._find(index)
        mean, variance = (held.activations.part(row, at).clone() for row in held.activations.value)
        own = {"mean": mean, "variance": variance, "count": int(held.activations.counts.value[at])}
        return own if held.slopes is None else {**own, "slopes": held.slopes.part(held.slopes.value[0], at).clone()}

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Load the statistics of a layer; an empty state deletes them."""
        self._uses, self._measured = [], []
        (self._seen.add if state else self._seen.discard)(index)
        if not state and not self._held:
            return
        held, at = self._find(index)
        for one, rows in ((held.activations, ("mean", "variance")), (held.slopes, ("slopes",))):
            if one is not None:
                for row, name in zip(one.value, rows, strict=True):
                    part = one.part(row, at)
                    part.copy_(state[name]) if state else part.zero_()
                one.counts.value[at] = state.get("count", 0)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the state of a layer."""
        place = self.places[index]
        own: dict[str, tuple[int, ...]] = {"mean": (place.inputs,), "variance": (place.inputs,)}
        return {**own, "slopes": (place.outputs,)} if self.scales else own

    def _kernels(self) -> list[MomentLaunches]:
        """Return the kernels that measure and average, where there are any and all layers are on one device."""
        if self._launches is None:
            if not self._held and is_capturing():
                return []
            self._launches = []
            if has_kernels(self.held):
                from gyroscope.control.preconditioners.moment_kernels import MomentLaunches

                one = self.held[0]
                self._launches = [MomentLaunches(self.places, one.shelf.order, one.activations)]
        return self._launches

    def _make(self) -> None:
        if not self._held:
            refuse_in_a_graph()
            self._held = [self._made(shelf) for shelf in shelves(self.places)]
            self._where = {i: (one, at) for one in self._held for at, i in enumerate(one.shelf.order)}

    def _made(self, shelf: Shelf) -> Held:
        order = [self.places[i] for i in shelf.order]
        spreads = Spreads([place.inputs for place in order], self.decay, shelf.like)
        slopes = Averages([place.outputs for place in order], self.decay, shelf.like) if self.scales else None
        return Held(shelf, spreads, slopes)

    def _find(self, index: int) -> tuple[Held, int]:
        self._make()
        return self._where[index]

    def _moments(self, uses: list[Use]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the mean and the variance of the coordinates of each layer that was used."""
        found: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        alike: defaultdict[tuple[Any, ...], list[Use]] = defaultdict(list)
        for use in uses:
            module = self.places[use.index].module
            if isinstance(module, nn.Conv2d):
                alike[(*_geometry(module), use.mean.shape, use.mean.dtype, use.mean.device)].append(use)
            else:
                found[use.index].append((use.mean, use.variance))
        for key, several in alike.items():
            first = several[0]
            if key not in self._windows:
                refuse_in_a_graph()
                module = self.places[first.index].module
                assert isinstance(module, nn.Conv2d)
                self._windows[key] = windows(module, first.mean)
            images = torch.stack([use.mean for use in several] + [use.variance for use in several])
            means, variances = patch_moments(images.view(2, len(several), *first.mean.shape), self._windows[key])
            for use, mean, variance in zip(several, means.unbind(), variances.unbind(), strict=True):
                found[use.index].append((mean, variance))
        return {i: mixed(parts) for i, parts in found.items()}

    def _slopes(self, uses: list[Use]) -> dict[int, Tensor]:
        """Return E[(Ds_j)²], summed over the rows of a sample, as in K-FAC, and averaged over passes of the model."""
        norms = [use.slopes for use in uses if use.slopes is not None]
        if not norms:
            return {}
        parts = torch._foreach_mul(norms, norms)
        torch._foreach_mul_(parts, [float(use.samples) for use in uses])
        found: defaultdict[int, list[Tensor]] = defaultdict(list)
        passes: defaultdict[int, set[int]] = defaultdict(set)
        for use, part in zip(uses, parts, strict=True):
            found[use.index].append(part)
            passes[use.index].add(id(use if use.batch is None else use.batch))
        return {i: own[0] if len(own) == 1 else sum(own[1:], own[0]) / len(passes[i]) for i, own in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_uses": [], "_measured": [], "_launches": None, "_windows": {}}


def has_kernels(held: Sequence[Held]) -> bool:
    """Return whether all layers are on one device for which there are kernels."""
    return len(held) == 1 and backend(held[0].shelf.like.device).__name__.endswith("triton")


def _geometry(module: nn.Conv2d) -> tuple[Any, ...]:
    around = tuple(module._reversed_padding_repeated_twice)
    return module.kernel_size, module.stride, module.dilation, around, module.padding_mode


class QuasiDiagonal(Preconditioner[Moments]):
    """Gives an optimizer the gradients of a network with centered and standardized activations (equation 10).

    With m and Σ running means and variances of a layer's input, the inner optimizer steps along `quasi_diagonal` of
    the gradient. This removes the outliers of the curvature, which come from means far from zero. The network's
    function, its forward and its backward pass do not change. A convolution is a layer on patches: m and Σ are of each
    channel at each position of the kernel.

    With labels, the scale of each unit j of the pre-activations is removed as well: row j is divided by
    S_jj = E[(Ds_j)²]. An undamped step is then invariant to affine maps of single activations and single
    pre-activations; without labels, of single activations.

    The t-th update of an average has the weight max(1/t, 1 − decay). Layers other than `nn.Linear` and `nn.Conv2d` are
    passed through, and listed in `unsupported`. Learning rates are those of coordinates with unit variance: where
    activations are small they are lower than without preconditioning. With labels "true", gradients must not be scaled
    (`GradScaler`) or accumulated over several backward passes.

    On a GPU, the gradients that the inner optimizer sees are in buffers that the next step overwrites: an optimizer
    that keeps them must copy them.

    With every=1 and no drawn labels, a whole training step can be captured in a CUDA graph, after three steps that are
    not captured.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained; it is called as a whole.
        loss: the loss, where labels are drawn.
        labels: None for equation 10 as it is; "sampled" for S under labels drawn from the model (Fisher), which takes
            another backward pass whenever it is measured; a function (output, generator) → targets that draws them;
            "true" for the labels of the training loop (empirical Fisher), where the loss is a mean over the first
            dimension of the model's output.
        biases: whether biases are preconditioned with the weights. A bias compensates the weights' step at the mean
            activation, so both must be stepped together: use False under a controller such as `Layca`, which sets the
            length of the weights' step only.
        damping: the amount added to variances and to S_jj, as a share of their mean over the layer. It prevents large
            steps along activations that hardly vary; 0 is exact.
        decay: the decay of the running averages.
        every: the number of steps between two measurements.
        seed: the seed of the generator that draws labels.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = QuasiDiagonal(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> model(3 + torch.randn(16, 4)).square().mean().backward(); optimizer.step()
        >>> optimizer.layers
        ('0', '2')

    Reference:
        Grosse, Neural net training dynamics, chapter 5, section 3.1; Ollivier, Riemannian metrics for neural networks.
    """

    prefix = "quasi_diagonal_"

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss: Loss | None = None,
        *,
        labels: Labels | None = None,
        biases: bool = True,
        damping: float = 0.1,
        decay: float = 0.95,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        nonnegative("damping", damping, hint="0.1")
        fraction("decay", decay, hint="0.95")
        if labels is None and loss is not None:
            raise DynamicsError(
                f"`loss` must be None with labels=None, which does not use it, got {loss!r}. Try labels='sampled', "
                "which scales the pre-activations as well."
            )
        self.damping = damping
        self._launches: list[Directions] | None = None
        super().__init__(
            optimizer, model, lambda found: Moments(found, decay, labels is not None),
            loss=loss, labels="true" if labels is None else labels, biases=biases, every=every, seed=seed,
            inputs=labels is None, capturable=every == 1,
        )  # fmt: skip

    def _at_once(self) -> Exchange | None:
        known = self._statistics
        if not known.complete:
            return None
        if self._launches is None:
            if is_capturing():
                return None
            self._launches = []
            if has_kernels(known.held):
                from gyroscope.control.preconditioners.direction_kernel import Directions

                self._launches = [Directions(self._places, known.held[0])]
        return self._launches[0](self.damping) if self._launches else None

    @property
    def scales(self) -> bool:
        """True if the scales of pre-activations are removed too, which takes labels."""
        return self._statistics.scales

    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        found: dict[int, Parts] = {}
        for held in self._statistics.held:
            a, cohorts = held.activations, held.shelf.cohorts
            precision = _reciprocal(self._damped(a, _beyond_rounding(a.variance, a.mean)))
            back = precision * a.mean
            back = back / a.spread(1 + a.sums(back * a.mean))
            lengths = [len(cohort.indices) * cohort.inputs for cohort in cohorts]
            means, precisions, backs = (one.split_with_sizes(lengths) for one in (a.mean, precision, back))
            scales = self._scales(held)
            for k, cohort in enumerate(cohorts):
                if any(i in gradients for i in cohort.indices):
                    W, b = cohort.stacked(gradients)
                    shape, kind = W.shape[::2], W.dtype
                    own = (one[k].view(shape).to(kind) for one in (means, precisions, backs))
                    W, b = _direction((W, b), *own)
                    if scales is not None:
                        S = scales[k].view(W.shape[:2]).to(kind)
                        W, b = W.mul_(S.unsqueeze(-1)), None if b is None else b.mul_(S)
                    found |= cohort.unstacked((W, b), gradients)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_launches": None}

    def _scales(self, held: Held) -> Sequence[Tensor] | None:
        """Return 1/S_jj, cohort by cohort."""
        if held.slopes is None:
            return None
        flat = _reciprocal(self._damped(held.slopes, held.slopes.value[0]))
        return flat.split_with_sizes([len(cohort.indices) * cohort.outputs for cohort in held.shelf.cohorts])

    def _damped(self, averages: Averages, values: Tensor) -> Tensor:
        """Return the values with a share of the layer's mean added."""
        if self.damping == 0:
            return values
        return values + averages.spread(averages.sums(values) * self.damping / averages.lengths)
