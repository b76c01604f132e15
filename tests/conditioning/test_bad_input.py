"""Invalid arguments are rejected with a message, before anything is changed."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gyroscope
from gyroscope.errors import ConditioningError, LayerError


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def pair(n: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 3


X, Y = pair()


def refused(
    *said: str,
    error: type[Exception] = ConditioningError,
    model: Any = None,
    loss: Any = F.cross_entropy,
    batch: Any = (X, Y),
    **options: Any,
) -> None:
    """The error names all of `said`, and the model has not changed."""
    model = mlp() if model is None else model
    module = isinstance(model, nn.Module) and not any(p.is_meta or is_lazy(p) for p in model.parameters())
    before = copy.deepcopy(model.state_dict()) if module else {}
    with pytest.raises(error) as raised:
        gyroscope.condition(model, loss, batch, **options)
    for word in said:
        assert word in str(raised.value)
    if module:
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("model", [3, None, "resnet", [nn.Linear(2, 2)], {}, lambda x: x])
def test_only_modules_are_models(model: Any) -> None:
    with pytest.raises(ConditioningError, match=f"`model` must be a torch.nn.Module, got {type(model).__name__}"):
        gyroscope.condition(model, F.cross_entropy, (X, Y))


def test_a_class_is_no_model() -> None:
    refused("`model` must be a torch.nn.Module, got type", model=nn.Linear)


def test_models_without_layers_or_values_are_refused() -> None:
    refused("has no layers", error=LayerError, model=nn.Sequential(nn.ReLU(), nn.BatchNorm1d(5)))
    refused("'0.weight'", "meta device", model=mlp().to("meta"))
    refused("'0.weight'", "lazy", error=LayerError, model=nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("pattern", ["zzz*", "", ["0*", "zzz*"]])
def test_a_pattern_that_matches_no_layer_is_refused_with_close_names(pattern: Any) -> None:
    refused("matches no layer", "0.weight", error=LayerError, layers=pattern)


@pytest.mark.parametrize("chosen", [[], (), {}, ["0*", 3], [None], b"0", [mlp()], [gyroscope.layers(mlp())[0], "2*"]])
def test_layers_are_layers_or_patterns(chosen: Any) -> None:
    refused("gyroscope.layers(model)", "glob patterns", layers=chosen)


def test_layers_of_another_model_are_refused() -> None:
    refused("None of the 2 layers could be analyzed", "0.weight", layers=gyroscope.layers(mlp()))


def test_layers_are_chosen_by_pattern_layer_and_list() -> None:
    model = mlp()
    found = gyroscope.layers(model)
    for chosen, names in (
        ("2*", ("2.weight",)),
        (["2*", "0*"], ("0.weight", "2.weight")),
        ((name for name in ["0.weight"]), ("0.weight",)),
        (found[1], ("2.weight",)),
        (found[:1], ("0.weight",)),
        (found, ("0.weight", "2.weight")),
    ):
        assert gyroscope.condition(model, F.cross_entropy, (X, Y), layers=chosen).layers == names


@pytest.mark.parametrize(
    "p", [0, 0.0, 1.5, -0.1, 2, "0.5", "a", True, [True], [None], [0.5, "1"], float("nan"), float("inf"), [[0.5]], [0j]]
)
def test_p_are_shares(p: Any) -> None:
    refused("`p` must be shares", "(0, 1]", p=p)


@pytest.mark.parametrize(
    "p", [0.5, 1, (0.5, 1), [0.5, 1.0], np.array([0.5, 1.0]), {0.5: None, 1.0: None}, np.float64(1)]
)
def test_p_of_many_forms_are_taken(p: Any) -> None:
    found = gyroscope.condition(mlp(), F.cross_entropy, (X, Y), p=p)
    assert found.p in ((0.5,), (1.0,), (0.5, 1.0))
    assert all(type(one) is float for one in found.p)


@pytest.mark.parametrize("empty", [(), [], np.array([])])
def test_no_p_at_all_is_the_largest_eigenvalue_alone(empty: Any) -> None:
    model = mlp()
    found, whole = (gyroscope.condition(model, F.cross_entropy, (X, Y), p=p) for p in (empty, (1.0,)))
    for one, other in zip(found.entries, whole.entries, strict=True):
        assert (one.kappa_x, one.kappa_g, one.kappa_f, one.rank_x, one.rank_g) == ({}, {}, {}, None, None)
        assert one.lambda_f == pytest.approx(other.lambda_f, rel=1e-9)
        assert (one.domination, one.dying, one.full) == (other.domination, other.dying, other.full)


LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (None, ("got NoneType", "`loss` must be a function of (output, target)")),
    "a number": (0.5, ("got float", "`loss` must be a function of (output, target)")),
    "a name": ("cross_entropy", ("got str",)),
    "a float": (lambda o, t: 3.0, ("got a float", "real tensor")),
    "an array": (lambda o, t: np.zeros(3), ("got a ndarray", "real tensor")),
    "none": (lambda o, t: None, ("got a NoneType", "real tensor")),
    "a tuple": (lambda o, t: (o.mean(), o), ("got a tuple", "real tensor")),
    "integers": (lambda o, t: (o > 0).sum(), ("torch.int64", "real tensor")),
    "complex numbers": (lambda o, t: (o + 1j).mean(), ("torch.complex64", "real tensor")),
    "no values": (lambda o, t: o[:0].sum(1), ("no values",)),
    "no gradient": (lambda o, t: o.detach().mean(), ("no gradient", "detached")),
    "not a number": (lambda o, t: o.mean() * float("nan"), ("The loss is nan",)),
    "infinite": (lambda o, t: o.mean() * -float("inf"), ("The loss is -inf",)),
    "a constant": (lambda o, t: torch.tensor(1.0), ("no gradient",)),
    "one argument": (lambda o: o.mean(), ("TypeError", "loss(output, target)")),
    "an error": (lambda o, t: {}["key"], ("KeyError", "loss(output, target)")),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_are_none_are_refused(kind: str) -> None:
    loss, said = LOSSES[kind]
    refused(*said, loss=loss)


@pytest.mark.parametrize("reduction", ["none", "Mean", "", None, 3, True, ["mean"], np.array(["mean", "sum"])])
def test_reductions_are_known_by_name(reduction: Any) -> None:
    refused("`reduction` must be", "'auto', 'mean', 'sum'", reduction=reduction)


@pytest.mark.parametrize("labels", ["model", "", "True", None, 3, ["true"], Y])
def test_labels_are_known_by_name_or_called(labels: Any) -> None:
    refused("`labels` must be", "'true', 'sampled' or a function", labels=labels)


def test_labels_of_a_function_are_those_that_it_gives() -> None:
    model, asked = mlp(), []

    def labels(output: Tensor, generator: torch.Generator) -> Tensor:
        asked.append((output.requires_grad, generator.initial_seed()))
        return Y.roll(1)

    by_hand = gyroscope.condition(model, F.cross_entropy, (X, Y), labels=labels, seed=7)
    assert by_hand.rows() == gyroscope.condition(model, F.cross_entropy, (X, Y.roll(1))).rows()
    assert asked == [(False, 7)]
    refused("The loss failed", labels=lambda output, generator: None)
    refused("The loss failed", labels=lambda output, generator: Y[:3])


def test_labels_cannot_be_sampled_for_a_loss_that_is_no_likelihood() -> None:
    refused("l1_loss", "labels cannot be drawn", loss=F.l1_loss, labels="sampled")
    refused("<lambda>", "labels=", loss=lambda o, t: F.cross_entropy(o, t), labels="sampled")


PAIRS = "a pair (inputs, targets)"
BATCHES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a tensor": (lambda: X, ("got Tensor.", PAIRS)),
    "nothing": (lambda: None, ("got NoneType.", PAIRS)),
    "a number": (lambda: 3, ("got int.", PAIRS)),
    "a name": (lambda: "train", ("got str.", PAIRS)),
    "a dict": (lambda: {"input": X, "labels": Y}, ("got dict.", PAIRS)),
    "inputs alone": (lambda: (X,), ("got an iterable with a Tensor in it", PAIRS)),
    "three tensors": (lambda: (X, Y, Y), ("got an iterable with a Tensor in it", PAIRS)),
    "arrays": (lambda: (X.numpy(), Y.numpy()), ("got an iterable with a ndarray in it", PAIRS)),
    "a list of inputs": (lambda: [X, X, X], ("got an iterable with a Tensor in it", PAIRS)),
    "dicts": (lambda: iter([{"input": X}]), ("got an iterable with a dict in it", PAIRS)),
    "an empty list": (list, ("got an iterable without batches", PAIRS)),
    "an empty stream": (lambda: iter(()), ("got an iterable without batches", PAIRS)),
    "an empty loader": (lambda: DataLoader([]), ("got an iterable without batches", PAIRS)),
    "other shapes": (lambda: (X[:, :3], Y), ("forward pass failed", "RuntimeError", "16x3")),
    "other types": (lambda: (X.double(), Y), ("forward pass failed", "RuntimeError")),
    "other names": (lambda: ({"x": X}, Y), ("forward pass failed", "TypeError", "'x'")),
    "more arguments": (lambda: ((X, X), Y), ("forward pass failed", "TypeError")),
    "no targets": (lambda: (X, None), ("loss failed", "NoneType")),
    "fewer targets": (lambda: (X, Y[:3]), ("loss failed", "ValueError")),
    "targets of another type": (lambda: (X, Y.float()), ("loss failed", "RuntimeError")),
    "targets as an array": (lambda: (X, Y.numpy()), ("loss failed", "ndarray")),
    "tensors without values": (lambda: (X.to("meta"), Y), ("cannot be moved", "cpu", "meta")),
    "a stream that breaks": (lambda: broken(), ("iterable of batches", "generator", "OSError: the disk")),
    "a loader that breaks": (lambda: DataLoader(Broken(), batch_size=2), ("iterable of batches", "DataLoader", "disk")),
    "a second batch of another kind": (lambda: iter([(X, Y), X]), ("got an iterable with a Tensor in it", PAIRS)),
}  # fmt: skip


def broken() -> Iterator[tuple[Tensor, Tensor]]:
    yield X, Y
    raise OSError("the disk is gone")


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i > 3:
            raise OSError("the disk is gone")
        return X[i], Y[i]


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_that_are_none_are_refused(kind: str) -> None:
    make, said = BATCHES[kind]
    refused(*said, batch=make())


class Two(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.linear(one + 2 * two)


Named = namedtuple("Named", ["inputs", "targets"])
ONE: dict[str, Any] = {
    "a tuple": (X, Y),
    "a list": [X, Y],
    "a named tuple": Named(X, Y),
    "positional arguments": ((X,), Y),
    "positional arguments in a list": ([X], Y),
    "named arguments": ({"input": X}, Y),
    "an ordered dict": (OrderedDict(input=X), Y),
    "a list of one": [(X, Y)],
    "two parts": [(X[:8], Y[:8]), (X[8:], Y[8:])],
    "a pair of pairs": ((X[:8], Y[:8]), (X[8:], Y[8:])),
    "lists in a list": [[X[:8], Y[:8]], [X[8:], Y[8:]]],
    "parts of other sizes": iter([(X[:3], Y[:3]), (X[3:4], Y[3:4]), (X[4:], Y[4:])]),
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=7),
    "in float64": (X.double().float(), Y),
}


@pytest.mark.parametrize("kind", ONE)
def test_a_batch_in_any_form_has_the_same_numbers(kind: str) -> None:
    model = mlp()
    found = gyroscope.condition(model, F.cross_entropy, ONE[kind])
    expected = gyroscope.condition(model, F.cross_entropy, (X, Y))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for one, other in zip(found.entries, expected.entries, strict=True):
        assert one.samples == other.samples == 16
        for name in ("lambda_x", "lambda_g", "lambda_f", "domination"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5), name
        assert (one.rank_x, one.rank_g, one.dying, one.full) == (other.rank_x, other.rank_g, other.dying, other.full)


TWO: dict[str, Any] = {
    "a tuple": ((X, X), Y),
    "a list": ([X, X], Y),
    "a dict": ({"two": X, "one": X}, Y),
    "what a loader makes of tuples": DataLoader([((x, x), y) for x, y in zip(X, Y, strict=True)], batch_size=16),
    "what a loader makes of dicts": DataLoader([({"one": x, "two": x}, y) for x, y in zip(X, Y, strict=True)], 16),
}


@pytest.mark.parametrize("kind", TWO)
def test_several_inputs_are_arguments(kind: str) -> None:
    model = Two()
    found = gyroscope.condition(model, F.cross_entropy, TWO[kind])
    assert found.entries[0].lambda_x == pytest.approx(float(torch.linalg.eigvalsh(9 * X.T @ X / 16)[-1]), rel=1e-5)


def test_a_target_may_be_anything_the_loss_takes() -> None:
    model = mlp()
    expected = gyroscope.condition(model, F.cross_entropy, (X, Y)).rows()
    for target, loss in (
        (None, lambda o, t: F.cross_entropy(o, Y[: len(o)])),
        ({"labels": Y}, lambda o, t: F.cross_entropy(o, t["labels"])),
        (Named(Y, "weights"), lambda o, t: F.cross_entropy(o, t.inputs)),
        (Y.tolist(), lambda o, t: F.cross_entropy(o, torch.tensor(t[: len(o)]))),
    ):
        rows = gyroscope.condition(model, loss, (X, target), reduction="mean").rows()
        assert rows == expected


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_empty_batch_is_refused_whatever_the_reduction(reduction: str) -> None:
    loss = nn.CrossEntropyLoss(reduction=reduction)
    refused("A batch is empty", batch=(X[:0], Y[:0]), loss=loss)
    refused("A batch is empty", batch=[(X, Y), (X[:0], Y[:0])], loss=loss)


@pytest.mark.parametrize("seed", ["a", 0.5, None, True, 10**30])
def test_seeds_are_whole_numbers_that_a_generator_takes(seed: Any) -> None:
    refused(f"got {seed!r}. Try 0.", "whole number", seed=seed)


def test_sparse_inputs_are_taken() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, graph: Tensor, x: Tensor) -> Tensor:
            return self.last(torch.sparse.mm(graph, self.first(x)))

    graph, x = torch.eye(16), torch.randn(16, 4)
    dense = nn.Sequential(*Sparse().children())
    found = gyroscope.condition(Sparse(), F.cross_entropy, ((graph.to_sparse(), x), Y)).entries
    expected = gyroscope.condition(dense, F.cross_entropy, (x, Y)).entries
    assert [one.lambda_f for one in found] == pytest.approx([one.lambda_f for one in expected], rel=1e-5)


@pytest.mark.parametrize("given", ["no", np.ones((3, 2)), torch.ones(2)], ids=["text", "array", "tensor"])
@pytest.mark.parametrize("name", ["patches", "spectra", "units"])
def test_flags_are_true_or_false(name: str, given: Any) -> None:
    refused(f"`{name}` must be True or False, got {given!r:.20}", **{name: given})


def test_a_number_is_no_choice_of_layers() -> None:
    refused("`layers` must be a list from gyroscope.layers(model)", layers=torch.tensor(1.0))


def test_blocks_of_a_fisher_matrix_are_wanted_or_not() -> None:
    with pytest.raises(ConditioningError, match="`blocks` must be True or False, got 'no'"):
        gyroscope.conditioning.fisher.fisher(mlp(), F.cross_entropy, (X, Y), blocks="no")
