"""A hook of mkdocs: the README is the site's first page, and links to files outside `docs` become their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

README = Path(__file__).resolve().parents[1] / "README.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the README as `index.md`."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that lead out of `docs`."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:examples|benchmarks|LICENSE|CHANGELOG)[^)]*\)", r"\1", markdown)
