"""The page: a run, or several, as one HTML file that can be mailed."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.page.report import report

__all__ = ["report"]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(__name__, {"report": "report"})
