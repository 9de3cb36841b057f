"""Rows: what becomes of a sample's bytes, field by field, transform by transform, failure by failure."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tasks_by_hand import Shelf, as_json, batch_of, job, npy, numbered, only_batch, run, slots_for

from streamload import errors
from streamload.decode.batch_maker import BatchMaker
from streamload.decode.failure import sample_error
from streamload.decode.tasks import PieceDone, RowFailure
from streamload.decode.user_code import UserFunction
from streamload.tar.table import MISSING


def png(value: int) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


# -- samples -------------------------------------------------------------------------------------------------------


def test_named_fields_make_tuples_in_the_order_requested() -> None:
    shelf = Shelf(numbered(3))
    numbers, arrays = only_batch(job(fields=("cls", "npy")), shelf, shelf.task(("cls", "npy")))
    assert numbers.tolist() == [0, 1, 2]
    assert arrays.tolist() == [[0] * 3, [1] * 3, [2] * 3]
    arrays, numbers = only_batch(job(fields=("npy", "cls")), shelf, shelf.task(("npy", "cls")))
    assert numbers.tolist() == [0, 1, 2]


def test_rows_come_from_any_shards_in_any_order() -> None:
    shelf = Shelf(numbered(7), per_shard=3)
    rows = [6, 0, 3, 3, 5, 1]
    arrays, numbers = only_batch(job(fields=("npy", "cls")), shelf, shelf.task(("npy", "cls"), rows))
    assert numbers.tolist() == rows
    assert arrays[:, 0].tolist() == rows


def test_without_fields_samples_are_dicts_with_key_and_url() -> None:
    shelf = Shelf(numbered(3), per_shard=2)
    batch = only_batch(job(), shelf, shelf.task())
    assert as_lists(batch) == {
        "__key__": ["key0", "key1", "key2"],
        "__url__": ["/data/0.tar", "/data/0.tar", "/data/1.tar"],
        "cls": [0, 1, 2],
        "npy": [[0] * 3, [1] * 3, [2] * 3],
    }


def test_alternatives_take_what_each_sample_has() -> None:
    samples = [{"txt": b"text"}, {"cls": b"7"}, {"txt": b"more"}]
    seen: list[Any] = []
    shelf = Shelf(samples)
    only_batch(
        job(fields=("cls;txt",), transform=lambda sample: (seen.append(sample[0]), 1)[1]),
        shelf,
        shelf.task(("cls;txt",)),
    )
    assert seen == ["text", 7, "more"]


def test_alternatives_of_images_make_one_batch() -> None:
    shelf = Shelf([{"jpg": png(1), "cls": b"0"}, {"png": png(2), "cls": b"1"}])
    images, _ = only_batch(job(fields=("jpg;png", "cls")), shelf, shelf.task(("jpg;png", "cls")))
    assert images[:, 0, 0, 0].tolist() == [1, 2]


def test_alternatives_that_change_kind_between_tasks_do_not_fit_the_layout() -> None:
    """The layout was learned from a text; an array cannot take its place."""
    shelf = Shelf([{"txt": b"text"}, {"npy": npy([1, 2])}, {"npy": npy([3, 4])}])
    work, task = job(fields=("npy;txt",)), shelf.task(("npy;txt",), [0])
    slots = slots_for(task)
    maker = BatchMaker(work, slots)
    first = maker.run(task, shelf, [-1, -1])
    assert first.pieces[0].layout is not None
    maker.fix_layout(first.pieces[0].layout)
    assert maker.run(shelf.task(("npy;txt",), [1, 2]), shelf, [-1, -1]).pieces[0].layout_mismatch


def test_a_field_that_a_sample_lacks_is_no_part_of_its_dict() -> None:
    shelf = Shelf([{"cls": b"1", "npy": npy([1])}, {"npy": npy([2])}, {"cls": b"3", "npy": npy([3]), "txt": b"x"}])
    seen: list[dict[str, Any]] = []
    only_batch(job(transform=lambda sample: (seen.append(sample), 1)[1]), shelf, shelf.task())
    assert [sorted(sample) for sample in seen] == [
        ["__key__", "__url__", "cls", "npy"],
        ["__key__", "__url__", "npy"],
        ["__key__", "__url__", "cls", "npy", "txt"],
    ]
    assert [sample["npy"].tolist() for sample in seen] == [[1], [2], [3]]


def test_dicts_of_different_fields_are_refused() -> None:
    shelf = Shelf([{"npy": npy([0, 1])}, {"npy": npy([2, 3]), "cls": b"1"}])
    done, _ = run(job(), shelf, shelf.task())
    assert done.pieces[0].layout_mismatch
    done, _ = run(job(), shelf, shelf.task(whole=True))
    (failure,) = done.pieces[0].failures
    assert (failure.kind, "'cls'" in failure.message) == ("CollateError", True)


def test_a_transform_of_a_field_is_not_called_where_a_dict_lacks_it() -> None:
    shelf = Shelf([{"cls": b"1", "txt": b"a"}, {"txt": b"b"}])
    done, _ = run(job(transform={"cls": lambda value: value + 1}), shelf, shelf.task(whole=True))
    assert [failure.kind for failure in done.pieces[0].failures] == ["CollateError"], "the dicts differ"
    seen: list[Any] = []
    only_batch(
        job(transform={"cls": lambda value: value + 1}, collate_fn=lambda rows: seen.extend(rows)),
        shelf,
        shelf.task(whole=True),
    )
    assert [sample.get("cls") for sample in seen] == [2, None]


@pytest.mark.parametrize("decode", [False, {"cls": bytes, "npy": bytes}])
def test_without_decoding_fields_are_bytes(decode: Any) -> None:
    shelf = Shelf(numbered(2))
    assert only_batch(job(fields=("cls",), decode=decode), shelf, shelf.task(("cls",))) == [(b"0", b"1")]


def test_the_users_decoder_takes_the_place_of_ours() -> None:
    shelf = Shelf(numbered(3))
    work = job(fields=("cls", "npy"), decode={"cls": lambda data: int(data) * 10})
    numbers, arrays = only_batch(work, shelf, shelf.task(("cls", "npy")))
    assert numbers.tolist() == [0, 10, 20]
    assert arrays[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["transform", "collate_fn"])
def test_functions_see_what_decoders_return_and_not_rows_of_columns(how: str) -> None:
    """Numbers and arrays are decoded a column at a time where nobody looks; where somebody does, types must hold."""
    seen: list[Any] = []
    shelf = Shelf([{"cls": b"1", "npy": npy(np.float32(2)), "txt": b"a"} for _ in range(3)])
    names = ("cls", "npy", "txt")
    functions: dict[str, Any] = {
        "transform": {"transform": lambda sample: (seen.append(sample), 0)[1]},
        "collate_fn": {"collate_fn": lambda rows: seen.extend(rows)},
    }
    only_batch(job(fields=names, **functions[how]), shelf, shelf.task(names, whole=True))
    assert [tuple(type(value) for value in sample) for sample in seen] == [(int, np.ndarray, str)] * 3
    assert seen[0][1].shape == ()


def test_values_that_the_user_keeps_or_changes_are_his_own() -> None:
    shelf = Shelf([{"npy": npy([1, 2, 3])}] * 3)

    def change(sample: tuple[Any]) -> Any:
        sample[0][0] += 10
        return sample

    (arrays,) = only_batch(job(fields=("npy",), transform=change), shelf, shelf.task(("npy",)))
    assert arrays.tolist() == [[11, 2, 3]] * 3


# -- transforms ----------------------------------------------------------------------------------------------------


def test_transforms_by_field_leave_the_other_fields_alone() -> None:
    shelf = Shelf(numbered(3))
    work = job(fields=("npy", "cls"), transform={"cls": lambda value: value * 2})
    arrays, numbers = only_batch(work, shelf, shelf.task(("npy", "cls")))
    assert numbers.tolist() == [0, 2, 4]
    assert arrays[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", ["cls;txt", "txt; cls"])
def test_a_transform_by_several_fields_sees_every_alternative(key: str) -> None:
    shelf = Shelf([{"txt": b"2"}, {"cls": b"3"}])
    work = job(fields=("cls;txt",), transform={key: lambda value: int(value) + 1})
    assert only_batch(work, shelf, shelf.task(("cls;txt",)))[0].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("transform", "values"),
    [
        ({"txt": lambda value: len(value)}, [2, 7, 3]),
        ({"txt": len, "cls": lambda value: -value}, [2, -7, 3]),
    ],
)
def test_a_transform_by_one_alternative_sees_only_samples_that_have_it(transform: Any, values: list[int]) -> None:
    shelf = Shelf([{"txt": b"ab"}, {"cls": b"7"}, {"txt": b"abc"}])
    work = job(fields=("cls;txt",), transform=transform)
    assert only_batch(work, shelf, shelf.task(("cls;txt",)))[0].tolist() == values


@pytest.mark.parametrize("by_field", [True, False])
def test_a_transform_that_returns_nothing_is_a_mistake_in_the_program(by_field: bool) -> None:
    shelf = Shelf(numbered(1))
    transform: Any = {"cls": lambda value: None} if by_field else (lambda value: None)
    done, _ = run(job(fields=("cls",), transform=transform), shelf, shelf.task(("cls",)))
    (failure,) = done.pieces[0].failures
    assert (failure.kind, failure.fatal) == ("TransformError", True)
    assert "it returned None; is a `return` missing?" in failure.message


def test_a_collate_fn_may_see_that_a_transform_returned_nothing() -> None:
    shelf = Shelf(numbered(3))
    work = job(
        fields=("cls",),
        transform=lambda sample: None if sample[0] == 1 else sample[0],
        collate_fn=lambda samples: [sample for sample in samples if sample is not None],
    )
    assert only_batch(work, shelf, shelf.task(("cls",), whole=True)) == [0, 2]


def test_a_transform_of_samples_may_return_any_nest() -> None:
    shelf = Shelf(numbered(2))
    work = job(fields=("cls",), transform=lambda sample: {"twice": [sample[0], {"again": torch.ones(2) * sample[0]}]})
    assert as_lists(only_batch(work, shelf, shelf.task(("cls",)))) == {
        "twice": [[0, 1], {"again": [[0.0, 0.0], [1.0, 1.0]]}]
    }


def test_a_transform_that_starts_from_encoded_gets_the_bytes_of_images() -> None:
    class Sized:
        uses_global_generators = False

        def __call__(self, image: Any) -> Any:
            raise AssertionError("it was to start from the bytes")

        def from_encoded(self, data: memoryview, rng: Any) -> Any:
            return len(data)

    shelf = Shelf([{"png": png(1)}])
    work = job(fields=("png",), transform={"png": Sized()})
    assert only_batch(work, shelf, shelf.task(("png",)))[0].tolist() == [len(png(1))]


def test_a_transform_that_starts_from_encoded_gets_what_a_decoder_of_the_users_makes() -> None:
    class Sized:
        def __call__(self, value: Any) -> Any:
            return value

        def from_encoded(self, data: memoryview, rng: Any) -> Any:
            raise AssertionError("the user's decoder was to be asked")

    shelf = Shelf([{"png": b"12"}])
    work = job(fields=("png",), decode={"png": int}, transform={"png": Sized()})
    assert only_batch(work, shelf, shelf.task(("png",)))[0].tolist() == [12]


# -- randomness ----------------------------------------------------------------------------------------------------


def draws_with_rng(sample: Any, rng: np.random.Generator) -> Any:
    return rng.integers(1 << 62, size=3)


def draws_from_globals(sample: Any) -> Any:
    return {
        "python": random.getrandbits(60),
        "numpy": np.random.randint(1 << 30, size=2),
        "torch": torch.randint(1 << 60, (2,)),
    }


@pytest.mark.parametrize("transform", [draws_with_rng, draws_from_globals])
def test_randomness_is_the_samples_own_and_not_that_of_the_task(transform: Callable[..., Any]) -> None:
    shelf = Shelf(numbered(6), per_shard=4)
    work = job(fields=("cls",), transform=transform, seed=3)
    whole = as_lists(only_batch(work, shelf, shelf.task(("cls",))))
    rows = whole if isinstance(whole, list) else whole["python"]
    assert len({str(row) for row in rows}) == 6, "every sample has its own"
    order = [4, 1, 5, 0]
    part = as_lists(only_batch(work, shelf, shelf.task(("cls",), order)))
    if isinstance(whole, dict):
        assert part == {key: [values[row] for row in order] for key, values in whole.items()}
    else:
        assert part == [whole[row] for row in order]


@pytest.mark.parametrize("transform", [draws_with_rng, draws_from_globals])
def test_randomness_changes_with_epoch_and_seed(transform: Callable[..., Any]) -> None:
    shelf = Shelf(numbered(1))

    def drawn(seed: int, epoch: int) -> str:
        work = job(fields=("cls",), transform=transform, seed=seed)
        return str(as_lists(only_batch(work, shelf, shelf.task(("cls",), epoch=epoch))))

    assert drawn(0, 0) == drawn(0, 0)
    assert len({drawn(0, 0), drawn(0, 1), drawn(1, 0), drawn(1, 1)}) == 4


def test_one_maker_follows_the_epochs() -> None:
    shelf = Shelf(numbered(2))
    task = shelf.task(("cls",))
    slots = slots_for(task)
    maker = BatchMaker(job(fields=("cls",), transform=draws_with_rng), slots)
    drawn = [
        batch_of(maker.run(task._replace(epoch=epoch), shelf, [-1, -1]).pieces[0], slots).tolist()
        for epoch in (0, 1, 0)
    ]
    assert drawn[0] == drawn[2] != drawn[1]


def test_fields_of_one_sample_draw_from_one_generator_in_turn() -> None:
    shelf = Shelf([{"cls": b"1", "txt": b"a", "id": b"2"}])
    names = ("cls", "txt", "id")
    transform = dict.fromkeys(("cls", "txt"), draws_with_rng)
    one, other, _ = as_lists(only_batch(job(fields=names, transform=transform), shelf, shelf.task(names)))
    assert one != other
    alone = as_lists(only_batch(job(fields=names, transform={"cls": draws_with_rng}), shelf, shelf.task(names)))[0]
    assert alone == one


def test_the_callers_generators_are_unchanged_where_rows_are_made_in_its_process() -> None:
    shelf = Shelf(numbered(4))
    task = shelf.task(("cls",))
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    expected = draws_from_globals(None)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    maker = BatchMaker(job(fields=("cls",), transform=draws_from_globals), slots_for(task), in_callers_process=True)
    maker.run(task, shelf, [-1, -1])
    assert as_lists(draws_from_globals(None)) == as_lists(expected)


def test_generators_are_restored_after_an_interrupt_too() -> None:
    def interrupt(sample: Any) -> Any:
        raise KeyboardInterrupt

    shelf = Shelf(numbered(1))
    task = shelf.task(("cls",))
    state = random.getstate()
    maker = BatchMaker(job(fields=("cls",), transform=interrupt), slots_for(task), in_callers_process=True)
    with pytest.raises(KeyboardInterrupt):
        maker.run(task, shelf, [-1, -1])
    assert random.getstate() == state


def test_only_functions_that_may_use_the_global_generators_have_them_seeded() -> None:
    drawn: list[float] = []

    def plain(sample: Any) -> int:
        drawn.append(random.random())
        return 0

    def with_rng(sample: Any, rng: Any) -> int:
        return plain(sample)

    class Says:
        """A transform that says for itself whether it draws from the global generators."""

        def __init__(self, uses_global_generators: bool) -> None:
            self.uses_global_generators = uses_global_generators

        def __call__(self, sample: Any) -> int:
            return plain(sample)

    shelf = Shelf(numbered(1))
    task = shelf.task(("cls",))
    for transform in (plain, with_rng, Says(True), Says(False)):
        BatchMaker(job(fields=("cls",), transform=transform), slots_for(task)).run(task, shelf, [-1, -1])
    assert [number == drawn[0] for number in drawn] == [True, False, True, False]


@pytest.mark.parametrize("function", [len, str, int, float])
def test_built_in_functions_of_a_value_draw_from_no_generator(function: Callable[[Any], Any]) -> None:
    assert not UserFunction(function).uses_global_generators
    assert UserFunction(lambda value: function(value)).uses_global_generators


@pytest.mark.parametrize("function", [sum, list, bytes, bytearray, sorted, max, next, iter, map, eval])
def test_built_in_functions_that_run_other_code_may_draw(function: Callable[[Any], Any]) -> None:
    assert UserFunction(function).uses_global_generators


def test_what_is_drawn_lazily_is_drawn_with_the_samples_own_seeds() -> None:
    shelf = Shelf(numbered(3))
    work = job(fields=("cls",), decode={"cls": lambda _: (random.random() for _ in range(3))}, transform={"cls": sum})
    first, again = (only_batch(work, shelf, shelf.task(("cls",)))[0].tolist() for _ in range(2))
    assert first == again
    assert len(set(first)) == 3


def test_functions_that_only_say_that_they_are_built_in_may_draw() -> None:
    names: dict[str, Any] = {}
    exec("class len:\n    def __call__(self, value): return 0", names)
    assert names["len"].__module__ == "builtins"
    assert UserFunction(names["len"]()).uses_global_generators


# -- failures ------------------------------------------------------------------------------------------------------


def failing(value: Any) -> Any:
    if value == 1:
        raise ValueError("a bad sample")
    return value


def test_a_transform_that_raises_fails_its_row_only() -> None:
    shelf = Shelf(numbered(4), per_shard=3)
    done, slots = run(job(fields=("cls", "npy"), transform={"cls": failing}), shelf, shelf.task(("cls", "npy")))
    (failure,) = done.pieces[0].failures
    assert (failure.row, failure.kind, failure.field, failure.fatal) == (1, "TransformError", "cls", False)
    assert (failure.shard, failure.sample) == (0, 1)
    assert failure.message == "the transform of field 'cls' raised ValueError: a bad sample"
    numbers, arrays = batch_of(done.pieces[0], slots)
    assert [numbers[row].item() for row in (0, 2, 3)] == [0, 2, 3]
    assert arrays[3].tolist() == [3] * 3


def test_bytes_that_cannot_be_decoded_fail_their_row_only() -> None:
    shelf = Shelf([{"cls": b"0"}, {"cls": b"x"}, {"cls": b"2"}, {"cls": b""}])
    done, slots = run(job(fields=("cls",)), shelf, shelf.task(("cls",)))
    assert [(failure.row, failure.kind, failure.fatal) for failure in done.pieces[0].failures] == [
        (1, "DecodeError", False),
        (3, "DecodeError", False),
    ]
    assert "cannot decode the bytes of field 'cls'" in done.pieces[0].failures[0].message
    assert done.pieces[0].failures[0].offset == shelf.table(["cls"], [1]).columns()[0].offsets[0]
    assert [batch_of(done.pieces[0], slots)[0][row].item() for row in (0, 2)] == [0, 2]


@pytest.mark.parametrize("names", [("txt", "cls", "npy"), ("cls", "txt", "npy"), ("npy", "txt", "cls")])
def test_the_first_field_that_fails_is_the_one_that_is_named(names: tuple[str, ...]) -> None:
    """And no row that has failed is touched again for another field."""
    touched: list[bytes] = []
    shelf = Shelf([{"cls": b"bad", "txt": b"\xff", "npy": b"bad"}, {"cls": b"1", "txt": b"t", "npy": npy([1])}])
    work = job(fields=names, decode={"npy": lambda data: touched.append(data) or np.zeros(1)})
    done, _ = run(work, shelf, shelf.task(names))
    (failure,) = done.pieces[0].failures
    assert failure.field == next(name for name in names if name != "npy")
    assert touched == [b"bad"] * (names[0] == "npy") + [npy([1])]


def test_a_field_that_a_tuple_lacks_fails_its_row() -> None:
    shelf = Shelf([{"cls": b"1", "txt": b"a"}, {"cls": b"2"}])
    done, _ = run(job(fields=("cls", "txt")), shelf, shelf.task(("cls", "txt")))
    (failure,) = done.pieces[0].failures
    assert (failure.row, failure.kind, failure.offset) == (1, "SampleError", MISSING)
    assert failure.message.startswith("the sample has no field 'txt'")


@pytest.mark.parametrize("transform", [None, {"cls": lambda value: value}])
def test_damaged_bytes_are_found_where_there_are_checksums(transform: Any) -> None:
    shelf = Shelf(numbered(3))
    crc32 = [zlib.crc32(shelf.samples[row]["cls"]) for row in range(3)]
    good = shelf.task(("cls",), crc32=crc32)
    work = job(fields=("cls",), transform=transform)
    assert only_batch(work, shelf, good)[0].tolist() == [0, 1, 2]
    crc32[1] ^= 1
    done, _ = run(work, shelf, shelf.task(("cls",), crc32=crc32))
    (failure,) = done.pieces[0].failures
    assert (failure.row, failure.kind) == (1, "DecodeError")
    assert "crc32 differs" in failure.message


@pytest.mark.parametrize("name", ["cls", "npy", "txt"])
@pytest.mark.parametrize("place", [(10**9, 3), (0, 10**9), (2, 10**9)])
def test_places_behind_the_end_of_a_shard_are_decode_errors(name: str, place: tuple[int, int]) -> None:
    shelf = Shelf([{**sample, "txt": b"text"} for sample in numbered(3)])
    task = shelf.task((name,))
    column = task.table.columns()[0]
    column.offsets[1], column.sizes[1] = place
    done, _ = run(job(fields=(name,)), shelf, task)
    (failure,) = done.pieces[0].failures
    assert (failure.row, failure.kind) == (1, "DecodeError")
    assert "beyond the end of the shard; run `streamload index`" in failure.message


@pytest.mark.parametrize("kind", [NameError, AttributeError, TypeError, ImportError, NotImplementedError, MemoryError])
def test_a_mistake_in_the_users_program_is_fatal(kind: type[Exception]) -> None:
    def mistaken(value: Any) -> Any:
        raise kind("a mistake")

    shelf = Shelf(numbered(1))
    for work in (
        job(fields=("cls",), transform={"cls": mistaken}),
        job(fields=("cls",), transform=mistaken),
        job(fields=("cls",), decode={"cls": mistaken}),
        job(fields=("cls",), decode={"cls": mistaken}, transform={"cls": failing}),
    ):
        done, _ = run(work, shelf, shelf.task(("cls",)))
        assert [failure.fatal for failure in done.pieces[0].failures] == [True]


@pytest.mark.parametrize("kind", [ValueError, KeyError, IndexError, OSError, RuntimeError, ZeroDivisionError])
def test_what_a_users_function_raises_because_of_the_data_is_not_fatal(kind: type[Exception]) -> None:
    def unhappy(value: Any) -> Any:
        raise kind("bad data")

    shelf = Shelf(numbered(1))
    for work in (
        job(fields=("cls",), transform={"cls": unhappy}),
        job(fields=("cls",), transform=unhappy),
        job(fields=("cls",), decode={"cls": unhappy}),
    ):
        done, _ = run(work, shelf, shelf.task(("cls",)))
        assert [failure.fatal for failure in done.pieces[0].failures] == [False]


def test_a_library_that_is_missing_is_fatal_in_our_own_decoders_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "msgpack", None)
    shelf = Shelf([{"msgpack": b"\x01"}])
    done, _ = run(job(fields=("msgpack",)), shelf, shelf.task(("msgpack",)))
    assert [(failure.kind, failure.fatal) for failure in done.pieces[0].failures] == [("DecodeError", True)]


def test_what_the_user_raised_is_the_cause_in_the_loop() -> None:
    shelf = Shelf(numbered(2))
    done, _ = run(job(fields=("cls",), transform={"cls": failing}), shelf, shelf.task(("cls",)))
    error = sample_error(done.pieces[0].failures[0], "/data/0.tar", "key1")
    assert isinstance(error, errors.TransformError)
    assert (error.url, error.key, error.offset) == (
        "/data/0.tar",
        "key1",
        int(shelf.table(["cls"], [1]).columns()[0].offsets[0]),
    )
    assert isinstance(error.__cause__, ValueError)
    notes = "\n".join(error.__cause__.__notes__)
    assert "in failing" in notes
    assert "shard '/data/0.tar', sample 'key1'" in notes


def test_interrupts_are_not_caught() -> None:
    def leave(sample: Any) -> Any:
        raise KeyboardInterrupt

    shelf = Shelf(numbered(1))
    with pytest.raises(KeyboardInterrupt):
        run(job(fields=("cls",), transform=leave), shelf, shelf.task(("cls",)))


def test_rows_that_killed_workers_are_not_touched_again() -> None:
    touched: list[int] = []
    shelf = Shelf(numbered(3))
    work = job(fields=("cls",), transform={"cls": lambda value: touched.append(value) or value})
    done, _ = run(work, shelf, shelf.task(("cls",), untried={1: "it was deadly"}))
    assert touched == [0, 2]
    (failure,) = done.pieces[0].failures
    assert (failure.row, failure.kind, failure.message, failure.sample) == (1, "SampleError", "it was deadly", 1)
    touched.clear()
    done, _ = run(job(fields=("cls", "npy")), shelf, shelf.task(("cls", "npy"), untried={0: "deadly"}))
    assert [failure.row for failure in done.pieces[0].failures] == [0]


def test_the_row_in_hand_is_noted_before_it_is_touched() -> None:
    progress = [-1, -1]
    seen: list[int] = []
    shelf = Shelf(numbered(4))
    task = shelf.task(("cls",))
    work = job(fields=("cls",), transform={"cls": lambda value: (seen.append(progress[0]), value)[1]})
    BatchMaker(work, slots_for(task)).run(task, shelf, progress)
    assert seen == [0, 1, 2, 3]
    assert progress[0] == -1, "while it collates, no row is in hand"


def test_the_answer_says_what_was_done() -> None:
    shelf = Shelf(numbered(5))
    done, _ = run(job(fields=("cls",)), shelf, shelf.task(("cls",), number=17))
    assert (done.number, done.rows, done.payload_bytes) == (17, 5, 5)
    assert done.costs.decode > 0
    assert done.costs.collate > 0


def test_failures_of_any_row_leave_the_others_right() -> None:
    """Every set of failing rows, over two batches, with a field that is read at once and one that is transformed."""
    shelf = Shelf(numbered(5), per_shard=2)

    for mask in range(32):
        bad = {row for row in range(5) if mask >> row & 1}

        def unless_bad(value: int, bad: set[int] = bad) -> int:
            if value in bad:
                raise ValueError
            return value

        work = job(fields=("cls", "npy"), transform={"cls": unless_bad})
        done, slots = run(work, shelf, shelf.task(("cls", "npy"), batches=(3, 2)))
        layout = next((piece.layout for piece in done.pieces if piece.layout), None)
        check_rows(done.pieces, bad, lambda piece, layout=layout, slots=slots: batch_of(piece, slots, layout))


def check_rows(pieces: tuple[PieceDone, ...], bad: set[int], batch: Callable[[PieceDone], Any]) -> None:
    first = 0
    for piece in pieces:
        rows = range(first, first + piece.piece.rows)
        failures: tuple[RowFailure, ...] = piece.failures
        assert [first + failure.row for failure in failures] == [row for row in rows if row in bad]
        if not bad.issuperset(rows):
            numbers, arrays = batch(piece)
            for row in rows:
                if row not in bad:
                    assert (int(numbers[row - first]), arrays[row - first].tolist()) == (row, [row] * 3)
        first += piece.piece.rows


def test_json_fields_are_collated_like_any_nest() -> None:
    shelf = Shelf([{"json": as_json({"a": [number, 2.5], "b": {"c": "x"}})} for number in range(2)])
    assert as_lists(only_batch(job(fields=("json",)), shelf, shelf.task(("json",)))) == [
        {"a": [[0, 1], [2.5, 2.5]], "b": {"c": ["x", "x"]}}
    ]


@pytest.mark.parametrize("per_shard", [1, 7, 8, 31, 32, 100])
def test_columns_read_at_once_and_one_by_one_are_the_same(per_shard: int) -> None:
    """Rows in any order, from few shards and from many."""
    shelf = Shelf(numbered(130), per_shard=per_shard)
    rows = np.random.default_rng(0).permutation(130).tolist()
    labels, arrays = only_batch(job(fields=("cls", "npy")), shelf, shelf.task(("cls", "npy"), rows))
    assert labels.tolist() == rows
    assert arrays.tolist() == [[row] * 3 for row in rows]
    single = job(fields=("cls", "npy"), transform=lambda sample: sample)
    for one, other in zip(only_batch(single, shelf, shelf.task(("cls", "npy"), rows)), (labels, arrays), strict=True):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
