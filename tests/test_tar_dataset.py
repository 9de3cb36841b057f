"""TarDataset: the loader's samples by their number, in torch's own tools, wherever the shards lie."""

from __future__ import annotations

import copy
import gzip
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers, write_samples
from matrix import exhaustive
from preloaded import Preloaded
from same_batches import assert_same
from servers.faults import FaultServer
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, WeightedRandomSampler, random_split

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.errors import DatasetIndexError, DecodeError, ShardChangedError, ShardFormatError, TransformError

COUNTS = [5, 1, 7, 4]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("numbers"), COUNTS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("plain"), COUNTS, index=False)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples of many kinds of fields, not all of which have all of them."""
    folder = tmp_path_factory.mktemp("mixed")
    generator = np.random.default_rng(0)
    for shard in range(3):
        with ShardWriter(folder / f"{shard}-%06d.tar") as writer:
            for number in range(6):
                sample: dict[str, Any] = {
                    "__key__": f"dir/{shard}{number}",
                    "png": generator.integers(0, 256, (5 + number, 6, 3), dtype=np.uint8),
                    "json": {"n": number, "boxes": [[1, 2]] * number},
                    "cls": number,
                }
                if number % 2:
                    sample["txt"] = f"a caption {number}"
                if shard == 1:
                    sample["npy"] = np.full((2, number), number, np.float32)
                writer.write(sample)
    return os.fspath(folder)


def labels_of(samples: Any) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def _open_files(folder: str) -> int:
    return sum(
        os.path.exists(f"/proc/self/fd/{number}") and os.readlink(f"/proc/self/fd/{number}").startswith(folder)
        for number in os.listdir("/proc/self/fd")
    )


# -- the same samples as the loader's ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fields": ("png", "cls", "__key__", "__url__")},
        {"decode": False},
        {"decode": {"json": len}},
        {"fields": ("npy;png", "json"), "transform": lambda sample: (sample[0].shape, sample[1]["n"])},
        {"transform": {"cls": str, "txt": str.upper}},
    ],
    ids=["dicts", "tuples", "bytes", "decoder", "alternatives", "by field"],
)
def test_every_sample_is_the_loaders(mixed: str, options: dict[str, Any]) -> None:
    with StreamLoader(mixed, num_workers=0, collate_fn=lambda rows: rows, **options) as loader:
        expected = [sample for batch in loader for sample in batch]
    with TarDataset(mixed, **options) as dataset:
        assert len(dataset) == len(expected) == 18
        assert_same(list(dataset), expected)
        assert_same([dataset[number] for number in range(18)], expected)
        chosen = [17, 0, 7, 7, -1, 6]
        assert_same(dataset.__getitems__(chosen), [expected[number] for number in chosen])


def test_numbers_slices_and_negative_numbers_are_those_of_a_list(numbers: str) -> None:
    with TarDataset(numbers, fields=("cls",)) as dataset:
        found = [label for (label,) in dataset]
        assert found == list(range(TOTAL))
        assert dataset[np.int64(6)] == dataset[torch.tensor(6)] == dataset[6 - TOTAL] == (6,)
        for part in (slice(3, 9), slice(None, None, -4), slice(20, 30), slice(-2, None)):
            assert [label for (label,) in dataset[part]] == found[part]
        for wrong in (TOTAL, -TOTAL - 1):
            with pytest.raises(IndexError, match=f"sample {wrong} is out of range: the dataset has {TOTAL}"):
                dataset[wrong]
        with pytest.raises(TypeError):
            dataset["3"]


def test_shards_without_an_index_are_scanned_by_each_process(plain: str) -> None:
    with TarDataset(plain) as dataset, pickle.loads(pickle.dumps(dataset)) as copy:
        assert labels_of(dataset) == labels_of(copy) == list(range(TOTAL))


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    with TarDataset(write_numbers(tmp_path, [1] * 80)) as dataset:
        assert labels_of(dataset.__getitems__([79, *range(80), 0])) == [79, *range(80), 0]
        assert _open_files(str(tmp_path)) == 64


@pytest.mark.parametrize("indexed", [True, False])
def test_labels_are_those_of_the_samples(numbers: str, plain: str, indexed: bool) -> None:
    with TarDataset(numbers if indexed else plain) as dataset:
        assert dataset.labels.tolist() == list(range(TOTAL))
        assert dataset.labels.dtype == np.int64


def test_labels_that_not_all_samples_have_are_refused(tmp_path: Path) -> None:
    with (
        TarDataset(write_samples(tmp_path, [{"cls": 1}, {"txt": "x"}])) as dataset,
        pytest.raises(DatasetIndexError, match="not every sample has"),
    ):
        print(dataset.labels)


# -- torch's tools -------------------------------------------------------------------------------------------------


def with_worker(sample: Any) -> tuple[int, int]:
    info = torch.utils.data.get_worker_info()
    return int(sample["cls"]), -1 if info is None else info.id


def test_torchs_loader_with_workers(numbers: str) -> None:
    dataset = TarDataset(numbers, transform=with_worker)
    assert dataset[3] == (3, -1)  # a file is open here that forked workers inherit
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    found = [tuple(column.tolist() for column in batch) for batch in loader]
    assert [label for labels, _ in found for label in labels] == list(range(TOTAL))
    assert {worker for _, workers in found for worker in workers} == {0, 1}
    dataset.close()


class Doubled(TarDataset):
    """A dataset as people make them: with a `__getitem__` and attributes of its own."""

    def __init__(self, urls: str) -> None:
        super().__init__(urls, fields=("cls",))
        self.factor = 2

    def __getitem__(self, index: Any) -> Any:
        return self.factor * super().__getitem__(index)[0]


def test_a_subclass_provides_its_own_samples(numbers: str) -> None:
    doubled = [2 * number for number in range(TOTAL)]
    with Doubled(numbers) as dataset:
        assert [dataset[number] for number in range(TOTAL)] == doubled
        assert list(dataset) == doubled
        assert [label for batch in DataLoader(dataset, batch_size=4) for label in batch.tolist()] == doubled
        assert Subset(dataset, [3, 1]).__getitems__([0, 1]) == [6, 2]


def test_a_dataset_keeps_its_attributes_where_it_is_copied_or_pickled(numbers: str) -> None:
    with Doubled(numbers) as dataset:
        dataset.factor = 3
        for other in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
            assert (other.factor, other[2]) == (3, 6)
            other.close()


def test_a_dataset_with_open_files_travels_to_a_process_that_knows_nothing(
    preloaded: Preloaded, numbers: str, tmp_path: Path
) -> None:
    """As with the start methods "spawn" and "forkserver"."""
    place = "there"
    with TarDataset(numbers, transform=lambda sample: (place, sample["cls"])) as dataset:
        (tmp_path / "pickled").write_bytes(pickle.dumps((dataset[2], dataset)))
    program = "import pickle, sys; _, ds = pickle.load(open(sys.argv[1], 'rb')); print(ds[-1], len(ds), *ds[:2])"
    ended = preloaded.run(program, tmp_path / "pickled")
    assert ended.output.strip() == "('there', 16) 17 ('there', 0) ('there', 1)"


def test_torchs_samplers_and_datasets(numbers: str, plain: str) -> None:
    with TarDataset(numbers) as dataset, TarDataset(plain) as other:
        assert labels_of(Subset(dataset, [3, 1])) == [3, 1]
        assert sorted(labels_of([*(parts := random_split(dataset, [7, 10]))[0], *parts[1]])) == list(range(TOTAL))
        assert labels_of(ConcatDataset([dataset, other])) == labels_of(dataset + other) == 2 * list(range(TOTAL))
        wanted = (dataset.labels == 4).astype(float)
        always_4 = DataLoader(dataset, sampler=WeightedRandomSampler(wanted.tolist(), 5), batch_size=5)
        assert next(iter(always_4))["cls"].tolist() == [4] * 5
        generator = torch.Generator().manual_seed(0)
        shuffled = DataLoader(dataset, sampler=RandomSampler(dataset, generator=generator), batch_size=None)
        found = labels_of(shuffled)
        assert found != sorted(found) == list(range(TOTAL))


# -- random numbers ------------------------------------------------------------------------------------------------


def draw(sample: Any, rng: np.random.Generator) -> tuple[int, float]:
    return int(sample["cls"]), float(rng.random())


def test_rng_follows_torchs_generator_whatever_is_read_together(numbers: str) -> None:
    with TarDataset(numbers, transform=draw) as dataset:
        chosen = [8, 2, 8, 0, 16, 2]
        torch.manual_seed(5)
        together = dataset.__getitems__(chosen)
        torch.manual_seed(5)
        assert [dataset[number] for number in chosen] == together
        assert len({value for _, value in together}) == 6, "a sample that is drawn twice is augmented twice"
        assert dataset[0] != dataset[0]


def test_torchs_generators_are_left_alone_where_no_rng_is_taken(numbers: str) -> None:
    with TarDataset(numbers, transform=lambda sample: torch.rand(()).item()) as dataset:
        torch.manual_seed(1)
        found = dataset[0], dataset[1]
        torch.manual_seed(1)
        assert found == (torch.rand(()).item(), torch.rand(()).item())


# -- processes, threads and what is left ---------------------------------------------------------------------------


def test_files_are_open_from_the_first_sample_to_the_end(numbers: str, plain: str) -> None:
    scanned = TarDataset(plain)
    assert _open_files(plain) == 0
    assert labels_of(scanned[:1]) == [0]
    scanned.close()
    dataset = TarDataset(numbers)
    assert _open_files(numbers) == 0
    print(dataset[0])
    assert _open_files(numbers) == 1
    dataset.close()
    dataset.close()
    assert _open_files(numbers) == 0
    assert labels_of(dataset[:1]) == [0], "what was closed is opened again"
    del dataset
    assert _open_files(numbers) == 0


def test_threads_share_a_dataset(mixed: str) -> None:
    with TarDataset(mixed) as dataset, ThreadPoolExecutor(4) as threads:
        chosen = [number % 18 for number in range(200)]
        expected = list(dataset)
        for number, sample in zip(chosen, threads.map(dataset.__getitem__, chosen)):
            assert_same(sample, expected[number])


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_transforms_error_names_shard_and_key_also_from_torchs_worker(numbers: str) -> None:
    calls: list[int] = []

    def fails(sample: Any) -> Any:
        calls.append(int(sample["cls"]))
        if sample["cls"] == 9:
            raise ValueError("nine")
        return int(sample["cls"])

    with TarDataset(numbers, transform=fails) as dataset:
        with pytest.raises(TransformError, match="nine") as raised:
            dataset[9]
        assert (raised.value.key, raised.value.url) == ("000009", f"{numbers}/part002-000000.tar")
        assert isinstance(raised.value.__cause__, ValueError)
        calls.clear()
        iterator = iter(dataset)  # what comes before it is given out
        assert [next(iterator) for _ in range(9)] == list(range(9))
        with pytest.raises(TransformError, match="nine"):
            next(iterator)
        assert calls == list(range(TOTAL)), "a function is called once for each sample"
        # This is how torch's DataLoader carries an error from its worker.
        carried = ExceptionWrapper((TransformError, raised.value, raised.tb))
        with pytest.raises(TransformError, match=r"nine.*000009"):
            carried.reraise()


def test_of_several_failures_the_first_one_is_raised(numbers: str) -> None:
    with TarDataset(numbers, transform=lambda sample: 1 // (int(sample["cls"]) % 4)) as dataset:
        with pytest.raises(TransformError) as raised:
            dataset.__getitems__([1, 8, 4, 0])
        assert raised.value.key == "000008"


def test_damaged_bytes_are_decode_errors(mixed: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(mixed, copy)
    shard = copy / "0-000000.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(b'{"n":' if b'{"n":' in content else b'{"n"')
    content[at] = ord("x")
    shard.write_bytes(content)
    with TarDataset(os.fspath(copy)) as dataset:
        with pytest.raises(DecodeError, match="json"):
            dataset[0]
        assert dataset[1]["cls"] == 1
    with TarDataset(os.fspath(copy), fields=("json",), decode=False, verify=True) as checked:
        with pytest.raises(DecodeError, match="crc32"):
            checked[0]


def test_wrong_arguments_are_refused(numbers: str, plain: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sample has 'jpg'; there are cls, npy"):
        TarDataset(numbers, fields=("jpg",))
    with pytest.raises(ValueError, match="no sample has 'jpg'; there are cls, npy"):
        TarDataset(plain, fields=("jpg",))
    with pytest.raises(TypeError, match="transform=3 must be"):
        TarDataset(numbers, transform=3)
    compressed = tmp_path / "a.tar.gz"
    compressed.write_bytes(gzip.compress(Path(plain, "part000-000000.tar").read_bytes()))
    with pytest.raises(ValueError, match="compressed as a whole"):
        TarDataset(compressed)
    damaged = tmp_path / "b.tar"
    damaged.write_bytes(Path(plain, "part000-000000.tar").read_bytes()[:-512])
    with pytest.raises(ShardFormatError):
        TarDataset(damaged)
    with pytest.raises(DatasetIndexError, match="checksums"):
        print(TarDataset(plain, verify=True)[0])


def test_a_shard_that_changed_since_is_refused(plain: str, tmp_path: Path) -> None:
    copy = tmp_path / "a.tar"
    shutil.copy(Path(plain, "part000-000000.tar"), copy)
    dataset = TarDataset(copy)
    os.utime(copy, (1, 1))
    with pytest.raises(ShardChangedError):
        dataset[0]


# -- remote shards -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_remote_shards_are_read_also_in_forked_workers(numbers: str, plain: str) -> None:
    with FaultServer(numbers) as server, TarDataset(server.url) as dataset:
        assert labels_of(dataset.__getitems__([16, 0, 5, -1, 0])) == [16, 0, 5, 16, 0]
        assert dataset[2]["npy"].tolist() == [2, 2, 2]
        assert dataset.labels.tolist() == list(range(TOTAL))
        batches = DataLoader(dataset, batch_size=6, num_workers=2, multiprocessing_context="fork")
        assert [label for batch in batches for label in batch["cls"].tolist()] == list(range(TOTAL))
    shard = "part000-000000.tar"
    with FaultServer({shard: Path(plain, shard).read_bytes()}) as server:
        with pytest.raises(DatasetIndexError, match="needs an index"):
            TarDataset(f"{server.url}/{shard}")


@pytest.mark.parametrize(
    "decode", [{"cls": float}, *map(exhaustive, [(True,), (False,)])], ids=["own", "built in", "bytes"]
)
def test_many_samples_of_one_remote_shard_are_read_together(decode: Any, tmp_path: Path) -> None:
    folder = write_numbers(tmp_path / "shards", [40])
    with TarDataset(folder, fields=("cls",), decode=decode) as dataset:
        expected = list(dataset)
    with FaultServer(folder) as server, TarDataset(server.url, fields=("cls",), decode=decode) as dataset:
        assert dataset.__getitems__([*range(12), 3]) == [*expected[:12], expected[3]]
        assert dataset[0:20] == expected[:20]
        batches = list(DataLoader(dataset, batch_size=32, collate_fn=list))
        assert batches == [expected[:32], expected[32:]]
