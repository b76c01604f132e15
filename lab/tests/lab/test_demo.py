import json

import pytest
import torch

import gyroscope
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.papers import demo
from gyroscope_lab.papers.demo import about, accuracy_text, in_words
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


def test_the_words_hold_the_result_of_every_configuration(measured):
    words = about(measured, command="gyroscope demo --out 'a b'")
    assert words[0] == in_words(measured.cells)
    [seeds] = [" ".join(one.split()) for one in words if "shows seed" in one]
    assert seeds.startswith("The page shows seed 3 of each configuration. Test accuracies over the seeds (3, 8) are,")
    assert seeds.endswith("; ".join(f"{cell.recipe.name} {accuracy_text(cell)}" for cell in measured.cells) + ".")


def test_the_words_have_the_papers_numbers(tmp_path):
    whole = demo.run(laboratory(tmp_path), seeds=[0], task=ONE)
    [told] = [" ".join(one.split()) for one in about(whole, command="gyroscope demo") if "C10-CNN1" in one]
    # As figures 1, 2, 3 and 9 of the paper print them for C10-CNN1.
    assert (
        "Layca 3^-7 57.1; Layca 3^-6 68.6; Layca 3^-5 81.0; Layca 3^-4 86.0; Layca 3^-3 88.5; Layca 3^-2 81.9; Layca "
        "3^-3, alpha -0.6 83.1; Layca 3^-3, alpha +0.6 68.7; SGD 79.7; SGD + weight decay 88.2."
    ) in told


def test_the_words_say_how_it_was_made_and_how_to_make_it_again(measured):
    words = " ".join(" ".join(about(measured, command="gyroscope demo --out '<a>'")).split())
    assert "Run it again with: gyroscope demo --out '<a>' --again." in words
    assert "Schedule: 1 epochs in batches of 32; the rate is divided by 5 after epochs" in words
    assert f"Made with gyroscope {gyroscope.__version__}, torch {torch.__version__}, python " in words
    assert "{" not in words
