"""What the feeder's process has to say goes where the user's own program logs."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from transforms import talkative

from streamload import StreamLoader


def with_an_index_of_another_tool(folder: Path) -> str:
    """Two samples and an index that cannot be read, of which the feeder warns when it lists them."""
    shards = write_numbers(folder / "shards", [2], index=False)
    (folder / "shards" / ".streamload").mkdir()
    (folder / "shards" / ".streamload" / "index.json").write_text("{}")
    return str(shards)


@pytest.mark.parametrize(("workers", "level"), [(0, "WARNING"), (1, "WARNING"), (1, "ERROR")])
def test_the_users_handlers_have_it_and_stderr_has_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], workers: int, level: str
) -> None:
    caplog.set_level(level, "streamload")
    with StreamLoader(with_an_index_of_another_tool(tmp_path), 1, num_workers=workers) as loader:
        assert len(list(loader)) == 2
    expected = [("streamload", "WARNING")] if level == "WARNING" else []
    assert [(record.name, record.levelname) for record in caplog.records] == expected
    assert caplog.text.count("continuing without an index") == len(expected)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}])
def test_a_transform_logs_as_it_would_in_the_users_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    """At the levels of the user's loggers, by name, whoever runs it."""
    caplog.set_level(logging.INFO, "mine")
    shards = write_numbers(tmp_path / "shards", [2])
    with StreamLoader(shards, 1, fields=("cls",), transform={"cls": talkative}, **options) as loader:
        assert len(list(loader)) == 2
    found = [record for record in caplog.records if record.name == "mine.deep"]
    said = [(record.levelname, record.getMessage()) for record in found]
    # That of the next epoch, which is begun ahead, may come too.
    assert said[:3] == [("INFO", "info of 0"), ("INFO", "info of 1"), ("ERROR", "went on")]
    assert {record.name for record in caplog.records} == {"mine.deep"}, "the root's level is a warning"
    assert {record.funcName for record in found} == {"talkative"}
    assert "ValueError: caught" in caplog.text
    assert (found[0].process == os.getpid()) == (options["num_workers"] == 0)
    assert capfd.readouterr().err == ""


def test_what_is_logged_by_a_thread_of_the_users_code_comes_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def transform(label: int) -> int:
        threads = [threading.Thread(target=logging.warning, args=("%d", number)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return label

    shards = write_numbers(tmp_path / "shards", [1])
    with StreamLoader(shards, 1, fields=("cls",), transform={"cls": transform}, num_workers=1) as loader:
        assert len(list(loader)) == 1
    assert {record.getMessage() for record in caplog.records} == {str(number) for number in range(20)}
