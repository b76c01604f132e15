"""Arguments of other types, modes, losses with a state, and watched trainings around an analysis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.errors import ConditioningError
from gyroscope.passes.batches import Batch
from gyroscope.passes.network import first_output, independent, network


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def pair(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(seed)), torch.arange(16) % 3


X, Y = pair()


@pytest.mark.parametrize("chosen", [3, 1.5, mlp()], ids=["an integer", "a float", "a model"])
def test_what_is_neither_a_layer_nor_a_pattern_chooses_no_layers(chosen: Any) -> None:
    with pytest.raises(ConditioningError, match="glob patterns"):
        gyroscope.condition(mlp(), F.cross_entropy, (X, Y), layers=chosen)


def test_a_layer_given_twice_is_treated_once() -> None:
    model = mlp()
    first = gyroscope.layers(model)[0]
    found = gyroscope.condition(model, F.cross_entropy, (X, Y), layers=[first, first])
    assert found.layers == ("0.weight",)
    assert found.untreated == {}


@pytest.mark.parametrize("group", [3, "all"])
def test_a_group_is_one_of_processes(group: Any) -> None:
    with pytest.raises(ConditioningError, match=f"`group` must be 'auto', None or a torch.* got {group!r}"):
        gyroscope.condition(mlp(), F.cross_entropy, (X, Y), group=group)


@pytest.mark.parametrize("seed", ["a", None, 1.5, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ConditioningError, match=f"`seed` must be a whole number .*, got {seed!r}"):
        gyroscope.condition(mlp(), F.cross_entropy, (X, Y), seed=seed)


def test_labels_may_not_be_an_array() -> None:
    with pytest.raises(ConditioningError, match=r"`labels` must be .* got array"):
        gyroscope.condition(mlp(), F.cross_entropy, (X, Y), labels=np.array([1, 2]))


@pytest.mark.parametrize(
    ("labels", "error"),
    [(lambda output, generator: 1 / 0, "ZeroDivisionError"), (lambda output: output, "TypeError")],
    ids=["an error", "one argument"],
)
def test_a_function_of_labels_that_fails_is_named(labels: Callable[..., Any], error: str) -> None:
    with pytest.raises(ConditioningError, match=f"The function `labels` failed with {error}"):
        gyroscope.condition(mlp(), F.cross_entropy, (X, Y), labels=labels)


def test_labels_cannot_be_sampled_for_a_tuple() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            return h, h.mean()

    with pytest.raises(ConditioningError, match="The output is a tuple"):
        gyroscope.condition(Two(), F.cross_entropy, (X, Y), labels="sampled")


def test_inference_mode_outside_changes_nothing() -> None:
    model = mlp()
    expected = gyroscope.condition(model, F.cross_entropy, (X, Y)).rows()
    with torch.inference_mode():
        assert gyroscope.condition(model, F.cross_entropy, (X, Y)).rows() == expected
        made_here = X * 1.0
        assert made_here.is_inference()
        assert gyroscope.condition(model, F.cross_entropy, (made_here, Y)).rows() == expected
        assert torch.is_inference_mode_enabled()


def test_statistics_are_as_they_were_after_an_analysis_in_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with torch.inference_mode():
        gyroscope.condition(model, F.cross_entropy, (X, Y))
    assert int(model[1].num_batches_tracked) == 0
    assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_a_loss_with_a_state_is_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.n += 1
            self.calls += 1
            return F.cross_entropy(output, target)

    loss = Counts()
    gyroscope.condition(mlp(), loss, (X, Y))
    assert (float(loss.n), loss.calls) == (0.0, 0)


class Checkpointed(nn.Module):
    """A reentrant checkpoint, from the input on or behind a layer, and a layer behind it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.body, self.at, self.head = mlp(), at, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body[self.at :], self.body[: self.at](x), use_reentrant=True))


def test_a_reentrant_checkpoint_that_begins_at_the_input_is_gone_through() -> None:
    model = Checkpointed(0)
    leaf = X.clone().requires_grad_()
    found = gyroscope.condition(model, F.cross_entropy, (leaf, Y))
    plain = gyroscope.condition(nn.Sequential(model.body, model.head), F.cross_entropy, (X, Y))
    assert found.layers == ("body.0.weight", "body.2.weight", "head.weight")
    for one, other in zip(found.entries, plain.entries, strict=True):
        assert (one.samples, one.dying, one.full) == (other.samples, other.dying, other.full)
        for name in ("lambda_x", "lambda_g", "lambda_f", "domination"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6), name
    assert leaf.grad is None


def trained(folder: Path, *, between: bool) -> tuple[gyroscope.Run, list[Tensor]]:
    """A watched training, analyzed by hand before, within and after its passes; also its weights at the end."""
    model = Checkpointed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def perhaps(seed: int) -> None:
        if between:
            x, y = pair(seed)
            gyroscope.condition(model, F.cross_entropy, (100 * x, y))

    with gyroscope.watch(model, optimizer, folder, budget=None, detail_every=1, conditioning=1) as monitor:
        for i in range(3):
            optimizer.zero_grad()
            perhaps(90 + i)
            x, y = pair(i)
            value = F.cross_entropy(model(x), y)
            perhaps(80 + i)
            value.backward()
            perhaps(70 + i)
            optimizer.step()
        assert monitor.error is None
    return gyroscope.load(folder), [p.detach() for p in model.parameters()]


def test_an_analysis_of_a_watched_model_with_a_reentrant_checkpoint_leaves_the_watch_alone(tmp_path: Path) -> None:
    (plain, weights), (disturbed, others) = (trained(tmp_path / str(b), between=b) for b in (False, True))
    assert plain.steps.tolist() == disturbed.steps.tolist() == [0, 1, 2, 3]
    assert plain.where("lambda_f").tolist() == [1, 2, 3]
    assert np.isfinite(plain.series("lambda_g")[1:]).all()
    assert plain.quantities.keys() == disturbed.quantities.keys()
    for name in plain.quantities:
        np.testing.assert_array_equal(plain.series(name), disturbed.series(name), err_msg=name)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


class Wasteful(nn.Sequential):
    """Calls its layers a second time for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(100 * x)
        return super().forward(x)


class Frugal(nn.Sequential):
    """Computes its layers again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


@pytest.mark.parametrize("kind", [Wasteful, Frugal])
def test_layers_that_are_called_in_vain_or_computed_again_have_the_same_factors(kind: type[nn.Sequential]) -> None:
    torch.manual_seed(0)
    model = kind(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    x, y = torch.randn(8, 1, 4, 4), torch.arange(8) % 4

    def factors(model: nn.Module) -> list[dict[str, Any]]:
        found = gyroscope.condition(model, nn.functional.cross_entropy, (x, y)).rows()
        return [{key: row[key] for key in ("lambda_x", "lambda_g", "kappa_x", "kappa_g", "lambda_f")} for row in found]

    wanted = factors(nn.Sequential(*model))
    assert factors(model) == wanted


def test_another_default_device_does_not_change_how_a_network_is_run() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    f = network(model, dict(model.named_parameters()), Batch((inputs,), {}, None), None)
    with torch.device("meta"):
        output = first_output(f)
        assert independent(f, output)
    assert torch.equal(output, model(inputs))
