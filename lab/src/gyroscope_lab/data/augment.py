"""Augmentation by shifting and mirroring images: drawn on the CPU, applied on the device of the images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from gyroscope_lab.errors import LabError

Per = Literal["image", "batch"]
Fill = Literal["reflect", "symmetric", "zero"]
Rounding = Literal["uniform", "nearest"]

# The largest int8.
_FARTHEST = 127
_FILLS = get_args(Fill)  # at module level, as older compilers do not support typing.get_args


@dataclass(frozen=True)
class Augmentation:
    """Shifts, mirroring, and the fill at the edges.

    The defaults are the rotation papers' (every image shifted by U(−4, 4), to the nearest pixel, and mirrored with
    probability ½). The conditioning paper's are `per="batch", fill="reflect", rounding="uniform", half=True`, and those
    of fb.resnet.torch `fill="zero", rounding="uniform"`.

    Args:
        shift: the largest shift in pixels, up, down, left or right; 0 for none.
        flip: True to mirror images left to right with probability ½.
        per: "image" to shift each image separately, "batch" to shift a whole batch by the same; images are always
            mirrored separately.
        fill: the fill at the edge, for `augment`: the mirrored image, with its outermost pixels repeated
            ("symmetric": b a | a b c; Keras calls it reflect) or not ("reflect": c b | a b c; as in Torch 7); or zeros
            ("zero": 0 0 | a b c), which are those of normalized images.
        rounding: "uniform" over the 2·shift + 1 whole numbers of pixels; or "nearest" to U(−shift, shift), where the
            largest shift in either direction is half as likely as the others.
        half: True to mirror exactly half of each batch, at random (rounded down for an odd number).

    >>> Augmentation(shift=2).draw(3, 2, torch.Generator().manual_seed(0))
    tensor([[ 0,  2,  1],
            [ 1, -2,  1],
            [ 0,  0,  1]], dtype=torch.int8)
    """

    shift: int = 4
    flip: bool = True
    per: Per = "image"
    fill: Fill = "symmetric"
    rounding: Rounding = "nearest"
    half: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("per", get_args(Per)), ("fill", _FILLS), ("rounding", get_args(Rounding))):
            _one_of(name, getattr(self, name), accepted)
        if isinstance(self.shift, bool) or not isinstance(self.shift, int) or not 0 <= self.shift <= _FARTHEST:
            raise LabError(f"`shift` must be a whole number of pixels from 0 to {_FARTHEST}, got {self.shift!r}.")
        if self.half and not self.flip:
            raise LabError("`half` must be False with flip=False: no image is mirrored.")

    def draw(self, count: int, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Return (dy, dx, flip) for each example of an epoch, in the order of training: int8 [count, 3].

        They are drawn in advance. A training that resumes with the generator's state then sees the same images again,
        and a CUDA graph of a step contains no random numbers.

        Args:
            count: the number of examples of the epoch.
            batch: the number of examples per batch; the last batch may be smaller.
            generator: a generator on the CPU, the same one for all epochs.
        """
        if count < 0 or batch < 1:
            raise LabError(f"`count` must be ≥ 0 and `batch` ≥ 1, got {count} and {batch}.")
        if generator.device.type != "cpu":
            raise LabError(f"`generator` must be on the CPU, got {generator.device}.")
        if self.per == "image":
            shifts = self._shifts(count, generator)
        else:
            shifts = self._shifts(-(-count // batch), generator).repeat_interleave(batch, dim=0)[:count]
        return torch.cat([shifts, self._flips(count, batch, generator)[:, None]], dim=1).to(torch.int8)

    def _shifts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        if self.rounding == "uniform" or not self.shift:
            return torch.randint(-self.shift, self.shift + 1, (count, 2), generator=generator)
        # U(−s, s) spans 4s half pixels: the first rounds to −s, the next two to 1 − s, and so on, and the last to s.
        halves = torch.randint(4 * self.shift, (count, 2), generator=generator)
        return (halves + 1) // 2 - self.shift

    def _flips(self, count: int, batch: int, generator: torch.Generator) -> torch.Tensor:
        if not self.flip:
            return torch.zeros(count, dtype=torch.int64)
        if not self.half:
            return torch.randint(2, (count,), generator=generator)
        sizes = [min(batch, count - start) for start in range(0, count, batch)]
        chosen = [(torch.randperm(size, generator=generator) < size // 2).long() for size in sizes]
        return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64)


def augment(x: torch.Tensor, moves: torch.Tensor, *, fill: Fill) -> torch.Tensor:
    """Return each image mirrored where its flip is 1, then seen through a window moved by (dy, dx).

        y[n, c, i, j] = x′[n, c, fold(i + dy_n), fold(j + dx_n)],   x′_n = x_n, or x_n mirrored left to right,

    where fold maps an index outside the image to the pixel that `fill` puts there; for "zero", y is 0 there. This
    equals padding, then cropping. A shift may be larger than the image; a mirrored image then repeats.

    No value is read back, nothing is random, and there are no loops, so a CUDA graph can capture it. The result is a
    new tensor with its channels last in memory.

    Args:
        x: images [N, C, H, W], of any type, on any device.
        moves: the moves of `Augmentation.draw`, [N, 3], on the same device.
        fill: the fill at the edge; see `Augmentation`.

    >>> image = torch.arange(1, 5).reshape(1, 1, 1, 4)
    >>> augment(image, torch.tensor([[0, 2, 0]]), fill="symmetric").flatten().tolist()
    [3, 4, 4, 3]
    >>> augment(image, torch.tensor([[0, 2, 0]]), fill="reflect").flatten().tolist()
    [3, 4, 3, 2]
    >>> augment(image, torch.tensor([[0, 0, 1]]), fill="reflect").flatten().tolist()
    [4, 3, 2, 1]
    """
    _one_of("fill", fill, _FILLS)
    if x.ndim != 4 or moves.shape != (len(x), 3) or moves.is_floating_point():
        raise LabError(
            "`x` must be images [N, C, H, W] and `moves` whole numbers [N, 3] of dy, dx and flip, "
            f"got {list(x.shape)} and {list(moves.shape)} of {moves.dtype}."
        )
    if moves.device != x.device:
        raise LabError(f"`moves` must be on the device of the images, {x.device}, got {moves.device}.")
    dy, dx, flip = moves.long()[:, :, None].unbind(1)
    height, width = x.shape[-2:]
    above, left = torch.arange(height, device=x.device) + dy, torch.arange(width, device=x.device) + dx
    rows, columns = _fold(above, height, fill), _fold(left, width, fill)
    columns = torch.where(flip != 0, width - 1 - columns, columns)
    images = torch.arange(len(x), device=x.device)
    taken = x.permute(0, 2, 3, 1)[images[:, None, None], rows[:, :, None], columns[:, None, :]]
    if fill == "zero":
        inside = ((above >= 0) & (above < height))[:, :, None] & ((left >= 0) & (left < width))[:, None, :]
        taken = taken * inside[..., None]
    return taken.permute(0, 3, 1, 2)


def _fold(index: torch.Tensor, size: int, fill: Fill) -> torch.Tensor:
    """Map any index into an image of `size` pixels that is mirrored at both ends without end."""
    last = 2 * size - 1 if fill == "symmetric" else 2 * size - 2
    period = last + 1 if fill == "symmetric" else max(last, 1)
    within = index % period
    return torch.minimum(within, last - within)


def _one_of(name: str, given: object, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise LabError(f"`{name}` must be {' or '.join(map(repr, accepted))}, got {given!r}.")
