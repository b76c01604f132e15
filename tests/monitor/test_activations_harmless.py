"""Looking at activations changes nothing, keeps nothing, waits for nothing, and stops nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from activation_models import seeded
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.passes.activations import COLUMNS, INFO, INPUTS, ActivationProbe, unavailable


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(4, 6, 3), nn.RReLU(),
        nn.Flatten(), nn.Linear(96, 10), nn.GELU(), nn.Linear(10, 3),
    )  # fmt: skip


def probe(model: nn.Module, **options) -> ActivationProbe:
    return ActivationProbe(model, gyroscope.layers(model), **options)


def train(model: nn.Module, steps: int = 6, *, amp: bool = False, probes=()) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        for one in probes if step % 2 else ():
            one.reset()
            one.attach()
        x = torch.randn(8, 1, 8, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(x)
        loss = out.float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.detach(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        for one in probes if step % 2 else ():
            one.detach()
            assert one.collect().isfinite().all()
    return [*seen, *[v.clone() for v in model.state_dict().values()], torch.get_rng_state()]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("count", [1, 2])
def test_training_is_the_same_to_the_bit(amp, count):
    bare = train(net(), amp=amp)
    model = net()
    looked_at = train(model, amp=amp, probes=[probe(model) for _ in range(count)])
    assert len(bare) == len(looked_at)
    assert all(a.equal(b) for a, b in zip(bare, looked_at, strict=True))


def test_two_probes_at_once_see_the_same():
    model = net()
    one, two = probe(model), probe(model)
    one.attach()
    two.attach()
    model(seeded((4, 1, 8, 8)))
    one.detach()
    model(seeded((4, 1, 8, 8), 1))
    first, both = one.collect(), two.collect()
    two.reset()
    model(seeded((4, 1, 8, 8)))
    assert not first.equal(both)
    assert two.collect().shape == first.shape
    two.detach()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_all_hooks_are_gone_after_detach():
    model = net()
    model[0].register_forward_hook(lambda *_: None)
    before, keys = hooks(model), list(model.state_dict())
    one = probe(model)
    assert hooks(model) == before
    one.attach()
    attached = hooks(model)
    one.attach()
    assert hooks(model) == attached > before
    assert list(model.state_dict()) == keys
    one.detach()
    one.detach()
    assert hooks(model) == before


def test_a_forgotten_probe_does_nothing_more():
    model = net()
    one = probe(model)
    one.attach()
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    model(seeded((4, 1, 8, 8)))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
def test_a_model_that_is_copied_meanwhile_is_not_looked_at(how):
    model = net()
    one = probe(model)
    one.attach()
    twin = how(model)
    twin(seeded((4, 1, 8, 8)))
    assert one.collect().isnan().all()
    model(seeded((4, 1, 8, 8)))
    assert one.collect().isfinite().all()
    one.detach()


def test_nothing_is_seen_before_attach_and_after_detach_and_reset():
    model = net()
    one = probe(model)
    model(seeded((4, 1, 8, 8)))
    assert one.collect().isnan().all()
    one.attach()
    model(seeded((4, 1, 8, 8)))
    one.detach()
    seen = one.collect()
    model(seeded((4, 1, 8, 8), 1))
    assert one.collect().equal(seen)
    one.reset()
    assert one.collect().isnan().all()


def test_no_activation_is_kept():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    one = probe(model)
    outputs: list[weakref.ref[Tensor]] = []
    for m in model:
        m.register_forward_hook(lambda m, args, out: outputs.append(weakref.ref(out)))
    one.attach()
    model(seeded((6, 3)))
    gc.collect()
    assert [ref() for ref in outputs] == [None] * 5
    before = large()
    model(seeded((10**5, 3)))
    gc.collect()
    assert large() == before
    one.detach()


def large() -> int:
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not is_lazy(t)]
    return sum(t.numel() >= 10**5 for t in tensors)


def test_nothing_is_read_back_from_the_device(monkeypatch):
    model = nn.Sequential(net(), nn.Unflatten(1, (1, 3)), nn.TransformerEncoderLayer(3, 1, 8, batch_first=True))
    one = probe(model, rank=3)
    one.attach()
    x = seeded((4, 1, 8, 8))
    model(x)
    expected = one.collect()
    one.reset()

    def refuse(*_, **__):
        raise AssertionError("waits for the device")

    torch.manual_seed(5)
    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    ran = one.ran
    inside = []
    monkeypatch.setattr(one, "ran", lambda *args: (inside.append(1), ran(*args)))
    model(x)
    found = one.collect()
    monkeypatch.undo()
    one.detach()
    assert one.error is None
    assert inside
    assert found.shape == expected.shape


def test_an_error_is_logged_once_and_ends_the_looking_alone(caplog, monkeypatch):
    model = net()
    one = probe(model)
    one.attach()
    monkeypatch.setattr("gyroscope.passes.activations.look", lambda *_, **__: 1 / 0)
    model(seeded((4, 1, 8, 8)))
    model(seeded((4, 1, 8, 8)))
    one.detach()
    assert isinstance(one.error, ZeroDivisionError)
    assert [r.getMessage() for r in caplog.records] == [
        "Activations are no longer measured: ZeroDivisionError: division by zero"
    ]
    assert one.collect().isnan().all()


def test_compiled_and_scripted_models_are_said_to_be_out_of_reach():
    model = net()
    assert unavailable(model) is None
    assert "the model is compiled" in unavailable(torch.compile(model, backend="eager"))
    model[0].compile(backend="eager")
    assert "the module '0' is compiled" in unavailable(model)
    assert "the module '1.0' is compiled" in unavailable(nn.Sequential(nn.ReLU(), model))


def test_hooks_that_are_there_when_a_model_is_compiled_break_no_graph():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    one = probe(model)
    one.attach()
    x = seeded((5, 3))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    out = compiled(x)
    one.detach()
    assert out.equal(model(x))
    assert one.error is None


def test_every_column_says_what_it_means():
    assert tuple(INFO) == (*COLUMNS, *INPUTS)
    assert all(info.name == name and info.unit and info.meaning for name, info in INFO.items())


def test_a_probe_of_nothing_is_refused():
    with pytest.raises(MonitorError, match="must have at least one layer, got none"):
        ActivationProbe(net(), [])
    with pytest.raises(MonitorError, match="`rank` must be a number of channels ≥ 0, got -1"):
        probe(net(), rank=-1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_input_is_not_looked_at_and_ends_nothing(layout):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    one = probe(model)
    one.attach()
    model(torch.eye(4).to_sparse(layout=layout))
    assert one.error is None
    assert one.inputs().isnan().tolist() == [[True] * len(INPUTS), [False] * len(INPUTS)]
    assert one.collect().isfinite().all()
    one.detach()
