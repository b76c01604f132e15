"""Numbers along logarithmic axes that a reader does not have to decode."""

from __future__ import annotations

from math import floor, log10

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

# Up to this many decades there is room for 1, 2, 5 in each.
_FEW = 2.5


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Give a logarithmic `axis` from `low` to `high` ticks at 1, 2, 5 or at powers of ten.

    >>> from gyroscope.figures.lines import own_axes
    >>> ax = own_axes()
    >>> ax.set_yscale("log"); ax.set_ylim(0.01, 0.3)
    (0.01, 0.3)
    >>> log_ticks(ax.yaxis, 0.01, 0.3)
    >>> [plain(tick) for tick in ax.get_yticks() if 0.01 <= tick <= 0.3]
    ['0.01', '0.02', '0.05', '0.1', '0.2']
    """
    few = log10(high / low) <= _FEW
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9))
    in_full = low >= 5e-4 and high < 1e5
    axis.set_major_formatter(FuncFormatter(lambda value, place: plain(value) if in_full else power(value)))
    axis.set_minor_locator(NullLocator() if few else LogLocator(subs=(2.0, 5.0), numticks=99))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """Return a number in full.

    >>> plain(0.02), plain(500), plain(20_000)
    ('0.02', '500', '20,000')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def power(value: float) -> str:
    r"""Return a positive number as a power of ten, or a multiple of one.

    >>> power(1e-6), power(2e-6)
    ('$10^{-6}$', '$2{\\times}10^{-6}$')
    """
    exponent = floor(log10(value) + 1e-9)
    digits = f"{value / 10.0**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if digits == "1" else f"${digits}{{\\times}}10^{{{exponent}}}$"
