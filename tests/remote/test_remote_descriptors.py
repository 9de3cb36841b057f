"""Many small shards where a process may open few files: they are closed and opened again, or there is an error."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from places import Place
from preloaded import Preloaded
from servers.faults import FaultServer

SHARDS = 150
PER_SHARD = 4
SIZES = [[64] * PER_SHARD] * SHARDS
MOST_OPEN = 128

SCRIPT = textwrap.dedent(
    """
    import json, resource, sys
    from streamload import StreamLoader
    from streamload.errors import StorageError

    samples, most_open, runs = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_open, most_open))
    for urls, options in runs:
        with StreamLoader(urls, 50, fields=("cls",), **options) as loader:
            try:
                for epoch in range(2):
                    print(sorted(label for batch in loader for label in batch[0].tolist()) == list(range(samples)))
            except StorageError as error:
                print(error)
        print("==")
    """
)


def said(preloaded: Preloaded, *runs: tuple[str, str, dict[str, object]]) -> list[list[str]]:
    """What a program that may open few files says of each of these runs: root, form and options."""
    places = [(Place(root).urls(form, range(SHARDS)), options) for root, form, options in runs]
    ended = preloaded.run(SCRIPT, json.dumps([SHARDS * PER_SHARD, MOST_OPEN, places]))
    assert ended.status == 0, ended.output
    return [lines.split("\n")[:-1] for lines in ended.output.split("==\n")[:-1]]


AT_ONCE = {"shuffle": SHARDS * PER_SHARD}
IN_TURN = {"shuffle": 6}
WHOLE = ["True", "True"]


@pytest.mark.exhaustive
def test_they_are_closed_and_opened_again(preloaded: Preloaded, server: FaultServer, folder: Path) -> None:
    """Remote ones that are needed one after the other, and local ones that are all needed at once; else is an error."""
    in_turn, local, local_here, (error,) = said(
        preloaded,
        (server.url, "plain", {**IN_TURN, "num_workers": 1}),
        (str(folder), "indexed", {**AT_ONCE, "num_workers": 1}),
        (str(folder), "indexed", {**AT_ONCE, "num_workers": 0}),
        (server.url, "indexed", {**AT_ONCE, "num_workers": 1}),
    )
    assert (in_turn, local, local_here) == (WHOLE, WHOLE, WHOLE)
    assert "more than 21 shards are needed at once" in error
    assert "may have only 128 files open" in error
    assert "`ulimit -n " in error
