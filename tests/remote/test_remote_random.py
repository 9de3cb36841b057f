"""Random options, storages and faults: the batches, states, errors and skipped samples of the plainest loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import pytest
from matrix import exhaustive
from places import Place, Step, each_step, local, without_names, write_datasets
from processes import kill_one
from random_runs import SHARDS, RandomRun, draw_run
from servers.faults import FaultServer

from streamload import StreamLoader
from streamload.errors import SampleError

SEEDS = [0, *(exhaustive((seed,)) for seed in range(1, 150))]


@dataclass(frozen=True, slots=True)
class Sources:
    """The datasets, on the disk and on a server that fails."""

    folder: Path
    server: FaultServer

    def loader(self, run: RandomRun, cache_folder: Path) -> StreamLoader:
        """What the run asks for, where it is and with its means."""
        if run.script is None:
            return self.on_disk(run, run.form, **run.means)
        self.server.play(run.script)
        reading: dict[str, Any] = {"filesystem": fsspec.filesystem("http")} if run.through_fsspec else {}
        if run.cached:
            reading |= {"cache_dir": cache_folder, "cache_size": "1MB"}
        return _loader(Place(f"{self.server.url}/{run.dataset}"), run, run.form, **run.means, **reading)

    def on_disk(self, run: RandomRun, form: str, **means: Any) -> StreamLoader:
        """What the run asks for, from local files."""
        return _loader(local(self.folder / run.dataset), run, form, **means)


def _loader(place: Place, run: RandomRun, form: str, **means: Any) -> StreamLoader:
    urls = place.urls(form, range(len(SHARDS[run.dataset])))
    return StreamLoader(urls, fields=("npy", "cls"), **run.requested, **means)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    folder = tmp_path_factory.mktemp("random")
    for name, lengths in SHARDS.items():
        write_datasets(folder / name, lengths, ["gz", "zst"])
    with FaultServer(folder) as server:
        yield Sources(folder, server)


@dataclass(slots=True)
class Seen:
    """What a loop has seen: the batches with their states, the key of the error, and those of skipped samples."""

    steps: list[Step] = field(default_factory=list)
    failed: str | None = None
    skipped: list[str | None] = field(default_factory=list)


def look(
    loader: StreamLoader, *, epochs: int, most: int | None = None, kill_behind: int = 0, kills: Iterable[str] = ()
) -> Seen:
    """Go through so many epochs, to their end or to an error; at most so many batches.

    Behind the batch of the number `kill_behind` a process of each of these modules is killed, if there is one.
    """
    seen = Seen()
    with loader:
        try:
            for step in each_step(loader, epochs):
                seen.steps.append(step)
                if len(seen.steps) == kill_behind:
                    for module in kills:
                        kill_one(module)
                if len(seen.steps) == most:
                    break
        except SampleError as error:
            seen.failed = error.key
        seen.skipped = [error.key for error in loader.skipped]
    return seen


def assert_same(found: list[Step], expected: list[Step], run: RandomRun) -> None:
    """Also the states, but for the names of shards that are compressed, and sizes that no web server states."""
    if run.form != "indexed":
        found, expected = without_names(found), without_names(expected)
    assert found == expected, run


@pytest.mark.filterwarnings("ignore:drop_last=True drops the whole epoch")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_gives_what_the_plainest_loader_gives(sources: Sources, tmp_path: Path, seed: int) -> None:
    run = draw_run(seed)
    expected = look(sources.on_disk(run, "indexed", num_workers=0), epochs=run.epochs)
    stop = int(run.place * len(expected.steps))
    while 0 < stop < len(expected.steps) and expected.steps[stop][0] == expected.steps[stop - 1][0]:
        stop += 1  # a batch that comes again; at the start of a pass the next one would
    found = look(sources.loader(run, tmp_path), epochs=run.epochs, kill_behind=stop, kills=run.kills)
    assert_same(found.steps, expected.steps, run)
    assert (found.failed, found.skipped) == (expected.failed, expected.skipped), run
    if stop:
        _assert_goes_on(sources, run, tmp_path, expected, stop)


def _assert_goes_on(sources: Sources, run: RandomRun, cache_folder: Path, expected: Seen, stop: int) -> None:
    """A loop that is left behind so many batches; another loader gives the rest from the state that was saved then."""
    begun = look(sources.loader(run, cache_folder), epochs=run.epochs, most=stop)
    assert_same(begun.steps, expected.steps[:stop], run)
    other = sources.on_disk(run, run.form, num_workers=0) if run.moves else sources.loader(run, cache_folder)
    other.load_state_dict(begun.steps[-1][2])
    rest = look(other, epochs=run.epochs - begun.steps[-1][2]["epoch"])
    assert_same(rest.steps, expected.steps[stop:], run)
    assert rest.failed == expected.failed, run
