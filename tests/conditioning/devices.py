"""The devices that numerical tests run on: a CPU, and a GPU where tests are run on one."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
