"""Networks of a few parameters of every sort, and all that a measurement must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

N = 7


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2), nn.Tanh(),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, normal(N, 4)),
    "cnn, evaluation mode": (lambda: cnn().eval(), normal(N, 1, 5, 5)),
    "cnn, training mode": (lambda: cnn().train(), normal(N, 1, 5, 5)),
    "embedding": (embedded, torch.randint(6, (N, 2), generator=generator())),
    "lstm": (Recurrent, normal(N, 3, 2)),
    "attention": (Attention, normal(N, 3, 4)),
    "attention, evaluation mode": (lambda: Attention().eval(), normal(N, 3, 4)),
}
Y = torch.arange(N) % 3


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a measurement must leave alone."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flags": [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()],
        "attributes": {str(i): len(m.__dict__) for i, m in enumerate(model.modules())},
        "tensors": [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "random": torch.get_rng_state(),
    }


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    torch.testing.assert_close(everything(model), before, rtol=0, atol=0)
