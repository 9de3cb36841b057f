"""Every program and command of the README and of the pages in `docs/` runs as it stands, and every link has a target.

A page's blocks run in their order, in a folder of its own, in this process where they can: starting an interpreter that
imports torch takes longer than most blocks. The README's run as a user types them: in an empty folder, each block as a
program of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from preloaded import Preloaded
from servers.rclone import free_port
from typer.testing import CliRunner

from streamload import StreamLoader
from streamload.cli.main import app
from streamload.cli.shardify import app as shardify

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE = {"docs/api.md", "docs/design.md", "docs/index-format.md", "docs/performance.md"}
EXCERPTS = {"docs/frameworks.md": 12}
"""Pages whose Python blocks stand in an example, and at least how many."""
NEEDS_CLUSTER = ("--ray", "RayFeeders")
"""Blocks with one of these run on a Ray cluster, in `tests/tools/test_tools_ray.py` and `tests/remote_feeders`."""
SERVED = "127.0.0.1:8333"
OURS = {"streamload": app, "shardify": shardify}
PHOTOS = 48
COMMANDS = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader of a page has: `photos` of two classes, each of another grey, packed as the README does it."""
    folder = tmp_path_factory.mktemp("reader")
    for number in range(PHOTOS):
        path = folder / "photos" / ("cat", "dog")[number % 3 == 0] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 48, 3), 5 * number, np.uint8)).save(path, quality=95)
    (command,) = [code for language, code in BLOCK.findall(PAGES["README.md"]) if language == "bash"]
    shell(command, folder)
    return folder


def shell(code: str, folder: Path) -> None:
    """Run a block of commands, ours in this process. What it starts in the background continues until `servers_end`."""
    lines = code.replace("\\\n", " ").splitlines()
    if all(line.startswith(tuple(f"{name} " for name in OURS)) for line in lines):
        for line in lines:
            name, *arguments = shlex.split(line, comments=True)
            with contextlib.chdir(folder):
                done = CliRunner().invoke(OURS[name], arguments)
            assert done.exit_code == 0, f"{line}\n{done.output}"
        return
    done = subprocess.run(["bash", "-euc", code], cwd=folder, env=COMMANDS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    if " &\n" in code:
        address = re.search(r"127\.0\.0\.1:(\d+)", code)
        assert address is not None
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(address[1]))):
                return
            assert time.monotonic() < until, code
            time.sleep(0.05)


@contextlib.contextmanager
def servers_end(folder: Path) -> Iterator[None]:
    """End the servers that the blocks of a page have started in a folder."""
    try:
        yield
    finally:
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.name() == "rclone" and process.cwd().startswith(os.fspath(folder)):
                    process.send_signal(signal.SIGKILL)


def program(page: str, code: str) -> None:
    """Run a Python block in this process; loaders that it leaves open are closed."""
    names: dict[str, Any] = {"__name__": "__main__", "train_step": lambda *step: None}
    exec(compile(code, page, "exec"), names)
    for value in names.values():
        if hasattr(value, "close") and type(value).__module__.startswith("streamload"):
            value.close()


def test_the_pages_are_known() -> None:
    without = {page for page in PAGES if not BLOCK.search(PAGES[page])}
    assert without == PROSE
    assert {language for text in PAGES.values() for language, _ in BLOCK.findall(text)} == {"python", "bash"}


def test_the_readmes_blocks_run_in_an_empty_folder(
    preloaded: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for language, code in BLOCK.findall(PAGES["README.md"]):
        if language == "bash":
            shell(code, tmp_path)
            continue
        ended = preloaded.run(f"import warnings; warnings.simplefilter('error')\n{code}")
        assert ended.status == 0, f"{code}\n{ended.output}"
        assert "Traceback" not in ended.output
    assert "of the validation images right" in ended.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", sorted({*PAGES} - PROSE - {*EXCERPTS, "README.md"}))
def test_a_pages_blocks_run(page: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = ("photos",) if page == "docs/coming-from.md" else ("photos", "shards")  # it packs them in its own way
    for name in copied:
        shutil.copytree(packed / name, tmp_path / name)
    annotate(packed, tmp_path / "voc")
    monkeypatch.chdir(tmp_path)
    served = f"127.0.0.1:{free_port()}"  # others may run the same test on this machine
    with servers_end(tmp_path):
        for language, code in BLOCK.findall(PAGES[page].replace(SERVED, served)):
            if any(word in code for word in NEEDS_CLUSTER):
                continue
            if language == "bash":
                shell(code, tmp_path)
            elif "import litdata" not in code and "from litdata" not in code:
                program(page, code)
    gc.collect()


def annotate(packed: Path, folder: Path) -> None:
    """Three images with annotations as in PASCAL VOC."""
    folder.mkdir()
    for number, image in enumerate(sorted((packed / "photos").rglob("*.jpg"))[:3]):
        shutil.copy(image, folder / f"{number}.jpg")
        box = "<xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax>"
        thing = f"<object><name>cat</name><bndbox>{box}</bndbox></object>"
        (folder / f"{number}.xml").write_text(f"<annotation>{thing * number}</annotation>")


@pytest.mark.parametrize("page", EXCERPTS)
def test_a_page_shows_what_the_examples_do(page: str) -> None:
    examples = [stripped(path.read_text()) for path in (ROOT / "examples").rglob("*.py")]
    blocks = [code for language, code in BLOCK.findall(PAGES[page]) if language == "python"]
    assert len(blocks) >= EXCERPTS[page]
    for block in blocks:
        assert any(stripped(block) in example for example in examples), block


def stripped(code: str) -> str:
    """Code without its indentation."""
    return "\n".join(line.strip() for line in code.strip().splitlines())


@pytest.mark.parametrize(
    ("options", "processes"),
    [({"num_workers": 0}, 0), ({"num_workers": 2}, 3)],
)
def test_how_many_processes_a_loader_has(packed: Path, options: dict[str, Any], processes: int) -> None:
    def own() -> int:
        return len(set(psutil.Process().children(recursive=True)) - before)

    before = set(psutil.Process().children(recursive=True))
    with StreamLoader(packed / "shards" / "val", 8, fields=("cls",), **options) as loader:
        assert own() == min(processes, 1)
        assert len(list(loader)) == 1
        assert own() == processes
    assert own() == 0


def test_every_link_has_a_target() -> None:
    for page, text in PAGES.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), f"{page}: {target}"
            if anchor:
                assert anchor in anchors(path.read_text()), f"{page}: {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 200


def test_the_design_page_names_every_room_and_files_that_there_are() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "streamload").glob("*/__init__.py")}
    assert set(re.findall(r"^\| \d+ \| `(\w+)/` \|", page, re.MULTILINE)) == rooms
    files = {path.name for folder in ("streamload", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"`(?:\w+/)*(\w+\.py)`", page)) <= files
