"""The laboratory's commands load what they need when they run."""

import json
import subprocess
import sys

import pytest

import forked

PROGRAM = """
import json, sys
import gyroscope_lab.cli.commands
json.dump(sorted(sys.modules), sys.stdout)
"""


@pytest.fixture(scope="module")
def loaded():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_commands_are_offered_without_what_they_train_with(loaded):
    assert "gyroscope_lab.cli.reproduce" in loaded
    assert sorted(loaded & {"torch", "sklearn", "scipy", "matplotlib", "gyroscope_lab.training.training"}) == []


def test_a_study_is_loaded_without_the_others():
    forked.execute("""
import sys
from gyroscope_lab.papers.catalogue import study
study("rotation/fig1")
studies = [name for name in sys.modules if name.startswith("gyroscope_lab.papers.")]
assert "gyroscope_lab.papers.rotation.alpha_and_rate" in studies
assert not [name for name in studies if ".conditioning" in name or ".dynamics" in name]
""")


def test_the_index_says_what_the_studies_are():
    from gyroscope_lab.papers.catalogue import index, made_index

    assert index() == made_index(), "write it again: python -m gyroscope_lab.papers.catalogue"
