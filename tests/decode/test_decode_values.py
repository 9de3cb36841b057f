"""Values of unlike sizes: they come back from a slot as they were, and no message carries them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tasks_by_hand import Shelf, batch_of, job, only_batch, run, slots_for, values_of

from streamload.decode.batch_maker import BatchMaker
from streamload.decode.columns import StoredBytes
from streamload.decode.tasks import Piece
from streamload.decode.values import ValueBlock, load_values

LARGE = b"x" * 300_000
MESSAGE_BYTES = 2_000


class Text(str):
    """What a user's decoder may return."""

    __slots__ = ()


def through_a_slot(column: list[Any], start: int = 64) -> list[Any]:
    values = ValueBlock([column])
    memory = np.full(start + values.size_bytes + 64, 7, np.uint8)
    stored = values.write(memory, start)
    assert (memory[:start] == 7).all(), "nothing is written before its place"
    assert (memory[-64:] == 7).all(), "nor behind it"
    (loaded,) = load_values(pickle.loads(pickle.dumps(stored)), memory)
    return loaded


@pytest.mark.parametrize(
    "column",
    [
        [b"a", b"", b"\x00\xff"],
        [b""],
        [b"", LARGE, b"b"],
        ["a", "", "c"],
        ["ä", "日本", "\ud800", "", "a"],
        ["ü" * 70_000, "", "a"],
        ["", ""],
        ["a", b"a", "b"],
        [Text("a"), Text("b")],
        [1, None, {"x": LARGE}],
        [np.array([None], object)],
        [np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])],
    ],
)
def test_values_come_back_as_they_were(column: list[Any]) -> None:
    came = through_a_slot(column)
    assert came == column
    assert [type(value) for value in came] == [type(value) for value in column]


def test_what_only_cloudpickle_can_pickle_comes_back() -> None:
    assert through_a_slot([lambda value: 2 * value])[0](4) == 8


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">f4", "c16"])
def test_ragged_arrays_are_views_of_the_slot(dtype: str) -> None:
    arrays = [np.ones(shape, dtype) for shape in ((2, 3), (0, 4), (5, 0), (1, 1))]
    values = ValueBlock([arrays])
    memory = np.zeros(values.size_bytes, np.uint8)
    (came,) = load_values(values.write(memory, 0), memory)
    for ours, theirs in zip(came, arrays, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours == theirs).all()
        assert ours.flags.aligned
        assert not ours.size or np.shares_memory(ours, memory)


# -- messages ------------------------------------------------------------------------------------------------------


def collated_ragged(samples: list[Any]) -> dict[str, Any]:
    images = [np.full((number + 1, 3), number, np.uint8) for number in range(len(samples))]
    return {"images": images, "tensors": tuple(torch.from_numpy(image).T for image in images), "raw": [b"a", LARGE]}


@pytest.mark.parametrize(
    "collate_fn", [None, collated_ragged, lambda samples: [data for data, _ in samples]], ids=["rows", "ragged", "list"]
)
def test_no_message_carries_values(collate_fn: Any) -> None:
    shelf = Shelf([{"bin": b"%d" % number * 100_000, "txt": b"text" * 9_000} for number in range(20)])
    fields = ("bin", "txt")
    done, _ = run(job(fields=fields, collate_fn=collate_fn), shelf, shelf.task(fields, whole=collate_fn is not None))
    assert done.pieces[0].failures == ()
    assert len(pickle.dumps(done)) < MESSAGE_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_list_of_ragged_tensors_comes_back_in_its_order_in_memory(dtype: torch.dtype) -> None:
    tensors = [torch.ones(height, 5, 3, dtype=dtype).permute(2, 0, 1) * height for height in (4, 2, 7)]
    shelf = Shelf([{"cls": b"1"}])
    came = only_batch(
        job(fields=("cls",), collate_fn=lambda _: (tensors, [np.zeros(()), np.ones(())])),
        shelf,
        shelf.task(("cls",), whole=True),
    )
    assert type(came) is tuple
    assert type(came[0]) is list
    for ours, theirs in zip(came[0], tensors, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    assert came[1] == [0.0, 1.0]


# -- bytes that nothing decodes ------------------------------------------------------------------------------------


class CountingShelf(Shelf):
    """Counts the fields that are read to memory of their own, and how often each place is read otherwise."""

    def __init__(self, samples: Sequence[Mapping[str, bytes]], per_shard: int = 1000) -> None:
        super().__init__(samples, per_shard)
        self.own = 0
        self.reads: Counter[tuple[int, int]] = Counter()

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        self.own += 1
        return super().read(shard, start, size_bytes)

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        self.reads[shard, start] += 1
        data = super().read(shard, start, len(target))
        target[: len(data)] = data
        return len(data)


class CutShelf(CountingShelf):
    """The first shard has become shorter since its size was looked up."""

    def size_bytes(self, shard: int) -> int:
        return super().size_bytes(shard) + 100 * (shard == 0)


SAMPLES = [{"bin": bytes([number]) * (1 + 1000 * number), "cls": b"%d" % number} for number in range(6)]


@pytest.mark.parametrize("whole", [True, False])
def test_they_are_read_straight_into_the_slot(*, whole: bool) -> None:
    shelf = CountingShelf(SAMPLES, per_shard=2)
    (data,) = only_batch(job(fields=("bin",), decode=False), shelf, shelf.task(("bin",), whole=whole))
    assert data == tuple(sample["bin"] for sample in SAMPLES)
    assert shelf.own == 0


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_batch_with_a_failed_row_has_those_of_the_others(on_error: str) -> None:
    shelf = CountingShelf([*SAMPLES[:2], {**SAMPLES[2], "cls": b"no number"}, *SAMPLES[3:]])
    fields = ("bin", "cls")
    done, slots = run(job(fields=fields, on_error=on_error), shelf, shelf.task(fields, whole=True))
    (piece,) = done.pieces
    assert [failure.row for failure in piece.failures] == [2]
    data, numbers = batch_of(piece, slots)
    assert numbers.tolist() == ([0, 1, 3, 3, 4, 5] if on_error == "replace" else [0, 1, 3, 4, 5])
    assert data == tuple(SAMPLES[number]["bin"] for number in numbers)
    assert set(shelf.reads.values()) == {1}, "what has been read may have been freed"


def test_they_are_read_once_where_torch_collates_the_batch() -> None:
    shelf = CountingShelf(SAMPLES)
    fields = ("bin", "cls")
    work = job(fields=fields, transform={"cls": lambda number: number / 2 if number % 2 else number})
    data, numbers = only_batch(work, shelf, shelf.task(fields, whole=True))
    assert data == tuple(sample["bin"] for sample in SAMPLES)
    assert numbers.tolist() == [0.0, 0.5, 2.0, 1.5, 4.0, 2.5]
    assert set(shelf.reads.values()) == {1}


@pytest.mark.parametrize("whole", [True, False])
def test_a_shard_that_became_shorter_is_the_failure_of_its_row(*, whole: bool) -> None:
    shelf = CutShelf(SAMPLES, per_shard=2)
    task = shelf.task(("bin",), whole=whole)
    task.table.columns()[0].sizes[1] += 50
    done, _ = run(job(fields=("bin",)), shelf, task)
    assert [(failure.row, failure.kind) for failure in done.pieces[0].failures] == [(1, "ShardChangedError")]


def test_a_place_beyond_the_shard_is_the_failure_of_its_row_and_takes_no_memory() -> None:
    shelf = Shelf(SAMPLES, per_shard=2)
    task = shelf.task(("bin",))
    task.table.columns()[0].sizes[1] += 1 << 50
    done, _ = run(job(fields=("bin",)), shelf, task)
    assert [(failure.row, failure.kind) for failure in done.pieces[0].failures] == [(1, "DecodeError")]


def test_other_rows_have_no_bytes_before_they_are_read() -> None:
    shelf = CountingShelf(SAMPLES)
    places = shelf.table(("bin",), range(6)).columns()[0]
    column = StoredBytes([0] * 6, places.offsets.tolist(), places.sizes.tolist(), shelf)
    assert list(column) == [sample["bin"] for sample in SAMPLES]
    assert list(column.slice(2, 4)) == [SAMPLES[2]["bin"], SAMPLES[3]["bin"]]
    assert list(column.take([5, 0])) == [SAMPLES[5]["bin"], SAMPLES[0]["bin"]]


# -- a part of a batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_bytes", [1 << 20, 1 << 10])
def test_a_part_stays_in_its_room(room_bytes: int) -> None:
    shelf = Shelf(SAMPLES)
    slots = slots_for(shelf.task(("bin",)))
    memory = slots.at_least(0, 2 << 20)
    memory[:] = 7
    plain = shelf.task(("bin",))
    task = plain._replace(pieces=(Piece(0, 0, 0, 6, values_start=1024, room_bytes=room_bytes),))
    (done,) = BatchMaker(job(fields=("bin",)), slots).run(task, shelf, [-1, -1]).pieces
    assert done.values is not None
    assert (memory[:1024] == 7).all()
    assert (memory[1024 + room_bytes :] == 7).all()
    if done.values.columns:
        assert values_of(done, slots) == [[sample["bin"] for sample in SAMPLES]]
    else:
        assert room_bytes < done.values.copied_bytes
        assert (memory == 7).all()
