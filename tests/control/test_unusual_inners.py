"""Inner optimizers that are not torch's: they assign `p.data`, keep state in lists, or set it up late."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import gyroscope
from gyroscope.errors import ControlError


def weight(seed=0):
    return nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)))


def target(p):
    return (p - weight(1).detach()).square().mean()


class Inner(Optimizer):
    """An optimizer that moves its parameters one by one."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p, group)


class Rebinding(Inner):
    """Gradient descent that gives the parameter another tensor, as tutorials do."""

    def move(self, p, group):
        p.data = p.data - group["lr"] * p.grad


class InPlace(Inner):
    def move(self, p, group):
        p.sub_(p.grad, alpha=group["lr"])


class Sharpness(Inner):
    """A step from the gradient at a point nearby, from which the weights come back by assignment, or in place."""

    def move(self, p, group):
        self.state[p]["old"] = old = p.data.clone()
        p.data.add_(p.grad)
        with torch.enable_grad():
            grad = torch.autograd.grad(target(p), p)[0]
        if group["assigns"]:
            p.data = old
        else:
            p.data.copy_(old)
        p.data.sub_(grad, alpha=group["lr"])


def course(make, wrap, steps=5):
    p = weight()
    optimizer = wrap(make([p]))
    for _ in range(steps):
        p.grad = torch.autograd.grad(target(p), p)[0]
        optimizer.step()
    return p.detach()


WRAPS = {
    "copied weights": gyroscope.Layca,
    "zeros": lambda inner: gyroscope.Layca(inner, reads_weights=False),
    "graft": lambda inner: gyroscope.Graft(torch.optim.SGD(inner.param_groups[0]["params"], lr=0.1), inner),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_an_inner_may_assign_the_data_of_a_parameter(wrap):
    moved = course(Rebinding, wrap)
    assert not torch.equal(moved, weight().detach())
    torch.testing.assert_close(moved, course(InPlace, wrap))


def test_an_inner_may_assign_a_tensor_that_it_keeps():
    assigned, in_place = (
        course(lambda ps, how=how: Sharpness(ps, assigns=how), gyroscope.Layca) for how in (True, False)
    )
    torch.testing.assert_close(assigned, in_place)
    assert target(assigned) < target(weight())


class Keeping(Inner):
    """Momentum whose mean lies in a list, or a mean of squares that is one number."""

    def move(self, p, group):
        state = self.state[p]
        if group["kind"] == "number":
            mean = state.setdefault("square", torch.zeros(()))
            mean.mul_(0.9).add_(p.grad.square().mean())
            p.sub_(p.grad / (mean.sqrt() + 1e-8), alpha=group["lr"])
        else:
            [mean] = state.setdefault("means", [torch.zeros_like(p)])
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize("wrap", [WRAPS["copied weights"], WRAPS["graft"]], ids=["Layca", "Graft"])
@pytest.mark.parametrize("kind", ["number", "list"])
def test_one_bad_gradient_costs_one_step_wherever_the_state_lies(kind, wrap):
    p = weight()
    optimizer = wrap(Keeping([p], kind=kind))
    for t in range(8):
        p.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(t)) * (float("nan") if t == 3 else 1.0)
        optimizer.step()
    assert list(optimizer.skipped().values()) == [1]


class Late(Inner):
    """Momentum that is set up at the first gradient that is not zero."""

    def move(self, p, group):
        if p.grad.any():
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
            p.sub_(state["mean"].mul_(0.9).add_(p.grad), alpha=group["lr"])


def test_an_inner_may_set_its_state_up_after_its_first_step():
    p = weight()
    optimizer = gyroscope.Layca(Late([p]))
    for scale in (0.0, 1.0, 1.0):
        p.grad = torch.ones_like(p) * scale
        optimizer.step()
    assert "radius" in optimizer.state_dict()["state"][0]
    assert not torch.equal(p, weight())


@pytest.mark.parametrize("again", ["step", "copy", "add"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adadelta, torch.optim.SGD])
def test_a_cleared_state_is_set_up_again(make, again):
    p = weight()
    optimizer = gyroscope.Layca(make([p], lr=0.1))
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state.clear()
    if again == "copy":
        optimizer = copy.deepcopy(optimizer)
    if again == "add":
        optimizer.add_param_group({"params": [weight(2)]})
    [p] = optimizer.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(p, weight())


class Lion(Inner):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, weight_decay=weight_decay)

    def move(self, p, group):
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])


def test_a_decay_of_which_it_is_not_known_how_it_enters_is_rejected():
    p = weight()
    gyroscope.Layca(Lion([p], weight_decay=0.5))  # reads the weights
    with pytest.raises(ControlError, match=r"`weight_decay` must be 0 with reads_weights=False, got 0.5: .* Lion"):
        gyroscope.Layca(Lion([p], weight_decay=0.5), reads_weights=False)
    vectors = {"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.5}
    optimizer = gyroscope.Layca(Lion([{"params": [p]}, vectors]), reads_weights=False)  # no layer decays
    optimizer.param_groups[0]["weight_decay"] = 0.5
    p.grad = torch.ones_like(p)
    with pytest.raises(ControlError, match="`weight_decay` must be 0"):
        optimizer.step()
    assert torch.equal(p, weight())
    assert torch.equal(p.grad, torch.ones_like(p))


class AdamWScheduleFreeClosure(Rebinding):
    """Has neither `train` nor `eval`: it swaps the weights around the closure."""


def test_schedule_free_optimizers_are_known_by_their_names_too():
    with pytest.raises(ControlError, match="got a AdamWScheduleFreeClosure, which keeps weights of its own"):
        gyroscope.Layca(AdamWScheduleFreeClosure([weight()]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.fc(x).relu()


def blocks(wrapped):
    net = nn.Sequential(*(Block() for _ in range(3)))
    for i in range(3):
        net[i] = wrapped(net[i])
    return net


def roles(net):
    return {
        name: group["role"]
        for group in gyroscope.steer(net, "adamw").param_groups
        for name in group["param_names"]
        if name.endswith("weight")
    }


def test_equal_blocks_that_are_compiled_or_checkpointed_one_by_one_have_no_head():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = roles(blocks(lambda block: block))
    assert set(bare.values()) == {"matrix"}
    for wrap in (checkpoint_wrapper, lambda block: torch.compile(block, backend="eager")):
        assert roles(blocks(wrap)) == bare


def test_a_group_that_is_rejected_is_not_added_in_part():
    optimizer = gyroscope.steer(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), "adamw")
    bias, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(3, 3))
    before = len(optimizer.param_groups)
    for params, says in (([bias, matrix * 2], "must be a leaf"), ([bias, matrix, matrix], "that it or another group")):
        with pytest.raises(ControlError, match=says):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == before
    optimizer.add_param_group({"params": [bias, matrix]})
    assert len(optimizer.param_groups) == before + 2


def test_one_cycle_finds_its_options_in_frozen_groups_too():
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    optimizer = gyroscope.steer(net, "adamw", embeddings="frozen")
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    optimizer.step()
    schedule.step()
    assert "frozen" in {group["rule"] for group in optimizer.param_groups}


def test_layers_of_equal_names_are_told_apart():
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    optimizer = gyroscope.Layca(torch.optim.SGD(first.named_parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(second.named_parameters())})
    assert list(optimizer.rates()) == ["0.weight", "group2.0.weight"]  # biases have a group of their own


def test_a_matrix_without_elements_is_no_layer():
    empty = nn.Parameter(torch.zeros(0, 4))
    optimizer = gyroscope.Layca(torch.optim.AdamW([empty, weight()], lr=0.1))
    assert len(optimizer.rates()) == 1


def test_graft_rejects_complex_parameters_before_anything_steps():
    given = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ControlError, match=r"Parameter .* must be float32, .*, got torch.complex64"):
        gyroscope.Graft(torch.optim.SGD([given], lr=0.1), torch.optim.SGD([given], lr=0.1))
    p = weight()
    optimizer = gyroscope.Graft(torch.optim.SGD([p], lr=0.1), torch.optim.SGD([p], lr=0.1))
    with pytest.raises(ControlError, match="complex64"):
        optimizer.add_param_group({"params": [given]})
    assert len(optimizer.param_groups) == len(optimizer.direction.param_groups) == 1
