"""The last part of a task: rows in their places, whole batches by the user's function, and what to do with the rest."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from tasks_by_hand import Shelf, as_json, batch_of, job, npy, numbered, only_batch, run, slots_for, values_of

from streamload.decode.batch_maker import BatchMaker
from streamload.decode.failure import error_from
from streamload.decode.tasks import Piece, PieceDone, RowsDone
from streamload.memory.slots import HeapSlots

Pair = namedtuple("Pair", "number arrays")


def failing(value: int) -> int:
    if value % 4 == 1:
        raise ValueError(f"bad {value}")
    return value


# -- rows in place -------------------------------------------------------------------------------------------------


def test_parts_of_a_batch_are_written_side_by_side() -> None:
    shelf = Shelf([{**sample, "txt": b"text %d" % number} for number, sample in enumerate(numbered(5))])
    names = ("cls", "npy", "txt")
    tasks = [shelf.task(names, rows, batches=(len(rows),), capacity=5) for rows in ([0, 1], [2], [3, 4])]
    slots = slots_for(tasks[0])
    first = 0
    parts: list[PieceDone] = []
    layout: bytes | None = None
    maker = BatchMaker(job(fields=names), slots)
    for task in tasks:
        piece = task.pieces[0]
        moved = task._replace(pieces=(Piece(0, 0, first, piece.rows, first * 1024, 1024),))
        (done,) = maker.run(moved, shelf, [-1, -1]).pieces
        if layout is None:
            layout = done.layout
            assert layout is not None
            maker.fix_layout(layout)
        else:
            assert done.layout is None, "the layout is told once"
        parts.append(done)
        first += piece.rows
    all_texts = [text for part in parts for text in values_of(part, slots)[0]]
    numbers, arrays, texts = batch_of(PieceDone(Piece(0, 0, 0, 5)), slots, layout, [all_texts])
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert arrays[:, 2].tolist() == [0, 1, 2, 3, 4]
    assert list(texts) == [f"text {number}" for number in range(5)]


def test_a_run_of_batches_goes_to_a_slot_each() -> None:
    shelf = Shelf(numbered(7))
    done, slots = run(job(fields=("cls", "npy")), shelf, shelf.task(("cls", "npy"), batches=(3, 3, 1)))
    layout = done.pieces[0].layout
    assert [batch_of(piece, slots, layout)[0].tolist() for piece in done.pieces] == [[0, 1, 2], [3, 4, 5], [6]]


def test_rows_unlike_those_before_are_layout_mismatches_of_their_batch_only() -> None:
    samples = [{"npy": npy(np.zeros(4 if number == 4 else 3))} for number in range(6)]
    shelf = Shelf(samples)
    done, slots = run(job(fields=("npy",)), shelf, shelf.task(("npy",), batches=(2, 2, 2)))
    assert [piece.layout_mismatch for piece in done.pieces] == [False, False, True]
    # The third is made again as a whole; its rows differ, so torch is asked, which refuses them.
    again, _ = run(job(fields=("npy",)), shelf, shelf.task(("npy",), [4, 5], whole=True))
    (failure,) = again.pieces[0].failures
    assert (failure.kind, failure.fatal, failure.sample) == ("CollateError", True, 4)
    assert "samples are not alike in [0]: the first is float64[4], number 1 is float64[3]; make them" in failure.message
    alike, slots = run(job(fields=("npy",)), shelf, shelf.task(("npy",), [4, 4], whole=True))
    assert batch_of(alike.pieces[0], slots)[0].shape == (2, 4)


def test_the_first_good_row_decides_on_the_layout() -> None:
    shelf = Shelf([{"cls": b"bad"}, {"cls": b"5"}])
    done, slots = run(job(fields=("cls",)), shelf, shelf.task(("cls",)))
    assert [failure.row for failure in done.pieces[0].failures] == [0]
    assert batch_of(done.pieces[0], slots)[0][1].item() == 5


def test_rows_that_have_all_failed_have_no_layout() -> None:
    shelf = Shelf([{"cls": b"bad"}, {"cls": b"worse"}])
    (piece,) = run(job(fields=("cls",)), shelf, shelf.task(("cls",)))[0].pieces
    assert (piece.layout, piece.layout_mismatch, len(piece.failures)) == (None, False, 2)


@pytest.mark.parametrize("value", [2**63, -(2**70), 10**30])
def test_an_integer_that_no_tensor_can_hold_is_an_error_of_its_batch(value: int) -> None:
    """It must not take the worker with it."""
    shelf = Shelf([{"json": as_json({"id": value})}, {"json": as_json({"id": 1})}])
    for rows in ([0, 1], [1, 0]):
        done, _ = run(job(fields=("json",)), shelf, shelf.task(("json",), rows))
        assert done.pieces[0].layout_mismatch
        (piece,) = run(job(fields=("json",)), shelf, shelf.task(("json",), rows, whole=True))[0].pieces
        assert [failure.kind for failure in piece.failures] == ["CollateError"]


@pytest.mark.parametrize("value", [None, {"a": None}, [1, None], {"a": [None]}])
def test_what_cannot_be_collated_is_an_error_that_says_what_to_do(value: Any) -> None:
    shelf = Shelf([{"json": as_json(value)}])
    assert run(job(fields=("json",)), shelf, shelf.task(("json",)))[0].pieces[0].layout_mismatch
    (piece,) = run(job(fields=("json",)), shelf, shelf.task(("json",), whole=True))[0].pieces
    (failure,) = piece.failures
    assert failure.kind == "CollateError"
    assert "its samples hold None in [0]" in failure.message
    assert failure.cause is None, "torch's words say less, in a page of its own frames"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("depth", [200, 320, 400, 600, 900])
def test_a_deep_nest_is_collated_or_an_error_of_its_batch(depth: int, whole: bool) -> None:
    """Data must not be able to take the worker down by its depth."""
    shelf = Shelf([{"json": b"[" * depth + b"]" * depth}])
    (piece,) = run(job(fields=("json",)), shelf, shelf.task(("json",), whole=whole))[0].pieces
    assert piece.layout_mismatch or piece.layout is not None or piece.failures


def test_rows_that_differ_in_key_order_only_fit() -> None:
    shelf = Shelf([{"json": b'{"a": 1, "b": 2}'}, {"json": b'{"b": 4, "a": 3}'}])
    (batch,) = only_batch(job(fields=("json",)), shelf, shelf.task(("json",)))
    assert {key: value.tolist() for key, value in batch.items()} == {"a": [1, 3], "b": [2, 4]}


def test_keys_that_only_some_rows_have_are_never_dropped_in_silence() -> None:
    """torch takes the keys of a batch's first row; a batch that begins with more keys must show them all."""
    shelf = Shelf([{"json": b'{"a": 1}'}, {"json": b'{"a": 2, "b": 3}'}])
    task = shelf.task(("json",), [0])
    maker = BatchMaker(job(fields=("json",)), slots_for(task))
    layout = maker.run(task, shelf, [-1, -1]).pieces[0].layout
    assert layout is not None
    maker.fix_layout(layout)
    assert maker.run(shelf.task(("json",), [1]), shelf, [-1, -1]).pieces[0].layout_mismatch
    (batch,) = only_batch(job(fields=("json",)), shelf, shelf.task(("json",), [1], whole=True))
    assert sorted(batch) == ["a", "b"]


# -- whole batches -------------------------------------------------------------------------------------------------


def test_whole_batches_may_each_have_a_layout_of_their_own() -> None:
    shelf = Shelf([{"npy": npy(np.arange(number // 2 + 1))} for number in range(4)])
    done, slots = run(job(fields=("npy",)), shelf, shelf.task(("npy",), batches=(2, 2), whole=True))
    assert [batch_of(piece, slots)[0].tolist() for piece in done.pieces] == [[[0], [0]], [[0, 1], [0, 1]]]
    assert all(piece.whole and piece.rows == 2 for piece in done.pieces)


def test_a_collate_fn_gets_a_list_of_samples_and_its_result_is_the_batch() -> None:
    seen: list[Any] = []

    def collate(samples: list[Any]) -> Any:
        seen.append(samples)
        return Pair([sample[0] for sample in samples], {"sum": sum(sample[1] for sample in samples), "text": "x"})

    shelf = Shelf(numbered(3))
    batch = only_batch(job(fields=("cls", "npy"), collate_fn=collate), shelf, shelf.task(("cls", "npy"), whole=True))
    assert type(seen[0]) is list
    assert [type(sample) for sample in seen[0]] == [tuple] * 3
    assert type(batch) is Pair
    assert batch.number == [0, 1, 2]
    assert batch.arrays["sum"].tolist() == [3, 3, 3]
    assert batch.arrays["text"] == "x"


@pytest.mark.parametrize(
    "result",
    [None, 3, [], {}, "text", torch.zeros(2, 0), [torch.ones(1), None, {"a": np.arange(3)}], {1: (2, [3])}, object],
)
def test_a_collate_fn_may_return_anything(result: Any) -> None:
    shelf = Shelf(numbered(2))
    work = job(fields=("cls",), collate_fn=lambda samples: result)
    assert str(only_batch(work, shelf, shelf.task(("cls",), whole=True))) == str(result)


def test_what_a_collate_fn_raises_is_fatal_and_names_the_batchs_first_sample() -> None:
    def collate(samples: list[Any]) -> Any:
        raise LookupError("cannot put these together")

    shelf = Shelf(numbered(5), per_shard=4)
    work = job(fields=("cls",), collate_fn=collate)
    done, _ = run(work, shelf, shelf.task(("cls",), batches=(3, 2), whole=True))
    for piece, place in zip(done.pieces, [(0, 0), (0, 3)], strict=True):
        (failure,) = piece.failures
        assert (failure.kind, failure.fatal, failure.row) == ("CollateError", True, 0)
        assert (failure.shard, failure.sample) == place
        assert failure.message.startswith("collate_fn raised LookupError: cannot put these together (for the batch")
        assert failure.cause is not None
        cause = error_from(failure.cause)
        assert isinstance(cause, LookupError)
        assert "in collate" in cause.__notes__[0]


def test_a_collate_fn_that_returns_what_cannot_be_sent_is_an_error_of_its_batch() -> None:
    shelf = Shelf(numbered(1))
    work = job(fields=("cls",), collate_fn=lambda samples: (value for value in samples))
    (piece,) = run(work, shelf, shelf.task(("cls",), whole=True))[0].pieces
    (failure,) = piece.failures
    assert failure.kind == "CollateError"
    assert "returned what cannot be sent to the training process: TypeError: cannot pickle 'gen" in failure.message


def test_a_collate_fn_that_returns_itself_is_an_error_of_its_batch() -> None:
    loop: list[Any] = []
    loop.append(loop)
    shelf = Shelf(numbered(1))
    work = job(fields=("cls",), collate_fn=lambda samples: loop)
    (piece,) = run(work, shelf, shelf.task(("cls",), whole=True))[0].pieces
    assert "RecursionError" in piece.failures[0].message


def test_randomness_in_a_collate_fn_is_that_of_the_batchs_first_sample() -> None:
    import random

    def collate(samples: list[Any]) -> Any:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    shelf = Shelf(numbered(6))
    work = job(fields=("cls",), collate_fn=collate)

    def drawn(rows: list[int], batches: tuple[int, ...]) -> list[Any]:
        done, slots = run(work, shelf, shelf.task(("cls",), rows, batches=batches, whole=True))
        return [batch_of(piece, slots) for piece in done.pieces]

    together = drawn([0, 1, 2, 3], (2, 2))
    assert together[0] != together[1]
    assert drawn([2, 3], (2,)) == together[1:]
    assert drawn([2, 5], (2,)) == together[1:]


# -- rows that failed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_error", "numbers"), [("skip", [[0, 2, 3], [4, 6]]), ("replace", [[0, 2, 2, 3], [4, 6, 6]])]
)
@pytest.mark.parametrize("collate_fn", [None, lambda samples: (torch.tensor([sample[0] for sample in samples]),)])
def test_failed_rows_of_whole_batches_are_left_out_or_replaced(
    on_error: str, numbers: list[list[int]], collate_fn: Any
) -> None:
    shelf = Shelf(numbered(7))
    work = job(fields=("cls",), transform={"cls": failing}, on_error=on_error, collate_fn=collate_fn)
    done, slots = run(work, shelf, shelf.task(("cls",), batches=(4, 3), whole=True))
    assert [batch_of(piece, slots)[0].tolist() for piece in done.pieces] == numbers
    assert [[failure.row for failure in piece.failures] for piece in done.pieces] == [[1], [1]]
    assert [failure.sample for piece in done.pieces for failure in piece.failures] == [1, 5]


@pytest.mark.parametrize("collate_fn", [None, lambda samples: pytest.fail("there is nothing to collate")])
def test_a_whole_batch_is_not_made_where_a_failure_will_be_raised(collate_fn: Any) -> None:
    shelf = Shelf(numbered(4))
    work = job(fields=("cls",), transform={"cls": failing}, on_error="raise", collate_fn=collate_fn)
    (piece,) = run(work, shelf, shelf.task(("cls",), whole=True))[0].pieces
    assert [failure.row for failure in piece.failures] == [1]
    assert piece.layout is None


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_whole_batch_is_not_made_where_a_failure_is_fatal_or_nothing_is_left(on_error: str) -> None:
    def mistaken(value: int) -> int:
        raise TypeError("a mistake")

    shelf = Shelf([{"cls": b"1"}, {"cls": b"5"}])
    for transform in (failing, mistaken):
        work = job(fields=("cls",), transform={"cls": transform}, on_error=on_error, collate_fn=pytest.fail)
        (piece,) = run(work, shelf, shelf.task(("cls",), whole=True))[0].pieces
        assert [(failure.row, failure.kind) for failure in piece.failures] == [
            (0, "TransformError"),
            (1, "TransformError"),
        ]


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_failed_rows_of_parts_hold_another_rows_bytes(on_error: str) -> None:
    """What is done about them is decided in the loop; their places must not be left undefined."""
    shelf = Shelf(numbered(4))
    work = job(fields=("cls", "npy"), transform={"cls": failing}, on_error=on_error)
    done, slots = run(work, shelf, shelf.task(("cls", "npy")))
    numbers, arrays = batch_of(done.pieces[0], slots)
    assert numbers.tolist() == [0, 0, 2, 3]
    assert arrays[:, 0].tolist() == [0, 0, 2, 3]


def test_failures_of_parts_are_numbered_within_the_batch() -> None:
    shelf = Shelf(numbered(6))
    task = shelf.task(("cls",), [1, 2, 5], capacity=8)
    piece = task.pieces[0]
    moved = task._replace(pieces=(type(piece)(0, 0, 4, 3),))
    done, _ = run(job(fields=("cls",), transform={"cls": failing}), shelf, moved)
    assert [failure.row for failure in done.pieces[0].failures] == [4, 6]


# -- the answer ----------------------------------------------------------------------------------------------------


def test_an_answer_travels() -> None:
    shelf = Shelf([{**sample, "txt": b"x"} for sample in numbered(4)])
    work = job(fields=("cls", "txt"), transform={"cls": failing})
    done, _ = run(work, shelf, shelf.task(("cls", "txt")))
    came: RowsDone = pickle.loads(pickle.dumps(done))
    assert came == done


def test_a_slot_grows_to_what_a_batch_needs() -> None:
    shelf = Shelf([{"npy": npy(np.arange(50_000, dtype=np.int64))}] * 3)
    task = shelf.task(("npy",))
    slots = HeapSlots()
    slots.take(1)
    (piece,) = BatchMaker(job(fields=("npy",)), slots).run(task, shelf, [-1, -1]).pieces
    assert piece.size_bytes == 3 * 400_000
    assert batch_of(piece, slots)[0].sum().item() == 3 * sum(range(50_000))
