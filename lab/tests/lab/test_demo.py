import json
from html.parser import HTMLParser

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.papers import demo
from gyroscope_lab.papers.demo import page
from gyroscope_lab.training.archive import Archive, forget

ONE = demo.TASK.lasting(1)


def laboratory(folder, **hooks):
    return Lab(Archive(folder), engine="serial", precision="float32", **hooks)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two recipes with two seeds each, of one epoch."""
    lab = laboratory(tmp_path_factory.mktemp("runs"))
    return demo.run(lab, seeds=[3, 8], recipes=demo.RECIPES[4:6], task=ONE)


def test_results_are_kept_by_recipe_then_seed(measured, tmp_path):
    assert measured.trained == 4
    for recipe, results in zip(demo.RECIPES[4:6], measured.results, strict=True):
        for seed, result in zip([3, 8], results, strict=True):
            assert run_one(demo.Trial(ONE, recipe, seed), Archive(tmp_path)) == result


def test_what_is_known_is_not_trained_again_until_it_is_forgotten(tmp_path):
    begun = []
    lab = laboratory(tmp_path, on_begin=lambda trials: begun.append([trial.seed for trial in trials]))
    settings = {"recipes": demo.RECIPES[8:9], "task": ONE}
    first = demo.run(lab, seeds=[0], **settings)
    both = demo.run(lab, seeds=[0, 1], **settings)
    assert (first.trained, both.trained, begun) == (1, 1, [[0], [1]])
    assert both.results[0][0] == first.results[0][0]
    forget(lab.archive, demo.trials(lab, seeds=[0], **settings))
    assert demo.run(lab, seeds=[0, 1], **settings).trained == 1
    assert begun == [[0], [1], [0]]


def test_a_demo_that_was_interrupted_goes_on_with_what_is_missing(tmp_path):
    def interrupt(trial, result):
        raise KeyboardInterrupt

    settings = {"seeds": [0, 1], "recipes": demo.RECIPES[8:9], "task": ONE}
    with pytest.raises(KeyboardInterrupt):
        demo.run(laboratory(tmp_path, on_done=interrupt), **settings)
    resumed = demo.run(laboratory(tmp_path), **settings)
    assert resumed.trained == 1
    assert resumed.results == demo.run(laboratory(tmp_path / "new"), **settings).results


def test_the_json_is_valid_even_when_there_is_nothing_to_rank(tmp_path):
    alone = demo.run(laboratory(tmp_path), seeds=[0], recipes=demo.RECIPES[:1], task=ONE)
    numbers = json.loads(json.dumps(alone.as_json(), allow_nan=False))
    assert numbers["rank_correlation"] is None
    assert numbers["configurations"][0]["trials"][0]["rotation"] == alone.results[0][0].rotation


class Tables(HTMLParser):
    """The rows of each table, and every address and picture."""

    def __init__(self):
        super().__init__()
        self.tables, self.sources, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def read(measured):
    parser = Tables()
    parser.feed(page(measured, b"<svg/>", command="gyroscope demo --out 'a b'"))
    assert parser.open == []
    return parser


def test_the_page_holds_every_number_of_every_training(measured, read):
    _, (headings, *rows) = read.tables
    assert headings[5:] == [f"conv{i}" for i in range(1, 7)] + ["classifier"]
    by_name = {row[0]: row[1:] for row in rows}
    assert len(by_name) == 6
    for recipe, results in zip(demo.RECIPES[4:6], measured.results, strict=True):
        for seed, result in zip([3, 8], results, strict=True):
            accuracies = [f"{100 * result.train_accuracy:.1f}", f"{100 * result.test_accuracy:.1f}"]
            turned = [f"{value:.3f}" for value in (np.mean(result.rotation[-1]), *result.rotation[-1])]
            assert by_name[f"{recipe.name}, seed {seed}"] == [*accuracies, f"{result.loss[-1]:.4f}", *turned]
        layers = np.mean([result.rotation[-1] for result in results], axis=0)
        assert by_name[f"{recipe.name}, mean"][4:] == [f"{value:.3f}" for value in layers]


def test_the_page_needs_nothing_else(read):
    [picture] = read.sources
    assert picture == "data:image/svg+xml;base64,PHN2Zy8+"


def test_the_page_has_the_papers_numbers_beside_ours(tmp_path):
    whole = demo.run(laboratory(tmp_path), seeds=[0], task=ONE)
    parser = Tables()
    parser.feed(page(whole, b"", command="gyroscope demo"))
    (_, *rows), _ = parser.tables
    assert [(row[0], row[-1]) for row in rows] == [
        # As figures 1, 2, 3 and 9 of the paper print them for C10-CNN1.
        ("Layca 3^-7", "57.1"),
        ("Layca 3^-6", "68.6"),
        ("Layca 3^-5", "81.0"),
        ("Layca 3^-4", "86.0"),
        ("Layca 3^-3", "88.5"),
        ("Layca 3^-2", "81.9"),
        ("Layca 3^-3, alpha -0.6", "83.1"),
        ("Layca 3^-3, alpha +0.6", "68.7"),
        ("SGD", "79.7"),
        ("SGD + weight decay", "88.2"),
    ]


def test_the_page_says_how_to_make_it_again(measured):
    text = page(measured, b"", command="gyroscope demo --out '<a>'")
    assert "<pre>gyroscope demo --out &#x27;&lt;a&gt;&#x27; --again</pre>" in text
    assert "1 epochs in batches of 32; the rate is divided by 5" in text
