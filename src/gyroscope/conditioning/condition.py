"""`condition`: the layer-wise conditioning of any network, from one forward and one backward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gyroscope.base import accepted
from gyroscope.base.hooks import alone
from gyroscope.conditioning import ranks
from gyroscope.conditioning.capture import Capture
from gyroscope.conditioning.result import Conditioning, LayerConditioning
from gyroscope.conditioning.solve import Spectrometer, solve
from gyroscope.conditioning.spectra import P, check_p
from gyroscope.conditioning.units import Units
from gyroscope.conditioning.uses import Use, in_order
from gyroscope.errors import ConditioningError, GyroscopeError
from gyroscope.layers.layer import Layer, chosen_layers
from gyroscope.layers.untouched import bare, requiring_gradients, tensors, untouched, without_gradients
from gyroscope.passes.activations import unavailable
from gyroscope.passes.batches import Batch, batches, is_pair
from gyroscope.passes.likelihood import known, labeled, sample_targets
from gyroscope.passes.losses import Loss, Reduction, check_reduction, counts_equally, mean_loss
from gyroscope.vectors.layout import any_sharded

Labels = Literal["true", "sampled"] | Callable[[Any, torch.Generator], Any]


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
    """Analyze how well each layer of a network is conditioned: how steep the loss is in its weight, and how uneven.

    For a layer h = Wx the Fisher information of W is approximated by F ≈ Σx ⊗ Σ∇h, the uncentered covariances of its
    input and of the loss's gradient at its output (equation 4 of Huang et al., 2020). λmax(F) = λmax(Σx) λmax(Σ∇h) says
    how steep the loss is, κ_p(F) = λmax/λ_p how hard the layer is to train; both come from the spectra of the two
    factors, without forming F (proposition 1). docs/conditioning.md has all conventions.

    Takes one forward and one backward pass per batch, in the model's current mode. Weights, gradients, buffers, random
    numbers and modes are left as they were.

    Args:
        model: any module. A compiled model is run uncompiled. For a model that is data-parallel or sharded with FSDP2,
            all ranks call together, each with its part of the batch.
        loss: `loss(output, target)`: a mean over the batch, a sum, or one value per sample.
        batch: (inputs, targets), or an iterable of these; inputs are a tensor, a tuple of positional arguments or a
            dict of keyword arguments.
        p: which κ_p, as shares in (0, 1] of the dimension; empty for λmax alone, which is cheaper.
        labels: "true" for the given targets; "sampled" to draw them from the model's own distribution, which is known
            for the usual losses; or a function (output, generator) → targets.
        patches: read convolutions by the patches they see, as K-FAC does, instead of by their channels.
        layers: a list from `gyroscope.layers`, or glob patterns on the names of layers; all layers if None.
        spectra: keep the full spectra of both factors.
        units: also count dying and full units.
        reduction: "mean" or "sum" for a loss that gives one number; "auto" finds out.
        group: the process group whose ranks share the batch; "auto" for that of DDP or FSDP2, None for this rank alone.
        seed: the seed of the generator that draws labels.

    Returns:
        The analysis. Print it, or use `rows()`, `to_pandas()` and `spectra`.

    Raises:
        ConditioningError: an argument is invalid, or no layer could be analyzed; the model is left as it was.

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
    chosen = list({id(one.parameter): one for one in chosen_layers(model, layers, ConditioningError)}.values())
    shares = check_p(p)
    check_reduction(reduction)
    if not callable(loss):
        raise ConditioningError(f"`loss` must be a function of (output, target), got {type(loss).__name__}.")
    if not callable(labels) and not (isinstance(labels, str) and labels in ("true", "sampled")):
        raise ConditioningError(
            f"`labels` must be 'true', 'sampled' or a function (output, generator) → targets, got {labels!r}."
        )
    patches = accepted.flag(patches, "patches", ConditioningError)
    spectra = accepted.flag(spectra, "spectra", ConditioningError)
    units = accepted.flag(units, "units", ConditioningError)
    seed = accepted.seed(seed, ConditioningError)
    groups = ranks.groups_given(model, group)
    spectrometer = None
    if not groups and is_pair(batch):
        # There is one batch: factors can be decomposed as soon as they are read.
        spectrometer = Spectrometer(full=bool(shares) or spectra)
    passes = _Passes(
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


class _Passes:
    """The passes over the batches, and their results."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        loss: Loss,
        labels: Labels,
        groups: list[Any],
        *,
        reduction: Reduction,
        patches: bool,
        units: bool,
        seed: int,
        spectrometer: Spectrometer | None,
    ) -> None:
        self.model, self.layers, self.loss, self.labels, self.reduction = bare(model), layers, loss, labels, reduction
        self.groups = groups
        # Kept from now on: within a pass FSDP2 replaces them, and leaves gradients on these.
        self.weights = [layer.parameter for layer in layers]
        self.device = self.weights[0].device
        self.generator = torch.Generator(self.device).manual_seed((seed + ranks.place(groups)) % 2**64)
        self.sharded = any_sharded(self.model.parameters())
        self.spectrometer = spectrometer
        self.capture = Capture(
            self.model,
            layers,
            patches=patches,
            top=spectrometer is not None and not spectrometer.full,
            complete=None if spectrometer is None else self._complete,
        )
        self.capture.waits = True
        self.reentrant = False
        self.hidden = unavailable(self.model) is not None
        self.probe = Units(self.model, layers) if units and not self.hidden else None
        self.gradients: dict[int, Tensor] = {}
        self.notes: dict[str, None] = {}
        self.times = 1.0  # the gradients are still to be multiplied by this
        self.samples = self.batches = 0
        self.labeled = self.counted = self.total = 0.0
        self.equal = True  # False once a batch was found whose samples have different weights

    def run(self, given: Any) -> None:
        """Pass all batches through the model."""
        with ExitStack() as stack:
            # A surrounding inference mode would give tensors without gradients.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(untouched(self.model))
            if isinstance(self.loss, nn.Module):
                stack.enter_context(untouched(self.loss))
            if isinstance(self.loss, nn.Module):
                stack.enter_context(without_gradients(self.loss))
            if self.sharded:
                stack.enter_context(without_gradients(self.model))
            else:
                stack.enter_context(requiring_gradients(layer.parameter for layer in self.layers))
            if self.hidden:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            _show_recurrences(self.model, self.device, stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(alone(self.capture, self.probe))
            self.capture.attach()
            stack.callback(self.capture.detach)
            stack.callback(setattr, self.capture, "complete", None)  # a bound method, which would keep this alive
            if self.probe is not None:
                self.probe.attach()
                stack.callback(self.probe.detach)
            # The passes of a sharded model wait for all ranks: a rank that fails must not leave the others waiting.
            together = self.groups if self.sharded else []
            for batch in ranks.in_step(batches(given, self.device), together):
                self._batch(batch, together)

    def _complete(self, use: Use) -> None:
        assert self.spectrometer is not None
        self.spectrometer.take(use.x)
        self.spectrometer.take(use.g)

    def _batch(self, batch: Batch, together: list[Any]) -> None:
        try:
            output = self.model(*batch.args, **batch.kwargs)
        except Exception as error:
            raise ConditioningError(
                f"The forward pass failed with {type(error).__name__}: {error}. The model was left as it was. `batch` "
                "must be (inputs, targets), with inputs a tensor, a tuple of positional arguments or a dict of keyword "
                "arguments."
            ) from error
        try:
            target = self._target(output, batch.target)
            n = _samples(output, target)
            if n == 0:
                raise ConditioningError("A batch is empty: the model's output has no rows, or there are no labels.")
            value, note = self._loss(output, target)
            weight = labeled(self.loss, target, n)
            self._weigh(output, target)
        except Exception as error:
            ranks.agree(error, together)
            raise
        counts = ranks.agree(None, together, weight)
        if note is not None:
            self.notes[note] = None
        self.reentrant = self.capture.find_functional([value])
        # Gradients of the mean over many samples may be too small for half precision; those of the sum are not.
        part = 1.0 if value.dtype is not torch.float16 else min(1.0, 2**15 / max(counts))
        self.capture.scale = scale = weight * part
        found = self._backward(value, scale)
        # FSDP2 has averaged over the ranks.
        self._add(found, sum(counts), part * sum(counts) / len(counts))
        if self.capture.broken is not None:
            broken = self.capture.broken
            raise ConditioningError(f"Reading a layer failed with {type(broken).__name__}: {broken}") from broken
        # The mean over all batches weights each by its labels; `result` divides by their share of all samples.
        self.capture.close(scale, share=1.0 if self.spectrometer is not None else weight / n)
        self.total += float(value.detach()) * weight
        self.samples += n
        self.labeled += weight
        self.batches += 1

    def _add(self, found: dict[int, Tensor], n: float, scale: float) -> None:
        """Update the mean over all batches; a layer that a batch does not use has a gradient of zero there."""
        dense = {i: g if g.layout is torch.strided else g.to_dense() for i, g in found.items()}
        self.counted += n
        if self.counted == n:
            self.gradients, self.times = dense, 1 / scale
            return
        share = n / self.counted
        held = {i: _wide(g) * (self.times * (1 - share)) for i, g in self.gradients.items()}
        for i, gradient in dense.items():
            part = _wide(gradient) * (share / scale)
            held[i] = held[i] + part if i in held else part
        self.gradients, self.times = held, 1.0

    def _target(self, output: Any, target: Any) -> Any:
        if self.labels == "true":
            return target
        detached = output.detach() if isinstance(output, Tensor) else output
        try:
            if callable(self.labels):
                return self.labels(detached, self.generator)
            return sample_targets(self.loss, detached, generator=self.generator, like=target)
        except GyroscopeError:
            raise
        except Exception as error:
            asked = "The function `labels`" if callable(self.labels) else "Drawing labels from the model"
            raise ConditioningError(
                f"{asked} failed with {type(error).__name__}: {error}. The output is a {type(output).__name__}. A "
                "function is called as labels(output, generator); labels='sampled' needs a tensor."
            ) from error

    def _loss(self, output: Any, target: Any) -> tuple[Tensor, str | None]:
        try:
            value, note = mean_loss(self.loss, output, target, reduction=self.reduction)
        except GyroscopeError:
            raise
        except Exception as error:
            raise ConditioningError(
                f"The loss failed with {type(error).__name__}: {error}. It is called as loss(output, target)."
            ) from error
        if not value.requires_grad:
            raise ConditioningError(
                "The loss does not depend on the weights of any layer: it has no gradient. Check that the output is "
                "not detached or computed under no_grad."
            )
        if not torch.isfinite(value):
            raise ConditioningError(f"The loss is {float(value.detach())}, so its gradients are not finite either.")
        return value, note

    def _weigh(self, output: Any, target: Any) -> None:
        """Refuse to average over batches or ranks if an unknown loss hides the weights of its samples."""
        if self.spectrometer is None and self.reduction == "auto" and known(self.loss) is None:
            self.equal = self.equal and counts_equally(self.loss, output, target)
        if not self.equal and (self.batches or self.groups):
            raise ConditioningError(
                "The samples do not all count the same in the loss, for example because labels are ignored or classes "
                "have weights, and the weights are not known, so batches or ranks cannot be averaged. Pass torch's own "
                "loss or a functools.partial of it, a loss with one value per sample, or all samples in one batch; "
                'reduction="mean" lets every label count the same.'
            )

    def _backward(self, value: Tensor, scale: float) -> dict[int, Tensor]:
        """Return the gradient of `scale` times the loss at each layer's weight."""
        parameters = self.weights
        seed = torch.full_like(value, scale)
        self.capture.waits = False
        try:
            if not self.sharded and not self.reentrant:
                # `backward`, which reentrant checkpoints and FSDP2 need, would add to `.grad` and run the hooks that
                # optimizers register on the accumulation.
                found = torch.autograd.grad(value, parameters, seed, allow_unused=True)
                return {i: gradient for i, gradient in enumerate(found) if gradient is not None}
            with nullcontext() if self.sharded else without_gradients(self.model):
                torch.autograd.backward(value, seed)
                gradients = {i: p.grad.detach() for i, p in enumerate(parameters) if p.grad is not None}
            for p in self.model.parameters() if self.sharded else ():
                p.grad = None
            return gradients
        except Exception as error:
            raise ConditioningError(
                f"The backward pass failed with {type(error).__name__}: {error}. The weights of all layers require "
                "gradients in it, including frozen ones."
            ) from error
        finally:
            self.capture.waits = True

    def result(self, *, p: tuple[float, ...], spectra: bool) -> Conditioning:
        """Return the numbers; called by all ranks together."""
        groups = self.groups
        uses = {key: use for key, use in self.capture.uses.items() if use.x.samples and use.g.samples}
        units = self._units(groups)
        with torch.no_grad():
            times = ranks.mean(float(self.samples), self.labeled, groups, self.device)
            for use in uses.values() if self.spectrometer is None else ():
                use.g.rescale(times)
            if groups:
                uses = ranks.gather(uses, groups, self.device)
                if not self.sharded:
                    weights = [layer.parameter for layer in self.layers]
                    own = {i: _wide(gradient) * self.times for i, gradient in self.gradients.items()}
                    self.gradients = ranks.mean_gradients(own, self.labeled, len(self.layers), groups, weights)
                    self.times = 1.0
            mean = ranks.mean(self.total, self.labeled, groups, self.device)
            ordered = in_order(uses)
            entries, untreated = ranks.together(groups, lambda: self._solved(ordered, units, p=p, spectra=spectra))
        seen = {use.position for use in ordered}
        missing = {
            layer.name: self.capture.reasons.get(i, "no use of it was found")
            for i, layer in enumerate(self.layers)
            if i not in seen
        }
        if partly := self._partly(seen):
            more = f"; and {len(partly) - 4} more" if len(partly) > 4 else ""
            self.notes[f"some uses of weights are not included: {'; '.join(partly[:4])}{more}"] = None
        untreated = missing | untreated
        if not entries:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(untreated.items())[:4])
            raise ConditioningError(f"None of the {len(self.layers)} layers could be analyzed: {reasons}.")
        return Conditioning(tuple(entries), p, untreated, tuple(self.notes), mean, self.batches)

    def _partly(self, seen: set[int]) -> list[str]:
        """Return the layers whose row leaves out some uses of their weight, and why."""
        reasons = ((i, self.layers[i], why) for i, why in sorted(self.capture.reasons.items()) if i in seen)
        # A parameter that the weight is computed from has no other use than that.
        own = ((layer, why) for i, layer, why in reasons if _is_own(layer, self.weights[i]))
        return [f"{layer.name}: {why}" for layer, why in own]

    def _solved(
        self, uses: list[Use], units: dict[int, tuple[float, float]], *, p: tuple[float, ...], spectra: bool
    ) -> tuple[list[LayerConditioning], dict[str, str]]:
        return solve(
            uses,
            self.layers,
            self.gradients,
            units,
            p=p,
            spectra=spectra,
            spectrometer=self.spectrometer,
            times=self.times,
        )

    def _units(self, groups: list[Any]) -> dict[int, tuple[float, float]]:
        if self.probe is None:
            return {}
        if groups:
            self.probe.gather(groups)
        return self.probe.shares()


def _show_recurrences(model: nn.Module, device: torch.device, stack: ExitStack) -> None:
    """Compute recurrent networks product by product: the fused kernels of mkldnn and cuDNN hide the products."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        else:
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)


def _is_own(layer: Layer, weight: Tensor) -> bool:
    """Return True if a module multiplies by the parameter itself, not by a weight computed from it.

    Torch's hooks for pruning, weight and spectral normalization compute a weight from `weight_orig` and `weight_v`.
    """
    hooked = layer.attribute.endswith(("_orig", "_v"))
    return layer.module._parameters.get(layer.attribute) is weight and not hooked


def _wide(gradient: Tensor) -> Tensor:
    """Return a gradient in a dtype wide enough for sums."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _samples(output: Any, target: Any) -> int:
    """Return the number of samples in a batch: the number of labels, or the output's first dimension."""
    if isinstance(target, Tensor) and target.dim() > 0 and not target.is_floating_point():
        return target.numel()
    first = next((one for one in tensors(output) if one.dim() > 0), None)
    return 1 if first is None else int(first.shape[0])
