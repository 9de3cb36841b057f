"""Every program of `docs/coming-from.md` runs, and what it had before and has now are the same samples."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from streamload import StreamLoader, TarDataset

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text()
HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PHOTOS = 48

Step = tuple[Any, Any]


def _blocks() -> dict[str, list[tuple[str, str]]]:
    """The blocks under each heading: language and code."""
    pieces = HEADING.split(re.sub(BLOCK, lambda block: block[0].replace("\n#", "\n\0#"), PAGE))
    found = {}
    for heading, text in zip(pieces[1::2], pieces[2::2]):
        blocks = BLOCK.findall(text.replace("\n\0#", "\n#"))
        if blocks:
            found[heading] = blocks
    return found


BLOCKS = _blocks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's reader has: `photos` of two classes, each of another grey, also packed as the page says."""
    folder = tmp_path_factory.mktemp("reader")
    for number in range(PHOTOS):
        label = ("cat", "dog")[number % 3 == 0]
        path = folder / "photos" / label / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 48, 3), 5 * number, np.uint8)).save(path, quality=95)
    ((_, command),) = [block for blocks in BLOCKS.values() for block in blocks if block[0] == "bash"]
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", command], cwd=folder, check=True, capture_output=True, env={**os.environ, "PATH": path}
    )
    return folder


def run(heading: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Step], dict[str, Any]]:
    """Run a program of the page here; what its `train_step` was given, and its variables."""
    programs = [code for language, code in BLOCKS[heading] if language == "python"]
    steps: list[Step] = []
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__", "train_step": lambda *step: steps.append(step)}
    exec(compile(programs[number], f"{heading} {number}", "exec"), names)
    if isinstance(names.get("loader"), StreamLoader):
        names["loader"].close()
    return steps, names


def photos_of(steps: list[Step]) -> list[tuple[int, int]]:
    """Which photographs there were, by their grey, and their labels."""
    found = []
    for images, labels in steps:
        assert tuple(images.shape[1:]) == (16, 16, 3)
        greys = torch.as_tensor(images).float().mean((1, 2, 3)) / 5
        found += zip(greys.round().int().tolist(), torch.as_tensor(labels).tolist(), strict=True)
    return found


ALL = {(number, int(number % 3 == 0)) for number in range(PHOTOS)}


def test_no_program_is_left_out() -> None:
    counted = {
        heading: len([1 for language, _ in blocks if language == "python"]) for heading, blocks in BLOCKS.items()
    }
    assert counted == {
        "From torch's DataLoader": 2,
        "Images and ragged boxes": 1,
        "Samples by their number": 1,
        "What workers see of your program": 3,
        "From WebDataset": 2,
        "From LitData": 2,
    }


@pytest.mark.parametrize("number", [0, 1], ids=["before", "now"])
@pytest.mark.parametrize("heading", ["From torch's DataLoader", "From WebDataset"])
def test_two_epochs_hold_every_photograph_twice(
    heading: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, _ = run(heading, number, folder, monkeypatch)
    assert [len(labels) for _, labels in steps] == [8] * 12
    seen = photos_of(steps)
    assert Counter(seen) == dict.fromkeys(ALL, 2)
    assert seen[:PHOTOS] != seen[PHOTOS:] != sorted(seen[PHOTOS:])


def test_litdatas_program(folder: Path, tmp_path: Path) -> None:
    """In a process of its own, since it leaves files behind; and with few processes, since each takes it seconds."""
    if importlib.util.find_spec("litdata") is None:
        pytest.skip("litdata is not installed")
    program = BLOCKS["From LitData"][0][1]
    for ours, quick in (("num_workers=1", 'num_workers=1, start_method="fork"'), ("num_workers=2", "num_workers=0")):
        assert program.count(ours) == 1
        program = program.replace(ours, quick)
    (tmp_path / "program.py").write_text(
        "seen = []\n"
        "def train_step(images, labels):\n"
        "    seen.extend(zip((images.float().mean((1, 2, 3)) / 5).round().int().tolist(), labels.tolist()))\n"
        f"{program}\n"
        "    import json; print('seen', json.dumps(seen), 'state', json.dumps(state))\n"
    )
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "DATA_OPTIMIZER_CACHE_FOLDER": str(tmp_path / "work")}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **places},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    seen = re.search(r"^seen (.*) state ", done.stdout, re.MULTILINE)
    assert seen is not None
    assert sorted(map(tuple, json.loads(seen[1]))) == sorted(ALL)


def test_the_program_in_its_stead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, names = run("From LitData", 1, folder, monkeypatch)
    assert sorted(photos_of(steps)) == sorted(ALL)
    assert json.loads(json.dumps(names["state"])) == names["state"]


def test_ragged_boxes_come_as_the_collate_fn_made_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, names = run("Images and ragged boxes", 0, folder, monkeypatch)
    assert [len(targets) for _, targets in steps] == [6, 6, 6, 2]
    number = 0
    for images, targets in steps:
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 32, 48)
        for image, target in zip(images, targets):
            assert abs(image.float().mean() - 12 * number) < 2
            boxes = [[10 * box, 10, 10 * box + 5, 20] for box in range(number % 4)]
            assert target["boxes"].dtype == torch.float32
            assert target["boxes"].shape == (len(boxes), 4)
            assert target["boxes"].tolist() == boxes
            assert target["labels"].tolist() == [1] * len(boxes)
            number += 1
    assert number == 20
    # The same collate_fn with torch's own loader.
    options = {"fields": ("jpg", "json"), "transform": {"jpg": names["as_tensor"], "json": names["targets"]}}
    with TarDataset("detection", **options) as dataset:
        theirs = list(DataLoader(dataset, batch_size=6, collate_fn=names["detection_batch"]))
    for (images, targets), (other_images, other_targets) in zip(steps, theirs, strict=True):
        assert images.equal(other_images)
        for one, other in zip(targets, other_targets, strict=True):
            assert one["boxes"].equal(other["boxes"])
            assert one["labels"].equal(other["labels"])


def test_the_dataset_in_torchs_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, names = run("Samples by their number", 0, folder, monkeypatch)
    seen = photos_of(steps)
    assert len(seen) == PHOTOS
    assert set(seen) <= ALL
    assert names["image"].shape == (16, 16, 3)
    names["dataset"].close()


def test_progressive_resizing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = run("What workers see of your program", 0, folder, monkeypatch)
    assert [tuple(images.shape) for images, _ in steps] == [(8, 16, 16, 3)] * 6 + [(8, 32, 32, 3)] * 6


def test_one_draw_for_both_fields(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = run("What workers see of your program", 1, folder, monkeypatch)
    assert len(steps) == 6
    assert all(images.equal(masks) and images.shape == (8, 16, 16, 3) for images, masks in steps)


def test_some_of_the_samples_in_full_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = run("What workers see of your program", 2, folder, monkeypatch)
    assert [len(labels) for _, labels in steps] == [8] * 4
    seen = [(round(float(image.float().mean()) / 5), int(label)) for batch in steps for image, label in zip(*batch)]
    assert sorted(seen) == sorted(pair for pair in ALL if pair[1] == 0)


def test_the_table_has_every_keyword_of_dataloader() -> None:
    table = PAGE.split("### Every keyword of DataLoader")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == list(inspect.signature(DataLoader).parameters)
    ours = inspect.signature(StreamLoader).parameters
    for name, counterpart in rows:
        if name in ours:
            assert f"`{name}`" in counterpart


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", PAGE):
        text = PAGE if not target else (Path(__file__).parent.parent / "docs" / target).read_text()
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}
        assert anchor in anchors
