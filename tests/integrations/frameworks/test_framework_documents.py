"""The examples of the page on frameworks run, one after the other, where the frameworks are installed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"
EXAMPLES = re.findall(r"^```python no-run\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    assert EXAMPLES
    for example in EXAMPLES:
        exec(compile(example, PAGE.name, "exec"), namespace)
