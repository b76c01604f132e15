"""The values of one quantity over layers, to bytes and back.

A row is float32, little-endian, one number a layer. Two cases are shorter, because they are common: a row in which
nothing is known (all NaN) has no bytes, and a row of equal numbers (a learning rate) has one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np

from gyroscope.store.record import Values


def pack(values: Values) -> Iterator[tuple[int, bytes]]:
    """Checksum and bytes of each row of `values` `[steps, layers]`.

    >>> rows = np.array([[1.0, 2.0], [0.5, 0.5], [np.nan, np.nan]], dtype=np.float32)
    >>> [len(data) for _, data in pack(rows)]
    [8, 4, 0]
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    unknown = np.all(np.isnan(values), axis=1)
    # Compared as bits, so that -0.0 stays -0.0.
    bits = values.view("<u4")
    equal = np.all(bits == bits[:, :1], axis=1)
    for i, row in enumerate(values):
        data = b"" if unknown[i] else row[:1].tobytes() if equal[i] else row.tobytes()
        yield crc32(data), data


def unpack(crc: int, data: bytes, layers: int) -> Values | None:
    """The row that `pack` made, as `[layers]` or, where all are equal, `[1]`; None if the bytes are not those.

    >>> [(crc, data)] = pack(np.array([[1.0, 2.0]], dtype=np.float32))
    >>> unpack(crc, data, 2), unpack(crc + 1, data, 2)
    (array([1., 2.], dtype=float32), None)
    """
    if not isinstance(data, bytes) or len(data) not in (0, 4, 4 * layers) or crc32(data) != crc:
        return None
    return np.frombuffer(data, dtype="<f4") if data else _UNKNOWN


_UNKNOWN = np.full(1, np.nan, dtype=np.float32)
