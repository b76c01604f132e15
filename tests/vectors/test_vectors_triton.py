"""The Triton kernels give the same results as the reference, shown on a CPU by Triton's interpreter."""

from pathlib import Path

from interpreted import assert_cases_hold, needs_triton


@needs_triton
def test_all_cases_hold_for_the_triton_backend():
    assert_cases_hold(Path(__file__).with_name("triton_cases.py"), more_than=300)
