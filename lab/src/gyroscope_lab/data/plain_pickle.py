"""Pickles of plain values and arrays of bytes, read without running code in them."""

from __future__ import annotations

import io
import pickle
from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gyroscope_lab.errors import LabError


def read_plain_pickle(content: bytes, *, name: str) -> object:
    """Return the content of a pickle: dictionaries, lists, tuples, strings, numbers and arrays of `uint8` only.

    A pickle is a program: it names functions and calls them. Here it finds only replacements, defined in this module,
    for the four names that numpy puts into the pickle of an array. Any other name is rejected before it runs.
    Strings of Python 2 come back as bytes, arrays as `PlainArray`.

    Args:
        content: the pickle.
        name: the name of the file, for errors.

    >>> read_plain_pickle(pickle.dumps({b"labels": [6, 9]}), name="data_batch_1")
    {b'labels': [6, 9]}
    >>> read_plain_pickle(pickle.dumps(eval), name="data_batch_1")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: data_batch_1 is rejected: it asks for builtins.eval, which no file of images needs...
    """
    try:
        return _Plain(content, name).load()
    except LabError:
        raise
    except Exception as error:
        # A damaged pickle can raise any error.
        raise LabError(
            f"{name} is damaged, or not a pickle ({type(error).__name__}: {error}). Fetch it again."
        ) from error


class PlainArray:
    """An array of bytes as a pickle describes it, in the protocol of numpy's arrays.

    >>> array = PlainArray()
    >>> array.__setstate__((1, (2, 2), PlainType("u1"), False, b"abcd"))
    >>> array.bytes()
    array([[ 97,  98],
           [ 99, 100]], dtype=uint8)
    """

    __slots__ = ("_content", "_fortran", "_shape")

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = (0,)
        self._fortran = False
        self._content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        if type(kind) is not PlainType or type(content) is not bytes:
            raise TypeError("an array of other things than bytes")
        if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
            raise TypeError(f"an array of the shape {shape!r}")
        if len(content) != prod(shape):
            raise ValueError(f"{len(content):,} bytes for an array of {' × '.join(map(str, shape))}")
        self._shape, self._fortran, self._content = shape, bool(fortran), content

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return the array, which is read-only.

        >>> array = PlainArray()
        >>> array.__setstate__((1, (2, 2), PlainType("u1"), True, b"acbd"))
        >>> array.bytes().tobytes()
        b'abcd'
        """
        order: Any = "F" if self._fortran else "C"
        return np.frombuffer(self._content, dtype=np.uint8).reshape(self._shape, order=order)


class PlainType:
    """The element type of such an array, which must be `uint8`.

    >>> PlainType("f8")
    Traceback (most recent call last):
    ValueError: an array of 'f8', where bytes (u1) are expected
    """

    __slots__ = ()

    def __init__(self, kind: str | bytes, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise ValueError(f"an array of {kind!r}, where bytes (u1) are expected")

    def __setstate__(self, state: object) -> None:
        # The byte order and similar properties, which do not matter for elements of one byte.
        pass


class _Function:
    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        # Without this, a pickle could set attributes of the functions that it calls.
        raise TypeError("a function has no state")


class _Reconstruct(_Function):
    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> PlainArray:
        return PlainArray()


class _FromBuffer(_Function):
    __slots__ = ()

    def __call__(self, content: bytes | bytearray, kind: object, shape: object, order: object) -> PlainArray:
        array = PlainArray()
        array.__setstate__((1, shape, kind, order == "F", bytes(content)))
        return array


class _Encode(_Function):
    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        # Python 3 writes bytes this way in the format of Python 2.
        if encoding != "latin1":
            raise ValueError(f"text in {encoding!r}, where latin1 is expected")
        return text.encode("latin1")


# numpy 2.0 moved the first two, and reads files with either name.
_STAND_INS: dict[str, object] = {
    "numpy.core.multiarray._reconstruct": _Reconstruct(),
    "numpy._core.multiarray._reconstruct": _Reconstruct(),
    "numpy.core.numeric._frombuffer": _FromBuffer(),
    "numpy._core.numeric._frombuffer": _FromBuffer(),
    "numpy.ndarray": PlainArray,
    "numpy.dtype": PlainType,
    "_codecs.encode": _Encode(),
}


class _Plain(pickle.Unpickler):
    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in _STAND_INS:
            raise LabError(
                f"{self._name} is rejected: it asks for {wanted}, which no file of images needs and which could run "
                "anything. Delete it, and fetch it again from its publisher."
            )
        return _STAND_INS[wanted]

    def persistent_load(self, pid: object) -> NoReturn:
        raise LabError(f"{self._name} is rejected: it asks for an object outside the file, {pid!r}. Fetch it again.")
