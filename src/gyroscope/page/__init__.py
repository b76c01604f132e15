"""The page: runs as one HTML file that can be mailed, or served while they are written."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.page.report import report
    from gyroscope.page.server import live

__all__ = ["live", "report"]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(__name__, {"report": "report", "server": "live"})
