"""Every command where something is in its way: a typo, an empty folder, no permission, a full disk, Ctrl-C.

One message, the exit status that `--help` names, and nothing left but what the next run goes on with.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from image_folders import files_below, images, run

from streamload import ShardWriter
from streamload.cli import main, shardify
from streamload.cli.command import EXIT_STATUS

COMMANDS: dict[str, tuple[Any, ...]] = {
    "ls": (main.app, "ls", "SOURCE"),
    "verify": (main.app, "verify", "SOURCE", "--workers", 1),
    "stats": (main.app, "stats", "SOURCE"),
    "bench": (main.app, "bench", "SOURCE", "--workers", 0, "--batches", 1, "--batch-size", 2),
    "show": (main.app, "show", "SOURCE", "--output", "PICTURE"),
    "index": (main.app, "index", "SOURCE", "--output", "DEST"),
    "map": (main.app, "map", f"{__name__}:unchanged", "SOURCE", "DEST", "--workers", 1),
    "shardify": (shardify.app, "SOURCE", "DEST", "--workers", 1, "--max-count", 4),
}
WRITERS = ("index", "map", "shardify")
STEPS = {"index": 2, "map": 13, "shardify": 13}
"""Requests from one obstacle to the next."""
PROGRESS = re.compile(r"(reading|verifying|indexing|mapping|packing|note): ")

REQUESTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""What Python's audit hooks call them."""
NEED_ROOM = {"os.mkdir", "os.rename"}
"""A file that is opened to be written too."""


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class Obstacle:
    """Stands before a request about a file of a folder; there is one at most, since audit hooks cannot be removed."""

    here: Obstacle | None = None

    def __init__(self, folder: Path, nth: int, error: BaseException, *, writing: bool) -> None:
        self._folder, self._left, self._error, self._writing = str(folder), nth, error, writing
        self.met = False

    def request(self, path: str, writes: bool) -> None:
        if path.startswith(self._folder) and (writes or not self._writing):
            self._left -= 1
            if self._left == 0:
                self.met = True
                if isinstance(self._error, OSError):
                    self._error.filename = path
                raise self._error


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if Obstacle.here is None or event not in REQUESTS or not isinstance(arguments[0], str):
        return
    writes = event in NEED_ROOM or (event == "open" and bool(arguments[2] & os.O_CREAT))
    Obstacle.here.request(arguments[0], writes)


sys.addaudithook(_audit)


@contextmanager
def standing(obstacle: Obstacle) -> Iterator[Obstacle]:
    Obstacle.here = obstacle
    try:
        yield obstacle
    finally:
        Obstacle.here = None


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What a command reads: images for `shardify`, shards with an index for the others."""
    folder = tmp_path_factory.mktemp("sources")
    with ShardWriter(folder / "shards", max_count=4) as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "txt": f"{number}", "cls": number})
    photos = images(folder, 3)
    return lambda command: photos if command == "shardify" else folder / "shards"


def called(command: str, source: object, dest: Path, *options: object) -> tuple[int, str, str]:
    app, *arguments = COMMANDS[command]
    places = {"SOURCE": source, "DEST": dest, "PICTURE": dest.parent / "sheet.png"}
    return run(app, *(places.get(argument, argument) for argument in arguments), *options)


def one_message(err: str) -> str:
    (message,) = (line for line in err.splitlines() if not PROGRESS.match(line))
    return message


def names_below(folder: Path) -> set[str]:
    return set(os.listdir(folder)) | set(files_below(folder)) if folder.exists() else set()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "source", ["nowhere", "empty", "file", "nowhere/*.tar", "nonsense://bucket/a.tar", "pipe:cat a.tar"]
)
def test_a_typo_and_an_empty_folder(tmp_path: Path, command: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"neither a shard nor a table")
    monkeypatch.chdir(tmp_path)
    before = names_below(tmp_path)
    status, out, err = called(command, source, tmp_path / "dest")
    assert status == (2 if command == "shardify" else 1)
    assert one_message(err).startswith("error: ")
    assert (out == "") == (command != "verify" or source not in ("nowhere", "file"))
    assert names_below(tmp_path) == before


OBSTACLES = {
    "Ctrl-C": (KeyboardInterrupt, False),
    "full disk": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
    "no permission": (lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)), False),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["Ctrl-C", "full disk", pytest.param("no permission", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("command", COMMANDS)
def test_at_every_request_for_a_file(
    command: str, kind: str, every: bool, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing is left, or what the same command (with --resume) completes to what an undisturbed one makes."""
    source, whole = sources(command), tmp_path / "whole"
    assert called(command, source, whole)[0] == 0
    before = files_below(source.parent)
    make_error, writing = OBSTACLES[kind]
    step = 1 if every else STEPS.get(command, 4)
    for nth in range(max(1, step // 2), 1000, step):
        dest = tmp_path / str(nth)
        with standing(
            Obstacle(source.parent if command not in WRITERS else tmp_path.parent, nth, make_error(), writing=writing)
        ) as obstacle:
            status, _, err = called(command, source, dest)
        if not obstacle.met:
            break
        if status != 0 or kind == "Ctrl-C":  # else the command has done without
            check_message(kind, status, err)
        left = files_below(dest)
        assert not [name for name in left if name.endswith((".tmp", ".partial"))]
        assert left or not dest.exists() or command == "index"  # an empty folder is no index
        if command in WRITERS:
            resume = () if command == "index" else ("--resume",)
            assert command != "index" or not left or files_below(dest) == files_below(whole)
            status, _, err = called(command, source, dest, *resume)
            assert (status, files_below(dest) == files_below(whole)) == (0, True), err
    assert files_below(source.parent) == before


def check_message(kind: str, status: int, err: str) -> None:
    *before, message = (line for line in err.splitlines() if not PROGRESS.match(line))
    assert status == (130 if kind == "Ctrl-C" else 1)
    assert message.startswith("interrupted" if kind == "Ctrl-C" else "error: ")
    assert ".tmp" not in message
    assert all(line.endswith(": Permission denied") for line in before)  # images that `shardify` cannot read


@pytest.mark.parametrize("command", WRITERS)
def test_a_disk_that_takes_a_part_of_a_file(command: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        status, out, err = called(command, sources(command), tmp_path / "dest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, out, os.listdir(tmp_path)) == (1, "", [])
    assert "File too large" in one_message(err)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output(sources: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "streamload", "ls", str(sources("ls"))]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot read or write standard output: No space left on device\n",
    )


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"show"}))
def test_json_is_one_document_on_standard_output(command: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    status, out, err = called(command, sources(command), tmp_path / "dest", "--json")
    found = json.loads(out)
    assert (status, [line for line in err.splitlines() if not PROGRESS.match(line)]) == (0, [])
    if command == "ls":
        assert [shard["samples"] for shard in found] == [4, 4]
    else:
        assert found["samples"] == {"shardify": 6, "bench": 2}.get(command, 8)


def test_json_of_samples_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(2):
            archive.addfile(tarfile.TarInfo(f"key\x7f{number}.txt"))
    status, out, _ = run(main.app, "ls", path, "--samples", "--json")
    samples = [{"url": str(path), "key": f"key\x7f{number}", "fields": {"txt": 0}} for number in range(2)]
    assert (status, json.loads(out), "\x7f" in out) == (0, samples, False)
    path.write_bytes(path.read_bytes()[:-9700])
    status, out, err = run(main.app, "verify", path, "--json")
    (fault,) = json.loads(out)["faults"]
    assert (status, fault["kind"], fault["url"]) == (1, "ShardFormatError", str(path))
    assert one_message(err) == "error: 1 fault in 1 shard"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_has_examples_of_options_that_exist_and_the_exit_status(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    app, *arguments = COMMANDS[command]
    status, out, _ = run(app, *arguments[: app is main.app], "--help")
    assert (status, EXIT_STATUS in out) == (0, True)
    name = f"streamload {command}" if app is main.app else "shardify"
    examples = re.findall(rf"^ +({name} [^\[].*?)(?:   .*)?$", out.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        assert {part for part in shlex.split(example) if part.startswith("--")} <= set(
            re.findall(r"│[ *]+(--\S+)", out)
        )
