"""A process that may open few files: batches take no more of them than their share, in the feeder or in the trainer."""

from __future__ import annotations

import os
import resource
import textwrap
import threading
from pathlib import Path

import pytest
from make_shards import write_numbers
from matrix import exhaustive
from preloaded import Preloaded

from streamload import StreamLoader
from streamload.errors import LoaderClosedError

SAMPLES = 1200

SCRIPT = textwrap.dedent(
    """
    import resource, sys
    from streamload import StreamLoader

    source, (kept_batches, SAMPLES, limit) = sys.argv[1], map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with StreamLoader(source, 2, True, fields=("cls",), num_workers=2) as loader:
        for epoch in range(2):
            kept, labels = [], []
            for batch in loader:
                kept = [*kept, batch][-kept_batches:]
                labels += batch[0].tolist()
            assert sorted(labels) == list(range(SAMPLES)), "each sample once"
            for before in kept:
                labels.remove(before[0][0].item())
    print("fine")
    """
)


@pytest.mark.parametrize(
    ("kept", "limit"), [(150, 256), *(exhaustive((kept, limit)) for kept, limit in ((1, 256), (1, 1024), (150, 1024)))]
)
def test_batches_take_their_share_of_descriptors_only(
    preloaded: Preloaded, tmp_path: Path, kept: int, limit: int
) -> None:
    source = write_numbers(tmp_path / "shards", [SAMPLES // 40] * 40)
    ended = preloaded.run(SCRIPT, source, kept, SAMPLES, limit)
    assert (ended.status, ended.output) == (0, "fine\n")


TOO_FEW = """
import resource, sys
import torch
from streamload import StreamLoader
from streamload.errors import StreamloadError

limits = [int(limit) for limit in sys.argv[2:]]
for limit in limits:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        with StreamLoader(sys.argv[1], 3, fields=("cls",), num_workers=2) as loader:
            list(loader)
    except StreamloadError as error:  # of the feeder, or of the shard that it could not open
        print(error)
"""


def test_a_limit_too_small_for_the_processes_is_named(preloaded: Preloaded, tmp_path: Path) -> None:
    """By the feeder, which cannot hand out shards, and by the trainer, which cannot start a feeder."""
    source = write_numbers(tmp_path / "shards", [50, 50])
    ended = preloaded.run(TOO_FEW, source, "20", "10")
    feeders, trainers = ended.output.splitlines()
    for said in (feeders, trainers):
        assert "too many open files" in said.lower()
        assert "raise the limit (`ulimit -n`)" in said
    assert "the limit of this process is 10;" in trainers


def test_too_many_open_files_of_the_trainer_are_named_as_the_cause(tmp_path: Path) -> None:
    """It was told that its feeder had closed the connection."""
    source = write_numbers(tmp_path / "shards", [400])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    with StreamLoader(source, 2, fields=("cls",), num_workers=1) as loader:
        batches = iter(loader)
        kept = [next(batches)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(OSError, match="too many open files to receive shared memory; raise the limit"):
                kept += batches
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in opened:
                os.close(descriptor)
        assert len(kept) < 200


def test_closing_while_another_thread_makes_a_batch_says_so(tmp_path: Path) -> None:
    """Without workers it was a KeyError."""
    source = write_numbers(tmp_path / "shards", [1000], width=1000)
    errors: list[BaseException] = []

    def read(loader: StreamLoader, started: threading.Event) -> None:
        try:
            while True:
                for _ in loader:
                    started.set()
        except LoaderClosedError as error:
            errors.append(error)

    for _ in range(4):
        loader, started = StreamLoader(source, 20, fields=("npy",), num_workers=0), threading.Event()
        thread = threading.Thread(target=read, args=(loader, started))
        thread.start()
        assert started.wait(30)
        loader.close()
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 4
