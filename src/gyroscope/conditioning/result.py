"""The result of a conditioning analysis: one row per layer, as a table, dicts or a data frame."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gyroscope.base import markup
from gyroscope.base.by_layer import ByLayer
from gyroscope.base.markup import number
from gyroscope.conditioning.spectra import Spectrum
from gyroscope.errors import ConditioningError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

Kappas = dict[float, float | None]

# The gap between two columns of a table, and the least width of the names, in characters.
_GAP, _LEAST = 3, 12
# The remarks below a table in a notebook.
_NOTES = 10


@dataclass(frozen=True)
class Spectra:
    """The spectra of Σx and Σ∇h of one layer.

    >>> import torch, gyroscope
    >>> batch = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
    >>> found = gyroscope.condition(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, batch, spectra=True)
    >>> found["weight"].spectra.x.values.round(3)
    array([4.5, 0.5])
    """

    x: Spectrum
    g: Spectrum


@dataclass(frozen=True)
class LayerConditioning:
    """The conditioning of one layer.

    Attributes:
        layer: its name.
        kind: its kind, such as "linear" or "conv".
        lambda_x, lambda_g, lambda_f: λmax of Σx, of Σ∇h, and of F = Σx ⊗ Σ∇h.
        kappa_x, kappa_g, kappa_f: κ_p of each by p; inf if λ_p = 0, None (undefined) if λmax = 0.
        rank_x, rank_g: the number of eigenvalues above zero; None if only λmax was asked for.
        dimension_x, dimension_g: the number of eigenvalues.
        samples: R, the rows, tokens or positions that Σx is the mean over.
        weight_norm: ‖W‖, the Frobenius norm.
        weight_spectral, gradient_spectral: the largest singular values of W and of ∂L/∂W; None if there is no gradient.
        domination: their ratio, gradient over weight; if it is far below 1, the weight dominates (definition 1).
        dying, full: the shares of its units that were active for no sample and for all; None if unknown.
        position: its index among the analyzed layers.
        spectra: the spectra of both factors; None unless asked for.

    >>> import torch, gyroscope
    >>> batch = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
    >>> layer = gyroscope.condition(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, batch)["weight"]
    >>> layer.kind, round(layer.lambda_x, 3), round(layer.kappa_x[1.0], 3), layer.rank_x
    ('linear', 4.5, 9.0, 2)
    """

    layer: str
    kind: str
    lambda_x: float
    lambda_g: float
    lambda_f: float
    kappa_x: Kappas
    kappa_g: Kappas
    kappa_f: Kappas
    rank_x: int | None
    rank_g: int | None
    dimension_x: int
    dimension_g: int
    samples: int
    weight_norm: float
    weight_spectral: float
    gradient_spectral: float | None
    domination: float | None
    dying: float | None
    full: float | None
    position: int = field(repr=False)
    spectra: Spectra | None = field(default=None, repr=False)

    def row(self) -> dict[str, Any]:
        """Return the numbers as a dict."""
        hidden = ("position", "spectra")
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
            if name not in hidden
        }


@dataclass(frozen=True)
class Conditioning(ByLayer[LayerConditioning]):
    """The conditioning of the layers of a network, in forward order.

    It prints as a table, in color if `rich` is installed.

    Attributes:
        entries: one per layer that could be treated.
        p: the shares p of the κ_p.
        untreated: the layers that could not be treated, and why.
        notes: remarks on how the numbers were obtained.
        loss: the mean loss.
        batches: the number of batches.

    >>> import torch, gyroscope
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> found = gyroscope.condition(net, torch.nn.functional.cross_entropy, (torch.randn(8, 3), torch.arange(8) % 2))
    >>> found.layers
    ('0.weight', '2.weight')
    >>> sorted(found.rows()[0])[:6]
    ['dimension_g', 'dimension_x', 'domination', 'dying', 'full', 'gradient_spectral']
    """

    _error = ConditioningError

    entries: tuple[LayerConditioning, ...]
    p: tuple[float, ...]
    untreated: dict[str, str]
    notes: tuple[str, ...]
    loss: float
    batches: int

    @property
    def spectra(self) -> dict[str, Spectra] | None:
        """Full spectra of both factors by layer; None unless asked for with `spectra=True`."""
        if any(entry.spectra is None for entry in self.entries):
            return None
        return {entry.layer: entry.spectra for entry in self.entries if entry.spectra is not None}

    def _missing(self, layer: str) -> str:
        if layer in self.untreated:
            return f"The layer {layer!r} was not treated: {self.untreated[layer]}."
        return super()._missing(layer)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per layer."""
        return [entry.row() for entry in self.entries]

    def to_pandas(self) -> Any:
        """Return a data frame with one row per layer and a column for each κ_p such as `kappa_x_p50`.

        An undefined κ is NaN.
        """
        return super().to_pandas()

    def _flat_rows(self) -> list[dict[str, Any]]:
        return [flat(row) for row in self.rows()]

    def table(self, *, width: int | None = None) -> Table:
        """Return a table for the terminal; one wider than `width` is split into blocks that repeat the names."""
        try:
            from rich import box
            from rich.table import Table
            from rich.text import Text
        except ImportError as error:
            raise MissingExtraError(
                "`table` needs rich, which is not installed; use `rows`, or: pip install 'gyroscope[cli]'"
            ) from error
        heads, lines = self._cells()
        whole = Table.grid()
        name, blocks = _blocks(heads, lines, width)
        for chosen in blocks:
            part = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            part.add_column(Text(heads[0]), max_width=name, overflow="fold")
            for i in chosen:
                part.add_column(Text(heads[i]), justify="right", no_wrap=True)
            for line in lines:
                # In strings, rich would take brackets for its markup.
                part.add_row(*(Text(line[i]) for i in (0, *chosen)))
            whole.add_row(part)
        for said in [*(f"not treated: {name}: {why}" for name, why in self.untreated.items()), *self.notes]:
            whole.add_row(Text(said, style="dim"))
        return whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(width=options.max_width)

    def __str__(self) -> str:
        heads, lines = self._cells()
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in [heads, *lines]
        ]
        text += [f"not treated: {name}: {why}" for name, why in self.untreated.items()]
        return "\n".join([*(line.rstrip() for line in text), *self.notes])

    def _repr_html_(self) -> str:
        said = [*(f"not treated: {name}: {why}" for name, why in self.untreated.items()), *self.notes]
        more = [f"… and {len(said) - _NOTES:,} more remarks"] if len(said) > _NOTES else []
        return "".join([markup.table(*self._cells()), *map(markup.paragraph, [*said[:_NOTES], *more])])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        heads = ["layer", "λmax Σx", "λmax Σ∇h", "λmax F"]
        shown = _shown(self.p)
        heads += [f"κ{percent(p)}% {which}" for which in ("Σx", "Σ∇h", "F") for p in shown]
        ranks = bool(self.p)
        heads += ["rank Σx", "rank Σ∇h"] if ranks else []
        heads += ["‖W‖", "σ∇W/σW", "dying", "full"]
        lines = []
        for e in self.entries:
            line = [e.layer, number(e.lambda_x), number(e.lambda_g), number(e.lambda_f)]
            line += [kappa(ks[p]) for ks in (e.kappa_x, e.kappa_g, e.kappa_f) for p in shown]
            line += [f"{e.rank_x}/{e.dimension_x}", f"{e.rank_g}/{e.dimension_g}"] if ranks else []
            line += [number(e.weight_norm), number(e.domination), share(e.dying), share(e.full)]
            lines.append(line)
        return heads, lines


def _blocks(heads: list[str], lines: list[list[str]], width: int | None) -> tuple[int, list[list[int]]]:
    """Return the width of the first column, and blocks of the others that fit next to it.

    >>> _blocks(["a", "bb", "cc"], [["1", "2", "3"]], 8)
    (1, [[1], [2]])
    """
    name, *widths = (max(map(len, column)) for column in zip(heads, *lines, strict=True))
    if width is not None:
        name = min(name, max(_LEAST, width // 2))
    blocks: list[list[int]] = [[]]
    for i in range(1, len(heads)):
        taken = name + sum(widths[k - 1] + _GAP for k in (*blocks[-1], i))
        if width is not None and blocks[-1] and taken > width:
            blocks.append([])
        blocks[-1].append(i)
    return name, blocks


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with one key for each κ_p, such as `kappa_x_p50`; an undefined κ is NaN.

    >>> flat({"layer": "a", "kappa_x": {0.5: 2.0, 1.0: None}})
    {'layer': 'a', 'kappa_x_p50': 2.0, 'kappa_x_p100': nan}
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {quantity(name, p): math.nan if k is None else k for p, k in value.items()}
        else:
            found[name] = value
    return found


def quantity(name: str, p: float) -> str:
    """Return the name of κ_p in data frames and runs.

    >>> quantity("kappa_f", 0.125)
    'kappa_f_p12.5'
    """
    return f"{name}_p{percent(p)}"


def percent(p: float) -> str:
    """Return a share in percent, without rounding errors.

    >>> percent(0.07), percent(1.0)
    ('7', '100')
    """
    return f"{100 * p:.10g}"


def kappa(value: float | None) -> str:
    """Return a condition number, "∞" or "undefined".

    >>> kappa(None), kappa(math.inf)
    ('undefined', '∞')
    """
    return "undefined" if value is None else "∞" if math.isinf(value) else number(value)


def share(value: float | None) -> str:
    """Return a share in percent, or a dash."""
    return "–" if value is None else f"{100 * value:.3g}%"


def _shown(p: tuple[float, ...]) -> list[float]:
    """Return the shares p that a table shows: one or two of them all, of more the middle and the last."""
    ordered = sorted(p)
    return ordered if len(ordered) <= 2 else [ordered[len(ordered) // 2], ordered[-1]]
