"""`Mixture`: several datasets as one, in exact proportions."""

from __future__ import annotations

import shutil
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_samples
from same_batches import global_batches

from streamload import Mixture, Portion, ShardWriter, StreamLoader
from streamload.errors import LoaderStateError

SIZES = {"a": [40, 3, 60], "b": [50], "c": [7, 7], "d": [200, 100], "e": [33, 33]}
OPTIONS: dict[str, Any] = {"fields": ("cls",), "num_workers": 0, "shuffle": 30}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sample n of the k-th dataset holds 1000 k + n."""
    root = tmp_path_factory.mktemp("mixture")
    for place, (name, counts) in enumerate(SIZES.items()):
        number = 1000 * place
        for shard, count in enumerate(counts):
            with ShardWriter(root / name / f"part{shard}-%03d.tar") as writer:
                for _ in range(count):
                    writer.write({"__key__": f"{number:06d}", "cls": number, "npy": np.full(3, number, np.int32)})
                    number += 1
    return {name: str(root / name) for name in SIZES}


def mixture(folders: dict[str, str], **weights: float) -> Mixture:
    return Mixture({name: (folders[name], weight) for name, weight in weights.items()})


def batches(mixed: Mixture, batch_size: int, state: Any = None, **options: Any) -> list[list[int]]:
    with StreamLoader(mixed, batch_size, **{**OPTIONS, **options}) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [batch[0].tolist() for batch in loader]


def test_every_batch_has_every_share_to_less_than_one_sample(folders: dict[str, str]) -> None:
    mixed = mixture(folders, a=5, b=1, c=0.21, d=9, e=2.17)
    shares = {list(SIZES).index(name): share for name, share in mixed.shares.items()}
    total: Counter[int] = Counter()
    found = batches(mixed, 25, epoch_size=1000)
    assert len(found) == 40
    for batch in found:
        counts = Counter(number // 1000 for number in batch)
        assert all(abs(counts[place] - share * 25) < 1 for place, share in shares.items())
        total += counts
    assert all(abs(total[place] - share * 1000) < 3 for place, share in shares.items())
    assert sum(total.values()) == 1000


def test_the_order_is_the_same_at_every_world_size_and_resumes_at_another(folders: dict[str, str]) -> None:
    mixed = mixture(folders, a=0.6, b=0.1, d=0.3)
    assert len(global_batches(mixed, 1, 24, **OPTIONS)) == 19, "as many samples as all datasets have"
    options: dict[str, Any] = {**OPTIONS, "epoch_size": 441, "pad": False}
    whole = global_batches(mixed, 4, 24, lanes=4, **options)
    with StreamLoader(mixed, 12, **options, rank=0, world_size=2, lanes=4) as loader:
        states = [loader.state_dict() for _ in loader]
    assert global_batches(mixed, 1, 24, states[6], **options) == whole[7:]
    flat = [number for batch in whole[:-1] for number in batch]
    other = global_batches(mixed, 3, 36, states[5], **options)
    assert sorted(sum(other[:2], [])) == sorted(flat[6 * 24 : 9 * 24]), "another batch size keeps the blocks"


def test_datasets_have_transforms_of_their_own(folders: dict[str, str]) -> None:
    mixed = Mixture(
        {
            "a": Portion(folders["a"], 1, transform={"cls": lambda value: -value}),
            "b": Portion(folders["b"], 1),
            "d": Portion(folders["d"], 1, transform=lambda sample: [sample[0] + 0.5]),
        }
    )

    def first(rows: list[Any]) -> Any:
        return [np.array([row[0] for row in rows], np.float64)]

    found = sum(batches(mixed, 30, transform={"cls": lambda n: 2 * n}, epoch_size=300, collate_fn=first), [])
    by_dataset = [
        [n for n in found if n <= 0],
        [n for n in found if 2000 <= n < 2100 and n % 1 == 0],
        [n for n in found if n % 1],
    ]
    assert [len(numbers) for numbers in by_dataset] == [100, 100, 100]
    assert set(by_dataset[1]) == {2 * n for n in range(1000, 1050)}
    assert all(3000 < n < 3301 for n in by_dataset[2])


def test_processes_and_shards_without_an_index_give_the_same(folders: dict[str, str], tmp_path: Path) -> None:
    transform = {"cls": lambda n: n + 1}
    expected = batches(Mixture({"a": Portion(folders["a"], 4, transform=transform), "d": (folders["d"], 6)}), 20)
    for name in ("a", "d"):
        shutil.copytree(folders[name], tmp_path / name)
    index = shutil.move(tmp_path / "a" / ".streamload", tmp_path / "index")
    shutil.rmtree(tmp_path / "d" / ".streamload")
    a = Portion(tmp_path / "a", 0.4, index=index, transform=transform)
    apart = Mixture({"a": a, "d": (f"{tmp_path}/d/part{{0..1}}-000.tar", 0.6)})
    assert batches(apart, 20, num_workers=1) == expected


def test_without_shuffle_each_dataset_comes_as_listed(folders: dict[str, str]) -> None:
    found = sum(batches(mixture(folders, a=0.6, d=0.4), 10, shuffle=False, epoch_size=150), [])
    for place, size in ((0, 90), (3, 60)):
        assert [n for n in found if n // 1000 == place] == list(range(1000 * place, 1000 * place + size))
    assert any(a // 1000 != b // 1000 for a, b in pairwise(found[:10]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: Mixture({}), "mapping"),
        (lambda f: Mixture([(f["a"], 1)]), "mapping"),
        (lambda f: Mixture({"a": (f["a"], 0)}), "'a'.*weight=0"),
        (lambda f: Mixture({"a": f["a"]}), r"dataset 'a' must be \(urls, weight\) or a Portion, not '"),
        (lambda f: StreamLoader(mixture(f, a=1, b=1), weights="balanced", **OPTIONS), "Mixture"),
        (lambda f: StreamLoader(mixture(f, a=1, b=1), index=f["a"], **OPTIONS), "index="),
        (lambda f: StreamLoader(Mixture({"a": (f["a"], 1), "b": (f["a"], 2)}), **OPTIONS), "names the shard .* twice"),
        (
            lambda f: StreamLoader(Mixture({"a": Portion(f["a"], 1, transform={"jpg": len})}), **OPTIONS),
            "dataset 'a'.*'jpg'",
        ),
    ],
    ids=range(8),
)
def test_what_makes_no_sense_is_refused(folders: dict[str, str], make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        make(folders)
    assert caught.value.__cause__ is None, "one traceback"


def test_fields_must_exist_in_every_dataset_and_samples_too(folders: dict[str, str], tmp_path: Path) -> None:
    write_samples(tmp_path / "other", [{"txt": "x"}])
    tarfile.open(tmp_path / "none.tar", "w").close()
    with pytest.raises(ValueError, match="dataset 'other'.*'cls'"):
        StreamLoader(Mixture({"a": (folders["a"], 1), "other": (tmp_path / "other", 1)}), **OPTIONS)
    empty = Mixture({"a": (folders["a"], 1), "b": (tmp_path / "none.tar", 1)})
    with StreamLoader(empty, **OPTIONS) as loader, pytest.raises(ValueError, match="dataset 'b'.*no samples"):
        iter(loader)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"a": 2, "b": 1}, "mixture was 'a: 0.5, b: 0.5' and is 'a: 0.66"),
        ({"b": 1, "a": 1}, "mixture was .* and is 'b: 0.5.*other names"),
    ],
)
def test_a_state_of_another_mixture_is_refused(folders: dict[str, str], weights: dict[str, float], named: str) -> None:
    with StreamLoader(mixture(folders, a=1, b=1), 10, **OPTIONS) as loader:
        state = loader.state_dict()
    with StreamLoader(mixture(folders, **weights), 10, **OPTIONS) as loader:
        with pytest.raises(LoaderStateError, match=named):
            loader.load_state_dict(state)
