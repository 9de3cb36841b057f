"""Functions that write their results straight into the batch: the same batches, with one copy less."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tasks_by_hand import Sample, Shelf, job, npy

from streamload.decode.batch_layout import Layout
from streamload.decode.batch_maker import BatchMaker
from streamload.decode.collate import build_batch
from streamload.decode.tasks import SAMPLE_NAMES, Job, Piece, PieceDone, RowsDone
from streamload.memory.slots import HeapSlots

SIZE = 2000  # int64: more than what is copied without a look


class Fill:
    """Makes a large array of a number, in `out` where that fits; `seen` tells how often it was offered what."""

    writes_into_out = True

    def __init__(self, bad: Sequence[int] = (), size: int = SIZE, dtype: type = np.int64) -> None:
        self.bad, self.size, self.dtype = bad, size, dtype
        self.offered: list[bool] = []
        self.used = 0

    def __call__(self, value: Any, out: Any = None) -> Any:
        self.offered.append(out is not None)
        fits = out is not None and out.shape == (self.size,) and out.dtype == self.dtype
        result = out if fits else np.empty(self.size, self.dtype)
        self.used += fits
        result[:] = int(value)
        if int(value) in self.bad:
            raise ValueError("bad")
        return result


class Work:
    """A row maker whose layout has been fixed by a first row, as a worker's is."""

    def __init__(self, work: Job, samples: Sequence[Sample], names: Sequence[str] | None) -> None:
        self.shelf, self.slots = Shelf(samples), HeapSlots()
        self.names = None if names is None else [name for name in names if name not in SAMPLE_NAMES]
        self.maker = BatchMaker(work, self.slots)
        self.rows = len(samples)
        first = self.run([0], batches=[1], capacity=self.rows, keys=("first",))
        (piece,) = first.pieces
        assert piece.layout is not None
        self.layout: Layout = pickle.loads(piece.layout)
        self.maker.fix_layout(piece.layout)

    def run(self, rows: Sequence[int], **changes: Any) -> RowsDone:
        slot = self.slots.take(1)
        for _ in range(len(changes.get("batches", [1])) - 1):
            self.slots.take(1)
        task = self.shelf.task(self.names, rows, first_slot=slot, **changes)
        return self.maker.run(task, self.shelf, [-1, -1])

    def batch(self, piece: PieceDone) -> Any:
        assert not piece.layout_mismatch
        memory = self.slots.at_least(piece.piece.slot, self.layout.offsets()[1])
        return build_batch(self.layout, memory, piece.piece.rows, [])


def digits(count: int) -> list[Sample]:
    return [{"cls": b"%d" % number, "npy": npy(np.full(3, number))} for number in range(count)]


@pytest.mark.parametrize("names", [("cls",), ("npy", "cls"), ("__url__", "cls", "npy", "__key__"), None])
def test_rows_are_made_in_their_slots(names: tuple[str, ...] | None) -> None:
    fill = Fill()
    work = Work(job(fields=names, transform={"cls": fill}), digits(7), names)
    assert fill.offered == [False], "the first row decides on the layout, so there is no place for it yet"
    done = work.run(range(7), batches=[4, 3], capacity=7, keys=tuple("abcdefg"))
    assert fill.used == 7
    for piece, numbers in zip(done.pieces, ([0, 1, 2, 3], [4, 5, 6]), strict=True):
        memory = work.slots.at_least(piece.piece.slot, work.layout.offsets()[1])
        made = [leaf for leaf in work.layout.arrays if leaf.shape == (SIZE,)]
        start = work.layout.offsets()[0][made[0].number]
        lies = memory[start : start + len(numbers) * SIZE * 8].view(np.int64).reshape(-1, SIZE)
        assert (lies == np.array(numbers)[:, None]).all()


@pytest.mark.parametrize("role", ["decode", "transform"])
def test_values_are_in_their_slots_as_soon_as_they_are_made(role: str) -> None:
    """So that memory for one value is enough: a function may even return the same array every time."""
    memory = np.empty(SIZE)

    def fill(value: Any) -> Any:
        memory[:] = float(value)
        return memory

    work = Work(job(fields=("cls",), **{role: {"cls": fill}}), digits(7), ("cls",))
    done = work.run(range(7), batches=[4, 3], capacity=7)
    for piece, numbers in zip(done.pieces, ([0, 1, 2, 3], [4, 5, 6]), strict=True):
        assert work.batch(piece)[0][:, 0].tolist() == numbers


SMALL = [{"npy": npy(np.full(3, number))} for number in range(9)]


@pytest.mark.parametrize("bad", [(), (1,), (3, 5), (4, 5, 6)])
def test_a_function_may_return_the_same_small_array_every_time(bad: tuple[int, ...]) -> None:
    memory = np.empty(3, np.int64)

    def decode(data: bytes) -> NDArray[Any]:
        memory[:] = np.load(BytesIO(data))
        if memory[0] in bad:
            raise ValueError
        return memory[:]

    work = Work(job(fields=("npy",), decode={"npy": decode}, on_error="skip"), SMALL, ("npy",))
    done = work.run(range(9), batches=[4, 2, 3], capacity=9)
    for piece, numbers in zip(done.pieces, ([0, 1, 2, 3], [4, 5], [6, 7, 8]), strict=True):
        good = [number for number in numbers if number not in bad]
        found = work.batch(piece)[0][:, 0].tolist() if good else []
        assert set(found) == set(good)


def test_small_values_are_in_their_slot_as_soon_as_those_of_a_batch_are_made() -> None:
    """So that those of a batch are all that there are, however many batches a task has."""
    made: list[weakref.ref[NDArray[Any]]] = []
    most = 0

    def decode(data: bytes) -> NDArray[Any]:
        nonlocal most
        value = np.load(BytesIO(data))
        made.append(weakref.ref(value))
        most = max(most, sum(each() is not None for each in made))
        return value

    work = Work(job(fields=("npy",), decode={"npy": decode}), SMALL, ("npy",))
    done = work.run(range(9), batches=[4, 2, 3], capacity=9)
    for piece, numbers in zip(done.pieces, ([0, 1, 2, 3], [4, 5], [6, 7, 8]), strict=True):
        assert work.batch(piece)[0][:, 0].tolist() == numbers
    assert most <= 5


@pytest.mark.parametrize("bad", [2, 5, 6])
@pytest.mark.parametrize("of_one_size", [False, True])
def test_small_values_beside_one_that_fails(bad: int, of_one_size: bool) -> None:
    samples = SMALL if of_one_size else [{"npy": sample["npy"] + bytes(at)} for at, sample in enumerate(SMALL)]

    def decode(data: bytes) -> NDArray[Any]:
        value = np.load(BytesIO(data))
        if value[0] == bad:
            raise ValueError
        return value

    work = Work(job(fields=("npy",), decode={"npy": decode}, on_error="skip"), samples, ("npy",))
    done = work.run(range(9), batches=[4, 2, 3], capacity=9)
    for piece, numbers in zip(done.pieces, ([0, 1, 2, 3], [4, 5], [6, 7, 8]), strict=True):
        assert [numbers[failure.row] for failure in piece.failures] == [bad] * (bad in numbers)
        found = work.batch(piece)[0][:, 0].tolist()
        assert [number for number in found if number != bad] == found
        assert [number for number in numbers if number not in found] == [bad] * (bad in numbers)


def test_small_values_of_other_lengths_that_would_fill_their_places_are_a_layout_mismatch() -> None:
    def decode(data: bytes) -> NDArray[Any]:
        value = np.load(BytesIO(data))
        return value[: {6: 2}.get(value[0], 3)] if value[0] != 7 else np.repeat(value, 2)[:4]

    work = Work(job(fields=("npy",), decode={"npy": decode}), SMALL, ("npy",))
    done = work.run(range(9), batches=[4, 2, 3], capacity=9)
    assert [piece.layout_mismatch for piece in done.pieces] == [False, False, True]


@pytest.mark.parametrize("value", [np.zeros(3, np.float32), np.zeros(4, np.int64), [0, 0, 0]])
def test_small_values_unlike_their_places_are_a_layout_mismatch(value: Any) -> None:
    def decode(data: bytes) -> Any:
        found = np.load(BytesIO(data))
        return value if found[0] == 5 else found

    work = Work(job(fields=("npy",), decode={"npy": decode}), SMALL, ("npy",))
    done = work.run(range(9), batches=[4, 2, 3], capacity=9)
    assert [piece.layout_mismatch for piece in done.pieces] == [False, True, False]


@pytest.mark.parametrize("value", [np.zeros(SIZE, np.float32), np.zeros(SIZE + 1), np.zeros(SIZE).tolist()])
def test_a_value_unlike_its_place_is_a_layout_mismatch(value: Any) -> None:
    decode = {"cls": lambda data: value if data == b"5" else np.zeros(SIZE)}
    work = Work(job(fields=("cls",), decode=decode), digits(7), ("cls",))
    done = work.run(range(7), batches=[4, 3], capacity=7)
    assert [piece.layout_mismatch for piece in done.pieces] == [False, True]


def test_each_field_has_places_of_its_own() -> None:
    """Two fields of one shape and dtype: neither lands where the other belongs."""
    samples = [{"a.cls": b"%d" % number, "b.cls": b"%d" % (100 + number)} for number in range(5)]
    for names in (("a.cls", "b.cls"), ("b.cls", "__key__", "a.cls"), None):
        a, b = Fill(), Fill()
        work = Work(job(fields=names, transform={"a.cls": a, "b.cls": b}), samples, names)
        done = work.run(range(5), keys=tuple("abcde"))
        assert (a.used, b.used) == (5, 5)
        memory = work.slots.at_least(done.pieces[0].piece.slot, work.layout.offsets()[1])
        starts = work.layout.offsets()[0]
        found = {
            tuple(memory[starts[leaf.number] :][: 5 * SIZE * 8].view(np.int64)[::SIZE].tolist())
            for leaf in work.layout.arrays
        }
        assert found == {(0, 1, 2, 3, 4), (100, 101, 102, 103, 104)}


def test_a_row_that_fails_half_made_leaves_the_others_whole() -> None:
    fill = Fill(bad=[2, 4])
    work = Work(job(fields=("cls",), transform={"cls": fill}, on_error="skip"), digits(6), ("cls",))
    done = work.run(range(6))
    (piece,) = done.pieces
    assert [failure.row for failure in piece.failures] == [2, 4]
    (batch,) = work.batch(piece)
    assert batch[[0, 1, 3, 5], 0].tolist() == [0, 1, 3, 5]
    assert batch[[2, 4], 0].tolist() == [0, 0], "their places hold the bytes of a good row"


@pytest.mark.parametrize("other", [Fill(size=SIZE + 1), Fill(dtype=np.float64)])
def test_a_result_that_does_not_fit_its_place_is_a_layout_mismatch(other: Fill) -> None:
    work = Work(job(fields=("cls",), transform={"cls": Fill()}), digits(3), ("cls",))
    strange = BatchMaker(job(fields=("cls",), transform={"cls": other}), work.slots)
    strange.fix_layout(pickle.dumps(work.layout))
    task = work.shelf.task(("cls",), first_slot=work.slots.take(1))
    assert strange.run(task, work.shelf, [-1, -1]).pieces[0].layout_mismatch


def test_functions_that_see_whole_samples_or_batches_get_no_place() -> None:
    fill = Fill()
    for changes in ({"transform": fill, "fields": ("cls",)}, {"transform": {"cls": fill}, "collate_fn": list}):
        shelf = Shelf([{"cls": b"3"}])
        slots = HeapSlots()
        slot = slots.take(1)
        work = job(**{"fields": ("cls",), **changes})
        if "collate_fn" not in changes:
            work = job(fields=("cls",), transform=lambda sample: fill(sample[0]))
        BatchMaker(work, slots).run(
            shelf.task(("cls",), first_slot=slot, whole="collate_fn" in changes), shelf, [-1, -1]
        )
    assert fill.offered == [False, False]


def test_a_part_of_a_batch_is_made_at_its_own_rows() -> None:
    work = Work(job(fields=("cls",), transform={"cls": Fill()}), digits(7), ("cls",))
    slot = work.slots.take(1)
    for first_row, rows in ((4, [4, 5, 6]), (0, [0, 1, 2, 3])):
        task = work.shelf.task(("cls",), rows)._replace(pieces=(Piece(0, slot, first_row, len(rows)),))
        work.maker.run(task, work.shelf, [-1, -1])
    memory = work.slots.at_least(slot, work.layout.offsets()[1])
    assert memory.view(np.int64)[: 7 * SIZE : SIZE].tolist() == list(range(7))


def test_a_batch_that_is_collated_as_a_whole_gets_no_place() -> None:
    """Its layout may be another one: it is told only when all rows are there."""
    fill = Fill()
    work = Work(job(fields=("cls",), transform={"cls": fill}), digits(3), ("cls",))
    work.run(range(3), whole=True)
    assert fill.offered == [False] * 4


def test_a_subclass_that_takes_no_out_is_not_offered_one() -> None:
    class Doubled(Fill):
        def __call__(self, value: Any) -> Any:
            return np.full(SIZE, 2 * int(value))

    work = Work(job(fields=("cls",), transform={"cls": Doubled()}), digits(3), ("cls",))
    (batch,) = work.batch(work.run(range(3)).pieces[0])
    assert batch[:, 0].tolist() == [0, 2, 4]
