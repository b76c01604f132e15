import json

from gyroscope.lab import demo
from gyroscope.lab.training import Schedule


def test_results_are_kept_by_recipe_then_seed():
    done = []
    measured = demo.run(
        seeds=[3, 8], recipes=demo.RECIPES[4:6], schedule=Schedule(epochs=1), on_done=done.append
    )
    assert [(trial.recipe, trial.seed) for trial in done] == [
        (recipe, seed) for recipe in demo.RECIPES[4:6] for seed in (3, 8)
    ]
    for trial, result in zip(done, [r for results in measured.results for r in results], strict=True):
        assert demo.run(seeds=[trial.seed], recipes=[trial.recipe], schedule=Schedule(epochs=1)).results == [
            [result]
        ]


def test_the_json_is_valid_even_when_there_is_nothing_to_rank():
    measured = demo.run(seeds=[0], recipes=demo.RECIPES[:1], schedule=Schedule(epochs=1))
    numbers = json.loads(json.dumps(measured.as_json(), allow_nan=False))
    assert numbers["rank_correlation"] is None
    assert numbers["configurations"][0]["trials"][0]["rotation"] == measured.results[0][0].rotation
