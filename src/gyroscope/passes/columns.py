"""The patches a convolution sees, one a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def patch_columns(
    x: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Any,
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """The patch at every output position of every sample and group: [C/groups · kernel, patches].

    Rows are in the order of `torch.nn.functional.unfold`. For few patches; `patch_gram` does not form them.

    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> patch_columns(x, kernel_size=(2,), stride=(1,), padding=(0,), dilation=(1,))
    tensor([[1., 2.],
            [2., 3.]])
    """
    n = len(kernel_size)
    ends: list[tuple[int, int]]
    if padding == "same":
        ends = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernel_size, dilation, strict=True)]
    elif padding == "valid":
        ends = [(0, 0)] * n
    else:
        ends = [(size, size) for size in ([padding] * n if isinstance(padding, int) else padding)]
    if any(end != (0, 0) for end in ends):
        mode = "constant" if padding_mode == "zeros" else padding_mode
        x = functional.pad(x, [size for end in reversed(ends) for size in end], mode=mode)
    for i, (k, s, d) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
    # [B, C, *out, *kernel] → [C/groups, *kernel, B, groups, *out]
    x = torch.unflatten(x, 1, (groups, -1))
    kernel = range(3 + n, 3 + 2 * n)
    x = x.permute(2, *kernel, 0, 1, *range(3, 3 + n))
    return x.flatten(n + 1).flatten(0, n)
