"""Findings about a run, in words and with their evidence: explanations, dominated layers, stalled networks."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.diagnosis.course import Course, course_of
    from gyroscope.diagnosis.diagnose import diagnose, findings, ordered
    from gyroscope.diagnosis.domination import Domination, dominated
    from gyroscope.diagnosis.explain import Explanation, explain
    from gyroscope.diagnosis.finding import Diagnosis, Finding
    from gyroscope.diagnosis.rules import KINDS
    from gyroscope.diagnosis.stall import LAST_LAYER_FILE, MARGIN, Stall, read_last_layer, stall, stalled

__all__ = [
    "KINDS",
    "LAST_LAYER_FILE",
    "MARGIN",
    "Course",
    "Diagnosis",
    "Domination",
    "Explanation",
    "Finding",
    "Stall",
    "course_of",
    "diagnose",
    "dominated",
    "explain",
    "findings",
    "ordered",
    "read_last_layer",
    "stall",
    "stalled",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "course": "Course course_of",
            "diagnose": "diagnose findings ordered",
            "domination": "Domination dominated",
            "explain": "Explanation explain",
            "finding": "Diagnosis Finding",
            "rules": "KINDS",
            "stall": "LAST_LAYER_FILE MARGIN Stall read_last_layer stall stalled",
        },
    )
