"""Claims about the conditioning of a model on two ranks that both check together; test_ranks starts the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import gyroscope
import two_ranks
from gyroscope.conditioning import Conditioning, Schedule
from gyroscope.errors import ConditioningError
from gyroscope.monitor import clock

Claim = Callable[[Path], None]
Pair = tuple[Tensor, Tensor]
GRADIENT = ("gradient_spectral", "domination")
N = 24


class Kinds(nn.Module):
    """Layers of more dimensions than samples and of fewer, a convolution, an embedding, and one that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 6)
        self.conv = nn.Conv1d(6, 7, 3, padding=1)
        self.wide = nn.Linear(7, 50)
        self.narrow = nn.Linear(50, 6)
        self.head = nn.Linear(6, 40, bias=False)
        self.act = nn.ReLU()

    def forward(self, words: Tensor) -> Tensor:
        x = self.act(self.conv(self.embedding(words).transpose(1, 2))).mean(2)
        return self.head(self.narrow(self.act(self.wide(x))))


class Tied(Kinds):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


def batch(seed: int = 1, n: int = N) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(30, (n, 4), generator=generator)
    return words, words[:, 0] + 5


def part(whole: Pair, cut: int) -> Pair:
    """This rank's part of a batch: the first `cut` samples, or the rest."""
    mine = slice(0, cut) if dist.get_rank() == 0 else slice(cut, None)
    return whole[0][mine], whole[1][mine]


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    tied = isinstance(model, Tied)
    for name, child in model.named_children():
        if any(True for _ in child.parameters()) and not (tied and name in ("embedding", "head")):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def analysed(model: nn.Module, given: Any, loss: Any = F.cross_entropy, **options: Any) -> Conditioning:
    return gyroscope.condition(model, loss, given, **options)


def assert_same(found: Conditioning, whole: Conditioning, *, without: Sequence[str] = (), rtol: float = 1e-5) -> None:
    assert found.layers == whole.layers
    assert found.p == whole.p
    assert found.untreated.keys() == whole.untreated.keys()
    for one, other in zip(found.rows(), whole.rows(), strict=True):
        for name in [key for key in other if key not in without]:
            a, b = one[name], other[name]
            if isinstance(b, dict):
                a, b = ([np.nan if v is None else v for v in d.values()] for d in (a, b))
            if a is None or isinstance(b, str | None):
                assert a == b, (other["layer"], name, a, b)
            else:
                np.testing.assert_allclose(a, b, rtol=rtol, err_msg=f"{other['layer']} {name}")


def everywhere(value: Any) -> list[Any]:
    told: list[Any] = [None, None]
    dist.all_gather_object(told, value)
    return told


def assert_agreed(found: Conditioning) -> None:
    """Both ranks have the same numbers, to the bit."""
    one, other = everywhere(repr(found.rows()))
    assert one == other


def parts_of_a_batch_on_data_parallel_ranks_have_the_numbers_of_the_whole(folder: Path) -> None:
    for make in (Kinds, Tied):
        whole = analysed(make(), batch())
        assert {entry.dimension_x > entry.samples for entry in whole.entries} == {True, False}
        for cut in (12, 19, 23):
            found = analysed(replicated(make()), part(batch(), cut))
            assert_same(found, whole)
            assert_agreed(found)


def halves_of_a_batch_on_sharded_ranks_have_the_numbers_of_the_whole(folder: Path) -> None:
    found = analysed(sharded(Kinds()), part(batch(), 12))
    assert_same(found, analysed(Kinds(), batch()))
    assert_agreed(found)


def spectra_of_unequal_parts_on_sharded_ranks_are_those_of_the_whole(folder: Path) -> None:
    whole = analysed(Kinds(), batch(), spectra=True)
    for cut in (5, 23):
        found = analysed(sharded(Kinds()), part(batch(), cut), spectra=True)
        assert_same(found, whole, without=GRADIENT)
        assert found.spectra is not None
        assert whole.spectra is not None
        for name, spectra in whole.spectra.items():
            for letter in ("x", "g"):
                one, other = getattr(found.spectra[name], letter).full(), getattr(spectra, letter).full()
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9 * other[0])


def unequal_parts_on_sharded_ranks_have_the_gradient_of_the_whole(folder: Path) -> None:
    whole = analysed(Kinds(), batch())
    for cut in (5, 19):
        found = analysed(sharded(Kinds()), part(batch(), cut))
        assert_same(found, whole)
        assert_agreed(found)
    seeds = [(3, 6), (4, 10), (5, 4)]
    parts = [part(batch(seed, n), n // 3) for seed, n in seeds]
    whole = analysed(Kinds(), [batch(seed, n) for seed, n in seeds])
    assert_same(analysed(sharded(Kinds()), iter(parts)), whole, rtol=2e-5)


def weights_of_the_root_of_a_sharded_model_have_gradients(folder: Path) -> None:
    assert_same(analysed(sharded(Tied()), part(batch(), 12)), analysed(Tied(), batch()))


def the_loss_is_the_mean_over_all_ranks(folder: Path) -> None:
    whole = analysed(Kinds(), batch())
    for wrap in (replicated, sharded):
        for cut in (12, 19):
            assert analysed(wrap(Kinds()), part(batch(), cut)).loss == pytest.approx(whole.loss, rel=1e-5)


def ranks_with_ignored_and_weighted_labels_have_the_numbers_of_the_whole(folder: Path) -> None:
    words, labels = batch()
    labels[:7] = -100  # most of the first rank's
    labels[20] = -100
    weights = torch.linspace(0.1, 3.0, 40)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(weight=weights)):
        whole = analysed(Kinds(), (words, labels), loss)
        for wrap in (replicated, sharded):
            for cut in (12, 9):
                found = analysed(wrap(Kinds()), part((words, labels), cut), loss)
                assert found.loss == pytest.approx(whole.loss, rel=1e-5)
                assert_same(found, whole, rtol=2e-5)
                assert_agreed(found)


def a_function_that_hides_ignored_labels_is_refused_on_both(folder: Path) -> None:
    words, labels = batch()
    labels[:7] = -100  # the first rank's alone
    for wrap in (replicated, sharded):
        with pytest.raises(ConditioningError, match="The samples do not all count the same in the loss"):
            analysed(wrap(Kinds()), part((words, labels), 12), lambda output, target: F.cross_entropy(output, target))


def hybrid_meshes_have_the_numbers_of_the_whole(folder: Path) -> None:
    whole = analysed(Kinds(), batch())
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        assert_same(analysed(sharded(Kinds(), mesh), part(batch(), 12)), whole)


def streams_of_batches_have_the_numbers_of_all(folder: Path) -> None:
    """Also of other lengths on the ranks, where nothing in a pass waits for another."""
    seeds = [(3, 6), (4, 10), (5, 2)]
    whole = analysed(Kinds(), [batch(seed, n) for seed, n in seeds])
    for wrap in (replicated, sharded):
        parts = [part(batch(seed, n), n // 2) for seed, n in seeds]
        found = analysed(wrap(Kinds()), iter(parts))
        assert_same(found, whole, rtol=2e-5)
        assert found.batches == 3
    mine = [batch(3, 6)] if dist.get_rank() == 0 else [batch(4, 10), batch(5, 2)]
    assert_same(analysed(replicated(Kinds()), mine), whole, rtol=2e-5)


def the_largest_eigenvalues_alone_are_those_of_the_whole(folder: Path) -> None:
    whole = analysed(Kinds(), batch(), p=())
    for wrap in (replicated, sharded):
        assert_same(analysed(wrap(Kinds()), part(batch(), 12), p=()), whole)


class Halves(nn.Module):
    """Units that are active for the samples of one rank alone, in a hidden layer and in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
            self.first.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
            self.last.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1]]))
            self.last.bias.copy_(torch.tensor([-0.5, -0.5, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def units_are_dying_or_full_if_they_are_on_both_ranks(folder: Path) -> None:
    x = torch.tensor([[1.0, 1.0], [2.0, 1.0], [-1.0, 1.0], [-3.0, 1.0]])
    given = x, torch.arange(4)
    whole = analysed(Halves(), given)
    assert [units(entry) for entry in whole.entries] == [(0, 1), (1, 1)]
    for wrap in (replicated, sharded):
        assert [units(entry) for entry in analysed(Halves(), part(given, 2)).entries] == [(1, 2), (2, 2)]
        singles = [(a[None], b[None]) for a, b in zip(*part(given, 2), strict=True)]
        for mine in (part(given, 2), singles):
            assert [units(entry) for entry in analysed(wrap(Halves()), mine).entries] == [(0, 1), (1, 1)]


def units(entry: Any) -> tuple[int, int]:
    """Numbers of dying and full units."""
    return round(entry.dying * entry.dimension_g), round(entry.full * entry.dimension_g)


class Switched(nn.Module):
    """A layer that is used for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.extra(h).tanh() if more else h)


def a_layer_that_one_rank_uses_has_its_samples_and_a_part_of_the_gradient(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 5, generator=generator), torch.arange(10) % 3
    model = Switched()
    alone = analysed(model, ((x[:4], True), y[:4]))
    for user in (0, 1):
        mine = ((x[:4], True), y[:4]) if dist.get_rank() == user else ((x[4:], False), y[4:])
        found = analysed(replicated(Switched()), mine)
        assert_agreed_but_for_units(found)
        for name in ("lambda_x", "lambda_g", "samples", "rank_x", "rank_g", "weight_spectral"):
            assert getattr(found["extra.weight"], name) == pytest.approx(getattr(alone["extra.weight"], name), rel=1e-5)
        # The mean loss is over all ten samples, of which four lead through the layer.
        assert found["extra.weight"].domination == pytest.approx(0.4 * alone["extra.weight"].domination, rel=1e-5)
        assert found["first.weight"].samples == 10


def a_layer_that_one_rank_uses_has_its_units(folder: Path) -> None:
    x, y = torch.randn(10, 5, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3
    alone = analysed(Switched(), ((x[:4], True), y[:4]))
    mine = ((x[:4], True), y[:4]) if dist.get_rank() == 1 else ((x[4:], False), y[4:])
    found = analysed(replicated(Switched()), mine)
    assert_agreed(found)
    assert units(alone["extra.weight"]) == (1, 4)
    assert units(found["extra.weight"]) == (1, 4)


def assert_agreed_but_for_units(found: Conditioning) -> None:
    rows = [{k: v for k, v in row.items() if k not in ("dying", "full")} for row in found.rows()]
    one, other = everywhere(repr(rows))
    assert one == other


def no_group_is_this_rank_alone(folder: Path) -> None:
    found = analysed(replicated(Kinds()), part(batch(), 7), group=None)
    assert_same(found, analysed(Kinds(), part(batch(), 7)))
    assert_same(analysed(replicated(Kinds()), part(batch(), 7), group=dist.group.WORLD), analysed(Kinds(), batch()))


def weights_in_another_order_in_memory_are_averaged_in_place(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(45, 3))
    net = net.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 3, 7, 7, generator=generator), torch.arange(8) % 3
    given = x.to(memory_format=torch.channels_last), y
    whole = analysed(net, given)
    assert_same(analysed(replicated(copy.deepcopy(net)), part(given, 3)), whole)


def what_goes_wrong_on_one_rank_is_raised_on_both(folder: Path) -> None:
    words, labels = batch()
    wrong: dict[str, tuple[Any, Any]] = {
        "forward pass failed": ((words + 1000, labels), F.cross_entropy),
        "loss failed": ((words, labels[:3]), F.cross_entropy),
        "got Tensor.": (words, F.cross_entropy),
        "got an iterable without batches": ([], F.cross_entropy),
        "the disk": (broken(), F.cross_entropy),
        "no gradient": ((words, labels), lambda o, t: F.cross_entropy(o.detach(), t)),
    }
    model = replicated(Kinds())
    before = copy.deepcopy(model.state_dict())
    for culprit, (said, (given, loss)) in enumerate(wrong.items()):
        mine = dist.get_rank() == culprit % 2
        with pytest.raises(ConditioningError) as raised:
            analysed(model, given if mine else batch(), loss if mine else F.cross_entropy)
        assert said in str(raised.value)
        assert ("Another rank failed" in str(raised.value)) != mine
    assert_same(analysed(model, part(batch(), 12)), analysed(Kinds(), batch()))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def broken() -> Any:
    yield batch()
    raise OSError("the disk is gone")


def a_loss_that_is_not_a_number_on_one_rank_of_a_sharded_model_is_raised_on_both(folder: Path) -> None:
    model = sharded(Kinds())
    factor = float("nan") if dist.get_rank() == 0 else 1.0
    with pytest.raises(ConditioningError, match="nan"):
        analysed(model, part(batch(), 12), lambda output, target: F.cross_entropy(output, target) * factor)
    assert_same(analysed(model, part(batch(), 12)), analysed(Kinds(), batch()))


def a_stream_that_breaks_on_one_rank_of_a_sharded_model_is_raised_on_both(folder: Path) -> None:
    """Or that ends there before it does on the other."""
    model = sharded(Kinds())
    for mine, said in ((broken(), "disk"), ([batch()], "batch")):
        with pytest.raises(ConditioningError, match=said):
            analysed(model, [batch(), batch()] if dist.get_rank() else mine)
    assert_same(analysed(model, part(batch(), 12)), analysed(Kinds(), batch()))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def a_sharded_model_is_as_it_was(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = sharded(net)
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    ran: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ran.append)
    for rounds in range(3):
        parameters = list(model.parameters())
        if rounds == 1:  # every other one has a gradient
            for p in parameters[::2]:
                p.grad = torch.ones_like(p)
        gradients = [p.grad for p in parameters]
        values = [local_of(p).clone() for p in parameters]
        sums = [None if g is None else local_of(g).clone() for g in gradients]
        buffers = {name: (id(b), b._version, b.clone()) for name, b in model.named_buffers()}
        hooks = [dict(p._post_accumulate_grad_hooks) for p in parameters]
        random = torch.get_rng_state()
        given: Any = (x, y) if rounds < 2 else "no batch"
        if rounds < 2:
            analysed(model, given)
        else:
            with pytest.raises(ConditioningError):
                analysed(model, given)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert all(isinstance(p, DTensor) for p in parameters)
        assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
        assert all(torch.equal(local_of(p), v) for p, v in zip(parameters, values, strict=True))
        for g, s in zip(gradients, sums, strict=True):
            assert g is None or torch.equal(local_of(g), s)
        for name, b in model.named_buffers():
            assert (id(b), b._version) == buffers[name][:2]
            assert torch.equal(b, buffers[name][2])
        assert [dict(p._post_accumulate_grad_hooks) for p in parameters] == hooks
        assert torch.equal(torch.get_rng_state(), random)
    assert not ran
    F.cross_entropy(model(x), y).backward()
    assert len(ran) == len(list(model.parameters()))


def gradients_of_the_root_of_a_sharded_model_are_as_they_were(folder: Path) -> None:
    model = sharded(Tied())
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    held = [(p.grad, local_of(p.grad).clone()) for p in model.parameters()]
    analysed(model, part(batch(2), 12))
    for p, (gradient, value) in zip(model.parameters(), held, strict=True):
        assert p.grad is gradient
        assert torch.equal(local_of(gradient), value)


def training_goes_on_as_if_a_sharded_model_had_not_been_analysed(folder: Path) -> None:
    weights = []
    for between in (False, True):
        model = sharded(Kinds())
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for seed in range(4):
            optimizer.zero_grad()
            words, labels = part(batch(seed), 12)
            output = model(words)
            F.cross_entropy(output, labels).backward()
            if between:
                analysed(model, part(batch(90 + seed), 12))
            optimizer.step()
            if between:
                analysed(model, part(batch(80 + seed), 12), p=())
        weights.append([local_of(p).clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def gradients_that_are_not_synchronised_are_not_mixed_with_those_of_an_analysis(folder: Path) -> None:
    totals = []
    for between in (False, True):
        model = sharded(Kinds())
        for last, seed in ((False, 1), (True, 2)):
            model.set_requires_gradient_sync(last)
            words, labels = part(batch(seed), 12)
            F.cross_entropy(model(words), labels).backward()
            if between and not last:
                with pytest.raises(ConditioningError, match="set_requires_gradient_sync"):
                    analysed(model, part(batch(), 12))
        totals.append([local_of(p.grad).clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


def go(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any, *, split: bool) -> None:
    for seed in steps:
        words, labels = part(batch(seed), 12) if split else batch(seed)
        optimizer.zero_grad()
        F.cross_entropy(model(words), labels).backward()
        optimizer.step()


PLAIN: dict[str, Any] = {"budget": None, "activations": False}


def recorded_alone(folder: Path, steps: Any, conditioning: Any) -> gyroscope.Run:
    """The run of one process on whole batches: each rank makes its own."""
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    path = folder / f"alone-{dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)
        with gyroscope.watch(model, optimizer, path, conditioning=conditioning, **PLAIN):
            go(model, optimizer, steps, split=False)
    return gyroscope.load(path)


def recorded_sharded(
    folder: Path, steps: Any, conditioning: Any, shard: Callable[..., Any] = sharded, **options: Any
) -> gyroscope.Run:
    model = shard(Kinds())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, folder / "run", conditioning=conditioning, **PLAIN | options) as monitor:
        go(model, optimizer, steps, split=True)
        assert monitor.error is None, monitor.error
    dist.barrier()
    return gyroscope.load(folder / "run")


def a_sharded_run_records_the_conditioning_of_one_process(folder: Path) -> None:
    whole, run = recorded_alone(folder, range(5), 2), recorded_sharded(folder, range(5), 2)
    assert run.layers == whole.layers
    assert run.where("lambda_f").tolist() == whole.where("lambda_f").tolist() == [1, 2, 4]
    names = [n for n in whole.quantities if n.startswith(("lambda", "kappa", "rank", "domination")) or "spectral" in n]
    assert len(names) == 23
    for name in names:
        rank = name.startswith("rank")
        np.testing.assert_allclose(
            run.series(name), whole.series(name), rtol=0 if rank else 5e-4, err_msg=name, equal_nan=True
        )


def an_error_on_one_rank_ends_the_analyses_of_both_and_nothing_else(folder: Path) -> None:
    asked = []

    def scale() -> float:
        asked.append(1)
        if dist.get_rank() == 1 and len(asked) == 2:
            raise ValueError("no scale on this rank")
        return 1.0

    run = recorded_sharded(folder, range(5), Schedule(every=1, scale=scale))
    assert len(asked) == 2
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.where("lambda_f").tolist() == [1]
    said = [event.text for event in run.events if event.kind == "error"]
    assert len(said) == 1
    assert "no scale on this rank" in said[0]


def analyses_by_budget_are_made_by_both_ranks_together(folder: Path) -> None:
    """They are made to look dearer on rank 1: rank 0 decides."""
    with pytest.MonkeyPatch.context() as patch:
        apart = 7 if dist.get_rank() == 0 else 3
        patch.setattr(clock.Clock, "analyses_stretched", lambda self: apart)
        run = recorded_sharded(folder, range(50), "budget", fully_shard, budget=0.5, detail_every=1000)
    assert run.where("lambda_f").tolist() == [1, 33, 40, 47]


def data_parallel_ranks_record_the_samples_of_the_first(folder: Path) -> None:
    """Replicas have their own halves of a batch, and the gradient of all of it."""
    model = replicated(Kinds())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    half = analysed(Kinds(), (batch(0)[0][:12], batch(0)[1][:12]))
    whole = analysed(Kinds(), batch(0))
    with gyroscope.watch(model, optimizer, folder / "run", conditioning=1, **PLAIN) as monitor:
        go(model, optimizer, range(1), split=True)
        assert monitor.error is None
    dist.barrier()
    run = gyroscope.load(folder / "run")
    for name, expected in (("lambda_x", half), ("lambda_g", half), ("domination", whole)):
        want = [getattr(entry, name) for entry in expected.entries]
        np.testing.assert_allclose(run.series(name)[1], want, rtol=1e-4, err_msg=name)


CLAIMS: list[Claim] = [
    parts_of_a_batch_on_data_parallel_ranks_have_the_numbers_of_the_whole,
    halves_of_a_batch_on_sharded_ranks_have_the_numbers_of_the_whole,
    spectra_of_unequal_parts_on_sharded_ranks_are_those_of_the_whole,
    unequal_parts_on_sharded_ranks_have_the_gradient_of_the_whole,
    weights_of_the_root_of_a_sharded_model_have_gradients,
    the_loss_is_the_mean_over_all_ranks,
    ranks_with_ignored_and_weighted_labels_have_the_numbers_of_the_whole,
    a_function_that_hides_ignored_labels_is_refused_on_both,
    hybrid_meshes_have_the_numbers_of_the_whole,
    streams_of_batches_have_the_numbers_of_all,
    the_largest_eigenvalues_alone_are_those_of_the_whole,
    units_are_dying_or_full_if_they_are_on_both_ranks,
    a_layer_that_one_rank_uses_has_its_samples_and_a_part_of_the_gradient,
    a_layer_that_one_rank_uses_has_its_units,
    no_group_is_this_rank_alone,
    weights_in_another_order_in_memory_are_averaged_in_place,
    what_goes_wrong_on_one_rank_is_raised_on_both,
    a_loss_that_is_not_a_number_on_one_rank_of_a_sharded_model_is_raised_on_both,
    a_stream_that_breaks_on_one_rank_of_a_sharded_model_is_raised_on_both,
    a_sharded_model_is_as_it_was,
    gradients_of_the_root_of_a_sharded_model_are_as_they_were,
    training_goes_on_as_if_a_sharded_model_had_not_been_analysed,
    gradients_that_are_not_synchronised_are_not_mixed_with_those_of_an_analysis,
    a_sharded_run_records_the_conditioning_of_one_process,
    an_error_on_one_rank_ends_the_analyses_of_both_and_nothing_else,
    analyses_by_budget_are_made_by_both_ranks_together,
    data_parallel_ranks_record_the_samples_of_the_first,
]


def rank(rank: int, folder: str) -> None:
    two_ranks.run(CLAIMS, rank, folder)
