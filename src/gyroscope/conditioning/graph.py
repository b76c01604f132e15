"""Uses of a weight that no module call shows, found in the autograd graph.

A matrix product with a weight leaves a node that saves its input and receives the gradient at its output, which is all
that the factors need. So do convolutions and embeddings that are called as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gyroscope.conditioning.uses import Convolution, Reader, Use, channels, convolution, features

# Operations between a weight and the product that uses it which do not change its values.
_THROUGH = ("TBackward", "TransposeBackward", "PermuteBackward", "ToCopyBackward", "ViewBackward", "AliasBackward",
            "UnsafeViewBackward", "ReshapeAliasBackward", "NumpyTBackward", "CloneBackward")  # fmt: skip
_SPLIT = ("SplitBackward", "SplitWithSizesBackward")
_TURN = ("TBackward", "TransposeBackward", "PermuteBackward", "NumpyTBackward")

# By node: the index of the weight among its inputs, and the name under which the other input is saved.
_PRODUCTS = {"AddmmBackward": (2, "mat1"), "MmBackward": (1, "self"), "LinearBackward": (1, "input")}
_ENDS = {*_PRODUCTS, "ConvolutionBackward", "EmbeddingBackward"}


@dataclass(frozen=True)
class Found:
    """A use of a weight in the graph.

    Attributes:
        position: the layer's position.
        kind: what the weight is used as.
        rows: the rows of the weight that are used; None for all.
        node: the node of the graph.
        how: the name under which the input is saved, or why it cannot be read.
        transposed: True for h = Wᵀx, False for h = Wx.
    """

    position: int
    kind: str
    rows: slice | None
    node: Any
    how: tuple[str] | str
    transposed: bool = False


def claim(top: Any, mark: str) -> None:
    """Mark the nodes that computed a module's output, from the last one down to the product."""
    for node in _maker(top):
        node.metadata[mark] = True


def find(roots: Iterable[Tensor], wanted: dict[int, int], mark: str) -> tuple[list[Found], bool]:
    """Return the unmarked uses of the parameters with these ids in the graphs that lead to `roots`, and mark them.

    Marks are on the nodes themselves, because a set of nodes would keep the graph alive. The second result is True if
    there is a reentrant checkpoint on the way.
    """
    reentrant = False
    seen: set[Any] = set()
    found: list[Found] = []
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reentrant = reentrant or _name(node) == "CheckpointFunctionBackward"
        if mark not in node.metadata and (uses := _use(node, wanted)):
            node.metadata[mark] = True
            found += uses
        stack += [after for after, _ in node.next_functions if after is not None]
    return found, reentrant


def hook(
    found: Found, use: Use, *, patches: bool, wanted: Callable[[Use], bool], failed: Callable[[Exception], None]
) -> None:
    """Add the samples of a use when its gradient arrives, if it is that of the loss."""
    use.calls += 1
    how = _reader(found, patches=patches)
    # Read now: in the backward pass, a checkpoint recomputes it only once, and the node itself needs it.
    kept = [getattr(found.node, f"_saved_{found.how[0]}")]

    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[0]
        if g is None or not kept or not wanted(use):
            return
        try:
            x = kept.pop()
            with torch._C._DisableAutocast():
                how.x(use.x, x.detach())
                how.g(use.g, g.detach())
        except Exception as error:
            failed(error)

    found.node.register_prehook(arrived)


def _name(node: Any) -> str:
    return _name_of(node.__class__)


@cache
def _name_of(kind: Any) -> str:
    return str(kind.__name__).rstrip("0123456789")


def _maker(top: Any) -> list[Any]:
    """Return the nodes of a module's computation from its output down to the product in it."""
    nodes = [top]
    while len(nodes) < 5 and _name(nodes[-1]) not in _ENDS:
        after = nodes[-1].next_functions
        if not after or after[0][0] is None:
            break
        nodes.append(after[0][0])
    return nodes


def _use(node: Any, wanted: dict[int, int]) -> list[Found]:
    name = _name(node)
    if name in _PRODUCTS:
        index, saved = _PRODUCTS[name]
        if (leaf := _leaf(node.next_functions[index])) is not None and id(leaf[0]) in wanted:
            transposed = leaf[2] != (name != "LinearBackward")
            return [Found(wanted[id(leaf[0])], "linear", leaf[1], node, (saved,), transposed)]
        # In W·x, with x on the right, the samples would be columns.
        if (leaf := _leaf(node.next_functions[len(node.next_functions) - 2])) is not None and id(leaf[0]) in wanted:
            return [Found(wanted[id(leaf[0])], "linear", None, node, "it is multiplied from the left")]
    elif name == "ConvolutionBackward":
        if (leaf := _leaf(node.next_functions[1])) is not None and id(leaf[0]) in wanted:
            return [Found(wanted[id(leaf[0])], "conv", None, node, ("input",))]
    elif name == "EmbeddingBackward" and (leaf := _leaf(node.next_functions[0])) is not None and id(leaf[0]) in wanted:
        return [Found(wanted[id(leaf[0])], "embedding", None, node, ("indices",))]
    elif not _passes(name):
        for edge in node.next_functions:
            if (leaf := _leaf(edge)) is not None and id(leaf[0]) in wanted:
                return [
                    Found(wanted[id(leaf[0])], "other", None, node, f"it is used in a {name.removesuffix('Backward')}")
                ]
    return []


def _passes(name: str) -> bool:
    return name in _THROUGH or name in _SPLIT


def _leaf(edge: tuple[Any, int]) -> tuple[Tensor, slice | None, bool] | None:
    """Return the parameter at the end of an edge, the rows used, and if it is transposed; None if there is none."""
    node, output = edge
    rows: slice | None = None
    turned = False
    while node is not None:
        name = _name(node)
        if hasattr(node, "variable"):
            return node.variable, rows, turned
        if not _passes(name):
            return None
        if name in _SPLIT:
            if rows is not None or node._saved_dim not in (0, -node._saved_self_sym_sizes.__len__()):
                return None
            rows = _part(node, output)
        turned ^= name in _TURN
        node, output = node.next_functions[0]
    return None


def _part(node: Any, output: int) -> slice:
    if hasattr(node, "_saved_split_sizes"):
        sizes = list(node._saved_split_sizes)
        start = sum(sizes[:output])
        return slice(start, start + sizes[output])
    size = node._saved_split_size
    total = node._saved_self_sym_sizes[0]
    return slice(output * size, min((output + 1) * size, total))


def _reader(found: Found, *, patches: bool) -> Reader:
    if found.kind == "linear":
        return Reader(features, features)
    if found.kind == "embedding":
        size = int(found.node._saved_weight_sym_argsize_0)
        return Reader(lambda factor, x: factor.add_counts(x, size), features)
    node = found.node
    kernel = tuple(node._saved_weight.shape[2:])
    if node._saved_transposed:
        return Reader(channels(len(kernel)), channels(len(kernel), node._saved_groups))
    shape = Convolution(
        kernel, tuple(node._saved_stride), tuple(node._saved_padding), tuple(node._saved_dilation), node._saved_groups
    )
    return convolution(shape, patches=patches)
