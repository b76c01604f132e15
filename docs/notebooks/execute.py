"""Execute the notebooks in this folder, and keep them with their outputs.

    python docs/notebooks/execute.py                    # all
    python docs/notebooks/execute.py 2_find_a_broken_layer.ipynb

Each runs in a kernel of its own, in an empty folder. Needs nbclient and ipykernel. What differs from run to run without
meaning (times, paths, ids) is left out, so that a change of a notebook is a change of its content.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Bytes that a notebook may have, with its pictures.
MOST = 300_000


def executed(notebook: Path) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, executed in order."""
    import nbformat
    from nbclient import NotebookClient

    read = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            read, timeout=300, kernel_name="python3", resources=resources, coalesce_streams=True, record_timing=False
        ).execute()
        text = nbformat.writes(read).replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "")
    found: dict[str, Any] = json.loads(text)
    found["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(found["cells"]):
        cell["id"], cell["metadata"] = f"cell-{i}", {}
    return found


def main() -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of notebooks; by default all")
    given = parser.parse_args()
    for notebook in [HERE / name for name in given.names] or sorted(HERE.glob("*.ipynb")):
        text = json.dumps(executed(notebook), indent=1, ensure_ascii=False) + "\n"
        if len(text.encode()) > MOST:
            sys.exit(f"{notebook.name} has {len(text.encode()):,} bytes, more than {MOST:,}; draw less")
        notebook.write_text(text, encoding="utf-8")
        print(f"{notebook.name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
