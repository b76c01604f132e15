"""A vision transformer for small images."""

from __future__ import annotations

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import require_images, require_share
from gyroscope_lab.models.gpt import Block, initialize_


def vit(
    seed: int,
    *,
    classes: int = 10,
    channels: int = 3,
    side: int = 32,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
    post_norm: bool = False,
) -> ViT:
    """Return a model that maps images [N, channels, side, side] to logits [N, classes].

    An image is cut into T = (side/patch)² patches. x = W₀ patches + P, then `depth` blocks as in `gpt`, whose attention
    is not causal, and h = W mean(LN(x)) + b: the mean over patches takes the place of a class token. Weights start as
    in `gpt`.

    Args:
        seed: the seed of the weights.
        classes: the number of outputs.
        channels: the number of channels of the images.
        side: the side of the images.
        patch: the side of a patch, a divisor of `side`.
        width: the size of x.
        depth: the number of blocks.
        heads: the number of heads, a divisor of width.
        dropout: the share of x, of attention and of each block's output dropped in training.
        post_norm: True to normalize sums instead of what is added to them.

    >>> vit(0)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    require_images(channels, classes)
    if min(side, patch, width, depth, heads) < 1:
        given = f"side {side}, patch {patch}, width {width}, depth {depth}, heads {heads}"
        raise LabError(f"All sizes of a transformer must be whole numbers ≥ 1, got {given}.")
    if width % heads:
        raise LabError(f"`width` must be a multiple of the {heads} heads, got {width}.")
    if side % patch:
        raise LabError(f"`side` must be a multiple of the patch of {patch}, got {side}.")
    require_share(dropout)
    with torch.random.fork_rng(devices=[]):
        model = ViT(channels, side, patch, width, depth, heads, classes, dropout=dropout, post_norm=post_norm)
    initialize_(model, depth, torch.Generator().manual_seed(seed))
    return model


class ViT(nn.Module):
    """Patches, blocks, and a linear map of their mean to the logits; see `vit`.

    >>> ViT(1, 8, 2, 16, 1, 2, 10)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        *,
        dropout: float = 0.0,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Linear(channels * patch**2, width)
        self.places = nn.Embedding((side // patch) ** 2, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        options = {"biases": True, "dropout": dropout, "causal": False, "post_norm": post_norm}
        self.blocks = nn.Sequential(*[Block(width, heads, **options) for _ in range(depth)])  # type: ignore[arg-type]
        self.norm = nn.Identity() if post_norm else nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, classes] of images [N, channels, side, side]."""
        # [N, C, H, W] -> [N, C, H/p, W/p, p, p] -> [N, T, C p²]
        cut = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        patches = cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = self.dropout(self.patches(patches) + self.places.weight)
        logits: torch.Tensor = self.classifier(self.norm(self.blocks(x)).mean(dim=1))
        return logits
