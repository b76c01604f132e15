"""The examples of each guide to a framework run, one after the other, where the frameworks are installed."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "frameworks"
GUIDES = sorted(guide for guide in FOLDER.glob("*.md") if guide.name != "index.md")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_examples_run_in_order(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    examples = re.findall(r"^```python no-run\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, guide.name, "exec"), namespace)


def test_every_guide_is_listed() -> None:
    assert [guide.name for guide in GUIDES if f"]({guide.name})" not in (FOLDER / "index.md").read_text()] == []
