"""The convolutions of few channels, run on the CPU by Triton's interpreter."""

from pathlib import Path

from interpreted import assert_cases_hold, needs_triton


@needs_triton
def test_the_kernels_keep_every_claim_of_narrow_cases():
    assert_cases_hold(Path(__file__).with_name("narrow_cases.py"), more_than=25)
