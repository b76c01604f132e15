"""A small decoder-only transformer for characters."""

from __future__ import annotations

from math import sqrt

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import require_share

DEVIATION = 0.02


def gpt(
    seed: int,
    *,
    vocab: int = 65,
    context: int = 128,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    tied: bool = False,
    biases: bool = False,
    dropout: float = 0.0,
    post_norm: bool = False,
) -> GPT:
    """Return a model that maps characters [N, T] to logits [N, T, vocab] of the next character at each position.

    x = E[characters] + P[: T], then `depth` blocks x ← x + A(LN(x)), x ← x + W₂ GELU(W₁ LN(x)), and h = W LN(x). A is
    causal attention of `heads` heads: softmax(q kᵀ/√d + mask) v, d = width/heads, and a last linear map. Weights start
    from N(0, 0.02²). Those of maps that are added to x start from N(0, 0.02²/(2 depth)), because x is the sum of 2
    `depth` such maps.

    With `post_norm`, blocks are x ← LN(x + A(x)), x ← LN(x + W₂ GELU(W₁ x)), as in the first transformers, and
    h = W x.

    Args:
        seed: the seed of the weights.
        vocab: the number of characters; 65 in Shakespeare.
        context: the longest sequence.
        width: the size of x.
        depth: the number of blocks.
        heads: the number of heads, a divisor of width.
        tied: True to use E as W.
        biases: True for linear maps with biases, which start at 0.
        dropout: the share of x, of attention and of each block's output dropped in training.
        post_norm: True to normalize sums instead of what is added to them.

    >>> model = gpt(0)
    >>> model(torch.zeros(2, 100, dtype=torch.long)).shape
    torch.Size([2, 100, 65])
    """
    if min(vocab, context, width, depth, heads) < 1:
        given = f"vocab {vocab}, context {context}, width {width}, depth {depth}, heads {heads}"
        raise LabError(f"All sizes of a transformer must be whole numbers ≥ 1, got {given}.")
    if width % heads:
        raise LabError(f"`width` must be a multiple of the {heads} heads, got {width}.")
    require_share(dropout)
    with torch.random.fork_rng(devices=[]):
        model = GPT(vocab, context, width, depth, heads, tied=tied, biases=biases, dropout=dropout, post_norm=post_norm)
    initialize_(model, depth, torch.Generator().manual_seed(seed))
    return model


class Attention(nn.Module):
    """Attention; one weight holds q, k and v. If it is causal, each position attends to itself and earlier ones alone.

    >>> Attention(8, 2, biases=False, dropout=0.0)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int, *, biases: bool, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return A(x) for x [N, T, width]."""
        # [N, T, 3 width] -> three of [N, heads, T, width/heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        out: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """x ← x + A(LN(x)), then x ← x + W₂ GELU(W₁ LN(x)); with `post_norm`, x ← LN(x + A(x)) and so on.

    >>> Block(8, 2, biases=False, dropout=0.0)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        biases: bool,
        dropout: float,
        causal: bool = True,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm1 = nn.LayerNorm(width, bias=biases)
        self.attention = Attention(width, heads, biases=biases, dropout=dropout, causal=causal)
        self.norm2 = nn.LayerNorm(width, bias=biases)
        self.linear1 = nn.Linear(width, 4 * width, bias=biases)
        self.gelu = nn.GELU()
        self.linear2 = nn.Linear(4 * width, width, bias=biases)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after the block."""
        out: torch.Tensor
        if self.post_norm:
            x = self.norm1(x + self.dropout(self.attention(x)))
            out = self.norm2(x + self.dropout(self.linear2(self.gelu(self.linear1(x)))))
        else:
            x = x + self.dropout(self.attention(self.norm1(x)))
            out = x + self.dropout(self.linear2(self.gelu(self.linear1(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Embeddings, blocks, and a linear map to the logits; see `gpt`.

    >>> GPT(5, 16, 8, 1, 2)(torch.zeros(1, 3, dtype=torch.long)).shape
    torch.Size([1, 3, 5])
    """

    def __init__(
        self,
        vocab: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        *,
        tied: bool = False,
        biases: bool = False,
        dropout: float = 0.0,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocab, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.Sequential(
            *[Block(width, heads, biases=biases, dropout=dropout, post_norm=post_norm) for _ in range(depth)]
        )
        self.norm = nn.Identity() if post_norm else nn.LayerNorm(width, bias=biases)
        self.classifier = nn.Linear(width, vocab, bias=False)
        if tied:
            self.classifier.weight = self.characters.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, T, vocab] of the characters after `characters` [N, T]."""
        length = characters.shape[-1]
        if length > self.context:
            raise LabError(f"Sequences must be no longer than the context of {self.context}, got {length}.")
        x = self.characters(characters) + self.places.weight[:length]
        logits: torch.Tensor = self.classifier(self.norm(self.blocks(self.dropout(x))))
        return logits


def initialize_(model: nn.Module, depth: int, generator: torch.Generator) -> None:
    """Draw the weights of a transformer of `depth` blocks from the distributions of `gpt`; biases become 0.

    >>> initialize_(nn.ModuleDict({"linear2": nn.Linear(2, 2)}), 1, torch.Generator().manual_seed(0))
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends_on_x = name.endswith(("attention.out.weight", "linear2.weight"))
            deviation = DEVIATION / sqrt(2 * depth) if ends_on_x else DEVIATION
            nn.init.normal_(parameter, 0, deviation, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
