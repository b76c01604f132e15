"""The values of one quantity over layers, to bytes and back.

A row is float32, little-endian, one number a layer. Two cases are shorter, because they are common: a row in which
nothing is known (all NaN) has no bytes, and a row of equal numbers (a learning rate) has one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np

from gyroscope.store.record import Values


def pack(values: Values) -> Iterator[bytes]:
    """The bytes of each row of `values` `[steps, layers]`.

    >>> rows = np.array([[1.0, 2.0], [0.5, 0.5], [np.nan, np.nan]], dtype=np.float32)
    >>> [len(data) for data in pack(rows)]
    [8, 4, 0]
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    unknown = np.all(np.isnan(values), axis=1)
    # Compared as bits, so that -0.0 stays -0.0.
    bits = values.view("<u4")
    equal = np.all(bits == bits[:, :1], axis=1)
    for i, row in enumerate(values):
        yield b"" if unknown[i] else row[:1].tobytes() if equal[i] else row.tobytes()


def checksum(attempt: int, step: int, quantity: int, part: int, data: bytes) -> int:
    """A number that tells whether a row is the one that was written, at the place where it was written.

    >>> checksum(1, 5, 1, 0, b"") == checksum(1, 6, 1, 0, b"")
    False
    """
    return crc32(data, crc32(b"%d %d %d %d" % (attempt, step, quantity, part)))


def unpack(data: bytes, layers: int) -> Values:
    """The row that `pack` made, as `[layers]` or, where all are equal, `[1]`.

    >>> [data] = pack(np.array([[1.0, 2.0]], dtype=np.float32))
    >>> unpack(data, 2)
    array([1., 2.], dtype=float32)
    """
    if len(data) not in (0, 4, 4 * layers):
        raise ValueError(f"{len(data)} bytes for {layers} layers")
    return np.frombuffer(data, dtype="<f4") if data else _UNKNOWN


_UNKNOWN = np.full(1, np.nan, dtype=np.float32)
