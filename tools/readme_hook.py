"""The README as the package's description: hatchling calls this when it builds the library.

A package index shows the description without the repository, and the repository has no public address yet. So relative
images are left out, with the caption below them, and relative links become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# An image in Markdown or HTML, alone in its paragraph, and a paragraph in italics after it, which is its caption.
IMAGE = r"(?:!\[[^\]]*\]\((?!https?:)[^)]*\)|<(?:p|picture|img|a)\b(?:(?!\n\n).)*<img\b(?:(?!\n\n).)*)"
FIGURE = re.compile(rf"^{IMAGE}\s*?\n\n(?:\*[^*](?:(?!\n\n).)*\*\n\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:)[^)]*\)")


class ReadmeHook(MetadataHookInterface):
    """Fill in the field `readme` of the metadata."""

    def update(self, metadata: dict[str, object]) -> None:
        """Set the description to the README without what a package index cannot show."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": shown(text)}


def shown(readme: str) -> str:
    """Return a README without relative images, their captions and relative links."""
    return LINK.sub(r"\1", FIGURE.sub("", readme))
