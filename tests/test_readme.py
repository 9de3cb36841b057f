"""Every code block of the README runs, in its order, in an empty folder with a user's images."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder but for `photos`, an ImageFolder of two classes."""
    folder = tmp_path_factory.mktemp("reader")
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(40):  # of many sizes, in both formats, as people have them
            height, width = generator.integers(60, 120, 2)
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            name = f"holiday {number}.v2.{'PNG' if number % 4 == 0 else 'jpg'}"
            Image.fromarray(pixels).save(folder / "photos" / label / name)
    yield folder
    for process in psutil.process_iter():  # servers that a block has started
        with contextlib.suppress(psutil.Error):
            if process.cwd().startswith(os.fspath(folder)):
                process.kill()


def test_there_are_blocks_of_known_languages_only() -> None:
    assert len(BLOCKS) >= 7
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda number: f"{number}-{BLOCKS[number][0]}")
def test_block_runs(number: int, folder: Path) -> None:
    language, code = BLOCKS[number]
    commands = os.path.dirname(sys.executable)
    command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-W", "error", "-c", code]
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
