"""Findings: what is wrong with a run, in which layer, since when, how it shows, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from gyroscope.base.by_layer import data_frame
from gyroscope.base.markup import paragraph, table, text
from gyroscope.errors import MonitorError

Severity = Literal["serious", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
#: The page that explains each kind, relative to the documents.
PAGE = "diagnosis.md"


@dataclass(frozen=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        kind: which rule found it; one of `gyroscope.diagnosis.KINDS`.
        severity: "serious" if training is broken or wasted, "warning" if it likely costs quality, and "note" if it is
            worth knowing. A note is not an alarm.
        layers: the layers it is about, the likeliest culprit first; empty if it is about the whole network.
        since: the step at which it began; None if it was there from the beginning.
        sentence: the finding in words.
        evidence: the measured values and the thresholds that they passed.
        remedy: what to try.
        link: the section of the documents that explains it.

    >>> found = Finding("frozen", "serious", ("conv1.weight",), None, "conv1.weight does not require gradients.")
    >>> print(found)
    serious: conv1.weight does not require gradients.
    >>> found.is_alarm
    True
    """

    kind: str
    severity: Severity
    layers: tuple[str, ...]
    since: int | None
    sentence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    link: str = ""

    @property
    def is_alarm(self) -> bool:
        """True if it is serious or a warning."""
        return self.severity != "note"

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence}"


@dataclass(frozen=True)
class Diagnosis(Sequence[Finding]):
    """Findings about a run, the most important first.

    Attributes:
        run: the run's name.
        findings: the findings.
        missing: what the run lacks to tell more, and how to record it; empty if it holds everything.
        decided: False if the run holds too little to say that nothing is wrong.

    >>> found = Diagnosis("first", (Finding("at_chance", "serious", (), 40, "The loss is at chance level."),))
    >>> len(found), found[0].kind, found.serious, found.decided
    (1, 'at_chance', True, True)
    >>> print(found)
    first: 1 serious finding
    serious: The loss is at chance level.
    """

    run: str
    findings: tuple[Finding, ...]
    missing: tuple[str, ...] = ()
    decided: bool = True

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The findings that are serious or warnings."""
        return tuple(one for one in self.findings if one.is_alarm)

    @property
    def serious(self) -> bool:
        """True if training is broken or wasted."""
        return any(one.severity == "serious" for one in self.findings)

    def headline(self) -> str:
        """Return the run's name and the number of findings of each severity."""
        counts = {severity: sum(one.severity == severity for one in self.findings) for severity in SEVERITIES}
        nouns = {"serious": ("serious finding", "serious findings"), "warning": ("warning", "warnings")}
        nouns["note"] = ("note", "notes")
        said = ", ".join(f"{n:,} {nouns[key][n != 1]}" for key, n in counts.items() if n)
        if not self.decided:
            return f"{self.run}: {said + '; ' if said else ''}the run does not hold enough to tell more"
        return f"{self.run}: {said or 'nothing is wrong that the measurements can show'}"

    def __str__(self) -> str:
        lines = [self.headline()]
        for one in self.findings:
            lines.append(str(one))
            if one.remedy:
                lines.append(f"  {one.remedy}")
        return "\n".join([*lines, *self.missing])

    def to_json(self) -> str:
        """Return the diagnosis as JSON."""
        return json.dumps(
            {
                "run": self.run,
                "decided": self.decided,
                "findings": [asdict(one) for one in self.findings],
                "missing": list(self.missing),
            },
            indent=1,
            ensure_ascii=False,
        )

    def to_pandas(self) -> Any:
        """Return a data frame with one row per finding."""
        rows = [asdict(one) | {"layers": ", ".join(one.layers), "evidence": dict(one.evidence)} for one in self]
        columns = ["kind", "severity", "layers", "since", "sentence", "evidence", "remedy", "link"]
        return data_frame(rows, columns)

    def _repr_html_(self) -> str:
        rows = [(one.severity, *(text(said, longest=2000) for said in (one.sentence, one.remedy))) for one in self]
        found = table(["severity", "finding", "what to try"], rows, words=range(3)) if rows else ""
        return "".join([paragraph(self.headline()), found, *map(paragraph, self.missing)])


class FindingError(MonitorError):
    """Raised on the training thread by `watch(on_finding="raise")`.

    Attributes:
        finding: the finding.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.sentence} {finding.remedy}".strip())
        self.finding = finding
