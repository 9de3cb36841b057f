"""What `docs/choosing.md` shows as programs runs, and does what the page says; so does what it says of processes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streamload import ShardWriter, StreamLoader, TarDataset

PAGE = (Path(__file__).parent.parent / "docs" / "choosing.md").read_text()
BLOCKS = {
    heading: code
    for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
}


def write(folder: Path, lengths: list[int]) -> None:
    with ShardWriter(folder / "%06d.tar", max_count=9) as writer:
        for number, length in enumerate(lengths):
            writer.write({"__key__": f"{number:06d}", "npy": np.full(length, number), "cls": number % 4})


def run(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[heading], heading, "exec"), names)
    return names


def test_all_programs_are_run_here() -> None:
    assert set(BLOCKS) == {"Some of the samples only", "A Mixture counts samples"}


def test_filtered_epochs_hold_every_wanted_sample_once_in_full_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shards", [3] * 50)
    monkeypatch.chdir(tmp_path)
    loader = run("Some of the samples only")["loader"]
    with StreamLoader("shards", 8, shuffle=True, fields=("npy",), num_workers=0, **chosen(loader)) as same:
        for _ in range(2):
            batches = [arrays[:, 0].tolist() for (arrays,) in same]
            assert [len(batch) for batch in batches] == [8, 8, 8, 1]
            assert sorted(sum(batches, [])) == list(range(0, 50, 2))
    assert len(loader) == 4
    loader.close()


def chosen(loader: StreamLoader) -> dict[str, Any]:
    wanted = np.isin(TarDataset("shards").labels, [0, 2])
    assert loader.state_dict()["epoch_size"] == wanted.sum() == 25
    return {"weights": wanted, "epoch_size": wanted.sum()}


def test_a_mixture_has_its_shares_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, length in (("code", 100), ("books", 1000)):
        write(tmp_path / f"shards-of-{name}", [length] * 40)
    monkeypatch.chdir(tmp_path)
    mixture = run("A Mixture counts samples")["mixture"]
    tokens: Counter[int] = Counter()
    with StreamLoader(mixture, 11, fields=("npy",), collate_fn=list, epoch_size=44, num_workers=0) as loader:
        for batch in loader:
            assert Counter(len(array) for (array,) in batch) == {100: 10, 1000: 1}
            tokens.update({len(array): 0 for (array,) in batch})
            for (array,) in batch:
                tokens[len(array)] += len(array)
    assert tokens[100] == tokens[1000] == 4000


@pytest.mark.parametrize(
    ("options", "processes"),
    [({"num_workers": 0}, 0), ({"num_workers": 2}, 3)],
)
def test_how_many_processes_a_loader_has(tmp_path: Path, options: dict[str, Any], processes: int) -> None:
    write(tmp_path / "shards", [3] * 20)
    before = set(psutil.Process().children(recursive=True))

    def own() -> int:
        return len(set(psutil.Process().children(recursive=True)) - before)

    with StreamLoader(tmp_path / "shards", 8, fields=("cls",), **options) as loader:
        assert own() == 0
        assert len(list(loader)) == 3
        assert own() == processes
    assert own() == 0
