"""Calls of a loader between epochs: an error is raised by the call that failed, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import children
from servers.faults import FaultServer

from streamload import ShardWriter, StreamLoader
from streamload.errors import ShardNotFoundError


def test_an_error_of_a_call_is_raised_by_that_call_only(shard_folder: Path) -> None:
    with ShardWriter(shard_folder, max_count=4) as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "cls": number})
    objects = {path.name: path.read_bytes() for path in sorted(shard_folder.glob("*.tar"))}
    first, second = objects
    with FaultServer({first: objects[first]}) as server:
        port = int(server.url.rpartition(":")[2])
        loader = StreamLoader([f"{server.url}/{name}" for name in objects], 4, fields=("cls",), num_workers=1)
        state = loader.state_dict()
        assert not [path for _, path, *_ in server.report().log if path.endswith(".tar")], "a state needs no network"
        with pytest.raises(ShardNotFoundError, match=second):
            loader.load_state_dict({**state, "fingerprint": "ab" * 16})  # one with sizes, which it requests
    with loader, FaultServer(objects, port=port):
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.state_dict()["epoch"] == 1


def test_a_feeder_that_answered_calls_is_ended_if_a_job_cannot_be_sent(shard_folder: Path) -> None:
    """The traceback of the error, which a notebook keeps, must not be all that holds the feeder."""
    with ShardWriter(shard_folder) as writer:
        writer.write({"__key__": "0", "cls": 0})
    numbers = (number for number in range(10))

    def counted(value: int) -> int:
        return value + next(numbers, 0)

    with FaultServer(shard_folder) as server:
        (shard,) = shard_folder.glob("*.tar")
        loader = StreamLoader(f"{server.url}/{shard.name}", fields=("cls",), transform={"cls": counted}, num_workers=1)
        with pytest.raises(TypeError, match="generator") as kept:
            next(iter(loader))
        loader.close()
        assert children("streamload.feeder") == []
        assert kept.tb is not None
