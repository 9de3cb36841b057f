"""The feeder is killed: another one goes on with the same batches, and of the dead one nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from processes import children, gone, wait_until
from transforms import negative, slow

from streamload import StreamLoader
from streamload.errors import WorkerError

COUNTS = [100, 60, 140]
TOTAL = sum(COUNTS)

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("feeder") / "shards", COUNTS)


def loader_of(source: str, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 10,
        "fields": ("cls",),
        "shuffle": True,
        "transform": {"cls": slow},
        "num_workers": 1,
        "prefetch_batches": 1,
    }
    return StreamLoader(source, **{**defaults, **options})


def undisturbed(source: str, *, epochs: int = 1, **options: Any) -> list[list[int]]:
    with loader_of(source, **{"num_workers": 0, "transform": None, **options}) as loader:
        return [batch[0].tolist() for _ in range(epochs) for batch in loader]


def kill_feeder() -> list[int]:
    """The feeder and its workers, which are dead soon; nothing where no feeder runs at the moment."""
    pids = [child.pid for child in children()]
    for feeder in children("streamload.feeder"):
        os.kill(feeder.pid, signal.SIGKILL)
        return pids
    return []


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_at_random_instants(source: str, kills: int, caplog: pytest.LogCaptureFixture) -> None:
    epochs = kills
    expected = undisturbed(source, epochs=epochs)
    generator = random.Random(19)
    kill_behind = set(generator.sample(range(5, len(expected) - 20, 20), kills))
    kept, before, due, killed = [], 0, 0, list[int]()
    with loader_of(source, num_workers=2, prefetch_batches=4) as loader:
        for epoch in range(epochs):
            for batch in loader:
                kept.append(batch[0])
                due += len(kept) in kill_behind
                assert loader.state_dict()["epoch"] == epoch
                read = loader.statistics().payload_bytes
                assert read >= before
                before = read
                time.sleep(generator.random() * 0.02 if due else 0)
                if due and (pids := kill_feeder()):
                    due -= 1
                    killed += pids
        assert loader.statistics().restarted_workers == kills
        assert wait_until(lambda: gone(killed))
    assert [labels.tolist() for labels in kept] == expected, "what was delivered stays valid"
    warnings = [record.getMessage() for record in caplog.records if record.name == "streamload"]
    assert len(warnings) == kills
    assert all("the feeder process was killed by SIGKILL" in warning for warning in warnings)


def test_two_that_die_in_turn_end_the_pass(source: str) -> None:
    def kill_parent(value: int) -> int:
        os.kill(os.getppid(), signal.SIGKILL)
        return value

    expected = undisturbed(source)
    with loader_of(source, transform={"cls": kill_parent}) as loader:
        with pytest.raises(WorkerError, match="two feeder processes died without .*memory_budget.* by SIGKILL"):
            next(iter(loader))
        assert children() == []
        loader.transform = None
        assert [batch[0].tolist() for batch in loader] == expected


@pytest.mark.exhaustive
def test_asynchronously_in_the_order_of_a_sampler(source: str) -> None:
    order = random.Random(5).sample(range(TOTAL), 200)
    expected = undisturbed(source, shuffle=False, sampler=order)

    async def loop() -> list[list[int]]:
        got = []
        async with loader_of(source, shuffle=False, sampler=order) as loader:
            async for batch in loader:
                got.append(batch[0].tolist())
                if len(got) == 7:
                    assert kill_feeder()
        return got

    assert asyncio.run(loop()) == expected


def test_failed_samples_are_noted_once(source: str, tmp_path: Path) -> None:
    """All samples of the first batches fail, and the feeder dies before there is a batch in their place."""
    killed = tmp_path / "killed"

    def fail_and_kill(value: int) -> int:
        time.sleep(0.005 if value < 50 else 0)  # so that each batch is a task
        if value < 30:
            raise ValueError("not this one")
        if value == 35 and not killed.exists():
            killed.touch()
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGKILL)
        return value

    def look(workers: int) -> tuple[list[list[int]], list[str | None]]:
        options = {"shuffle": False, "on_error": "skip", "transform": {"cls": fail_and_kill}, "num_workers": workers}
        with loader_of(source, **options) as loader:
            batches = [batch[0].tolist() for batch in loader]
            assert loader.statistics().skipped_samples == 30
            return batches, [error.key for error in loader.skipped]

    found = look(1)
    assert killed.exists()
    assert found == look(0)


@pytest.mark.exhaustive
def test_what_has_changed_since_a_pass_began_is_for_the_next(source: str) -> None:
    expected = undisturbed(source, epochs=2)
    with loader_of(source) as loader:
        got = []
        for batch in loader:
            got.append(batch[0].tolist())
            if len(got) == 5:
                loader.transform = {"cls": negative}
                assert kill_feeder()
        assert loader.statistics().restarted_workers == 1
        got += [(-batch[0]).tolist() for batch in loader]
    assert got == expected
