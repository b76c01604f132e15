"""What is looked at on sampled steps alone: activations, second moments, the spread over neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.transfer import to_host
from gyroscope.layers.layer import Layer
from gyroscope.monitor import moments, neurons
from gyroscope.monitor.exchanged import Exchanged
from gyroscope.monitor.track import Track
from gyroscope.passes import activations as acts
from gyroscope.store.record import QuantityInfo

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule
    from gyroscope.monitor.conditioned import Conditioned


class Detail:
    """The detail of the layers of one optimizer."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        *,
        activations: bool,
        spread: bool,
        threshold: float,
        conditioning: Schedule | None = None,
        shared: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.exchanged = Exchanged(model, layers)
        self.neurons = neurons.Neurons(layers) if spread else None
        hidden = acts.unavailable(model) if activations or conditioning else None
        self.why_not = hidden
        self.conditioned: Conditioned | None = None
        if conditioning is not None and not hidden:
            from gyroscope.monitor.conditioned import Conditioned  # and with it all of conditioning

            self.conditioned = Conditioned(model, layers, conditioning, shared=shared)
        self.probe = acts.ActivationProbe(model, layers, threshold=threshold) if activations and not hidden else None
        self.attached = False

    @property
    def infos(self) -> dict[str, QuantityInfo]:
        """Names, units and meanings of what may be found."""
        found = dict(moments.INFO)
        if self.neurons is not None:
            found |= neurons.INFO
        if self.probe is not None:
            found |= acts.INFO
        if self.conditioned is not None:
            found |= self.conditioned.infos
        return found

    @property
    def looks_inside(self) -> bool:
        """Whether hooks are on, of this or of the analysis of conditioning."""
        return self.attached or (self.conditioned is not None and self.conditioned.attached)

    def attach(self) -> None:
        """Put forward hooks on, to look at one step."""
        if self.probe is not None:
            self.probe.reset()
            if not self.attached:
                self.probe.attach()
            self.attached = True

    def detach(self) -> None:
        """Take them off."""
        if self.probe is not None and self.attached:
            self.probe.detach()
            self.attached = False

    def collect(self, track: Track) -> dict[str, Tensor]:
        """What was seen in this step, on its way to host memory."""
        if not track.sampling:
            return self._analysed()
        parameters = track.parameters()
        found: dict[str, Tensor | None] = {"moments": moments.moment_percentiles(self.optimizer, parameters)}
        if self.probe is not None and self.attached:
            found["activations"] = self.probe.collect()
        if self.neurons is not None:
            found["neurons"] = self.neurons.measure(parameters, track.reference)
        seen = {name: to_host(value) for name, value in found.items() if value is not None}
        return seen | self._analysed()

    def _analysed(self) -> dict[str, Tensor]:
        found = None if self.conditioned is None else self.conditioned.take()
        return {} if found is None else {"conditioning": found}

    def resolve(self, found: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """The same as values by quantity, one a layer, once it has arrived."""
        values: dict[str, npt.NDArray[np.float32]] = {}
        for key, names in (("moments", moments.NAMES), ("activations", acts.COLUMNS)):
            if key in found:
                columns = found[key].float().numpy().astype(np.float32).T
                values |= dict(zip(names, columns, strict=True))
        if "neurons" in found and self.neurons is not None:
            rows = self.neurons.quantiles(found["neurons"]).astype(np.float32)
            values |= dict(zip(neurons.NAMES, rows, strict=True))
        kept = {name: value for name, value in values.items() if np.isfinite(value).any()}
        if "conditioning" in found and self.conditioned is not None:
            with np.errstate(over="ignore"):
                columns = found["conditioning"].numpy().astype(np.float32).T
            kept |= {n: v for n, v in zip(self.conditioned.names, columns, strict=True) if not np.isnan(v).all()}
        return kept
