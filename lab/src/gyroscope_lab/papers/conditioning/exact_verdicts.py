"""What the conditioning paper says of these figures, beside what came out."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt

from gyroscope_lab.papers.conditioning.exact_result import PAPER_LARGEST, PAPER_MODEL, Line, Study, Verdict

# The paper gives orders of magnitude; "around" is taken to mean within a factor of ten.
_AROUND = 10.0
# "Match well" is taken to mean within a factor of two.
_CLOSE = 2.0


def verdicts(study: Study) -> list[Verdict]:
    """Return what the paper says, as far as the lines of `study` can tell, and whether it is so.

    >>> plain = Line("plain", "F", None, False, 2e-5, (9.0, inf), 1, 2)
    >>> bn = Line("bn", "F", None, False, 2.0, (8.0, 9.0), 2, 2)
    >>> for verdict in verdicts(Study("fig1", "mlp-8x24", "digits", 9, {}, (0.5, 1.0), (plain, bn), 0.0)):
    ...     print(verdict.says, "|", verdict.here, "|", verdict.holds)
    λmax of F, plain | 2e-05 | True
    λmax of F, bn | 2 | True
    κ_p of F is lower with BN | at 2 of 2 shares p | True
    """
    found = []
    for matrix in dict.fromkeys(line.matrix for line in study.lines):
        exact = [line for line in study.lines if line.matrix == matrix and not line.approximate]
        whole = [line for line in exact if line.layer is None]
        blocks = [line for line in exact if line.layer is not None]
        if study.model == PAPER_MODEL and matrix == "F":
            found += [_around(line) for line in whole]
        if whole:
            found.append(_better(f"κ_p of {matrix} is lower with BN", _pairs(whole)))
        if blocks:
            found.append(_better(f"κ_p of the {matrix}_k is lower with BN", _pairs(blocks)))
        found += _matching(study, matrix, blocks)
    return found


def _around(line: Line) -> Verdict:
    paper = PAPER_LARGEST[line.network]
    holds = paper / _AROUND <= line.largest <= paper * _AROUND
    return Verdict(f"λmax of F, {line.network}", f"around {paper:g}", f"{line.largest:.2g}", holds)


def _pairs(lines: Iterable[Line]) -> list[tuple[float, float]]:
    """κ_p of the plain network and of the normalized one, wherever at least one of them is finite."""
    by_layer: dict[int | None, dict[str, Line]] = {}
    for line in lines:
        by_layer.setdefault(line.layer, {})[line.network] = line
    both = [pair for pair in by_layer.values() if len(pair) == len(PAPER_LARGEST)]
    values = [
        (inf if a is None else a, inf if b is None else b)
        for pair in both
        for a, b in zip(pair["plain"].kappa, pair["bn"].kappa, strict=True)
    ]
    return [(a, b) for a, b in values if min(a, b) < inf]


def _better(says: str, pairs: list[tuple[float, float]]) -> Verdict:
    lower = sum(bn < plain for plain, bn in pairs)
    return Verdict(says, "yes", f"at {lower} of {len(pairs)} shares p", bool(pairs) and lower == len(pairs))


def _matching(study: Study, matrix: str, blocks: list[Line]) -> list[Verdict]:
    found = []
    for network in PAPER_LARGEST:
        both = [
            (line, study.find(network, matrix, line.layer, approximate=True))
            for line in blocks
            if line.network == network and _has_approximation(study, line)
        ]
        if not both:
            continue
        found.append(_ratios(f"λmax of the approximated {matrix}_k, {network}", [
            near.largest / exact.largest for exact, near in both if exact.largest > 0
        ]))  # fmt: skip
        found.append(_ratios(f"κ_p of the approximated {matrix}_k, {network}", [
            b / a
            for exact, near in both
            for a, b in zip(exact.kappa, near.kappa, strict=True)
            if a is not None and b is not None and max(a, b) < inf
        ]))  # fmt: skip
    return found


def _has_approximation(study: Study, line: Line) -> bool:
    wanted = (line.network, line.matrix, line.layer, True)
    return any((o.network, o.matrix, o.layer, o.approximate) == wanted for o in study.lines)


def _ratios(says: str, ratios: list[float]) -> Verdict:
    """How far approximations are from what they approximate: the middle ratio, and the two ends."""
    if not ratios:
        return Verdict(says, "matches well", "nothing finite to compare", False)
    ordered = sorted(ratios)
    middle = sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])
    here = f"{middle:.2g} times the exact one in the middle, {ordered[0]:.2g} to {ordered[-1]:.2g}"
    return Verdict(says, "matches well", here, 1 / _CLOSE <= middle <= _CLOSE)
