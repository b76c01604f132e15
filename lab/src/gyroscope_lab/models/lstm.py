"""A recurrent language model for characters."""

from __future__ import annotations

from math import sqrt

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import require_share


def lstm(
    seed: int, *, vocab: int = 65, width: int = 128, depth: int = 2, tied: bool = False, dropout: float = 0.0
) -> LSTM:
    """Return a model that maps characters [N, T] to logits [N, T, vocab] of the next character at each position.

    x = E[characters], `depth` LSTM layers of `width` units from a state of zeros, and h = W x + b. All weights and
    biases start from the uniform distribution on ±1/√width, as those of torch's LSTM do, but the forget gates begin
    open: their biases b_ih and b_hh add up to 1.

    Args:
        seed: the seed of the weights.
        vocab: the number of characters; 65 in Shakespeare.
        width: the number of units of a layer, and the size of a character's embedding.
        depth: the number of LSTM layers.
        tied: True to use E as W.
        dropout: the share of E's output and of each layer's output dropped in training.

    >>> lstm(0)(torch.zeros(2, 100, dtype=torch.long)).shape
    torch.Size([2, 100, 65])
    """
    if min(vocab, width, depth) < 1:
        given = f"vocab {vocab}, width {width}, depth {depth}"
        raise LabError(f"All sizes of a recurrent network must be whole numbers ≥ 1, got {given}.")
    require_share(dropout)
    with torch.random.fork_rng(devices=[]):
        model = LSTM(vocab, width, depth, tied=tied, dropout=dropout)
    _initialize_(model, width, torch.Generator().manual_seed(seed))
    return model


class LSTM(nn.Module):
    """An embedding, LSTM layers, and a linear map to the logits; see `lstm`.

    >>> LSTM(5, 8, 1)(torch.zeros(1, 3, dtype=torch.long)).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, vocab: int, width: int, depth: int, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocab, width)
        self.cells = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout if depth > 1 else 0.0)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.classifier = nn.Linear(width, vocab)
        if tied:
            self.classifier.weight = self.characters.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, T, vocab] of the characters after `characters` [N, T]."""
        states, _ = self.cells(self.dropout(self.characters(characters)))
        logits: torch.Tensor = self.classifier(self.dropout(states))
        return logits


def _initialize_(model: LSTM, width: int, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        nn.init.uniform_(parameter, -1 / sqrt(width), 1 / sqrt(width), generator=generator)
        if name.startswith("cells.bias"):
            with torch.no_grad():
                parameter[width : 2 * width] = 0.5  # torch orders the gates input, forget, cell, output
