"""Σx and Σ∇h as their definitions read: all rows of inputs and of gradients, whole matrices, in float64."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Rows = Callable[[Tensor], Tensor]  # to [R, d], a row a sample


def last(a: Tensor) -> Tensor:
    """The last dimension is that of the features."""
    return a.reshape(-1, a.shape[-1])


def positions(spatial: int, groups: int = 1) -> Rows:
    """Channels of [B, C, *spatial] at each position; those of each group are samples of their own."""

    def rows(a: Tensor) -> Tensor:
        a = a if a.dim() == spatial + 2 else a[None]
        a = a.reshape(a.shape[0], groups, a.shape[1] // groups, -1)
        return torch.cat([a[n, k].T for n in range(a.shape[0]) for k in range(groups)])

    return rows


def patches(conv: Any) -> Rows:
    """What a convolution sees at each output position, cut out one after the other."""
    spatial = len(conv.kernel_size)

    def rows(x: Tensor) -> Tensor:
        x = padded(conv, x if x.dim() == spatial + 2 else x[None])
        reach = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        starts = [range(0, size - r + 1, s) for size, r, s in zip(x.shape[2:], reach, conv.stride, strict=True)]
        width = x.shape[1] // conv.groups
        found = []
        for n, group, at in itertools.product(range(len(x)), range(conv.groups), itertools.product(*starts)):
            window = [slice(a, a + r, d) for a, r, d in zip(at, reach, conv.dilation, strict=True)]
            found.append(x[(n, slice(group * width, (group + 1) * width), *window)].flatten())
        return torch.stack(found)

    return rows


def padded(conv: Any, x: Tensor) -> Tensor:
    sizes = []
    for axis, (k, d) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        total = d * (k - 1)
        if conv.padding == "same":
            sizes.append((total // 2, total - total // 2))
        elif conv.padding == "valid":
            sizes.append((0, 0))
        else:
            sizes.append((conv.padding[axis], conv.padding[axis]))
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(x, [n for pair in reversed(sizes) for n in pair], mode=mode)


def one_hot(classes: int) -> Rows:
    return lambda indices: functional.one_hot(indices.reshape(-1).long(), classes).double()


@dataclass(frozen=True)
class Literal:
    """All rows of a layer: its inputs x, and its gradients g of the loss of each sample."""

    x: Tensor
    g: Tensor

    @property
    def sigma_x(self) -> Tensor:
        return self.x.T @ self.x / len(self.x)

    @property
    def sigma_g(self) -> Tensor:
        return self.g.T @ self.g / len(self.g)


class Tape:
    """Inputs and outputs of products as they are computed; their rows once a batch is through the backward pass."""

    def __init__(self) -> None:
        self.open: defaultdict[str, list[tuple[Tensor, Tensor, Rows, Rows]]] = defaultdict(list)
        self.x: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.g: defaultdict[str, list[Tensor]] = defaultdict(list)

    def put(self, name: str, x: Tensor, h: Tensor, x_rows: Rows = last, g_rows: Rows = last) -> Tensor:
        h.retain_grad()
        self.open[name].append((x.detach().clone(), h, x_rows, g_rows))
        # What is done in place to what a layer puts out is done to another tensor.
        return h * 1

    def linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        h = x @ weight.T
        return self.put(name, x, h if bias is None else h + bias)

    def watch(self, name: str, module: nn.Module, x_rows: Rows = last, g_rows: Rows = last) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self.put(name, args[0], output, x_rows, g_rows)

        return module.register_forward_hook(hook)

    def backward(self, mean_loss: Tensor) -> None:
        mean_loss.backward()
        for name, calls in self.open.items():
            x = torch.cat([x_rows(x.double()) for x, _, x_rows, _ in calls])
            g = torch.cat(
                [g_rows((torch.zeros_like(h) if h.grad is None else h.grad).double()) for _, h, _, g_rows in calls]
            )
            self.x[name].append(x)
            self.g[name].append(len(g) * g)  # of the mean over R samples, to that of each
        self.open.clear()

    def __getitem__(self, name: str) -> Literal:
        return Literal(torch.cat(self.x[name]), torch.cat(self.g[name]))


def agree(found: Any, tape: Tape, names: Sequence[str] | None = None, *, accuracy: float = 1e-10) -> None:
    """Every number of an analysis, made with `spectra=True`, is that of the rows on the tape."""
    assert list(found.layers) == (list(tape.x) if names is None else list(names))
    for name in found.layers:
        agree_layer(found, name, tape[name], accuracy=accuracy)


def agree_layer(found: Any, name: str, expected: Literal, *, accuracy: float = 1e-10) -> None:
    row, spectra = found[name], found.spectra[name]
    x, g = descending(expected.sigma_x), descending(expected.sigma_g)
    assert (row.samples, row.dimension_x, row.dimension_g) == (len(expected.x), len(x), len(g))
    close(spectra.x.full(), x, accuracy, f"spectrum of Σx of {name}")
    close(spectra.g.full(), g, accuracy, f"spectrum of Σ∇h of {name}")
    product = torch.kron(expected.sigma_x, expected.sigma_g) if len(x) * len(g) <= 400 else None
    f = descending(product) if product is not None else torch.outer(x, g).flatten().sort(descending=True).values
    for values, top, kappas in (
        (x, row.lambda_x, row.kappa_x),
        (g, row.lambda_g, row.kappa_g),
        (f, row.lambda_f, row.kappa_f),
    ):
        assert math.isclose(top, values[0], rel_tol=accuracy, abs_tol=1e-300)
        assert tuple(kappas) == found.p
        for p, kappa in kappas.items():
            if top == 0:
                assert kappa is None
            else:
                at = values[place(p, len(values)) - 1]
                assert abs(top / kappa - at) <= 4 * accuracy * top, f"κ_{p} of {name} is {kappa}, λ_p {at} of {top}"
    assert (row.rank_x, row.rank_g) == (rank(expected.x, accuracy), rank(expected.g, accuracy))


def agree_weight(row: Any, weight: Tensor, gradient: Tensor, *, accuracy: float = 1e-10) -> None:
    """The norms of a weight and of its gradient, and their ratio."""
    w, slope = weight.detach().double().flatten(1), gradient.double().flatten(1)
    sigma, steep = torch.linalg.svdvals(w)[0].item(), torch.linalg.svdvals(slope)[0].item()
    assert math.isclose(row.weight_norm, w.norm().item(), rel_tol=accuracy)
    assert math.isclose(row.weight_spectral, sigma, rel_tol=accuracy)
    assert math.isclose(row.gradient_spectral, steep, rel_tol=accuracy, abs_tol=1e-300)
    assert math.isclose(row.domination, steep / sigma, rel_tol=2 * accuracy, abs_tol=1e-300)


def descending(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0).clamp(min=0)


def place(p: float, dimension: int) -> int:
    """⌈p·d⌉ of the decimal that p is printed as."""
    return math.ceil(Fraction(str(p)) * dimension)


def rank(rows: Tensor, accuracy: float) -> int:
    values = torch.linalg.svdvals(rows)
    return int((values > max(1e-7, accuracy**0.5) * values[0]).sum())


def close(found: Any, expected: Tensor, accuracy: float, what: str) -> None:
    off = (torch.as_tensor(found) - expected).abs().max().item()
    assert off <= accuracy * expected[0].item() + 1e-300, f"{what}: off by {off} of {expected[0].item()}"
