"""From samples to batches: any samples make torch's batches, and each failure is that of its own sample."""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict, namedtuple
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from make_shards import write_samples
from same_batches import assert_same
from torch.utils.data import default_collate

from streamload import StreamLoader
from streamload.errors import CollateError, DecodeError, StreamloadError, TransformError
from streamload.images import Compose, Resize

WORKERS = pytest.mark.parametrize("workers", [0, 1])


class Box(NamedTuple):
    corner: Any
    size: Any


Single = namedtuple("Single", ["only"])


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"cls": number, "npy": np.full(3, number)} for number in range(count)]


def batches_of(source: str, batch_size: int, workers: int = 0, **options: Any) -> list[Any]:
    with StreamLoader(source, batch_size, num_workers=workers, **options) as loader:
        return list(loader)


# -- samples of all kinds ------------------------------------------------------------------------------------------

DTYPES = ["?", "u1", "i4", "i8", "f2", "f4", "f8", "c8"]

numbers = (
    st.integers(-5, 5) | st.floats(-2, 2) | st.booleans() | st.sampled_from([2**62, 2**63, -(2**63), float("inf")])
)
texts = st.text(max_size=3) | st.binary(max_size=3)
numpy_scalars = st.builds(lambda dtype, value: np.dtype(dtype).type(value), st.sampled_from(DTYPES), st.integers(0, 3))
shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (0, 4)])
arrays = st.tuples(st.sampled_from(DTYPES), shapes).flatmap(lambda kind: npst.arrays(*kind))
tensors = st.builds(
    lambda dtype, shape, fill: torch.full(shape, fill, dtype=dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    shapes,
    st.integers(0, 3),
)
refused = st.sampled_from([None, np.array(["a"]), np.array([None]), {1}, Ellipsis, np.datetime64("2020-01-01")])
leaves = numbers | texts | numpy_scalars | arrays | tensors

names = st.sampled_from(["a", "b", "__key__", 1])


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(names, children, max_size=3),
        st.dictionaries(names, children, max_size=2).map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Box, children, children),
        children.map(Single),
    )


samples = st.recursive(leaves | refused, nests, max_leaves=5)


def again(value: Any, draw: Any, *, odd: bool) -> Any:
    """A sample like another one: the same nest and kinds of leaves; with `odd` it may differ here and there."""
    if odd and draw(st.integers(0, 3)) == 0:
        return draw(samples)
    if isinstance(value, dict):
        kept = [key for key in value if not (odd and draw(st.integers(0, 7)) == 0)]
        return type(value)((key, again(value[key], draw, odd=odd)) for key in kept)
    if isinstance(value, Box | Single):
        return type(value)(*(again(item, draw, odd=odd) for item in value))
    if isinstance(value, list | tuple):
        items = [again(item, draw, odd=odd) for item in value]
        return type(value)([*items, draw(leaves)] if odd and draw(st.integers(0, 7)) == 0 else items)
    if isinstance(value, np.ndarray) and odd:
        return draw(arrays)
    if isinstance(value, bool | int | float | str | bytes) and draw(st.booleans()):
        return type(value)(draw(st.sampled_from([0, 1]))) if not isinstance(value, str | bytes) else value * 2
    return value


@st.composite
def rows_of_batches(draw: st.DrawFn) -> list[Any]:
    first = draw(samples)
    odd = draw(st.booleans())
    return [first, *(again(first, draw, odd=odd) for _ in range(draw(st.integers(0, 3))))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four samples, which a transform replaces by others."""
    return write_samples(tmp_path_factory.mktemp("rows"), numbered(4))


def ours(source: str, values: list[Any]) -> Any:
    """The batch that a loader makes of samples, or its error."""
    transform = values.__getitem__
    with StreamLoader(
        source, 4, fields=("cls",), transform=lambda sample: transform(sample[0] % len(values)), num_workers=0
    ) as loader:
        try:
            return next(iter(loader))
        except StreamloadError as error:
            return error


def torchs(values: list[Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that cannot be written to
            return default_collate([values[number % len(values)] for number in range(4)])
    except Exception as error:
        return error


@settings(max_examples=15, deadline=None)
@given(values=rows_of_batches())
@example(values=[[], []])
@example(values=[{}, {"a": 1}])
@example(values=[{"a": 1}, {"a": 1, "b": 2}])
@example(values=[["a"], [None]])
@example(values=["a", 1])
@example(values=[True, 2])
@example(values=[np.zeros(()), np.float64(1)])
@example(values=[1, 2**63])
@example(values=[[np.zeros(2), "a"], [np.zeros(2), "b"], [np.zeros(3), "c"]])
@example(values=[{"boxes": np.zeros((2, 4))}, {"boxes": np.zeros((0, 4))}])
def test_batches_of_any_samples_are_torchs(source: str, values: list[Any]) -> None:
    """Mappings of unlike keys are always refused; torch takes the first one's keys."""
    assume(all(value is not None for value in values))  # that is a transform without a `return`, and is told as that
    theirs, found = torchs(values), ours(source, values)
    if isinstance(found, StreamloadError):
        assert isinstance(theirs, Exception) or "missing" in str(found), f"torch makes {theirs} of it: {found}"
    else:
        assert not isinstance(theirs, Exception), f"torch refuses it ({theirs}), and we gave {found}"
        assert_same(found, theirs)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            [np.zeros(2), np.zeros(3)],
            "not like the first of its batch: the first is float64[2], this one is float64[3]",
        ),
        ([{"a": [1]}, {"a": [1, 2]}], "of its batch in ['a'][1]: the first is missing, this one is int"),
        ([2**70, 1], "the first is an integer beyond int64, this one is int"),
        ([2**70, 2**70], "holds an integer beyond int64, which cannot become a tensor"),
        ([(1, np.array(["x"]))], "holds <U1[1] in [1], which cannot become a tensor"),
        ([{"a": {"b": 1}}, {"a": {}}], "in ['a']['b']: the first is int, this one is missing"),
        ([np.zeros((4, 5, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)], "images.Resize((224, 224)), say)"),
    ],
)
def test_an_error_says_where_samples_differ(source: str, values: list[Any], said: str) -> None:
    assert said in str(ours(source, values))


def test_the_other_byte_order_is_converted(tmp_path: Path) -> None:
    source = write_samples(tmp_path, [{"npy": np.arange(3, dtype=">f4")}, {"npy": np.array(5, ">i2")}])
    with StreamLoader(source, 1, fields=("npy",), num_workers=0) as loader:
        (numbers,), (number,) = loader
    assert numbers.tolist() == [[0, 1, 2]]
    assert (number.tolist(), number.dtype) == ([5], torch.int16)


@pytest.mark.parametrize("depth", [200, 400, 900])
def test_a_deep_nest_is_collated_or_an_error(tmp_path: Path, depth: int) -> None:
    """Data must not be able to end the process by its depth."""
    source = write_samples(tmp_path, [{"json": b"[" * depth + b"]" * depth}])
    assert isinstance(outcome_of(source, 1, fields=("json",)), list | str)


# -- through a worker's memory -------------------------------------------------------------------------------------

PAIRS: list[Any] = [
    (torch.tensor([1 + 2j]).conj().imag, "b"),
    (torch.tensor(1.5).expand(3, 2), b"\x00\xff"),
    (torch.tensor(2.0, dtype=torch.bfloat16), ""),
    (np.arange(60, dtype=np.uint8).reshape(4, 5, 3).transpose(2, 0, 1), 1),
    (np.arange(60, dtype=np.uint8).reshape(4, 5, 3).transpose(2, 0, 1), 1.5),
    (np.array([1, 2], "u4"), True),
    (np.asfortranarray(np.ones((2, 3))), np.int16(4)),
    (Box(np.zeros((0, 4)), Single(1)), {"a": [1, "ä"], 2: ()}),
    (np.zeros(3), "again"),
    (np.zeros(3, "f4"), "x" * 100_000),
]


@WORKERS
def test_rows_of_changing_kinds_arrive_as_torch_collates_them(tmp_path: Path, workers: int) -> None:
    source = write_samples(tmp_path, numbered(2 * len(PAIRS)))
    found = batches_of(source, 2, workers, fields=("cls",), transform=lambda sample: PAIRS[sample[0] // 2])
    for batch, pair in zip(found, PAIRS, strict=True):
        assert_same(batch, default_collate([pair, pair]))
    assert found[3][0].is_contiguous(memory_format=torch.channels_last)


RESULTS: list[Any] = [
    torch.arange(6).reshape(2, 3),
    7,
    None,
    np.array(3.5),
    {},
    (np.zeros((0, 3)), torch.zeros(2, 0)),
    {"x": [torch.zeros(2), (1, "text", {"y": np.ones(3, np.int16)})], "z": None},
    Box(torch.zeros(2), Single(np.ones(2))),
    {1: torch.zeros(1), None: 2},
    torch.tensor([1.5, 2.5]).to(torch.bfloat16),
    torch.tensor([1 + 2j]).conj(),
    np.arange(5)[::-1],
    ["a", "\ud800", "日本"],
    np.array([None, 1]),
    np.zeros(2, [("x", "i4")]),
    np.array(["2020-01-01"], "datetime64[D]"),
    OrderedDict(a=torch.zeros(2)),
    {1, 2},
    [np.ones((2, 3)), np.ones((0, 4)), np.ones((5, 0))],
    [torch.ones(height, 5, 3).permute(2, 0, 1) for height in (4, 2, 7)],
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.zeros(3, 4).T,
]


def test_what_a_collate_fn_returns_arrives_as_it_was(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    odd = [torch.eye(3).to_sparse(), masked, torch.nn.Parameter(torch.ones(2)), lambda value: 2 * value]
    results = [*RESULTS, *odd]
    source = write_samples(tmp_path, numbered(len(results)))
    found = batches_of(source, 1, 1, fields=("cls",), collate_fn=lambda samples: results[samples[0][0]])
    for batch, result in zip(found, RESULTS, strict=False):
        assert_same(batch, result.resolve_conj() if isinstance(result, torch.Tensor) else result)
        if isinstance(result, torch.Tensor) and result.stride() != (0, 1):
            assert batch.stride() == result.stride()
    assert [tensor.stride() for tensor in found[19]] == [tensor.stride() for tensor in RESULTS[19]]
    sparse, came, parameter, function = found[-4:]
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert came.mask.tolist() == [True, False]
    assert isinstance(parameter, torch.nn.Parameter)
    assert function(4) == 8


def test_a_batch_that_cannot_be_sent_is_an_error(source: str) -> None:
    with pytest.raises(CollateError, match="cannot be sent to the training process: TypeError: cannot pickle"):
        batches_of(source, 4, 1, fields=("cls",), collate_fn=lambda samples: (value for value in samples))


# -- fields and functions ------------------------------------------------------------------------------------------

INTEGER_TEXTS = st.one_of(
    st.integers(-(10**18) + 1, 10**18 - 1).map(lambda n: str(n).encode()),
    st.integers(0, 99).map(lambda n: str(n).encode()),
    st.sampled_from([b"", b"x", b"-", b"-0", b"007", b" 1", b"1\n", b"+1", b"1_0", b"1" * 19]),
)
NPY = st.tuples(st.sampled_from([*DTYPES, ">f4"]), st.sampled_from([(), (3,), (2, 3)]), st.sampled_from("CF"))


@settings(max_examples=8, deadline=None)
@given(texts=st.lists(INTEGER_TEXTS, min_size=1, max_size=6), npy=NPY, other=NPY, seed=st.integers(0, 3))
def test_columns_are_decoded_as_single_values(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], npy: Any, other: Any, seed: int
) -> None:
    """Numbers and arrays are decoded a column at a time where no function sees them."""
    members = []
    for number, text in enumerate(texts):
        dtype, shape, order = other if number == 3 else npy
        members.append({"cls": text, "npy": np.full(shape, number, dtype, order)})
    folder = write_samples(tmp_path_factory.mktemp("columns"), members, max_count=2)
    for field in ("cls", "npy"):
        plain, single = (
            outcome_of(folder, len(texts), fields=(field,), shuffle=True, seed=seed, on_error="skip", **options)
            for options in ({}, {"transform": lambda sample: sample})
        )
        if isinstance(plain, str):
            assert plain == single
        else:
            assert_same(plain, single)


def outcome_of(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that were left out
        try:
            return batches_of(*arguments, **options)
        except StreamloadError as error:
            return f"{type(error).__name__} {error.key}"


def test_functions_see_what_decoders_return(tmp_path: Path) -> None:
    seen: list[Any] = []
    source = write_samples(tmp_path, [{"cls": 1, "npy": np.float32(2), "txt": "a"}] * 3)
    fields = ("cls", "npy", "txt")
    batches_of(source, 3, fields=fields, transform=lambda sample: (seen.append(sample), 0)[1])
    batches_of(source, 3, fields=fields, collate_fn=seen.extend)
    assert [tuple(type(value) for value in sample) for sample in seen] == [(int, np.ndarray, str)] * 6


def test_arrays_that_a_function_changes_are_its_own(tmp_path: Path) -> None:
    def change(sample: tuple[Any]) -> Any:
        sample[0][0] += 10
        return sample

    source = write_samples(tmp_path, [{"npy": np.array([1, 2, 3])}] * 3)
    for _ in range(2):
        assert batches_of(source, 3, fields=("npy",), transform=change)[0][0].tolist() == [[11, 2, 3]] * 3


@pytest.mark.parametrize("argument", ["decode", "transform"])
@pytest.mark.parametrize("shape", [(), (3,), (2000,)])
@pytest.mark.parametrize("memories", [1, 3])
@pytest.mark.parametrize("fresh", [0, 2, 5])
def test_a_function_may_return_the_same_arrays_again(
    tmp_path: Path, argument: str, shape: tuple[int, ...], memories: int, fresh: int
) -> None:
    memory, calls = np.empty((memories, *shape), np.int64), count(-fresh)

    def fill(value: Any) -> Any:
        call, number = next(calls), int(value)
        array = np.empty(shape, np.int64) if call < 0 else memory[call % memories, ...]
        array[...] = number
        if number == 1:
            raise ValueError
        return array if number < 20 or not shape else array[:2]

    options = {"fields": ("cls",), argument: {"cls": fill}, "on_error": "skip"}
    with StreamLoader(write_samples(tmp_path, numbered(40)), 4, num_workers=0, **options) as loader:
        for _ in range(2):  # in the second pass the shapes are known
            found = [row.flatten()[0].item() for (batch,) in loader for row in batch]
            assert found == [0, *range(2, 40)]


class Fill:
    """Makes an array of a number, in `out` where that fits, and raises half-way for some numbers."""

    writes_into_out = True

    def __init__(self, lengths: list[int], bad: set[int]) -> None:
        self.lengths, self.bad = lengths, bad

    def __call__(self, number: int, out: Any = None) -> Any:
        length = self.lengths[number // 4]
        result = out if out is not None and out.shape == (length,) else np.empty(length, np.int64)
        result[:] = number
        if number in self.bad:
            raise ValueError
        return result


@pytest.fixture(scope="module")
def two_fields(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fields")
    return write_samples(folder, [{"a.cls": number, "b.cls": number} for number in range(32)])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 700]), st.sampled_from([1, 3, 1100])), min_size=8, max_size=8),
    st.sets(st.integers(0, 31), max_size=4),
)
def test_the_batches_of_a_task_may_have_other_shapes(
    two_fields: str, lengths: list[tuple[int, int]], bad: set[int]
) -> None:
    """Rows are written where the batch before had them, which may be the wrong place; some are made by half."""
    a, b = (Fill(list(each), bad) for each in zip(*lengths, strict=True))
    options = {"fields": ("a.cls", "b.cls"), "transform": {"a.cls": a, "b.cls": b}, "on_error": "skip", "pad": False}
    with StreamLoader(two_fields, 4, num_workers=0, **options) as loader:
        for _ in range(2):  # in the second pass several batches make a task
            found = [tuple(values.tolist() for values in batch) for batch in loader]
            good = [[n for n in range(start, start + 4) if n not in bad] for start in range(0, 32, 4)]
            assert found == [tuple([f(n).tolist() for n in some] for f in (a, b)) for some in good if some]


@pytest.mark.parametrize(
    ("transform", "values"),
    [
        ({"txt": lambda value: len(value)}, [2, 7, 3]),
        ({"txt": len, "cls": lambda value: -value}, [2, -7, 3]),
        ({"cls; txt": str}, ["ab", "7", "abc"]),
    ],
)
def test_a_transform_of_an_alternative_sees_only_samples_that_have_it(
    tmp_path: Path, transform: Any, values: list[Any]
) -> None:
    source = write_samples(tmp_path, [{"txt": "ab"}, {"cls": 7}, {"txt": "abc"}])
    ((found,),) = batches_of(source, 3, fields=("cls;txt",), transform=transform)
    assert list(found) == values


def test_a_transform_of_a_field_is_not_called_where_a_dict_lacks_it(tmp_path: Path) -> None:
    source = write_samples(tmp_path, [{"cls": 1, "txt": "a"}, {"txt": "b"}])
    (found,) = batches_of(source, 2, transform={"cls": lambda value: value + 1}, collate_fn=list)
    assert [(sample.get("cls"), sample["txt"]) for sample in found] == [(2, "a"), (None, "b")]


def test_a_transform_that_returns_nothing_is_an_error_but_for_a_collate_fn(source: str) -> None:
    options: dict[str, Any] = {"fields": ("cls",), "transform": {"cls": [0, None, 2, 3].__getitem__}}
    with pytest.raises(TransformError, match="returned None"):
        batches_of(source, 4, **options)
    assert batches_of(source, 4, collate_fn=list, **options) == [[(0,), (None,), (2,), (3,)]]


def test_a_transform_of_one_field_that_gets_the_whole_sample_is_explained(source: str) -> None:
    with pytest.raises(TransformError, match=r"whole sample: for one field, give \{'cls': function\}"):
        batches_of(source, 4, fields=("cls",), transform=abs)


def test_what_starts_from_encoded_images_gets_what_a_given_decoder_makes(tmp_path: Path) -> None:
    class Sized:
        def __call__(self, value: Any) -> Any:
            return value

        def from_encoded(self, data: memoryview, rng: Any) -> Any:
            return len(data)

    source = write_samples(tmp_path, [{"png": b"12"}])
    options: dict[str, Any] = {"fields": ("png",), "transform": {"png": Sized()}}
    assert batches_of(source, 1, **options)[0][0].tolist() == [2]
    assert batches_of(source, 1, decode={"png": int}, **options)[0][0].tolist() == [12]


@pytest.fixture
def unlike(tmp_path: Path) -> str:
    return write_samples(tmp_path, [{("npy" if n % 2 else "seg.npy"): np.full(2, n), "cls": n} for n in range(6)])


def test_keys_and_urls_may_stand_among_the_fields(unlike: str) -> None:
    fields = ("cls", "__key__", "npy;seg.npy", "__url__")
    labels, keys, values, urls = batches_of(unlike, 3, fields=fields)[0]
    assert labels.tolist() == [0, 1, 2]
    assert keys == ("000000", "000001", "000002")  # a tuple, as default_collate has it
    assert values.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert urls == (f"{unlike}/shard-000000.tar",) * 3
    assert batches_of(unlike, 6, 1, fields=("__key__",)) == [[tuple(f"{number:06d}" for number in range(6))]]


@pytest.mark.parametrize("fields", [("npy; seg.npy ", "txt ; bin?"), (".NPY;Seg.npy", ".TXT;BIN?")])
def test_blanks_dots_and_case_mean_nothing(unlike: str, fields: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"decode": {"npy; SEG.npy": len}, "transform": {" .seg.npy ;NPY": float}}
    ((sizes, absent),) = batches_of(unlike, 6, fields=fields, **options)
    assert sizes.tolist() == [144] * 6
    assert absent == (None,) * 6


def test_bytes_where_nothing_is_decoded(unlike: str) -> None:
    assert batches_of(unlike, 6, 1, fields=("cls",), decode=False) == [[(b"0", b"1", b"2", b"3", b"4", b"5")]]


# -- randomness ----------------------------------------------------------------------------------------------------


def draws_with_rng(sample: Any, rng: np.random.Generator) -> Any:
    return rng.integers(1 << 62, size=3)


def test_fields_of_one_sample_draw_from_one_generator_in_turn(tmp_path: Path) -> None:
    source = write_samples(tmp_path, [{"cls": 1, "txt": "a"}])
    options: dict[str, Any] = {"fields": ("cls", "txt")}
    one, other = batches_of(source, 1, transform=dict.fromkeys(("cls", "txt"), draws_with_rng), **options)[0]
    alone, _ = batches_of(source, 1, transform={"cls": draws_with_rng}, **options)[0]
    assert one.tolist() == alone.tolist() != other.tolist()


def test_functions_in_a_chain_are_seeded_as_they_are_alone(tmp_path: Path) -> None:
    source = write_samples(tmp_path, [{"png": np.full((9, 9, 3), number, np.uint8)} for number in range(20)])

    def drawn(transform: Any, workers: int) -> list[int]:
        batches = batches_of(source, 5, workers, fields=("png",), transform={"png": transform})
        return [number for (batch,) in batches for number in batch.tolist()]

    def noise(_: Any) -> Any:
        return np.array(random.randint(0, 10**6))

    alone = drawn(noise, 0)
    assert len(set(alone)) == 20
    assert drawn(Compose([noise]), 0) == drawn(Compose([Resize(4), noise]), 0) == alone
    assert drawn(Compose([Resize(4), noise]), 1) == alone


@pytest.mark.exhaustive
def test_code_that_imports_torch_in_a_worker_draws_seeded_numbers(tmp_path: Path) -> None:
    """And what it has changed in place before is not changed twice."""
    source = write_samples(tmp_path, [{"npy": np.ones(2)}, {"npy": np.ones(2), "txt": "x"}] * 6)

    def draw(sample: Any) -> Any:
        sample["npy"] += 10

        import torch  # no worker has it before

        return [float(sample["npy"][0]), float(torch.rand(()))]

    def drawn(num_workers: int) -> list[Any]:
        return [[column.tolist() for column in batch] for batch in batches_of(source, 2, num_workers, transform=draw)]

    assert drawn(1) == drawn(0)
    assert [values for values, _ in drawn(0)] == [[11.0, 11.0]] * 6


def test_a_collate_fn_draws_from_the_generators_of_its_first_sample(source: str) -> None:
    def collate(samples: list[Any]) -> Any:
        return [*random.choices(range(1 << 30), k=2), float(np.random.rand())]

    in_workers, here = (batches_of(source, 2, workers, fields=("cls",), collate_fn=collate) for workers in (1, 0))
    assert in_workers == here
    assert here[0] != here[1]


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate_fn", [None, lambda samples: default_collate(samples)])
def test_failures_of_any_samples_leave_the_others_right(tmp_path: Path, collate_fn: Any) -> None:
    """Every set of failing samples, over two batches, with a field that is read at once and one that is transformed."""
    source = write_samples(tmp_path, numbered(5), max_count=2)
    bad: set[int] = set()

    def unless_bad(value: int) -> int:
        if value in bad:
            raise ValueError
        return value

    options: dict[str, Any] = {"fields": ("cls", "npy"), "transform": {"cls": unless_bad}, "collate_fn": collate_fn}
    for mask in range(31):
        bad = {row for row in range(5) if mask >> row & 1}
        with StreamLoader(source, 3, num_workers=0, on_error="skip", pad=False, **options) as loader:
            rows = [(n, *row) for labels, npy in loader for n, row in zip(labels.tolist(), npy.tolist(), strict=True)]
            assert rows == [(number,) * 4 for number in range(5) if number not in bad]
            assert [error.key for error in loader.skipped] == [f"{number:06d}" for number in sorted(bad)]


@pytest.mark.parametrize("fields", [("txt", "cls", "npy"), ("cls", "txt", "npy"), ("npy", "txt", "cls")])
def test_the_first_field_that_fails_is_named(tmp_path: Path, fields: tuple[str, ...]) -> None:
    """And no other field of the sample is touched."""
    touched: list[bytes] = []
    source = write_samples(tmp_path, [{"cls": b"bad", "txt": b"\xff", "npy": b"bad"}])
    decode = {"npy": lambda data: touched.append(data) or np.zeros(1)}
    with pytest.raises(DecodeError, match=f"of field '{next(name for name in fields if name != 'npy')}'"):
        batches_of(source, 1, fields=fields, decode=decode)
    assert touched == [b"bad"] * (fields[0] == "npy")


@pytest.mark.parametrize("how", ["field", "sample", "decode"])
def test_a_mistake_in_the_program_is_fatal_and_bad_data_is_not(source: str, how: str) -> None:
    kind: type[Exception] = Exception

    def fails(value: Any) -> Any:
        if value in (1, b"1", (1,)):
            raise kind("no")
        return value if how != "decode" else int(value)

    given: Any = {"transform": fails} if how == "sample" else {how.replace("field", "transform"): {"cls": fails}}
    with StreamLoader(source, 4, fields=("cls",), num_workers=0, on_error="skip", **given) as loader:
        for kind in (NameError, AttributeError, TypeError, ImportError, NotImplementedError, MemoryError):
            with pytest.raises((TransformError, DecodeError), match="counts as a mistake in the program: raise Value"):
                list(loader)
        for kind in (ValueError, KeyError, IndexError, OSError, RuntimeError, ZeroDivisionError, StopIteration):
            assert [batch[0].tolist() for batch in loader] == [[0, 2, 3]]
    with pytest.raises((TransformError, DecodeError), match="(raised|cls':) StopIteration: no"):
        batches_of(source, 4, fields=("cls",), **given)


def test_a_library_that_is_missing_is_fatal_in_our_decoders_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    source = write_samples(tmp_path, [{"msgpack": b"\x01"}])
    with pytest.raises(DecodeError, match=r'msgpack.*pip install "streamload\[codecs\]"'):
        batches_of(source, 1, fields=("msgpack",), on_error="skip")


@pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes that the kernel has read")
@pytest.mark.parametrize("options", [{"collate_fn": len}, {"decode": {"npy": len}}])
def test_large_arrays_are_read_once_in_the_callers_process(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_samples(tmp_path, [{"npy": np.zeros(50_000 + number)} for number in range(16)])

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    batches_of(source, 8, fields=("npy",), **options)
    assert bytes_read() - before < 1.5 * 16 * 400_000
