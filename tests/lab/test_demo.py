import json

from gyroscope.lab import demo
from gyroscope.lab.training import Schedule


def test_results_are_kept_by_recipe_then_seed():
    done = []
    recipes = demo.RECIPES[4:6]
    measured = demo.run(seeds=[3, 8], recipes=recipes, schedule=Schedule(epochs=1), on_done=done.append)
    pairs = [(recipe, seed) for recipe in recipes for seed in (3, 8)]
    assert [(trial.recipe, trial.seed) for trial in done] == pairs
    results = [result for results in measured.results for result in results]
    for (recipe, seed), result in zip(pairs, results, strict=True):
        alone = demo.run(seeds=[seed], recipes=[recipe], schedule=Schedule(epochs=1))
        assert alone.results == [[result]]


def test_the_json_is_valid_even_when_there_is_nothing_to_rank():
    measured = demo.run(seeds=[0], recipes=demo.RECIPES[:1], schedule=Schedule(epochs=1))
    numbers = json.loads(json.dumps(measured.as_json(), allow_nan=False))
    assert numbers["rank_correlation"] is None
    assert numbers["configurations"][0]["trials"][0]["rotation"] == measured.results[0][0].rotation
