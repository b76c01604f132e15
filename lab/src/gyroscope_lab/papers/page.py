"""The demo as a page: one HTML file that needs nothing else to be read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from gyroscope_lab.papers.demo import SGD_RATE, WEIGHT_DECAY, Demo, versions
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.summary import in_words
from gyroscope_lab.training.recipe import Recipe

_STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { width: 100%; height: auto; } figure { margin: 1.5rem 0; }
figcaption, .small { color: #555; font-size: 0.875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
tr.mean td { font-weight: 600; border-bottom-color: #999; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.875rem; background: #f4f4f4; }
code { padding: 0.1rem 0.25rem; } pre { padding: 0.6rem 0.8rem; overflow-x: auto; } dt { font-weight: 600; }
"""
_WHAT = """
<p>A network of seven layers learns to read handwritten digits from 200 examples, under {count} configurations. While
it learns, every layer <em>rotates</em>: the direction of its weights <i>w</i> leaves the direction
<i>w</i><sub>0</sub> they started from. Rotation is the cosine distance 1 − ⟨<i>w</i>, <i>w</i><sub>0</sub>⟩ /
(‖<i>w</i>‖ ‖<i>w</i><sub>0</sub>‖): 0 where nothing has turned, 1 at a right angle.</p>
<p><em>Layca</em> makes the learning rate an angle: in each step every layer turns by arctan ρ, where ρ begins at the
power of 3 that a configuration is named after. With α below 0 the first layers turn faster than the last, with α above
0 the last ones. <em>SGD</em> turns layers as it happens to.</p>
<p>The layer-rotation paper trains larger networks on photographs in the same ways (its figure 1), and claims: all of
them can learn their training examples, but the further <em>all</em> layers rotate, the better a network does on
examples it has not seen. The column on the right of the next table has its accuracies for one of these networks,
C10-CNN1 on CIFAR-10. They are of another task, so it is the order that can be compared, not the numbers.</p>
"""
_FIGURE = """One panel a configuration, one line a layer, dark for the first and light for the last: its rotation after
each epoch. The number in a panel is the test accuracy."""
_TRAININGS = """<p class="small">The last columns are the rotation of each layer at the end, from the first layer to
the last; darker is further. Loss is the mean training loss of the last epoch. What each layer did in every epoch is in
<code>demo.json</code>.</p>"""
_MORE = """<p class="small">Every training is recorded as a run: <code>gyroscope runs</code> lists them,
<code>gyroscope show</code> and <code>gyroscope plot</code> show what each layer did, <code>gyroscope compare</code>
puts runs side by side. The figure is beside this page as <code>rotation.png</code> and <code>rotation.svg</code>, every
number as <code>demo.json</code>.</p>"""


def page(demo: Demo, svg: bytes, *, command: str) -> str:
    """Return the page.

    Args:
        demo: what was measured.
        svg: the figure.
        command: what made it, for whoever wants to make it again.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.papers.demo import QUICK_RECIPES, TASK, run
    >>> from gyroscope_lab.engine.laboratory import Lab
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo = run(Lab(Archive(folder)), seeds=[0], recipes=QUICK_RECIPES[:1], task=TASK.lasting(1))
    >>> page(demo, b"<svg/>", command="gyroscope demo")[:15]
    '<!DOCTYPE html>'
    """
    image = b64encode(svg).decode()
    parts = [
        "<h1>How far layers rotate, and how well a network generalises</h1>",
        f"<p><strong>{escape(in_words(demo.summaries))}</strong></p>",
        f'<figure><img alt="Rotation curves of every configuration" src="data:image/svg+xml;base64,{image}">'
        f"<figcaption>{_FIGURE}</figcaption></figure>",
        "<h2>What is shown</h2>",
        _WHAT.format(count=len(demo.recipes)),
        "<h2>Configurations</h2>",
        _configurations(demo),
        "<h2>Every training</h2>",
        _TRAININGS,
        _trainings(demo),
        "<h2>Settings</h2>",
        _settings(demo),
        "<h2>Make it again</h2>",
        f"<pre>{escape(command)} --again</pre>",
        _MORE,
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = "<title>Gyroscope: layer rotation on digits</title>"
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}{title}<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _configurations(demo: Demo) -> str:
    rows = []
    for summary in demo.summaries:
        final, told = summary.final_rotation, _told(summary.recipe)
        numbers = (min(final), summary.mean_rotation, max(final))
        rows.append(
            _row(
                [
                    summary.recipe.name,
                    f"{100 * summary.train_accuracy:.1f}",
                    summary.test,
                    *(f"{value:.3f}" for value in numbers),
                    "–" if told is None else f"{told:.1f}",
                ]
            )
        )
    headings = (
        "configuration", "train %", "test %", "least rotated layer", "mean rotation", "most rotated layer",
        "test %, paper (C10-CNN1)",
    )  # fmt: skip
    return _table(headings, rows)


def _told(recipe: Recipe) -> float | None:
    """What the paper has for a configuration on C10-CNN1."""
    known = "c10-cnn1"
    if recipe.control is None:
        told = paper.WEIGHT_DECAY[known] if recipe.weight_decay else paper.SGD_RATES[known][-1]
        return paper.absolute(known, told)
    if recipe.alpha:
        return paper.by_alpha(known, recipe.alpha)
    return paper.by_rate(known, round(np.log(recipe.rate) / np.log(3)))


def _trainings(demo: Demo) -> str:
    rows = []
    for summary, results in zip(demo.summaries, demo.results, strict=True):
        for seed, result in zip(demo.seeds, results, strict=True):
            cells = [
                f"{summary.recipe.name}, seed {seed}",
                f"{100 * result.train_accuracy:.1f}",
                f"{100 * result.test_accuracy:.1f}",
                f"{result.loss[-1]:.4f}",
                f"{np.mean(result.final_rotation):.3f}",
            ]
            rows.append(_row(cells, shaded=result.final_rotation))
        if len(results) > 1:
            loss = np.mean([result.loss[-1] for result in results])
            cells = [
                f"{summary.recipe.name}, mean",
                f"{100 * summary.train_accuracy:.1f}",
                f"{100 * summary.test_accuracy:.1f}",
                f"{loss:.4f}",
                f"{summary.mean_rotation:.3f}",
            ]
            rows.append(_row(cells, shaded=summary.final_rotation, kind="mean"))
    layers = [name.removesuffix(".weight") for name in demo.layers]
    return _table(("configuration", "train %", "test %", "loss", "mean rotation", *layers), rows)


def _row(cells: Sequence[str], *, shaded: Sequence[float] = (), kind: str = "") -> str:
    plain = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    given = f' class="{kind}"' if kind else ""
    return f"<tr{given}>{plain}{''.join(map(_shaded, shaded))}</tr>"


def _shaded(rotation: float) -> str:
    # Up to a right angle; the lightest text stays readable on the darkest cell.
    strength = 0.55 * min(max(rotation, 0.0), 1.0) if np.isfinite(rotation) else 0.0
    return f'<td style="background: rgba(31, 119, 180, {strength:.2f})">{rotation:.3f}</td>'


def _table(headings: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _settings(demo: Demo) -> str:
    task, schedule = demo.task, demo.task.schedule
    cuts = ", ".join(map(str, schedule.milestones))
    seconds = sum(result.seconds for results in demo.results for result in results)
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    said = {
        "Data": "scikit-learn's digits, 8×8 pixels: 200 to train on (20 of each), 1,597 to test on; pixels are "
        "normalized by the mean and the standard deviation of the 200",
        "Network": f"{task.model}: six convolutions with batch normalization and a linear layer; no biases, no gains",
        "Schedule": f"{schedule.epochs} epochs in batches of {schedule.batch}; the rate is divided by "
        f"{schedule.factor:g} after epochs {cuts}",
        "SGD": f"a rate of {SGD_RATE:.3g} and a weight decay of {WEIGHT_DECAY:g}, the best of a grid by test accuracy: "
        "if that choice flatters anyone it is SGD, since Layca's rates are the paper's",
        "Seeds": f"{', '.join(map(str, demo.seeds))}: of the initialization and of the order of the examples; ± is the "
        "standard deviation over them",
        "Made with": f"{made}; float32 on a CPU, {seconds:.0f} s of training on one core",
    }
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in said.items()) + "</dl>"
