"""Rates over layers and over time: the published multipliers and warm-up, and rotations recorded and replayed."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gyroscope
from gyroscope.control.rates import Rates, alpha_multipliers, record, replay, warmup
from gyroscope.errors import ControlError
from oracles.control import angle, multipliers, warmup_rate

CLAIM = settings(derandomize=True, deadline=None, max_examples=40)


@CLAIM
@given(st.floats(-1, 1), st.integers(1, 120))
def test_multipliers_are_the_published_ones(alpha, n):
    assert alpha_multipliers(alpha, n) == pytest.approx(multipliers(alpha, n), rel=1e-12)


@pytest.mark.parametrize(("alpha", "slowest"), [(0.6, 0.01024), (0.8, 3.2e-4)])
def test_the_slowest_layer_turns_at_the_published_share(alpha, slowest):
    assert alpha_multipliers(-alpha, 9)[0] == 1.0
    assert alpha_multipliers(-alpha, 9)[-1] == pytest.approx(slowest, rel=1e-12)
    assert alpha_multipliers(alpha, 9)[0] == pytest.approx(slowest, rel=1e-12)
    assert alpha_multipliers(alpha, 9)[-1] == 1.0


def test_at_the_limits_one_layer_turns_alone():
    assert alpha_multipliers(-1.0, 4) == [1.0, 0.0, 0.0, 0.0]
    assert alpha_multipliers(1.0, 4) == [0.0, 0.0, 0.0, 1.0]
    assert alpha_multipliers(0.0, 4) == [1.0] * 4


@pytest.mark.parametrize("alpha", [-1.0, -0.6, 0.0, 0.6, 1.0])
def test_a_single_layer_turns_at_the_rate_itself(alpha):
    assert alpha_multipliers(alpha, 1) == [1.0]


@pytest.mark.parametrize("steps", [0, 1, 7, 40])
@pytest.mark.parametrize("lr", [1.0, 3**-3])
def test_warm_up_follows_the_published_line(steps, lr):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = gyroscope.Layca(torch.optim.SGD([p], lr=lr))
    schedule = warmup(optimizer, steps)
    for t in range(steps + 3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(warmup_rate(lr, t, steps), rel=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("steps", [torch.tensor(4), np.int64(4)])
def test_a_warm_up_over_a_number_of_torch_or_numpy_gives_plain_rates(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=1.0)
    schedule = warmup(optimizer, steps, start=torch.tensor(0.5))
    optimizer.step()
    schedule.step()
    assert (type(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["lr"]) == (float, 0.625)


def test_layers_turn_by_the_warm_up_rate():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    optimizer = gyroscope.Layca(torch.optim.SGD([p], lr=0.3))
    schedule = warmup(optimizer, 4)
    for t in range(6):
        before = p.detach().clone()
        p.grad = torch.randn(6, 5, dtype=torch.float64)
        optimizer.step()
        schedule.step()
        assert math.tan(angle(before, p)) == pytest.approx(warmup_rate(0.3, t, 4), rel=1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, r"`steps` must be a finite number ≥ 0, got -1"),
        ({"steps": 3, "start": 1.5}, r"`start` must be a share of the rate, a number from 0 to 1, got 1\.5"),
        ({"steps": 3, "start": float("nan")}, r"`start` must be .*got nan"),
        ({"steps": float("nan")}, r"`steps` must be a finite number ≥ 0, got nan"),
        ({"steps": "3"}, r"`steps` must be a finite number ≥ 0, got '3'"),
    ],
)
def test_an_impossible_warm_up_is_refused_and_nothing_changes(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=1.0)
    with pytest.raises(ControlError, match=message):
        warmup(optimizer, **arguments)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert "initial_lr" not in optimizer.param_groups[0]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(model, optimizer, steps):
    """Train on fixed data; returns tan θ of each weight matrix at each step, measured from outside."""
    generator = torch.Generator().manual_seed(1)
    tangents = []
    weights = [p for p in model.parameters() if p.dim() > 1]
    for _ in range(steps):
        x = torch.randn(16, 5, generator=generator).to(weights[0].dtype)
        optimizer.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        before = [w.detach().clone() for w in weights]
        optimizer.step()
        tangents.append([math.tan(angle(w, p)) for w, p in zip(before, weights, strict=True)])
    return torch.tensor(tangents, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_the_record_is_the_tangent_of_the_angle_of_every_step(cls, dtype):
    model = network(dtype)
    optimizer = cls(model.parameters(), lr=0.01)
    with record(model, optimizer) as recorder:
        measured = train(model, optimizer, 12)
    rates = recorder.rates
    assert rates.layers == ("0.weight", "2.weight", "4.weight")
    assert rates.tangents.dtype == torch.float64
    torch.testing.assert_close(rates.tangents, measured, rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=1e-12)


def test_the_record_of_a_layca_run_is_its_rates():
    model = network(torch.float64)
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.07), model, alpha=-0.5)
    with record(model, optimizer) as recorder:
        train(model, optimizer, 3)
    expected = torch.tensor([0.07 * m for m in multipliers(-0.5, 3)], dtype=torch.float64)
    torch.testing.assert_close(recorder.rates.tangents, expected.expand(3, 3), rtol=1e-8, atol=0)


def test_after_close_nothing_more_is_recorded():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = record(model, optimizer)
    assert tuple(recorder.rates.tangents.shape) == (0, 3)
    train(model, optimizer, 2)
    assert len(recorder.close().tangents) == 2
    train(model, optimizer, 2)
    assert len(recorder.rates.tangents) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "inner",
    [
        lambda ps: torch.optim.SGD(ps, lr=1.0),
        lambda ps: gyroscope.SGD_AMom(ps, lr=1.0),
        lambda ps: torch.optim.Adam(ps, lr=1.0),
    ],
    ids=["SGD", "SGD_AMom", "Adam"],
)
def test_a_replayed_run_turns_each_layer_by_the_recorded_angle_at_each_step(inner, dtype):
    model = network(dtype)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    with record(model, adam) as recorder:
        train(model, adam, 10)
    recorded = recorder.rates
    again = network(dtype)
    optimizer = gyroscope.Layca(inner(again.parameters()), again, others="frozen")
    player = replay(optimizer, recorded)
    measured = train(again, optimizer, 10)
    assert player.taken == 10
    torch.testing.assert_close(measured, recorded.tangents, rtol=2e-4 if dtype == torch.float32 else 1e-9, atol=0)
    assert len({round(float(t), 9) for t in recorded.tangents.flatten()}) == 30, "the rates should differ"


def test_after_close_the_replay_keeps_the_last_rates():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    player = replay(optimizer, Rates(optimizer.layers, torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)))
    train(model, optimizer, 1)
    player.close()
    measured = train(model, optimizer, 1)
    assert measured[0].tolist() == pytest.approx([0.1, 0.2, 0.3], rel=1e-3)


def test_a_run_longer_than_the_record_is_stopped_before_anything_moves():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    replay(optimizer, Rates(optimizer.layers, torch.full((2, 3), 0.1, dtype=torch.float64)))
    train(model, optimizer, 2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ControlError, match=r"All 2 steps of the record are replayed\. Stop here, or record a longer"):
        train(model, optimizer, 1)
    assert all(torch.equal(p.detach(), w) for p, w in zip(model.parameters(), before, strict=True))


def test_a_record_of_other_layers_is_refused():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    with pytest.raises(
        ControlError,
        match=r"recorded on other layers .*: 1 and 3; number 0 is 'weight' there and '0\.weight' here.*same layers",
    ):
        replay(optimizer, Rates(("weight",), torch.ones(1, 1, dtype=torch.float64)))


def test_a_rate_other_than_one_is_refused():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ControlError, match=r"`lr` of group 0 must be 1, .*got 0\.1.*lr=1"):
        replay(optimizer, Rates(optimizer.layers, torch.ones(1, 3, dtype=torch.float64)))
    assert optimizer.multipliers.tolist() == [1.0, 1.0, 1.0]


def test_a_record_of_a_diverged_run_is_refused():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    rates = Rates(optimizer.layers, torch.tensor([[0.1, float("nan"), 0.1]], dtype=torch.float64))
    with pytest.raises(ControlError, match="not finite: the recorded run diverged"):
        replay(optimizer, rates)


def test_a_record_survives_a_file(tmp_path):
    rates = Rates(("a", "b"), torch.rand(5, 2, dtype=torch.float64))
    rates.save(tmp_path / "rates.pt")
    loaded = Rates.load(tmp_path / "rates.pt")
    assert loaded.layers == rates.layers
    assert torch.equal(loaded.tangents, rates.tangents)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ControlError, match=r"no file .*absent\.pt\. `Rates\.save` writes one"):
        Rates.load(tmp_path / "absent.pt")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut short"])
def test_a_corrupt_file_is_named(tmp_path, content):
    path = tmp_path / "broken.pt"
    path.write_bytes(content)
    with pytest.raises(ControlError, match=r"broken\.pt does not hold recorded rates"):
        Rates.load(path)


def test_rates_of_which_a_bit_has_flipped_on_disk_are_refused(tmp_path):
    path = tmp_path / "rates.pt"
    tangents = torch.rand(50, 2, dtype=torch.float64)
    Rates(("a", "b"), tangents).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(tangents.numpy().tobytes()) + 7] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ControlError, match=r"does not hold recorded rates: .*damaged"):
        Rates.load(path)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "rates.pt"
    Rates(("a", "b"), torch.rand(5, 2, dtype=torch.float64)).save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ControlError, match=r"rates\.pt does not hold recorded rates"):
        Rates.load(path)


@pytest.mark.parametrize("data", [{"layers": ["a"]}, {"layers": ["a"], "tangents": [1.0]}, [1, 2]])
def test_a_file_of_something_else_is_named(tmp_path, data):
    path = tmp_path / "other.pt"
    torch.save(data, path)
    with pytest.raises(ControlError, match=r"other\.pt does not hold recorded rates"):
        Rates.load(path)


def test_a_file_whose_rates_and_layers_do_not_match_is_refused(tmp_path):
    path = tmp_path / "mismatch.pt"
    torch.save({"layers": ["a", "b"], "tangents": torch.ones(4, 3)}, path)
    with pytest.raises(ControlError, match=r"mismatch\.pt does not hold recorded rates"):
        Rates.load(path)


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_a_record_of_parts_of_layers_is_refused_and_no_hook_is_left(granularity):
    model = nn.LSTM(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ControlError, match=r'split into segments: weight_ih_l0, .*one angle.*granularity "tensor"'):
        record(gyroscope.layers(model, granularity=granularity), optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("given", [["0.weight"], "0.weight", []])
def test_a_record_of_what_is_no_layer_is_refused(given):
    with pytest.raises(ControlError, match="must be a model"):
        record(given, torch.optim.Adam(network().parameters()))


def test_a_replay_that_would_step_biases_at_rate_one_is_refused():
    model = network()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model)
    rates = Rates(optimizer.layers, torch.full((2, 3), 0.1, dtype=torch.float64))
    with pytest.raises(
        ControlError, match=r'Group 1 holds parameters that are not layers.*others="frozen".*others_lr='
    ):
        replay(optimizer, rates)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("options", [{"others": "frozen"}, {"others_lr": 0.01}])
def test_a_replay_takes_frozen_biases_and_biases_at_a_rate_of_their_own(options):
    model = network()
    before = model[0].bias.detach().clone()
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, **options)
    replay(optimizer, Rates(optimizer.layers, torch.full((2, 3), 0.1, dtype=torch.float64)))
    train(model, optimizer, 2)
    assert torch.equal(model[0].bias.detach(), before) == ("others" in options)


def test_a_replay_takes_biases_that_do_not_require_gradients():
    model = network()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" not in name)
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model)
    replay(optimizer, Rates(optimizer.layers, torch.full((1, 3), 0.1, dtype=torch.float64)))
    train(model, optimizer, 1)


@pytest.mark.parametrize("use", [lambda given: warmup(given, 3), lambda given: record(network(), given)])
def test_what_is_no_optimizer_is_refused(use):
    with pytest.raises(ControlError, match=r"`optimizer` must be a torch\.optim\.Optimizer.*got a Sequential"):
        use(network())


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"weight": [0.1]}, "`recorded` must be a Rates, got a dict"),
        (Rates(("weight",), -torch.ones(3, 1)), "negative rates"),
    ],
)
def test_what_is_no_record_is_refused_and_no_hook_is_left(recorded, message):
    model = nn.Linear(3, 2)
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    with pytest.raises(ControlError, match=message):
        replay(optimizer, recorded)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("layers", "tangents", "message"),
    [
        (("weight",), [[0.1]], r"`tangents` must be a tensor of real numbers of shape \[steps, 1\], .*got a list"),
        (("weight",), None, "got a NoneType"),
        (("weight",), torch.ones(3), r"got a tensor of shape \(3,\), torch\.float32 on cpu"),
        (("weight",), torch.ones(3, 2), r"got a tensor of shape \(3, 2\)"),
        (("weight",), torch.ones(3, 1, dtype=torch.complex64), "got a tensor of .*complex64"),
        (("weight",), torch.ones(3, 1, device="meta"), "got a tensor of .*on meta"),
        (("weight",), torch.ones(3, 1).to_sparse(), "got a tensor of .*sparse"),
        (5, torch.ones(3, 1), "`layers` must be a tuple of names, got 5"),
        ((5,), torch.ones(3, 1), r"`layers` must be a tuple of names, got \(5,\)"),
    ],
)
def test_rates_are_made_of_names_and_numbers_alone(layers, tangents, message):
    with pytest.raises(ControlError, match=message):
        Rates(layers, tangents)


def test_a_replay_by_what_controls_nothing_is_refused():
    with pytest.raises(ControlError, match=r"`optimizer` must be a Layca, got a SGD"):
        replay(torch.optim.SGD(network().parameters(), lr=1.0), Rates(("weight",), torch.ones(1, 1)))


def test_a_record_of_a_complex_layer_is_refused_before_the_first_step():
    model = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ControlError, match=r"Layer weight must be float32.*got torch\.complex64"):
        record(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_rates_that_cannot_be_written_are_kept_and_the_file_named(tmp_path):
    rates = Rates(("weight",), torch.ones(1, 1, dtype=torch.float64))
    with pytest.raises(ControlError, match=r"could not be written to .*nowhere.rates\.pt"):
        rates.save(tmp_path / "nowhere" / "rates.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ControlError, match=r"could not be written to .*folder"):
        rates.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("path", [None, 5, b"rates.pt"])
def test_rates_are_saved_to_paths_and_files_alone(path):
    with pytest.raises(ControlError, match=r"`path` must be a path or an open file, got .*Try 'rates\.pt'"):
        Rates(("weight",), torch.ones(1, 1)).save(path)


def test_rates_cannot_be_saved_under_impossible_names_and_to_closed_files(tmp_path):
    closed = io.BytesIO()
    closed.close()
    for path in (tmp_path / "a\0b", tmp_path / "\ud83d", tmp_path / ("x" * 300), closed, io.StringIO()):
        with pytest.raises(ControlError, match="could not be written to"):
            Rates(("weight",), torch.ones(1, 1)).save(path)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_file_there_was(tmp_path, monkeypatch):
    path = tmp_path / "rates.pt"
    Rates(("weight",), torch.ones(1, 1, dtype=torch.float64)).save(path)

    def half(data, to):
        to.write(b"half a fi")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(ControlError, match="no space left on device"):
        Rates(("weight",), torch.zeros(9, 1, dtype=torch.float64)).save(path)
    assert Rates.load(path).tangents.tolist() == [[1.0]]
    assert list(tmp_path.iterdir()) == [path]


def test_rates_are_saved_to_open_files_and_through_links(tmp_path):
    rates = Rates(("weight",), torch.ones(1, 1, dtype=torch.float64))
    opened = io.BytesIO(b"before")
    opened.seek(6)
    rates.save(opened)
    opened.seek(6)
    assert Rates.load(opened).tangents.tolist() == [[1.0]]
    (tmp_path / "link.pt").symlink_to(tmp_path / "rates.pt")
    for _ in range(2):  # it leads to nothing yet, and then to a file
        rates.save(tmp_path / "link.pt")
        assert (tmp_path / "link.pt").is_symlink()
        # Neither the name nor the time is in it.
        assert (tmp_path / "rates.pt").read_bytes() == opened.getvalue()[6:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "rates.pt"]


@pytest.mark.parametrize("wrap", [gyroscope.Layca, lambda adam: gyroscope.Graft(adam, sgd_beside(adam))])
def test_an_optimizer_inside_a_controller_is_not_recorded(wrap):
    """Its weights are not in their place while it steps, so that every angle would be zero."""
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    outer = wrap(adam)
    with pytest.raises(ControlError, match=r"The Adam is inside a (Layca|Graft), .*\. Record the (Layca|Graft)"):
        record(model, adam)
    with record(model, outer) as recorder:
        train(model, outer, 1)
    assert bool((recorder.rates.tangents > 0).all())


def test_a_controller_is_found_around_preconditioners_too(tmp_path):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = gyroscope.control.KFAC(gyroscope.control.KFAC(sgd, model, labels="true"), model, labels="true")
    record(model, sgd).close()  # its steps are those that are taken
    outer = gyroscope.Layca(inner, model)
    for one in (inner, inner.inner, sgd):
        with pytest.raises(ControlError, match=rf"The {type(one).__name__} is inside a Layca"):
            record(model, one)
        with pytest.raises(gyroscope.errors.MonitorError, match="inside a Layca"):
            gyroscope.watch(model, one, tmp_path / "run")
    record(model, outer).close()


def sgd_beside(optimizer):
    return torch.optim.SGD([p for group in optimizer.param_groups for p in group["params"]], lr=0.1)


def test_an_optimizer_that_is_wrapped_while_it_is_recorded_is_refused_at_the_step():
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with record(model, adam) as recorder:
        optimizer = gyroscope.Layca(adam, model)
        with pytest.raises(ControlError, match="The Adam is inside a Layca"):
            train(model, optimizer, 1)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    assert len(recorder.rates.tangents) == 0


def test_an_optimizer_whose_controller_is_gone_is_recorded_again():
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    gyroscope.Layca(adam)
    with record(model, adam) as recorder:
        train(model, adam, 1)
    assert bool((recorder.rates.tangents > 0).all())


def test_a_record_of_a_model_that_the_optimizer_does_not_step_is_refused():
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ControlError, match="does not hold these layers of the model: weight"):
        record(other, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


class CallsItsBase(torch.optim.AdamW):
    """torch runs the hooks of both classes around this step."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


@pytest.mark.parametrize("failing", [False, True])
def test_an_optimizer_that_calls_its_base_class_is_recorded_once_per_step(failing):
    model = nn.Linear(4, 3)
    torch.optim.AdamW(model.parameters())  # from now on, hooks run around AdamW's own step too
    optimizer = CallsItsBase(model.parameters(), lr=0.01)
    angles = []
    with record(model, optimizer) as recorder:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            before = model.weight.detach().clone()
            optimizer.fails = failing and step == 1
            if optimizer.fails:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                continue
            optimizer.step()
            angles.append(math.tan(angle(before, model.weight.detach())))
    assert recorder.rates.tangents[:, 0].tolist() == pytest.approx(angles, rel=1e-4)
