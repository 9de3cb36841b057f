"""An epoch of which `drop_last` leaves nothing is not an empty loop in silence."""

from __future__ import annotations

from typing import Any

import pytest
from make_shards import write_numbers

from streamload import StreamLoader

INDEXED, UNINDEXED = "indexed", "unindexed"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("few")
    return {
        INDEXED: write_numbers(folder / INDEXED, [3, 2]),
        UNINDEXED: write_numbers(folder / UNINDEXED, [3, 2], index=False),
    }


@pytest.mark.parametrize(("source", "workers"), [(INDEXED, 0), (UNINDEXED, 1)])
def test_it_is_warned_of_once_at_the_line_of_the_loop(sources: dict[str, str], source: str, workers: int) -> None:
    with StreamLoader(sources[source], 8, drop_last=True, num_workers=workers) as loader:
        with pytest.warns(UserWarning, match="5 samples, and one batch of batch_size=8 takes 8; give") as said:
            assert list(loader) == []
        assert [warning.filename for warning in said] == [__file__]
        assert list(loader) == []  # a second warning would be an error


def test_the_ranks_are_named(sources: dict[str, str]) -> None:
    options: dict[str, Any] = {"drop_last": True, "num_workers": 0, "rank": 1, "world_size": 3}
    with (
        StreamLoader(sources[INDEXED], 2, **options) as loader,
        pytest.warns(UserWarning, match="batch_size=2 on each of 3 ranks takes 6"),
    ):
        assert list(loader) == []


def test_nothing_is_said_where_nothing_was_lost(sources: dict[str, str]) -> None:
    with StreamLoader(sources[UNINDEXED], 2, drop_last=True, num_workers=0) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    with StreamLoader(sources[UNINDEXED], 8, drop_last=True, num_workers=0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
    with StreamLoader(sources[UNINDEXED], 8, num_workers=0) as loader:
        assert len(list(loader)) == 1
