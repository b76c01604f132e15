"""Unusable input is refused: the error says what was given, what is accepted and what to do, and nothing changes."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import gyroscope
from gyroscope.control.layca import check_group
from gyroscope.control.rates import alpha_multipliers
from gyroscope.control.torch_contract import as_group
from gyroscope.errors import ControlError, GyroscopeError, LayerError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def backward(model):
    model.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()


def snapshot(optimizer):
    """Everything an optimizer holds: its groups, parameters by identity, their values, and its state."""
    groups = [
        {k: list(map(id, v)) if k == "params" else copy.deepcopy(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    grads = [None if p.grad is None else p.grad.detach().clone() for p in params]
    state = [copy.deepcopy(dict(optimizer.state[p])) if p in optimizer.state else None for p in params]
    return groups, values, grads, state


def same(x, y):
    if isinstance(x, torch.Tensor):
        x, y = (t.to_dense() if t.is_sparse else t for t in (x, y))
        return torch.equal(x, y)
    if isinstance(x, dict):
        return set(x) == set(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))
    return x == y or (x != x and y != y)


class Unchanged:
    """Asserts that a block of code raises, and leaves the optimizer as it was."""

    def __init__(self, optimizer, message, kind=ControlError):
        self.optimizer = optimizer
        self.before = snapshot(optimizer)
        self.raises = pytest.raises(kind, match=message)

    def __enter__(self):
        return self.raises.__enter__()

    def __exit__(self, *error):
        caught = self.raises.__exit__(*error)
        assert same(self.before, snapshot(self.optimizer)), "something was changed"
        return caught


def sgd_at(model, lr):
    """torch refuses some of these rates itself, so they are written into the group."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.param_groups[0]["lr"] = lr
    return inner


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, -math.inf])
def test_a_rate_that_is_no_angle_is_refused_at_construction(lr):
    model = network()
    inner = sgd_at(model, lr)
    with Unchanged(
        inner, rf"`lr` of group 0 must be a finite number ≥ 0, the rate ρ = tan θ of a step, got {lr}\. Try 3\*\*-3"
    ):
        gyroscope.Layca(inner, model)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor])
def test_a_rate_that_a_scheduler_makes_impossible_is_refused_at_the_step(lr, cls):
    model = network()
    optimizer = gyroscope.Layca(cls(model.parameters(), lr=0.1), model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t == 0 else lr / 0.1)
    backward(model)
    optimizer.step()
    schedule.step()
    backward(model)
    with Unchanged(optimizer, "`lr` of group 0 must be a finite number ≥ 0.*got "):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()


@pytest.mark.parametrize("lr", ["0.1", [0.1], 1j, torch.tensor(-0.1), torch.ones(2)], ids=str)
def test_a_rate_that_is_no_number_is_refused_at_the_step(lr):
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model)
    optimizer.param_groups[0]["lr"] = lr
    with Unchanged(optimizer, "`lr` of group 0 must be a finite number ≥ 0.*got "):
        optimizer.step()


@pytest.mark.parametrize(
    "number", [np.float32(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor([0.25])], ids=repr
)
def test_numbers_of_numpy_and_torch_are_numbers(number):
    def taken(value):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"alpha": value, "growth": value, "others_lr": value, "project": False, "reproject": False}
        optimizer = gyroscope.Layca(inner, model, **options)
        optimizer.param_groups[0]["lr"] = value
        torch.manual_seed(1)
        for _ in range(2):
            backward(model)
            optimizer.step()
        return list(model.parameters())

    torch.testing.assert_close(taken(number), taken(0.25))


class Rateless(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise AssertionError("was stepped")


def test_an_optimizer_without_a_rate_is_refused():
    model = network()
    inner = Rateless(model.parameters())
    with Unchanged(inner, "`lr` of group 0 must be .*got None"):
        gyroscope.Layca(inner, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.01}, r"`alpha` must be a number from -1 .*got 1\.01"),
        ({"alpha": -2.0}, r"`alpha` must be a number from -1 .*got -2\.0"),
        ({"alpha": math.nan}, r"`alpha` must be a number from -1 .*got nan"),
        ({"alpha": "x"}, r"`alpha` must be a number from -1 .*got 'x'"),
        ({"alpha": None}, r"`alpha` must be a number from -1 .*got None"),
        ({"multipliers": 0.5}, r"`multipliers` must be a sequence of 2 numbers, one per layer.*got 0\.5"),
        ({"multipliers": "12"}, r"`multipliers` must be a sequence of 2 numbers, one per layer.*got '12'"),
        (
            {"multipliers": ["a", "b"]},
            r"`multipliers` must be a sequence of 2 numbers, one per layer.*got \['a', 'b'\]",
        ),
        (
            {"multipliers": {0: 0.5, 1: 1.0}},
            r"`multipliers` must be a sequence of 2 numbers, one per layer.*got \{0: .*",
        ),
        (
            {"multipliers": torch.tensor([1j, 1.0])},
            "`multipliers` must be a sequence of 2 numbers, one per layer.*got .*",
        ),
        (
            {"multipliers": torch.ones(2, device="meta")},
            "`multipliers` must be a sequence of 2 numbers, one per layer.*got .*",
        ),
        ({"multipliers": [1.0, 10**400]}, "`multipliers` must be a sequence of 2 numbers, one per layer.*got .*"),
        ({"multipliers": [1.0]}, "`multipliers` must have one number per layer, got 1 for 2 layers"),
        ({"multipliers": [1.0] * 3}, "`multipliers` must have one number per layer, got 3 for 2 layers"),
        ({"multipliers": [1.0, -0.5]}, r"`multipliers` must be finite numbers ≥ 0, got \[1\.0, -0\.5\]"),
        ({"multipliers": [1.0, math.nan]}, "`multipliers` must be finite numbers ≥ 0"),
        ({"multipliers": [1.0, math.inf]}, "`multipliers` must be finite numbers ≥ 0"),
        ({"multipliers": [1.0, 1.0], "alpha": 0.5}, "`alpha` must be 0 where `multipliers` are given.*Give one"),
        ({"others": "freeze"}, "`others` must be one of 'inner', 'frozen', got 'freeze'"),
        ({"nonfinite": "ignore"}, "`nonfinite` must be one of 'skip', 'raise', got 'ignore'"),
        ({"zero_norm": "ignore"}, "`zero_norm` must be one of 'raise', 'skip', got 'ignore'"),
        ({"scale": "absolute"}, "`scale` must be one of 'relative', 'unit', got 'absolute'"),
        ({"growth": 1e-4}, r"`growth` must be a number ≥ 0 with reproject=False, or None, got 0\.0001"),
        ({"growth": -1.0, "reproject": False}, r"`growth` must be a number ≥ 0 .*got -1\.0"),
        ({"growth": math.nan, "reproject": False}, "`growth` must be a number ≥ 0 .*got nan"),
        ({"others_lr": -0.1}, r"`others_lr` must be a finite number ≥ 0, got -0\.1"),
        ({"others_lr": math.inf}, "`others_lr` must be a finite number ≥ 0, got inf"),
        ({"others_lr": math.nan}, "`others_lr` must be a finite number ≥ 0, got nan"),
        ({"others_lr": "1"}, "`others_lr` must be a finite number ≥ 0, got '1'"),
        ({"others_lr": 10**400}, "`others_lr` must be a finite number ≥ 0, got 10+"),
        ({"growth": "x", "reproject": False}, "`growth` must be a number ≥ 0 .*got 'x'"),
        ({"others": np.ones(2)}, "`others` must be one of 'inner', 'frozen', got array.*"),
        ({"project": "no"}, "`project` must be True or False, got 'no'"),
        ({"reproject": np.ones(2)}, "`reproject` must be True or False, got array"),
        ({"reads_weights": torch.ones(2)}, "`reads_weights` must be True or False, got tensor"),
        ({"alpha": torch.ones(2)}, r"`alpha` must be a number from -1 .*got tensor\(\[1\., 1\.\]\)"),
    ],
)
def test_an_option_that_is_not_accepted_is_refused(options, message):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Unchanged(inner, message):
        gyroscope.Layca(inner, model, **options)


@pytest.mark.parametrize("alpha", [1.01, -1.01, math.nan, math.inf, None])
def test_multipliers_of_an_impossible_alpha_are_refused(alpha):
    with pytest.raises(ControlError, match=f"`alpha` must be a number from -1 .*got {alpha}"):
        alpha_multipliers(alpha, 3)


@pytest.mark.parametrize("n_layers", [None, 0, -3, 2.5, "3", True])
def test_multipliers_of_an_impossible_number_of_layers_are_refused(n_layers):
    with pytest.raises(ControlError, match=rf"`n_layers` must be an integer ≥ 1, got {n_layers!r}\. Try len"):
        alpha_multipliers(0.5, n_layers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, r"`multipliers` must be a sequence of 2 numbers, one per layer.*got 0\.5"),
        ([1.0], "`multipliers` must have one number per layer, got 1 for 2 layers"),
        ([1.0, -1.0], "finite numbers ≥ 0"),
        (torch.ones(2, device="meta"), "`multipliers` must be a sequence of 2 numbers, one per layer.*got .*"),
        (torch.tensor([1j, 1.0]), "`multipliers` must be a sequence of 2 numbers, one per layer.*got .*"),
        (torch.ones(3), r"`multipliers` must have shape \(2,\), one per layer, got \(3,\)"),
    ],
)
def test_multipliers_set_later_are_checked_too(value, message):
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model, multipliers=[0.5, 0.25])
    with Unchanged(optimizer, message):
        optimizer.multipliers = value
    assert optimizer.multipliers.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("given", [network(), [nn.Parameter(torch.ones(2, 2))], "sgd", None, torch.optim.SGD])
def test_what_is_not_an_optimizer_is_refused(given):
    with pytest.raises(
        ControlError, match=rf"`optimizer` must be a torch\.optim\.Optimizer, got a {type(given).__name__}. Try"
    ):
        gyroscope.Layca(given)


def test_an_optimizer_without_the_models_parameters_is_refused():
    model, other = network(), network()
    inner = torch.optim.SGD(other.parameters(), lr=0.1)
    message = r"does not hold these layers of the model: 0\.weight, 2\.weight\. Build it on this model's parameters"
    with Unchanged(inner, message):
        gyroscope.Layca(inner, model)


def test_an_optimizer_without_some_of_the_models_layers_is_refused():
    model = network()
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with Unchanged(inner, r"does not hold these layers of the model: 2\.weight\. .*include="):
        gyroscope.Layca(inner, model)


def test_of_many_missing_layers_a_few_are_named():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(9)))
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with Unchanged(inner, r"0\.weight, 1\.weight, 2\.weight, 3\.weight, 4\.weight and 4 more\."):
        gyroscope.Layca(inner, model)


def test_a_model_without_layers_is_refused():
    model = nn.LayerNorm(5)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with Unchanged(inner, "LayerNorm has no layers.*include", LayerError):
        gyroscope.Layca(inner, model)


def test_an_optimizer_without_matrices_is_refused():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))], lr=0.1)
    with Unchanged(inner, "holds no layer to control: no parameter of two or more dimensions.*use FSDP2"):
        gyroscope.Layca(inner)


def test_a_model_without_matrices_that_step_is_refused():
    model = network()
    inner = torch.optim.SGD([model[0].bias], lr=0.1)
    model.requires_grad_(False)
    with Unchanged(inner, "holds no layer to control.*Frozen layers are not controlled"):
        gyroscope.Layca(inner, model)


@pytest.mark.parametrize(
    ("give", "what"),
    [
        (lambda model: model.parameters(), "a generator that holds a Parameter"),
        (lambda model: list(model.parameters()), "a list that holds a Parameter"),
        (lambda model: ["0.weight", "2.weight"], r"a list that holds '0\.weight'"),
        (lambda model: "0.weight", r"'0\.weight'"),
        (lambda model: gyroscope.layers(model)[0], "a Layer"),
        (lambda model: [gyroscope.layers(model)[0], model[2]], "a list that holds a Linear"),
        (lambda model: [gyroscope.layers(model)[0], None], "a list that holds a NoneType"),
        (lambda model: model.state_dict(), "a OrderedDict"),
        (lambda model: model[0].weight, "a Parameter"),
        (lambda model: 3, "a int"),
    ],
)
def test_what_is_neither_a_model_nor_layers_is_refused(give, what):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with Unchanged(inner, rf"must be a model .* or a list of layers from gyroscope\.layers.*got {what}"):
        gyroscope.Layca(inner, give(model))


def test_an_empty_list_of_layers_is_refused():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with Unchanged(inner, r"must be a model or a list of one or more .*got an empty list"):
        gyroscope.Layca(inner, [])


@pytest.mark.parametrize("wrap", [gyroscope.Layca, lambda inner: gyroscope.Graft(inner, adam_beside(inner))])
def test_an_optimizer_that_is_controlled_already_is_refused(wrap):
    model = network()
    wrapped = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    name = type(wrapped).__name__
    with Unchanged(wrapped, rf"must be an optimizer without a controller, got a {name}.*Keep one of the two"):
        gyroscope.Layca(wrapped, model)


def adam_beside(inner):
    return torch.optim.Adam([p for group in inner.param_groups for p in group["params"]])


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_a_flattened_parameter_is_refused(shape):
    flat = nn.Parameter(torch.ones(shape))
    flat._is_flat_param = True
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2, 2)), flat], lr=0.1)
    with Unchanged(inner, r"group0\.1 is a flattened shard .*has no layers\. Use FSDP2 \(fully_shard\) or DDP"):
        gyroscope.Layca(inner)


def test_a_model_of_flattened_parameters_is_refused():
    model = nn.Linear(3, 4)
    model.weight._is_flat_param = True
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with Unchanged(inner, "'weight' is flattened .*FSDP2", LayerError):
        gyroscope.Layca(inner, model)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_sparse_gradient_of_a_controlled_embedding_is_refused(cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    optimizer = gyroscope.Layca(cls(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 3])).square().sum().backward()
    with Unchanged(
        optimizer,
        r"0\.weight has a sparse gradient; nothing was changed\. Use sparse=False in the embedding, or exclude it",
    ):
        optimizer.step()


def test_a_sparse_embedding_may_be_left_to_the_inner_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    layers = gyroscope.layers(model, exclude="0.*")
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), layers)
    model(torch.tensor([1, 3])).square().sum().backward()
    optimizer.step()
    expected = before - 0.1 * model[0].weight.grad.to_dense()
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_a_scheduler_built_before_a_mixed_group_is_split_is_refused():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    message = r"Group 0 holds layers and other parameters, .*already has a scheduler\. Wrap the optimizer first"
    with Unchanged(inner, message):
        gyroscope.Layca(inner, model)


class OwnInitialRate(torch.optim.SGD):
    """Keeps the first rate in its groups, as optimizers that decouple weight decay from the schedule do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["initial_lr"] = lr


def test_an_initial_rate_without_a_scheduler_is_not_called_a_scheduler():
    model = network()
    inner = OwnInitialRate(model.parameters(), lr=0.1)
    message = "The scheduler, the checkpoint or the OwnInitialRate that set it .* in groups of their own"
    with Unchanged(inner, message):
        gyroscope.Layca(inner, model)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) is many]} for many in (True, False)]
    optimizer = gyroscope.Layca(OwnInitialRate(groups, lr=0.1), model)
    backward(model)
    optimizer.step()
    assert set(optimizer.rates().values()) == {0.1}


def test_a_group_is_split_where_an_initial_rate_is_among_the_optimizers_own_settings():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.defaults["initial_lr"] = inner.param_groups[0]["initial_lr"] = 0.1
    optimizer = gyroscope.Layca(inner, model, others_lr=0.01)
    assert [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups] == [(0.1, 0.1), (0.01, 0.01)]
    torch.optim.lr_scheduler.ExponentialLR(second := torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    second.defaults["initial_lr"] = 0.1
    with pytest.raises(ControlError, match="already has a scheduler"):
        gyroscope.Layca(second, model)


def test_a_scheduler_built_before_is_fine_where_no_group_is_split():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = gyroscope.Layca(inner, model)
    backward(model)
    optimizer.step()
    schedule.step()
    assert optimizer.rates() == {"0.weight": 0.05, "1.weight": 0.05}


def test_lbfgs_cannot_give_its_other_parameters_a_rate_of_their_own():
    model = network()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with Unchanged(inner, "`others_lr` must be None with LBFGS, got .*one group"):
        gyroscope.Layca(inner, model, others_lr=0.01)


def test_lbfgs_in_half_precision_is_refused_at_the_step():
    model = nn.Linear(4, 3, bias=False).bfloat16()
    optimizer = gyroscope.Layca(torch.optim.LBFGS(model.parameters(), lr=0.1), model)

    def closure():
        loss = model(torch.ones(1, 4, dtype=torch.bfloat16)).square().sum()
        loss.backward()
        return loss

    with Unchanged(optimizer, "LBFGS evaluates a closure .*half precision does not allow.*float32 and use"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"`momentum` must be a number ≥ 0 and below 1, got 1\.0"),
        ({"momentum": -0.1}, r"`momentum` must be a number ≥ 0 and below 1, got -0\.1"),
        ({"momentum": math.nan}, "`momentum` must be a number ≥ 0 and below 1, got nan"),
        ({"momentum": "0.9"}, "`momentum` must be a number ≥ 0 and below 1, got '0.9'"),
        ({"lr": -1.0}, r"`lr` must be a finite number ≥ 0, .*got -1\.0"),
        ({"lr": math.nan}, "`lr` must be a finite number ≥ 0, .*got nan"),
        ({"lr": "0.1"}, "`lr` must be a finite number ≥ 0, .*got '0.1'"),
        ({"lr": torch.tensor(-0.1)}, r"`lr` must be a finite number ≥ 0, .*got tensor\(-0\.1000\)"),
        (
            {"lr": torch.ones(2)},
            r"`lr` must be a finite number ≥ 0, .*got tensor\(\[1\., 1\.\]\)",
        ),
        ({"weight_decay": -1.0}, r"`weight_decay` must be a finite number ≥ 0, got -1\.0"),
        ({"maximize": "no"}, "`maximize` must be True or False, got 'no'"),
        ({"weight_decay": math.nan}, "`weight_decay` must be a finite number ≥ 0, got nan"),
    ],
)
def test_sgd_amom_refuses_numbers_it_cannot_use(options, message):
    with pytest.raises(ControlError, match=message):
        gyroscope.SGD_AMom([nn.Parameter(torch.ones(2))], **options)


def test_a_message_names_a_few_of_a_thousand_layers():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(1202)))
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for p in model.parameters():
        nn.init.zeros_(p)
        p.grad = torch.ones_like(p)
    with Unchanged(optimizer, r"zero norm.*: 0\.weight, .*, 4\.weight and 1197 more; nothing"):
        optimizer.step()
    other = optimizer.state_dict()
    other["layers"][700] = "stem"
    with Unchanged(
        optimizer, "a model with other layers: 1202 and 1202; number 700 is 'stem' there and '700.weight' here"
    ):
        optimizer.load_state_dict(other)
    other = optimizer.state_dict()
    other["shapes"][1] = [2, 1]
    with Unchanged(optimizer, r"1202 and 1202; number 1 is \[2, 1\] there and \[1, 1\] here"):
        optimizer.load_state_dict(other)


def test_sgd_amom_takes_a_rate_in_a_tensor_of_one_element():
    def step(lr):
        w = nn.Parameter(torch.ones(3))
        w.grad = torch.tensor([1.0, 2.0, 3.0])
        gyroscope.SGD_AMom([w], lr=lr).step()
        return w.detach()

    torch.testing.assert_close(step(torch.tensor([0.5])), step(0.5))


def test_every_error_is_a_gyroscope_error():
    assert issubclass(ControlError, GyroscopeError)
    assert issubclass(LayerError, GyroscopeError)


def test_the_same_layer_given_twice_is_refused():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = gyroscope.layers(model)
    with Unchanged(inner, r"0\.weight .*twice"):
        gyroscope.Layca(inner, [*layers, layers[0]])


def test_a_gradient_of_another_shape_is_refused():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 3)).sum().backward()
    model.weight.data = torch.ones(3, 2)
    with Unchanged(optimizer, r"gradient of weight must have the shape \(3, 2\) of its weights, got \(2, 3\)"):
        optimizer.step()


def test_a_complex_layer_is_refused_before_anything_is_changed():
    p = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
    inner = torch.optim.SGD([p], lr=0.1)
    with pytest.raises(ControlError, match=r"must be float32.*got torch.complex64"):
        gyroscope.Layca(inner)
    assert len(inner.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_group_with_a_matrix_that_is_no_layer_is_refused_before_it_is_added(dtype):
    p = torch.ones(3, 3, dtype=dtype)
    message = rf"of the group must be float32, .*got {dtype}\. Leave it out"
    for params in ([torch.ones(2, 2), p], p, iter([p]), [("w", p)]):
        with pytest.raises(ControlError, match=message):
            check_group(as_group({"params": params})["params"], 0.1)
    with pytest.raises(ControlError, match="Parameter w of the group"):
        check_group([("w", p)], 0.1)
    with pytest.raises(ControlError, match="Parameter 1 of the group"):
        check_group([torch.ones(2, 2), p], 0.1)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, None, "x"])
def test_a_group_with_a_rate_that_is_no_angle_is_refused_before_it_is_added(lr):
    with pytest.raises(ControlError, match=rf"`lr` of the group must be a finite number ≥ 0.*got {lr!r}"):
        check_group([torch.ones(2, 2)], lr)


def test_a_group_that_can_be_added_is_returned_as_a_list():
    p, count = nn.Parameter(torch.ones(2, 2)), torch.zeros(3, dtype=torch.int64)
    assert [id(q) for q in as_group({"params": iter([p, count])})["params"]] == [id(p), id(count)]
    assert as_group({"params": p})["params"] == [p]
    check_group([p, count], torch.tensor(0.1))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, gyroscope.SGD_AMom])
@pytest.mark.parametrize("change", ["append", "append to others", "add behind", "remove", "remove group"])
def test_groups_that_were_changed_behind_the_controllers_back_are_refused(cls, change):
    model = network()
    optimizer = gyroscope.Layca(cls(model.parameters(), lr=0.01), model)
    backward(model)
    optimizer.step()
    new = nn.Parameter(torch.ones(3, 3))
    groups = optimizer.param_groups
    match change:
        case "append":
            groups[0]["params"].append(new)
        case "append to others":
            groups[1]["params"].append(new)
        case "add behind":
            optimizer.inner.add_param_group({"params": [new]})
        case "remove":
            groups[0]["params"].pop()
        case "remove group":
            groups.pop()
    new.grad = torch.ones(3, 3)
    backward(model)
    message = r"had groups of \[2, 2\] parameters and now has groups of .*add_param_group of the controller"
    with Unchanged(optimizer, message):
        optimizer.step()
    with Unchanged(optimizer, message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@pytest.mark.parametrize("others", ["inner", "frozen"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, gyroscope.SGD_AMom])
def test_a_group_without_matrices_may_be_added_to_the_inner_optimizer_itself(cls, others):
    came = []
    for behind in (False, True):
        torch.manual_seed(0)
        model = network()
        optimizer = gyroscope.Layca(cls(model.parameters(), lr=0.01), model, others=others)
        gain, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
        parameters = [*model.parameters(), gain, matrix]
        for added in (None, gain, matrix):
            if added is not None:
                to = optimizer.inner if behind and added is gain else optimizer
                to.add_param_group({"params": [added], "lr": 0.5})
                assert optimizer.controls(len(optimizer.param_groups) - 1) == (added is matrix)
            for k, p in enumerate(parameters):
                p.grad = torch.arange(1.0, 1.0 + p.numel()).reshape(p.shape) + k
            optimizer.step()
        came.append([p.detach().clone() for p in parameters])
        assert bool((gain.detach() != 1.0).all()) == (others == "inner")
    assert all(torch.equal(p, q) for p, q in zip(*came, strict=True))


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"params": [nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))]}, "complex64"),
        ({"params": [nn.Parameter(torch.ones(2, 2))], "lr": -1.0}, "-1"),
    ],
)
def test_a_group_that_would_be_refused_at_construction_is_refused_when_it_is_added(group, says):
    optimizer = gyroscope.Layca(torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1))
    with pytest.raises(ControlError, match=says):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda own: None, "must be a dict with 'params', got None"),
        (lambda own: {}, r"must be a dict with 'params', got a dict with the keys \[\]"),
        (lambda own: {"lr": 0.1}, r"got a dict with the keys \['lr'\]"),
        (lambda own: {"params": 5}, "`params` of the group must be a tensor or a list of tensors, got 5"),
        (lambda own: {"params": "weight"}, "`params` of the group must be a tensor or a list of tensors, got 'weight'"),
        (lambda own: {"params": {nn.Parameter(torch.ones(2))}}, "must be a list, got a set, which has no order"),
        (lambda own: {"params": [5]}, "rejected the group .*nothing was changed"),
        (lambda own: {"params": own}, "rejected the group .*nothing was changed"),
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner, model: gyroscope.Layca(inner, model),
        lambda inner, model: gyroscope.Graft(inner, torch.optim.Adam(model.parameters())),
        lambda inner, model: gyroscope.control.KFAC(inner, model, labels="true"),
    ],
    ids=["Layca", "Graft", "KFAC"],
)
def test_what_is_no_group_is_refused_before_it_is_added(wrap, give, says):
    model = network()
    controller = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with Unchanged(controller, says):
        controller.add_param_group(give(controller.param_groups[0]["params"]))


@pytest.mark.parametrize("wrap", [gyroscope.Layca, lambda o, m: gyroscope.Graft(o, torch.optim.Adam(m.parameters()))])
@pytest.mark.parametrize("closure", [torch.tensor(0.5), 0.5, "loss"])
def test_a_closure_that_cannot_be_called_is_refused(wrap, closure):
    model = network()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model)
    with Unchanged(
        optimizer, rf"`closure` must be a function .*got a {type(closure).__name__}\. Call step\(\) without one"
    ):
        optimizer.step(closure)


@pytest.mark.parametrize("group", [-1, None, "0", 0.0, (1,)])
def test_groups_are_asked_for_by_number(group):
    model = network()
    with pytest.raises(ControlError, match="`group` must be the index of a parameter group, an integer ≥ 0, got "):
        gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model).controls(group)


@pytest.mark.parametrize("give", [gyroscope.Layca, lambda o, m: gyroscope.control.rates.record(m, o)])
def test_a_model_without_values_is_refused(give):
    model = network().to("meta")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ControlError, match=r"Layer 0\.weight is on the meta device and has no values.*to_empty"):
        give(inner, model)
    assert len(inner.param_groups) == 1
    optimizer = gyroscope.Layca(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ControlError, match="Parameter 0 of the group is on the meta device"):
        optimizer.add_param_group({"params": model.parameters()})


class PassesOn(Optimizer):
    """Wraps another optimizer without calling Optimizer.__init__, as wrappers of other libraries do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def state_dict(self):
        return self.optimizer.state_dict()


class Lookahead(PassesOn):
    """Keeps slow weights."""


class TRAC(PassesOn):
    """Steps along the way from the first weights, which it keeps."""


class Uphill(PassesOn):
    """Changes the step of the optimizer it wraps, as OrthoGrad does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.neg_()
        return self.optimizer.step(closure)


class OwnState(PassesOn):
    """Saves the state of the optimizer it wraps within its own, as Magma does."""

    def state_dict(self):
        return {"base": self.optimizer.state_dict()}


class ScheduleFree(torch.optim.SGD):
    """Exchanges the weights in train() and eval()."""

    def train(self):
        pass

    def eval(self):
        pass


def test_a_wrapper_that_did_not_call_the_constructor_of_optimizers_steps():
    model = network()
    optimizer = gyroscope.Layca(PassesOn(torch.optim.AdamW(model.parameters(), lr=0.1)), model)
    before = model[0].weight.detach().clone()
    backward(model)
    optimizer.step()
    cosine = torch.cosine_similarity(before.flatten().double(), model[0].weight.detach().flatten().double(), dim=0)
    assert math.tan(math.acos(cosine)) == pytest.approx(0.1, rel=1e-4)
    assert "radius" in optimizer.state_dict()["state"][0]


def test_a_wrapper_that_changes_the_step_is_not_taken_off():
    turned = []
    for wrap in (PassesOn, Uphill):
        torch.manual_seed(0)
        model = network()
        before = model[0].weight.detach().clone()
        optimizer = gyroscope.Layca(wrap(torch.optim.SGD(model.parameters(), lr=0.1)), model)
        backward(model)
        optimizer.step()
        moved = model[0].weight.detach() - before
        turned.append(moved - (moved * before).sum() / before.square().sum() * before)
    torch.testing.assert_close(turned[0], -turned[1])


def test_an_optimizer_whose_state_is_not_in_torchs_form_is_refused():
    model = network()
    optimizer = OwnState(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ControlError, match=r"must have 'state' and 'param_groups', .*that of OwnState does not"):
        gyroscope.Layca(optimizer, model)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: Lookahead(torch.optim.SGD(ps, lr=0.1)),
        lambda ps: PassesOn(Lookahead(torch.optim.SGD(ps, lr=0.1))),
        lambda ps: TRAC(torch.optim.SGD(ps, lr=0.1)),
        lambda ps: ScheduleFree(ps, lr=0.1),
    ],
)
def test_an_optimizer_with_weights_of_its_own_is_refused(make):
    model = network()
    optimizer = make(list(model.parameters()))
    before = snapshot(optimizer)
    with pytest.raises(ControlError, match="keeps weights of its own"):
        gyroscope.Layca(optimizer, model)
    assert same(snapshot(optimizer), before)


class ListsRates(torch.optim.SGD):
    """Keeps the first rate of each group in a list (AdaBound)."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.base_lrs = [group["lr"] for group in self.param_groups]


def test_an_optimizer_that_keeps_a_list_by_group_is_refused_where_a_group_would_be_split():
    model = network()
    optimizer = ListsRates(model.parameters(), lr=0.1)
    before = snapshot(optimizer)
    with pytest.raises(ControlError, match="base_lrs"):
        gyroscope.Layca(optimizer, model)
    assert same(snapshot(optimizer), before)
    layers = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    gyroscope.Layca(ListsRates([{"params": layers}, {"params": others}], lr=0.1), model)
