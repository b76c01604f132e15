"""Runs for the tests of the page, and a bundle that is small enough to look through."""

import numpy as np

from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer, load

HOSTILE = "</script><script>alert(1)"


def written(folder, series, *, steps=None, layers=None, meta=None, records=(), step=0):
    """Write arrays [steps, layers] by quantity as a run, or as an attempt to resume it at `step`, and open it."""
    values = {name: np.asarray(one, dtype=np.float32) for name, one in series.items()}
    times, count = next(iter(values.values())).shape
    names = layers or [f"block{i // 2}.conv{i % 2}.weight" for i in range(count)]
    table = [LayerInfo(name, "conv", (4, 4, 3, 3)) for name in names]
    about = {name: QuantityInfo(name, "1", f"what {name} means") for name in values}
    with Writer(folder, table, about, meta=meta or {}, step=step) as writer:
        writer.put(Rows(0, np.arange(times) if steps is None else np.asarray(steps, dtype=np.int64), values))
        for record in records:
            writer.put(record)
    return load(folder)


TEMPLATE = """<!doctype html>
<html><head>{% if csp %}<meta http-equiv="Content-Security-Policy" content="{{ csp }}">{% endif %}
<title>{{ title }}</title>
{% for style in styles %}<style>{{ style }}</style>{% endfor %}</head><body>
<script type="application/json" id="gyroscope">{{ config }}</script>
{% for script in scripts %}<script>{{ script }}</script>
{% endfor %}{% for one in embedded %}<script type="{{ one.type }}" id="{{ one.id }}">{{ one.text }}</script>
{% endfor %}</body></html>
"""


def write_bundle(folder):
    (folder / "vendor").mkdir(parents=True)
    for name, text in {
        "page.html": TEMPLATE,
        "page.min.css": "body { color: red; }\n",
        "page.min.js": "const two = 2; // \"<b>\" & 'quotes'",
        "vendor/plot.iife.min.js": "var plot = 1 < 2;",
        "vendor/plot.min.css": ".plot > a { }",
        "vendor/plot.LICENSE": "Permission is granted.\n",
    }.items():
        (folder / name).write_text(text)
    return folder
