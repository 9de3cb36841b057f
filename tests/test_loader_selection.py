"""`where` and optional fields: which samples take part, exactly and before batches are made."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_samples
from matrix import exhaustive
from servers.faults import FaultServer
from typer.testing import CliRunner

from streamload import Mixture, Portion, ShardWriter, StreamLoader, TarDataset
from streamload.cli.main import app
from streamload.errors import CollateError, DatasetIndexError, LoaderStateError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SAMPLES = 500
NUMBERS = range(SAMPLES)


def has_text(number: int) -> bool:
    return number % 3 > 0


def size(number: int) -> int:
    return 100 + number % 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample n has the label n % 10, n % 50 + 100 bytes, two thirds have a text, and all have some metadata."""
    place = tmp_path_factory.mktemp("selection") / "shards"
    with ShardWriter(place, max_count=60) as writer:
        for number in NUMBERS:
            score = {"score": number / 100} if number % 7 else {}
            about = {**score, "twice": number * 2, "about": {"lang": "en" if number % 2 else "de"}}
            sample = {"__key__": key(number), "bin": bytes(size(number)), "cls": number % 10, "json": about}
            writer.write(sample | ({"txt": f"text {number}"} if has_text(number) else {}))
    for columns in ("json:score,json:about.lang", "json:twice"):  # the second is added to the first
        assert CliRunner().invoke(app, ["index", str(place), "--columns", columns]).exit_code == 0
    return place


def key(number: int) -> str:
    return f"{number:05d}"


def loader_of(urls: Any, **options: Any) -> StreamLoader:
    return StreamLoader(urls, **{"batch_size": 16, "fields": ("__key__",), "num_workers": 0, **options})


def selected(urls: Any, **options: Any) -> list[int]:
    """The samples of an epoch; all batches but the last are full, and there are as many as `len` says."""
    with loader_of(urls, **options) as loader:
        batches = [[int(name) for name in keys] for (keys,) in loader]
        assert len(loader) == len(batches)
        assert {"weights", "sampler"} & options.keys() or len(loader.dataset) == sum(map(len, batches))
    assert {len(batch) for batch in batches[:-1]} <= {16}
    return [number for batch in batches for number in batch]


CONDITIONS: list[tuple[Any, Callable[[int], bool]]] = [
    ('"txt"', has_text),
    ('not "txt" and label in (1, 2)', lambda n: not has_text(n) and n % 10 in (1, 2)),
    ("2 <= label < 5 or key == '00007'", lambda n: 2 <= n % 10 < 5 or n == 7),
    ("size.txt < 8", lambda n: has_text(n) and n < 100),
    ("score > 1.5", lambda n: n % 7 > 0 and n > 150),
    ("not score > 1.5", lambda n: n % 7 > 0 and n <= 150),
    ("not (score > 1.5 and label == 3)", lambda n: n % 10 != 3 or (n % 7 > 0 and n <= 150)),
    (f"-{10**400} < label not in (3, {10**20})", lambda n: n % 10 != 3),
    ("about.lang == 'en' and label not in (3, 5)", lambda n: n % 2 == 1 and n % 10 not in (3, 5)),
    ("twice // 2 % 100 == -(-5)", lambda n: n % 100 == 5),
    ("size.txt != 8", lambda n: has_text(n) and len(f"text {n}") != 8),
    ("score != 1.5 and score not in (2.5, 3)", lambda n: n % 7 > 0 and n not in (150, 250, 300)),
    (lambda columns: (columns["label"] == 3) & columns["has.txt"], lambda n: n % 10 == 3 and has_text(n)),
]


@pytest.mark.parametrize(("where", "takes_part"), CONDITIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_condition(folder: Path, where: Any, takes_part: Callable[[int], bool]) -> None:
    expected = list(filter(takes_part, NUMBERS))
    assert selected(folder, where=where) == expected
    shuffled = selected(folder, where=where, shuffle=True)
    assert sorted(shuffled) == expected != shuffled
    dataset = TarDataset(folder, fields=("__key__",), where=where)
    assert [int(name) for (name,) in dataset] == expected
    assert dataset[-1] == (key(expected[-1]),)


def test_the_order_is_that_without_a_condition_and_without_an_index(folder: Path, tmp_path: Path) -> None:
    assert selected(folder, shuffle=True, where="label >= 0") == selected(folder, shuffle=True)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns(".streamload"))
    where = '"txt" and size.bin > 120 and label < 7'
    expected = selected(folder, where=where, shuffle=True)
    assert selected(bare, where=where, shuffle=True) == expected
    with FaultServer(bare) as server:
        urls = f"{server.url}/shard-{{000000..000008}}.tar"
        assert selected(urls, where=where, shuffle=True) == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_what_is_selected_and_another_number_of_them_resumes(folder: Path, world_size: int) -> None:
    options: dict[str, Any] = {"where": '"txt"', "shuffle": 50, "lanes": 2, "seed": 3}
    got: list[int] = []
    counts = set()
    for rank in range(world_size):
        with loader_of(folder, **options, batch_size=6, rank=rank, world_size=world_size) as loader:
            batches = iter(loader)
            got += [int(name) for _ in range(4) for name in next(batches)[0]]
            state = loader.state_dict()
            counts.add(len(loader))
    assert len(counts) == 1, "ranks keep step"
    for rank in range(4):
        with loader_of(folder, **options, batch_size=6, rank=rank, world_size=4, pad=False) as loader:
            loader.load_state_dict(state)
            got += [int(name) for (keys,) in loader for name in keys]
    assert sorted(got) == list(filter(has_text, NUMBERS))


def test_a_state_of_another_selection_is_refused(folder: Path) -> None:
    with loader_of(folder, where="label == 3") as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert "epoch_size" not in state
    for other in ({"where": "label == 4"}, {}):
        with loader_of(folder, **other) as loader, pytest.raises(LoaderStateError, match="selection was"):
            loader.load_state_dict(state)


def test_keys(folder: Path, tmp_path: Path) -> None:
    wanted = [499, 3, 77]
    for keys in (map(key, wanted), set(map(key, wanted)), np.array(list(map(key, wanted)))):
        assert selected(folder, where=keys) == sorted(wanted)
    (tmp_path / "ids.txt").write_text("\n".join(map(key, wanted)) + "\n")
    assert selected(folder, where=tmp_path / "ids.txt") == sorted(wanted)


def test_a_split_by_fraction_is_decided_by_keys_alone(folder: Path) -> None:
    train, test = (selected(folder, where=f"fraction {sign} 0.8") for sign in ("<", ">="))
    assert sorted([*train, *test]) == list(NUMBERS)
    assert 0.7 < len(train) / SAMPLES < 0.9
    half = folder / "shard-{000000..000003}.tar"
    assert selected(half, where="fraction < 0.8") == [number for number in train if number < 240]
    assert selected(folder, where="fraction(1) < 0.8") not in (train, list(NUMBERS))


def test_with_weights_samplers_and_epoch_sizes(folder: Path) -> None:
    few = {"where": "label in (1, 2) and (label == 1 or size.bin > 130)", "shuffle": True}
    members = set(selected(folder, **few))
    drawn = Counter(number % 10 for number in selected(folder, **few, weights="balanced", epoch_size=200))
    assert drawn == {1: 100, 2: 100}
    weights = np.arange(SAMPLES, dtype=float)
    assert set(selected(folder, **few, weights=weights)) <= members
    assert selected(folder, where="label == 3", sampler=[4, 0, 4]) == [43, 3, 43]
    by_label = dict.fromkeys(range(10), 1.0)
    assert set(selected(folder, **few, weights=by_label)) <= members
    with loader_of(folder, **few, epoch_size=20) as loader:
        epochs = [[int(name) for (keys,) in loader for name in keys] for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [20] * 4
    counts = Counter(sum(epochs, []))
    assert set(counts) <= members
    assert max(counts.values()) - min(counts[number] for number in members) <= 1, "all in turn"


def test_portions_of_a_mixture(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    mixture = Mixture(
        {"a": Portion(folder, 0.5, where="label == 1"), "b": Portion(other, 0.5, where=[key(22), key(32)])}
    )
    with loader_of(mixture, shuffle=True) as loader:
        numbers = Counter(int(name) for (keys,) in loader for name in keys)
    assert sum(numbers.values()) == 52
    assert {number for number in numbers if number % 10 != 1} == {22, 32}
    assert numbers[22] == numbers[32] == 13
    with pytest.raises(ValueError, match="Mixture don't go together; give each dataset its own: Portion"):
        loader_of(mixture, where="label == 1")


def test_only_parts_with_selected_samples_are_fetched(tmp_path: Path) -> None:
    samples = [{"bin": bytes([number]) * 1_000_000, "cls": number} for number in range(60)]
    write_samples(tmp_path / "large", samples, max_count=30)
    with FaultServer(tmp_path / "large") as server:
        urls = f"{server.url}/shard-{{000000..000001}}.tar"
        assert selected(urls, fields=("__key__", "bin"), where="label == 59", collate_fn=keys_of) == [59]
        asked = [path for method, path, _ in server.report().log if method == "GET" and path.endswith(".tar")]
        assert asked == ["/shard-000001.tar"]
        assert server.report().sent_bytes < 10_000_000


def keys_of(samples: list[tuple[str, bytes]]) -> list[list[str]]:
    return [[name for name, content in samples if len(content) == 1_000_000]]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"where": "nothing > 1"}, DatasetIndexError, r"index: `streamload index --columns json:nothing` \("),
        ({"where": "json.a.b > 1"}, DatasetIndexError, r"`streamload index --columns json:a\.b` \("),
        ({"where": "label = 3"}, ValueError, r"\(invalid syntax\).* == \(not =\)"),
        ({"where": '"cls" == 1'}, ValueError, r"names no column \(quotes make a string\)"),
        ({"where": "__import__('os').system('x')"}, ValueError, "is not a condition; a condition is made of"),
        ({"where": "[x for x in (1,)] == 1"}, ValueError, "is not supported"),
        ({"where": "label.__class__ == 1"}, DatasetIndexError, "there is no column 'label.__class__'"),
        ({"where": "label"}, TypeError, "`label` is not a condition, since it has numbers or strings; compare it"),
        ({"where": "label == 'three'"}, TypeError, "strings cannot be compared with numbers"),
        ({"where": "1 < 'a' and label > 0"}, TypeError, "strings cannot be compared with numbers"),
        ({"where": "1 < 'a' and 'cls'"}, TypeError, "strings cannot be compared with numbers"),
        ({"where": "label in key"}, ValueError, "is not a list"),
        ({"where": "label > 50"}, ValueError, "selects none of 500 samples"),
        ({"where": "class_name == 'cat'"}, ValueError, r"needs a classes\.json beside the shards: "),
        ({"where": lambda columns: columns["label"]}, TypeError, "must return one truth value for each of 500"),
        ({"where": ["00001", "zebra"]}, ValueError, "where= has 1 key that no sample has, such as zebra"),
        ({"where": [1]}, TypeError, "keys are strings"),
        ({"where": []}, ValueError, "where= has no keys"),
        ({"where": Path("no such file")}, ValueError, "must name a file of keys, one per line, but it cannot be read"),
        ({"where": 5}, TypeError, "must be a condition such as .*, a function, or keys"),
        (
            {"where": 'not "caption"'},
            DatasetIndexError,
            "the field 'caption', which no sample has; the fields are bin, cls",
        ),
        ({"where": lambda columns: dict(columns)}, TypeError, "columns are looked up by name"),
        (
            {"where": "label == 3", "weights": np.ones(50), "shuffle": True},
            ValueError,
            "50 numbers, but the dataset has 500",
        ),
        ({"fields": ("txt", "txt?")}, ValueError, "'txt' is not valid"),
        ({"fields": ("txt?;bin",)}, ValueError, "'txt\\?;bin' is not valid"),
    ],
)
def test_what_makes_no_sense(folder: Path, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        loader_of(folder, **options)


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("cls == 1", "'cls' (write label, which is the integer in the field cls): "),
        ("lable == 1", "'lable' (did you mean 'label'?): "),
        ("json == 3", "'json' (for the field json, write \"json\" in quotes for its presence, size.json for its size)"),
    ],
)
def test_a_column_that_is_not_there_is_refused_with_what_may_be_meant(folder: Path, where: str, hint: str) -> None:
    says = (
        rf"there is no column {re.escape(hint)}.*the index has about.lang, score, twice; key, label,.*--columns json:"
    )
    with pytest.raises(DatasetIndexError, match=says):
        loader_of(folder, where=where)


def test_a_class_that_is_not_there_is_refused_with_those_there_are(folder: Path, tmp_path: Path) -> None:
    named = shutil.copytree(folder, tmp_path / "named")
    (named / "classes.json").write_text('{"classes": ["house", "dog", "tree", "3", "4", "5", "6", "7", "8", "9"]}')
    says = "where= compares class_name with 'zebra', which .*; the classes are 'house', 'dog', 'tree'"
    with pytest.raises(ValueError, match=says):
        loader_of(named, where="class_name not in ('dog', 'zebra')")
    assert selected(named, where="class_name in ('dog', 'house')") == selected(folder, where="label < 2")
    between = selected(named, where="class_name > 'horse' and class_name < 'housf'")
    assert between == selected(folder, where="label == 0")


def test_columns_are_not_taken_for_those_of_shards_written_since(folder: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(folder, newer)
    write_samples(newer / "more-%03d.tar", [{"__key__": "new", "cls": 1}])
    with pytest.raises(DatasetIndexError, match="'score' has no values for this shard, which is newer"):
        loader_of(newer, where="score > 1")
    assert len(selected(newer / "shard-*.tar", where="score > 1")) == len([n for n in NUMBERS if n % 7 and n > 100])


class Trap:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("made",))


def test_nothing_in_a_file_of_columns_is_executed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "copy")
    np.savez("copy/.streamload/columns.npz", score=np.array([Trap()]))
    with pytest.raises(DatasetIndexError, match="the columns cannot be read"):
        loader_of("copy", where="score > 1")
    assert not Path("made").exists()


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_optional_fields(folder: Path, workers: int) -> None:
    expected = [f"text {number}" if has_text(number) else None for number in NUMBERS]
    with loader_of(folder, fields=("txt?", "cls"), num_workers=workers) as loader:
        assert [text for texts, _ in loader for text in texts] == expected
    upper = {"txt": str.upper}
    with loader_of(folder, fields=("txt?", "cls"), num_workers=workers, transform=upper) as loader:
        assert [text for texts, _ in loader for text in texts] == [text and text.upper() for text in expected]
    assert TarDataset(folder, fields=("cls", "txt?"))[3] == (3, None)
    with pytest.raises(ValueError, match="every sample has __key__"):
        loader_of(folder, fields=("__key__?",))


def test_on_the_command_line(folder: Path) -> None:
    for columns, message in (
        ("score", "write FIELD:NAME"),
        ("json:about", "has values of dict"),
        ("jsn:score", "no sample has a value for 'score'"),
        ("json:label", "has a special meaning"),
    ):
        failed = CliRunner().invoke(app, ["index", str(folder), "--columns", columns])
        assert failed.exit_code == 2
        assert message in " ".join(failed.output.split())


def test_an_optional_number_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    write_samples(tmp_path / "some", [{"txt": "text"} | ({"cls": n} if n % 2 else {}) for n in range(20)])
    with loader_of(tmp_path / "some", fields=("txt", "cls?")) as loader, pytest.raises(CollateError) as caught:
        next(iter(loader))
    message = "in ['cls']: the first is None, this one is int; make samples alike in transform= (None mixes only with"
    assert message in str(caught.value)
    filled = loader_of(
        tmp_path / "some", fields=("cls?",), transform=lambda sample: -1 if sample[0] is None else sample[0]
    )
    with filled as loader:
        assert next(iter(loader)).tolist()[:4] == [-1, 1, -1, 3]
