"""The blocks of residual networks, their shortcuts, and the recomputation of a block in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from gyroscope_lab.models.building import Norm, conv3x3


class SamePad(nn.Module):
    """Pad images for a 3×3 convolution of stride 2, as TensorFlow's "same" does: by 1 in total where a size is even.

    That pixel is added at the end, so outputs are centered at pixels 1, 3, 5, …; with `padding=1` at 0, 2, 4, … Odd
    sizes are padded at both ends, as with `padding=1`.

    >>> SamePad()(torch.ones(1, 1, 2, 3))[0, 0].tolist()
    [[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad x [N, C, H, W]."""
        height, width = x.shape[-2:]
        return F.pad(x, (width % 2, 1, height % 2, 1))


class PaddedShortcut(nn.Module):
    """Shortcut A: every other pixel, and zeros for the additional channels.

    >>> PaddedShortcut(1, 2, stride=2)(1 + torch.arange(4.0).view(1, 1, 2, 2)).flatten().tolist()
    [1.0, 0.0]
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.stride, self.missing = stride, width - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term added to the block's own output."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))


class Block(nn.Module):
    """y = compute(x); if `checkpointed`, activations within the block are recomputed in the backward pass."""

    checkpointed = False

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return recomputed(self, self.compute, x) if self.checkpointed else self.compute(x)


class BasicBlock(Block):
    """y = ReLU(BN(W₂ ∗ ReLU(BN(W₁ ∗ x))) + s(x)), with s the identity or a shortcut that changes the shape.

    Args:
        channels: the number of channels of x.
        width: the number of channels of y.
        stride: the stride of the first convolution; 2 halves the image.
        norm: returns a normalization for a number of channels.
        projection: True for a 1×1 convolution as the shortcut that changes the shape (its weight is registered and used
            after the block's own); False for one without weights (`PaddedShortcut`).
        same: True for strided convolutions padded as in TensorFlow (`SamePad`).

    >>> BasicBlock(3, 4, stride=2, norm=nn.BatchNorm2d)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 4, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        stride: int,
        norm: Norm,
        projection: bool = False,
        same: bool = False,
    ) -> None:
        super().__init__()
        pads = same and stride == 2
        self.pad = SamePad() if pads else nn.Identity()
        self.conv1 = conv3x3(channels, width, stride=stride, padding=0 if pads else 1)
        self.norm1 = norm(width)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(width, width)
        self.norm2 = norm(width)
        self.shortcut = _shortcut(channels, width, stride, projection)
        self.relu2 = nn.ReLU()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        y = self.relu1(self.norm1(self.conv1(self.pad(x))))
        y = self.norm2(self.conv2(y))
        out: torch.Tensor = self.relu2(y + self.shortcut(x))
        return out


class PreactBlock(Block):
    """y = W₂ ∗ ReLU(BN(W₁ ∗ p)) + s(x), p = ReLU(BN(x)); s(p) replaces s(x) if the shortcut is `shared`.

    Args:
        channels: the number of channels of x.
        width: the number of channels of y.
        stride: the stride of the first convolution; 2 halves the image.
        norm: returns a normalization for a number of channels.
        projection: True for a 1×1 convolution as the shortcut that changes the shape, as in `BasicBlock`.
        shared: True for a shortcut that starts from p.
        dropout: the share of activations dropped before the second convolution, in training.

    >>> PreactBlock(3, 4, stride=2, norm=nn.BatchNorm2d)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 4, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        stride: int,
        norm: Norm,
        projection: bool = False,
        shared: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.norm1 = norm(channels)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(channels, width, stride=stride)
        self.norm2 = norm(width)
        self.relu2 = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(width, width)
        self.shortcut = _shortcut(channels, width, stride, projection)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        p = self.relu1(self.norm1(x))
        y = self.relu2(self.norm2(self.conv1(p)))
        y = self.conv2(self.dropout(y))
        out: torch.Tensor = y + self.shortcut(p if self.shared else x)
        return out


def normalized_shortcut(channels: int, width: int, *, stride: int) -> nn.Module:
    """Return shortcut B: the identity or, where the shape changes, a 1×1 convolution and batch normalization.

    >>> normalized_shortcut(3, 3, stride=1)
    Identity()
    >>> [type(module).__name__ for module in normalized_shortcut(3, 4, stride=2)]
    ['Conv2d', 'BatchNorm2d']
    """
    shortcut = _shortcut(channels, width, stride, projection=True)
    return nn.Sequential(shortcut, nn.BatchNorm2d(width)) if isinstance(shortcut, nn.Conv2d) else shortcut


def _shortcut(channels: int, width: int, stride: int, projection: bool) -> nn.Module:
    if stride == 1 and channels == width:
        return nn.Identity()
    if projection:
        return nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False)
    return PaddedShortcut(channels, width, stride=stride)


def recomputed(block: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return y = compute(x), keeping only x for the backward pass, which recomputes the rest.

    Outputs, gradients and running averages are those of `compute(x)`, bit for bit. Batch normalization that runs twice
    would count a batch twice in its averages, so the second run writes to temporary ones. In the second run the modules
    are in the modes of the first, even if these have changed. Random state is only saved for blocks with dropout, so
    that steps of other blocks can be captured in CUDA graphs. Within `torch.compile` this does nothing: the compiler
    decides what to keep.

    Args:
        block: the module.
        compute: its function.
        x: its input.

    >>> norm = nn.BatchNorm1d(2)
    >>> recomputed(norm, norm, torch.randn(8, 2)).sum().backward()
    >>> int(norm.num_batches_tracked)
    1
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute(x)

    modules = list(block.modules())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Again(modules)

    drops = any(module.training and _drops(module) for module in modules)
    y: Tensor = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=drops, context_fn=contexts)
    return y


def _drops(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in training: dropout of any kind, alone or within other layers."""
    return (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or bool(getattr(module, "dropout", 0))


class _Again(AbstractContextManager[None]):
    """The context of the second and later runs: the modes of the first run, and averages that are not read."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]

    def __enter__(self) -> None:
        self._found = [(module, module.training, dict(module._buffers)) for module, _ in self._modes]
        for module, training in self._modes:
            module.training = training
            if isinstance(module, _BatchNorm) and training:
                # Of the same shapes: torch compares the saved tensors with those of the first run.
                for name in ("running_mean", "running_var"):
                    average = module._buffers[name]
                    module._buffers[name] = None if average is None else torch.empty_like(average)
                module._buffers["num_batches_tracked"] = None

    def __exit__(self, *_: object) -> None:
        for module, training, buffers in self._found:
            module.training = training
            module._buffers.update(buffers)
