"""Series of a run as the page draws them: bins with mean, minimum and maximum, packed into a few bytes.

A frame is one quantity of a run, compressed with gzip:

    uint32         length n of the header, little-endian like all that follows
    n bytes        the header, JSON in UTF-8; then zeros up to a multiple of 8 bytes from the start
    float64[T]     first step of each bin
    float64[T]     last step of each bin
    the values, of L layers in T bins, layer after layer

The header has `quantity`, `layers` (L), `bins` (T), `exact`, `encoding`, `scale`, `low`, `high`, `clipped`, `from` and
`to`. If the frame is `exact`, each bin is one measured step, and there is one plane of values; otherwise there are
three: means, minima and maxima over the finite values in each bin. In the encoding "float32" they are numbers, NaN for
unknown ones. In the encoding "codes" each is a uint16: 0 for unknown, and c = 1 ... 4095 for

    low + (c − 1)/4094 · (high − low),    or, if `scale` is "log",    low · (high/low)^((c − 1)/4094).

The first plane then has the codes of means, as differences modulo 65536 from those of the bin before; the second what
must be subtracted from the code of the mean for that of the minimum, the third what must be added for that of the
maximum. All low bytes of a plane come before its high bytes: similar bytes next to each other compress well.
`clipped` is the number of bins with values that are not positive, on a logarithmic scale; these have the code of `low`.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gyroscope.store import Run
from gyroscope.store.labels import look_of, settle
from gyroscope.store.record import Steps, Values

#: Bins of a frame, unless others are asked for.
BINS = 512
#: Bytes of float32 values up to which a frame holds them as they are.
LIMIT = 100_000
#: Values that are read, and encoded, at a time.
_PIECE = 1 << 21
#: The largest code; 0 is unknown, and 1 is `low`.
_CODES = 4095

Codes = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Binned:
    """A quantity of a run in bins of measured steps.

    Attributes:
        first, last: the first and the last step of each bin [T].
        mean, least, most: over the finite values in each bin [L, T]; NaN if there are none.
        exact: True if each bin is one step; the three are then the same.
    """

    first: Steps
    last: Steps
    mean: Values
    least: Values
    most: Values
    exact: bool


def frame(
    run: Run,
    quantity: str,
    *,
    bins: int | None = BINS,
    first: int | None = None,
    last: int | None = None,
    limit: int = LIMIT,
) -> bytes:
    """Return a quantity of a run as a frame.

    Args:
        run: the run.
        quantity: one of `run.quantities`.
        bins: the most bins; None for every measured step.
        first, last: the steps to begin and to end with; those of the run if None.
        limit: bytes of float32 values up to which they are kept as they are; beyond, they become codes.

    Raises:
        StoreError: the run has no such quantity, or its file is damaged.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     data = gzip.decompress(frame(run, "rotation", bins=2))
    >>> header = json.loads(data[4 : 4 + data[0]])
    >>> header["layers"], header["bins"], header["exact"], header["encoding"]
    (3, 2, False, 'float32')
    """
    found = binned(run, quantity, bins=bins, first=first, last=last)
    look = settle(look_of(quantity, run.quantities[quantity]), found.mean)
    return packed(found, quantity, scale="log" if look.scale == "log" else "linear", limit=limit)


def binned(
    run: Run, quantity: str, *, bins: int | None = BINS, first: int | None = None, last: int | None = None
) -> Binned:
    """Return a quantity of a run in at most `bins` bins with equal numbers of measured steps, as far as possible.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     found = binned(run, "rotation", bins=2)
    >>> found.first.tolist(), found.last.tolist(), found.mean[2], found.most[2]
    ([0, 20], [10, 40], array([0.1, 0.6], dtype=float32), array([0.2, 0.8], dtype=float32))
    """
    steps, layers = run.where(quantity), len(run.layers)
    low, high = (-np.inf if first is None else first), (np.inf if last is None else last)
    steps = steps[(steps >= low) & (steps <= high)]
    edges = edges_of(len(steps), bins)
    count = len(edges) - 1
    exact = count == len(steps)
    planes = [np.empty((layers, count), dtype=np.float32) for _ in range(1 if exact else 3)]
    # Whole bins, as many as fit into a piece.
    widest = int(np.diff(edges).max(initial=1))
    together = max(_PIECE // (layers * widest), 1)
    for a in range(0, count, together):
        b = min(a + together, count)
        values = run.series(quantity, steps=steps[edges[a] : edges[b]])
        parts = (
            (np.where(np.isfinite(values), values, np.nan),) if exact else reduce(values, edges[a : b + 1] - edges[a])
        )
        for plane, part in zip(planes, parts, strict=True):
            plane[:, a:b] = part.T
    mean, least, most = planes * 3 if exact else planes
    return Binned(steps[edges[:-1]], steps[edges[1:] - 1], mean, least, most, exact)


def reduce(values: Floats, edges: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Return the means, the minima and the maxima over the finite ones of `values` in each bin; NaN if there are none.

    >>> mean, least, most = reduce(np.array([1.0, 3.0, np.nan, 5.0]), np.array([0, 2, 3, 4]))
    >>> mean, least, most
    (array([ 2., nan,  5.]), array([ 1., nan,  5.]), array([ 3., nan,  5.]))
    """
    known, begins = np.isfinite(values), edges[:-1]
    finite = values if known.all() else np.where(known, values, np.nan).astype(values.dtype)
    least, most = np.fmin.reduceat(finite, begins), np.fmax.reduceat(finite, begins)
    total = np.add.reduceat(np.where(known, values, 0), begins, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        mean = total / np.add.reduceat(known, begins, dtype=np.int64)
    return np.clip(mean, least, most), least, most  # rounding may take a mean out by a digit


def edges_of(count: int, bins: int | None) -> npt.NDArray[np.int64]:
    """Return where each of at most `bins` bins of `count` things begins, and where the last one ends.

    >>> edges_of(5, 2).tolist(), edges_of(2, 5).tolist()
    ([0, 2, 5], [0, 1, 2])
    """
    wanted = count if bins is None else min(count, bins)
    return np.arange(wanted + 1) * count // max(wanted, 1)


def packed(found: Binned, quantity: str, *, scale: Literal["linear", "log"], limit: int = LIMIT) -> bytes:
    """Return bins as a frame; the scale is that of codes.

    >>> steps, values = np.arange(2), np.array([[1.0, np.nan]], dtype=np.float32)
    >>> data = gzip.decompress(packed(Binned(steps, steps, values, values, values, True), "mine", scale="log", limit=0))
    >>> data[-4:]    # the differences of the codes 1 and 0: low bytes, then high bytes
    b'\\x01\\xff\\x00\\xff'
    """
    planes = [found.mean] if found.exact else [found.mean, found.least, found.most]
    layers, bins = found.mean.shape
    header: dict[str, Any] = {"quantity": quantity, "layers": layers, "bins": bins, "exact": found.exact}
    window = {"from": int(found.first[0]) if bins else None, "to": int(found.last[-1]) if bins else None}
    if sum(plane.nbytes for plane in planes) <= limit:
        header |= {"encoding": "float32", "scale": scale, "low": None, "high": None, "clipped": 0, **window}
        values = b"".join(plane.astype("<f4", copy=False).tobytes() for plane in planes)
    else:
        low, high = _range(planes, scale)
        clipped = int((found.least <= 0).sum()) if scale == "log" else 0
        header |= {"encoding": "codes", "scale": scale, "low": low, "high": high, "clipped": clipped, **window}
        mean, *others = [_codes(plane, low, high, scale) for plane in planes]
        apart = [mean - others[0], others[1] - mean] if others else []
        changes = mean.copy()
        changes[:, 1:] -= mean[:, :-1]  # modulo 65536
        values = b"".join(_low_bytes_first(plane) for plane in (changes, *apart))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    steps = b"".join(edge.astype("<f8").tobytes() for edge in (found.first, found.last))
    start = len(text).to_bytes(4, "little") + text
    return gzip.compress(start + bytes(-len(start) % 8) + steps + values, 6, mtime=0)


def _range(planes: list[Values], scale: str) -> tuple[float, float]:
    """Return the smallest and the largest value, of positive ones on a logarithmic scale; 0 and 0 if there are none."""
    low, high = np.inf, -np.inf
    for plane in planes:
        known = plane > 0 if scale == "log" else np.isfinite(plane)
        low = min(low, float(np.min(plane, initial=np.inf, where=known)))
        high = max(high, float(np.max(plane, initial=-np.inf, where=known)))
    return (low, high) if low <= high else (0.0, 0.0)


def _codes(plane: Values, low: float, high: float, scale: str) -> Codes:
    """Return the codes of values [L, T], some layers at a time."""
    codes = np.empty(plane.shape, dtype=np.uint16)
    rows = max(_PIECE // max(plane.shape[1], 1), 1)
    for a in range(0, len(plane), rows):
        part = plane[a : a + rows].astype(np.float64)
        known = np.isfinite(part)
        if scale == "log":
            part = np.log(np.maximum(part, low, where=known, out=np.full_like(part, low)) / low)
            whole = np.log(high / low) if low < high else 1.0
        else:
            part, whole = np.where(known, part, low) - low, high - low if low < high else 1.0
        codes[a : a + rows] = np.where(known, 1 + np.rint((_CODES - 1) * (part / whole)), 0)
    return codes


def _low_bytes_first(plane: Codes) -> bytes:
    return np.ascontiguousarray(plane.astype("<u2", copy=False).reshape(-1, 1).view(np.uint8).T).tobytes()
