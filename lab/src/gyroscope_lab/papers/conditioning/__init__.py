"""The conditioning paper: exact spectra of small networks, and layers of deep ones while they are trained."""

from gyroscope_lab.papers.conditioning.exact import (
    PLANS,
    SAMPLES,
    Choices,
    Plan,
    Study,
    a1,
    a2,
    a3,
    a4,
    fig1,
    fig2,
    reproduce,
    reproduce_all,
)

__all__ = [
    "PLANS",
    "SAMPLES",
    "Choices",
    "Plan",
    "Study",
    "a1",
    "a2",
    "a3",
    "a4",
    "fig1",
    "fig2",
    "reproduce",
    "reproduce_all",
]
