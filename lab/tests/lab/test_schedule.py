from math import cos, inf, nan, pi

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from gyroscope.control.rates import warmup
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.schedule import Schedule

SCHEDULES = {
    "the papers' C10-CNN1": Schedule(epochs=100, batch=8, cuts=(0.8, 0.9, 0.97)),
    "a factor of ten": Schedule(epochs=10, batch=8, cuts=(0.7, 0.9), factor=10.0),
    "no cuts": Schedule(epochs=4, batch=8, cuts=()),
    "cut from the start": Schedule(epochs=4, batch=8, cuts=(0.0, 0.5)),
    "two cuts at once": Schedule(epochs=4, batch=8, cuts=(0.5, 0.5)),
    "cut at the end, which never comes": Schedule(epochs=4, batch=8, cuts=(1.0,)),
    "a warm-up": Schedule(epochs=8, batch=8, cuts=(0.75,), warmup=3.0),
    "a warm-up of one and a half epochs": Schedule(epochs=8, batch=8, warmup=1.5),
    "cut while warming up": Schedule(epochs=8, batch=8, cuts=(0.25,), warmup=4.0),
    "a warm-up longer than training": Schedule(epochs=3, batch=8, warmup=6.0),
}


def made_by_torch(schedule, steps):
    """The rate of every step from torch's scheduler for the cuts, and from the warm-up of `gyroscope.control`."""
    rates = []
    weight = torch.nn.Parameter(torch.ones(1))
    cut, warm = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)
    cuts = MultiStepLR(cut, schedule.milestones, gamma=1 / schedule.factor)
    warming = warmup(warm, round(schedule.warmup * steps))
    for _ in range(schedule.epochs):
        for _ in range(steps):
            rates.append(cuts.get_last_lr()[0] * warming.get_last_lr()[0])
            warm.step()
            warming.step()
        cut.step()
        cuts.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_every_step_is_that_of_torchs_schedulers(name):
    schedule, steps = SCHEDULES[name], 4
    rates = [schedule.multiplier(epoch, step / steps) for epoch in range(schedule.epochs) for step in range(steps)]
    assert rates == pytest.approx(made_by_torch(schedule, steps), rel=1e-12)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_that_a_list_is_cut_into(drop_last):
    for examples in range(1, 70):
        for size in (1, 7, 32, 100):
            schedule = Schedule(batch=size, drop_last=drop_last)
            cut = [len(list(range(examples))[at : at + size]) for at in range(0, examples, size)]
            if drop_last and len(cut) > 1 and cut[-1] < size:
                cut.pop()
            assert list(schedule.batches(examples)) == cut
            assert schedule.steps(examples) == len(cut)


def test_another_number_of_epochs_keeps_the_shares_of_cuts_and_of_warming_up():
    schedule = Schedule(epochs=200, cuts=(0.3, 0.6, 0.8), warmup=10.0).lasting(20)
    assert (schedule.epochs, schedule.milestones, schedule.warmup) == (20, [6, 12, 16], 1.0)


def test_a_cosine_falls_to_zero_after_a_linear_warm_up():
    schedule = Schedule(epochs=10, cuts=(), cosine=True, warmup=1.0)
    assert schedule.multiplier(0) == pytest.approx(0.1)
    assert schedule.multiplier(0, 0.5) == pytest.approx(0.55 * (1 + cos(0.05 * pi)) / 2)
    assert [schedule.multiplier(epoch) for epoch in (5, 10)] == pytest.approx([0.5, 0.0])


def test_a_share_of_few_epochs_is_never_cut_off_before_the_first():
    """Otherwise a training of one epoch would have no epoch at its own rate."""
    for epochs in (1, 2, 3):
        schedule = Schedule(epochs=epochs, cuts=(0.1, 0.4, 0.9))
        assert schedule.multiplier(0) == 1.0
        assert schedule.multiplier(epochs) == pytest.approx(5.0**-3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"epochs": 0}, "`epochs` must be a whole number ≥ 1, got 0"),
        ({"epochs": 2.5}, r"`Schedule\.epochs` must be a whole number \(int\), got 2\.5"),
        ({"batch": 0}, "`batch` must be a whole number ≥ 1, got 0"),
        ({"batch": -1}, "`batch` must be a whole number ≥ 1, got -1"),
        ({"passes": 0}, "`passes` must be a whole number ≥ 1, got 0"),
        ({"drawn": -1}, "`drawn` must be a whole number ≥ 0, got -1"),
        (
            {"cuts": (0.5, 80)},
            r"`cuts` must be shares of all epochs, from 0 to 1, got \(0\.5, 80\)\. Try \(0\.8, 0\.9\)",
        ),
        ({"cuts": (nan,)}, r"`cuts` must be shares of all epochs, from 0 to 1, got \(nan,\)\. Try \(0\.8, 0\.9\)"),
        ({"cosine": True}, r"`cuts` must be empty with a cosine, got \(0\.8, 0\.9\)\. Try cuts=\(\)\."),
        ({"factor": 0.0}, r"`factor` must be a finite number > 0, got 0\.0"),
        ({"factor": inf}, "`factor` must be a finite number > 0, got inf"),
        ({"warmup": -1.0}, r"`warmup` must be a finite number of epochs ≥ 0, got -1\.0"),
        ({"warmup": nan}, "`warmup` must be a finite number of epochs ≥ 0, got nan"),
        ({"warmup": inf}, "`warmup` must be a finite number of epochs ≥ 0, got inf"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(given, says):
    with pytest.raises(LabError, match=says):
        Schedule(**given)
