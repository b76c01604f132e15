"""The detector of scale invariance on networks of which it is known, and on models that are hard to measure."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from gyroscope.errors import DynamicsError
from gyroscope.layers.layer import layers
from gyroscope.theory.invariance import TOLERANCE, _judge, alignment, invariance, rescaled


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batch(n: int = 24, d: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(n, d), torch.arange(n) % classes


def net(norm: nn.Module | None = None, first: nn.Module | None = None) -> nn.Sequential:
    parts = [first or nn.Linear(6, 8, bias=False), norm or nn.Identity(), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


def verdicts(model: nn.Module, given=None, loss=F.cross_entropy, **options) -> dict[str, str]:
    found = invariance(model, loss, batch() if given is None else given, **options)
    return {row["layer"]: row["scale_invariant"] for row in found.rows()}


NORMS = {
    "none": (None, "no"),
    "batch": (nn.BatchNorm1d(8), "unit"),
    "batch with the ε of Keras": (nn.BatchNorm1d(8, eps=1e-3), "unit"),
    "batch in evaluation": (nn.BatchNorm1d(8).eval(), "no"),
    "layer": (nn.LayerNorm(8), "tensor"),
    "root mean square": (nn.RMSNorm(8, eps=1e-6), "tensor"),
    "group": (nn.GroupNorm(2, 8), "tensor"),
}


@pytest.mark.parametrize(("norm", "expected"), NORMS.values(), ids=NORMS)
def test_what_follows_a_layer_decides_whether_its_scale_matters(norm, expected):
    assert verdicts(net(norm)) == {"0.weight": expected, "3.weight": "no"}


def test_weight_normalization_makes_the_direction_scale_invariant_a_unit():
    assert verdicts(net(first=weight_norm(nn.Linear(6, 8)))) == {"0.weight": "unit", "3.weight": "no"}


def test_convolutions_are_judged_by_their_filters():
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4), nn.Tanh(), nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6), nn.Tanh(),
        nn.ConvTranspose1d(6, 6, 3, groups=2), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(72, 3),
    )  # fmt: skip
    found = invariance(model, F.cross_entropy, (torch.randn(8, 2, 10), torch.arange(8) % 3))
    assert [e.scale_invariant for e in found.entries] == ["unit", "unit", "tensor", "no"]
    assert [e.units for e in found.entries] == [4, 6, 0, 3]  # one in groups has its units along two dimensions


@pytest.mark.parametrize("points", [1, 4])
def test_a_loss_that_normalizes_makes_the_last_layer_invariant(points):
    def cosine(output: Tensor, target: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(output, F.one_hot(target, 3).to(output), dim=1)

    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    assert verdicts(model, loss=cosine, points=points) == {"0.weight": "tensor"}


def test_the_cosines_are_those_of_a_literal_loop():
    model, (x, y) = net(nn.BatchNorm1d(8)), batch()
    found = invariance(model, F.cross_entropy, (x, y))
    wide = copy.deepcopy(model).double()
    F.cross_entropy(wide(x.double()), y).backward()
    for entry, linear in zip(found.entries, (wide[0], wide[3]), strict=True):
        w, g = linear.weight.detach().numpy(), linear.weight.grad.numpy()
        units = [w[j] @ g[j] / np.linalg.norm(w[j]) / np.linalg.norm(g[j]) for j in range(len(w))]
        assert entry.cosine_unit == pytest.approx(max(map(abs, units)), rel=1e-9)
        assert entry.cosine_tensor == pytest.approx((w * g).sum() / np.linalg.norm(w) / np.linalg.norm(g), rel=1e-9)
        assert entry.gradient_norm == pytest.approx(np.linalg.norm(g), rel=1e-12)


def test_what_is_left_by_epsilon_is_measured_and_grows_with_it():
    off = [invariance(net(nn.BatchNorm1d(8, eps=eps)), F.cross_entropy, batch()) for eps in (1e-300, 1e-5, 1e-3, 10.0)]
    numbers = [found["0.weight"].deviation_unit for found in off]
    assert numbers[0] < 1e-12 < numbers[1] < numbers[2] < TOLERANCE < numbers[3]


def test_a_layer_at_the_optimum_of_its_scale_is_not_taken_for_invariant():
    # Least squares at its minimum over γ in γw: ⟨w, ∇⟩ is zero there, and nowhere else.
    x, model = torch.randn(20, 5, dtype=torch.float64), nn.Linear(5, 2, bias=False).double()
    y = torch.randn(20, 2, dtype=torch.float64)
    with torch.no_grad():
        out = model(x)
        model.weight *= (out * y).sum() / out.square().sum()
    once = invariance(model, F.mse_loss, (x, y), points=1)["weight"]
    assert once.deviation_tensor < 1e-9  # by which it would pass
    assert (once.scale_invariant, once.by_rescaling) == ("no", True)
    assert verdicts(model, (x, y), F.mse_loss) == {"weight": "no"}


class Odd(nn.Module):
    """Tied, frozen, unused, dead and zero weights, dropout, statistics, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, sparse=True)
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.second = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Linear(6, 6)
        self.dead = nn.Linear(6, 6)
        self.zero = nn.Linear(6, 6)
        nn.init.zeros_(self.zero.weight)
        self.thin = nn.Linear(1, 6)
        self.third = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tied(self.norm(self.first(self.embedding(tokens)))))
        x = self.drop(torch.tanh(self.second(checkpoint(self.frozen, x, use_reentrant=False))))
        x = x + 0 * self.dead(x) + self.zero(x) + self.third(self.thin(x[:, :1]))
        return self.last(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_layer_of_an_odd_model_gets_its_answer_in_any_precision(dtype):
    model = Odd().to(dtype)
    assert verdicts(model, (torch.arange(32) % 7, torch.arange(32) % 3)) == {
        "embedding.weight": "tensor",  # the batch norm after it takes out its scale, but not a token's
        "first.weight": "unit",
        "frozen.weight": "unit",
        "unused.weight": "undecided: no gradient",
        "dead.weight": "undecided: no gradient",
        "zero.weight": "undecided: the weight is zero",
        "thin.weight": "unit",
        "last.weight": "no",
    }


def test_a_measured_model_is_left_as_found():
    model = Odd()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0) if parameter.requires_grad else None
    state, before = copy.deepcopy(model.state_dict()), {n: (p, p.grad) for n, p in model.named_parameters()}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    flags = [(m.training, p.requires_grad) for m in model.modules() for p in m.parameters()]
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with torch.no_grad():
        invariance(model, F.cross_entropy, (torch.arange(32) % 7, torch.arange(32) % 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        held, gradient = before[name]
        assert parameter is held
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, grads[name])
    assert flags == [(m.training, p.requires_grad) for m in model.modules() for p in m.parameters()]
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert (np.random.get_state()[1] == random_states[2]).all()  # noqa: NPY002


def test_the_model_is_left_as_found_when_its_pass_fails():
    model = net(nn.BatchNorm1d(8))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(DynamicsError, match=r"forward pass in torch.float64 failed with RuntimeError"):
        invariance(model, F.cross_entropy, (torch.randn(4, 7), torch.arange(4) % 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32


def test_units_without_a_gradient_are_counted_and_do_not_decide():
    model = net(nn.BatchNorm1d(8))
    with torch.no_grad():
        model[3].weight[:, 2:4] = 0
    found = invariance(model, F.cross_entropy, batch(), points=1)["0.weight"]
    assert (found.scale_invariant, found.silent_units, found.units) == ("unit", 2, 8)


def test_its_own_precision_is_used_where_asked_and_gives_the_same_verdicts():
    seen = []
    model = net(nn.BatchNorm1d(8))
    model[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert verdicts(model) == verdicts(model, dtype=None) == {"0.weight": "unit", "3.weight": "no"}
    assert set(seen) == {torch.float64, torch.float32}


def test_inputs_losses_and_layers_come_in_many_forms():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(nn.BatchNorm1d(8))

        def forward(self, *, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    x, y = batch()
    model = torch.compile(Named(), backend="eager")

    def loss(out: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(out["logits"], target, reduction="none")

    found = invariance(model, loss, ({"x": x}, y), layers="net.0*")
    assert found.invariant == ("net.0.weight",)
    assert invariance(model, loss, ({"x": x}, y), layers=layers(model)[1:]).layers == ("net.3.weight",)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert invariance(model._orig_mod.net, weighted, (x, y)).invariant == ("0.weight",)


def test_a_printed_result_is_a_table_with_a_line_a_layer():
    found = invariance(net(nn.LayerNorm(8)), F.cross_entropy, batch())
    head, *lines = str(found).splitlines()
    assert head.split()[:2] == ["layer", "scale-invariant"]
    assert [line.split("  ")[0] for line in lines] == list(found) == ["0.weight", "3.weight"]
    assert "as a whole" in lines[0]
    assert found.to_pandas().loc["3.weight", "scale_invariant"] == "no"
    assert "3.weight" in found
    assert len(found) == 2
    with pytest.raises(DynamicsError, match=r"no layer '4.weight'; the layers are 0.weight, 3.weight"):
        found["4.weight"]


# The second look


def thin(norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), norm or nn.Identity(), nn.ReLU(), nn.Linear(8, 3))


def depthwise() -> nn.Sequential:
    before = nn.Conv1d(1, 8, 1, bias=False), nn.Conv1d(8, 8, 3, groups=8, bias=False)
    return nn.Sequential(*before, nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 3))


LITTLE = {
    "two examples": (lambda: net(nn.BatchNorm1d(8)), (2, 6), ["unit", "no"]),
    "one weight per unit": (lambda: thin(nn.BatchNorm1d(8)), (24, 1), ["unit", "no"]),
    "one weight per unit, plain": (thin, (24, 1), ["no", "no"]),
    "depthwise": (depthwise, (24, 1, 6), ["unit", "unit", "no"]),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "shape", "expected"), LITTLE.values(), ids=LITTLE)
def test_gradients_that_are_all_epsilon_do_not_hide_an_invariance(make, shape, expected, seed):
    torch.manual_seed(seed)
    model, x = make(), torch.randn(shape)
    for layer in layers(model):  # no weight so small that ε does matter
        layer.parameter.data = torch.randn_like(layer.parameter).sign() * (0.5 + torch.rand_like(layer.parameter))
    assert list(verdicts(model, (x, torch.arange(len(x)) % 3)).values()) == expected


def test_a_bias_that_breaks_the_invariance_of_layer_normalization_is_still_told():
    looked = 0
    for seed in range(8):
        torch.manual_seed(seed)
        found = invariance(net(nn.LayerNorm(8), nn.Linear(6, 8)), F.cross_entropy, batch())["0.weight"]
        assert found.scale_invariant == "no"
        looked += found.change_tensor is not None
    assert looked > 0  # near the threshold, and rescaled for real


@pytest.mark.parametrize("top", [30.0, 100.0])
@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_units_that_saturate_are_not_taken_for_invariant(activation, inputs, top):
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(inputs, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 1))
        x = top * torch.rand(48, inputs)
        found = invariance(model, F.mse_loss, (x, torch.randn(48, 1)))["0.weight"]
        assert found.scale_invariant != "unit"
        assert not (found.scale_invariant == "tensor" and found.by_rescaling and found.change_tensor > 0.05)


def test_units_at_the_ends_of_their_range_are_not_taken_for_invariant():
    model = nn.Sequential(nn.Linear(1, 16, bias=False), nn.Tanh(), nn.Linear(16, 1))
    model[0].weight.data = torch.randn(16, 1).sign() * (1 + 0.1 * torch.rand(16, 1))
    x = torch.randn(48, 1).sign() * (2 + 0.1 * torch.rand(48, 1))
    found = invariance(model, F.mse_loss, (x, torch.randn(48, 1)))["0.weight"]
    assert found.change_unit < 0.05 < found.change_tensor
    assert found.scale_invariant == "undecided: one weight per unit"


def test_what_epsilon_does_fades_with_the_square_of_the_scale():
    [layer] = layers(nn.Linear(3, 2))
    w = torch.randn(2, 3, dtype=torch.float64)

    def told(see):
        return rescaled(see, layer, [w], 0, torch.Generator().manual_seed(0))

    assert told(lambda w: [w[0] / (w[0].square().sum(1, keepdim=True) + 1e-2).sqrt()]).fades
    assert not told(lambda w: [torch.tanh(10 * w[0])]).fades
    assert not told(lambda w: [w[0]]).fades


def test_a_residual_branch_of_next_to_no_size_is_not_taken_for_invariant():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + 1e-6 * torch.tanh(self.inner(x)))

    found = invariance(Branch(), F.cross_entropy, batch())["inner.weight"]
    assert found.scale_invariant == "no"
    assert found.change_unit > 0.1


def test_a_loss_that_does_not_see_the_scale_of_outputs_leaves_one_weight_a_unit_undecided():
    def cosine(output: Tensor, target: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(output, F.one_hot(target, 3).to(output), dim=1)

    model = nn.Sequential(nn.Linear(1, 3, bias=False))
    assert verdicts(model, batch(d=1), cosine) == {"0.weight": "undecided: one weight per unit"}


def test_where_cosines_are_clear_nothing_runs_but_the_passes_at_the_points():
    model, seen = net(nn.BatchNorm1d(8)), []
    model[3].register_forward_hook(lambda *_: seen.append(True))
    found = invariance(model, F.cross_entropy, batch(), points=4)
    assert len(seen) == 4
    assert found["0.weight"].change_unit is None


@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_of_its_own_a_network_gets_the_verdicts_of_more(dtype, width):
    parts = [nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)]
    x, y = batch(64)
    found = invariance(nn.Sequential(*parts).to(dtype), F.cross_entropy, (x.to(dtype), y), dtype=None)
    assert [e.scale_invariant for e in found.entries] == ["unit", "no"]
    assert found["0.weight"].silent_units < width / 4


def test_a_layer_all_of_whose_units_are_silent_is_undecided():
    [layer] = layers(nn.Linear(10, 8))
    w, g = torch.randn(8, 10), torch.randn(8, 10)
    g -= (w * g).sum() / w.square().sum() * w  # orthogonal as a whole
    silent = replace(alignment(layer, w, g), largest=None, typical=None, silent=8)
    assert _judge(layer, w, g, [silent], tolerance=0.05).scale_invariant == "undecided: no gradient"
    assert _judge(layer, w, g, [alignment(layer, w, g)], tolerance=0.05).scale_invariant == "tensor"


def test_cosines_of_coarse_numbers_are_summed_in_fine_ones():
    [layer] = layers(nn.Linear(500, 4))
    w, g = (torch.randn(4, 500).to(torch.bfloat16) for _ in range(2))
    found = alignment(layer, w, g)
    fine = alignment(layer, w.double(), g.double())
    assert found.tensor == pytest.approx(fine.tensor, rel=1e-4)
    units = [(w[j].double() @ g[j].double() / w[j].double().norm() / g[j].double().norm()).abs() for j in range(4)]
    pulls = [w[j].double().norm() * g[j].double().norm() for j in range(4)]
    assert found.largest == pytest.approx(float(max(units)), rel=1e-4)
    typical = sum(u * p for u, p in zip(units, pulls, strict=True)) / sum(pulls)
    assert found.typical == pytest.approx(float(typical), rel=1e-4)


def test_rescaling_is_held_against_turning():
    [layer] = layers(nn.Linear(3, 2))
    w = torch.randn(2, 3, dtype=torch.float64)

    def told(see):
        return rescaled(see, layer, [w], 0, torch.Generator().manual_seed(0))

    by_unit, whole = told(lambda w: [F.normalize(w[0], dim=1)]), told(lambda w: [w[0] / w[0].norm()])
    assert max(by_unit.unit, by_unit.tensor) < 1e-12
    assert whole.tensor < 1e-12 < 0.1 < whole.unit
    plain = told(lambda w: [w[0]])
    # ‖4w − w‖ beside the largest ‖w′ − w‖ of three, at most 2‖w‖.
    assert plain.tensor >= 1.5
    assert told(lambda w: [torch.ones(2)]) is None


def nothing(output: Tensor, target: Tensor) -> Tensor:
    return output.detach().sum()


BAD = {
    "no model": (lambda m, b: invariance("net", F.cross_entropy, b), "got str"),
    "no loss": (lambda m, b: invariance(m, 3, b), "a int"),
    "no pair": (lambda m, b: invariance(m, F.cross_entropy, b[0]), "one pair"),
    "no gradient": (lambda m, b: invariance(m, nothing, b), "does not depend"),
    "no number": (lambda m, b: invariance(m, lambda o, t: o.argmax(), b), "`loss` must return a real tensor"),
    "not finite": (lambda m, b: invariance(m, lambda o, t: o.sum() / 0, b), "say nothing"),
    "no tolerance": (
        lambda m, b: invariance(m, F.cross_entropy, b, tolerance=0),
        "`tolerance` must be a finite number > 0",
    ),
    "no points": (lambda m, b: invariance(m, F.cross_entropy, b, points=0), "`points` must be a whole number ≥ 1"),
    "no type": (lambda m, b: invariance(m, F.cross_entropy, b, dtype=torch.int64), "floating-point"),
    "no layers": (lambda m, b: invariance(m, F.cross_entropy, b, layers=[]), "an empty list"),
    "another's layers": (
        lambda m, b: invariance(m, F.cross_entropy, b, layers=layers(nn.Linear(2, 2))),
        "must be layers of `model`",
    ),
}


@pytest.mark.parametrize(("asked", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_measured_is_refused_in_words(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked(net(), batch())


def test_a_loss_that_fails_is_told_of():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    batch = torch.randn(8, 3), torch.rand(8)
    with pytest.raises(DynamicsError, match=r"The loss failed with RuntimeError: .* Try dtype=None to keep types"):
        invariance(model, F.cross_entropy, batch)


def test_invariance_is_found_within_inference_mode_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(32, 5), torch.arange(32) % 3
    expected = invariance(net, F.cross_entropy, batch).rows()
    with torch.inference_mode():
        assert invariance(net, F.cross_entropy, batch).rows() == expected
