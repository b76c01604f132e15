"""Code that knows nothing about networks: lazy loading, accepted numbers, whole files, transfers."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy, required

if TYPE_CHECKING:
    from gyroscope.base.accepted import whole
    from gyroscope.base.transfer import pinned, to_host
    from gyroscope.base.whole_file import read_whole, require_whole, whole_file, write_whole

__all__ = [
    "lazy",
    "pinned",
    "read_whole",
    "require_whole",
    "required",
    "to_host",
    "whole",
    "whole_file",
    "write_whole",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "accepted": "whole",
            "transfer": "pinned to_host",
            "whole_file": "read_whole require_whole whole_file write_whole",
        },
    )
