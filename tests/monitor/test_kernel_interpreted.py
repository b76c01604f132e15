"""The monitor's kernel, run on the CPU by Triton's interpreter."""

from pathlib import Path

from interpreted import assert_cases_hold, needs_triton


@needs_triton
def test_the_kernel_keeps_every_claim_of_kernel_cases():
    assert_cases_hold(Path(__file__).with_name("kernel_cases.py"), more_than=80)
