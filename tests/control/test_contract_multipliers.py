"""Multipliers are what they are said to be: copies, checked, saved with the state."""

import pytest
import torch

import gyroscope
from gyroscope.control.proposal import Proposer
from gyroscope.errors import ControlError


def two_layers():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(2, 4))]
    return params, gyroscope.Layca(torch.optim.SGD(params, lr=0.1))


def step(params, optimizer):
    before = [p.detach().double().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    pairs = zip(before, (p.detach().double() for p in params), strict=True)
    return [torch.tan(torch.arccos((a * b).sum() / a.norm() / b.norm())).item() for a, b in pairs]


def test_what_the_multipliers_return_is_a_copy():
    params, optimizer = two_layers()
    optimizer.multipliers[0] = 0.0
    assert optimizer.rates() == {"group0.0": 0.1, "group0.1": 0.1}
    assert step(params, optimizer) == pytest.approx([0.1, 0.1], rel=1e-4)


def test_a_tensor_that_was_set_may_change_afterwards():
    params, optimizer = two_layers()
    factors = torch.tensor([0.5, 1.0], dtype=torch.float64)
    optimizer.multipliers = factors
    factors.zero_()
    assert step(params, optimizer) == pytest.approx([0.05, 0.1], rel=1e-4)


def test_multipliers_are_saved_and_loaded():
    _, optimizer = two_layers()
    optimizer.multipliers = [0.5, 0.25]
    params, other = two_layers()
    other.load_state_dict(optimizer.state_dict())
    assert step(params, other) == pytest.approx([0.05, 0.025], rel=1e-4)


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [-1.0, 1.0]])
def test_a_tensor_is_checked_as_a_list_is(bad):
    _, optimizer = two_layers()
    with pytest.raises(ControlError, match="finite numbers ≥ 0"):
        optimizer.multipliers = torch.tensor(bad)
    assert optimizer.multipliers.tolist() == [1.0, 1.0]


def test_an_interruption_between_proposal_and_update_leaves_no_half_step_behind(monkeypatch):
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    grads = [torch.randn(4, 3) for _ in range(2)]

    def run(interrupted):
        p = torch.nn.Parameter(start.clone())
        optimizer = gyroscope.Layca(torch.optim.NAdam([p], lr=0.1))
        p.grad = grads[0].clone()
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr("gyroscope.control.steering.sweep", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            assert torch.equal(p, start)
        else:
            optimizer.inner.step()  # the state has seen the gradient, the weights have not moved
            p.data.copy_(start)
        p.grad = grads[1].clone()
        optimizer.step()
        return p.detach()

    torch.testing.assert_close(run(True), run(False))


def test_the_layers_of_a_group_are_walked_a_few_times_a_step_however_many_there_are():
    class Counted(list):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(100)]
    for p in params:
        p.grad = torch.ones(2, 2)
    proposer = Proposer(torch.optim.Adam(params, lr=0.1))
    (proposal,), _ = proposer.propose([Counted(range(90))], frozen=[0])
    assert len(proposal.params) == 90
    assert all(torch.equal(p, torch.ones(2, 2)) for p in params)
    assert Counted.walks < 10
