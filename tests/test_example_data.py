"""The examples of data that are no plain images: pairs with captions and scores, embeddings, and sound."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from matrix import exhaustive

_EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        exhaustive(("clip.py", "169 pairs selected, 10 full batches, 2 broken images")),
        exhaustive(("embeddings.py", "400 of 400 labels right")),
        exhaustive(("sound.py", "12 of 12 recordings right")),
    ],
)
def test_an_example_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(_EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == said
