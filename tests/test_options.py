"""Wrong and unknown arguments: each is refused where it is given, with its name, its value, and what would be right."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
from make_shards import write_numbers
from torch.utils.data import DataLoader

from streamload import Mixture, ShardWriter, StreamLoader, TarDataset
from streamload.arguments import parse_bytes
from streamload.errors import ShardFormatError
from streamload.images import RandomResizedCrop
from streamload.options import Options, rank_and_world_size
from streamload.text import counted, listed, printable
from streamload.workers.launchers import available_processors

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(StreamLoader).parameters.items()}


def options(**changes: Any) -> Options:
    return Options.among({**DEFAULTS, "num_workers": 2, **changes})


def function(value: Any) -> Any:
    return value


def two_arguments(image: Any, label: Any) -> Any:
    return image, label


def three_arguments(key: str, image: Any, label: Any) -> Any:
    return key, image, label


def no_argument() -> None:
    pass


def named(value: Any) -> str:
    """The same in every process: without addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:30]


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    *[(name, 0, ValueError, "at least 1") for name in ("batch_size", "prefetch_batches", "lanes")],
    ("lanes", 10**8, ValueError, "at most 1,048,576 or None"),
    ("shuffle", 10**30, ValueError, "at most"),
    ("num_workers", 100_000, ValueError, 'at most 1,024 (or "auto", the default'),
    ("shuffle", 0, ValueError, "at least 1 (the window, in samples), or True or False"),
    *[("shuffle", value, TypeError, "or True or False") for value in (1.5, "yes")],
    *[(name, -1, ValueError, "at least 0") for name in ("num_workers", "seed")],
    *[
        (name, value, TypeError, "must be an integer of at least")
        for name in ("batch_size", "prefetch_batches", "seed", "lanes", "num_workers")
        for value in (1.5, "four", True, [1])
    ],
    *[(name, None, TypeError, "must be an integer") for name in ("prefetch_batches", "seed")],
    ("batch_size", None, TypeError, "single samples use streamload.TarDataset"),
    *[
        (name, value, TypeError, "must be True or False")
        for name in ("drop_last", "pad", "verify")
        for value in (1, 0, None, "yes")
    ],
    *[("on_error", value, ValueError, "'raise', 'skip', 'replace'") for value in ("ignore", None, print, {})],
    *[(name, 3, TypeError, "must be a function, or None") for name in ("collate_fn", "worker_init_fn")],
    *[("decode", value, TypeError, "mapping from extensions to functions") for value in (None, "jpg", function, 1)],
    ("decode", {"jpg": 3}, TypeError, "must map an extension to a function; it has 'jpg': 3"),
    ("decode", {1: function}, TypeError, "must map an extension to a function; it has 1"),
    *[("transform", value, TypeError, "a mapping from fields to functions") for value in (3, "crop", [function])],
    ("transform", {"jpg": None}, TypeError, "must map a field to a function; it has 'jpg': None"),
    ("transform", two_arguments, TypeError, "a tuple of its fields, or a dict if fields=None (and with a random"),
    ("transform", no_argument, TypeError, "rng): too many positional arguments"),
    ("transform", {"jpg": two_arguments}, TypeError, "transform['jpg']"),
    ("decode", {"jpg": three_arguments}, TypeError, "called with one argument, its bytes"),
    ("transform", {"jpg": RandomResizedCrop}, TypeError, "give an instance, as in RandomResizedCrop(...), which is"),
    ("collate_fn", two_arguments, TypeError, "called with one argument, the list of a batch's samples"),
    *[("fields", value, TypeError, 'a tuple of strings, such as ("jpg;png", "cls")') for value in ("jpg", 3, {"jpg"})],
    *[
        ("fields", value, ValueError, 'a tuple of strings, such as ("jpg;png", "cls")')
        for value in ((), [], ("jpg", 3), ("",), ("jpg;",), (";",), ("a;;b",))
    ],
    ("fields", ("__name__",), ValueError, "'__name__' is not a field; use __key__ or __url__"),
    *[("memory_budget", value, TypeError, '"512MiB" or "20GB"') for value in (None, 1.5, True, ["1GB"])],
    *[("memory_budget", value, ValueError, '"512MiB" or "20GB"') for value in (0, -1, "", "much", "GB", "3 furlongs")],
    *[("cache_size", value, ValueError, '"512MiB" or "20GB"') for value in (0, "nan", "1e400GB", "1e300GB")],
    ("cache_size", "10GB", ValueError, "without cache_dir"),
    ("cache_dir", 3, TypeError, "the path of a folder"),
    ("cache_dir", "/dev/null/cache", ValueError, "cannot be used: Not a directory ('/dev/null/cache')"),
    ("cache_dir", "s3://bucket/cache", ValueError, "is a url, but must be the path of a folder on a local disk"),
    ("cache_dir", "gs:/bucket/cache", ValueError, "is a url, but must be the path"),  # as pathlib shortens it
    ("cache_dir", "file:///cache", ValueError, "is a url, but must be the path"),
]


@pytest.mark.parametrize(("name", "value", "kind", "advice"), WRONG, ids=named)
def test_a_wrong_argument_is_refused_with_name_value_and_what_is_right(
    source: str, name: str, value: Any, kind: type[Exception], advice: str
) -> None:
    with pytest.raises(kind, match=re.escape(name)) as caught:
        StreamLoader(source, **{"batch_size": 1, name: value})
    assert advice in str(caught.value)
    shown = repr(next(iter(value.items()))[1]) if isinstance(value, dict) and value else repr(value)
    assert shown in str(caught.value)


def test_what_only_this_process_can_read_has_no_workers() -> None:
    assert options(num_workers="auto").resolved_for(["memory://a.tar", "b.tar"]).num_workers == 0
    assert options(num_workers="auto").resolved_for(["b.tar", "s3://b/c.tar"]).num_workers == "auto"
    assert options(num_workers=0).resolved_for(["memory://a.tar"]).num_workers == 0
    with pytest.raises(ValueError, match=r"num_workers=2, but only this process can read 'memory://a.tar'"):
        options(num_workers=2).resolved_for(["b.tar", "memory://a.tar"])


@pytest.mark.parametrize("name", ["decode", "transform"])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("png", "jpg;png"), "functions for 'png' and 'jpg;png', both for the field 'png'"),
        (("png", ".PNG"), "functions for 'png' and '.PNG', both for the field 'png'"),
        *(((key,), f"a function for '{key}', which contains an empty field name") for key in ("", "jpg;", "a; ;b")),
    ],
)
def test_functions_without_a_field_of_their_own_are_refused(name: str, keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has {said}"):
        options(**{name: dict.fromkeys(keys, function)})
    options(**{name: {"jpg;png": function, "mask.png": function}})


def test_a_transform_for_a_field_that_is_not_read_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"transform has a function for 'png', which is not in fields=\('jpg', 'cls'\)"
    ):
        options(fields=("jpg", "cls"), transform={"png": function})
    options(fields=("jpg;png", "cls"), transform={"png": function, "cls": function})
    for key in ("jpg;png", "png;jpg", "jpg; png", "jpg"):
        options(fields=("jpg;png",), transform={key: function})
    with pytest.raises(ValueError, match="transform has a function for 'gif', which is not in fields"):
        options(fields=("jpg;png",), transform={"jpg;gif": function})
    with pytest.raises(ValueError, match=r"\(did you mean 'jpg'\?\)"):
        options(fields=("jpg", "cls"), transform={"jpeg": function})
    with pytest.raises(ValueError, match="transform has a function for '__key__'"):
        options(fields=("__key__", "cls"), transform={"__key__": function})


def test_fields_that_no_sample_has_are_refused_with_those_there_are() -> None:
    given = options(fields=("jpg;png", "label", "__key__"))
    with pytest.raises(ValueError, match=r"fields=.*no sample has 'label'; there are cls, png"):
        given.check_fields_exist(["cls", "png"])
    given.check_fields_exist(["label", "png"])
    with pytest.raises(ValueError, match=r"no sample has 'jpeg'; there are cls, jpg \(did you mean 'jpg'\?\)"):
        options(fields=("jpeg",)).check_fields_exist(["cls", "jpg"])
    options().check_fields_exist([])
    for existing in (["jpg", "png"], ["jpg"], ["png"]):
        options(transform={"jpg; png": function}).check_fields_exist(existing)
    with pytest.raises(ValueError, match="transform has a function for 'jpg;png'; the fields are gif$"):
        options(transform={"jpg;png": function}).check_fields_exist(["gif"])
    with pytest.raises(ValueError, match="transform has a function for '__key__'; the fields are gif$"):
        options(transform={"__key__": function}).check_fields_exist(["gif"])


@pytest.mark.parametrize(("wanted", "there"), [("png", "05.png"), ("jpg;png", "05.png"), ("mp3", "0.mp3")])
def test_names_that_are_split_at_another_dot_than_was_meant_are_explained(wanted: str, there: str) -> None:
    said = (
        rf"no sample has '{wanted}'; there are cls, {there}\. Names are split at the first dot, so the file "
        rf"'x\.{there}' is the field '{there}' of the sample 'x'; .*rename the files.*fields=None"
    )
    with pytest.raises(ValueError, match=said):
        options(fields=(wanted,)).check_fields_exist(["cls", there])
    with pytest.raises(ValueError, match="no sample has 'ng'; there are cls, 05.png"):
        options(fields=("ng",)).check_fields_exist(["cls", "05.png"])


def test_numpys_numbers_are_taken_as_pythons(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [20])
    numbers: dict[str, Any] = {name: np.int64(3) for name in ("batch_size", "seed", "shuffle")}
    numbers |= {"drop_last": np.True_, "memory_budget": np.uint64(1 << 30)}
    numbers |= {"epoch_size": np.int64(12), "num_workers": np.int8(0), "rank": np.int64(1), "world_size": np.int64(2)}
    epoch: Any = np.int64(2)
    with StreamLoader(source, **numbers) as loader:
        loader.set_epoch(epoch)
        next(iter(loader))
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["seed"], state["epoch"], loader.batch_size, loader.rank, loader.world_size) == (3, 2, 3, 1, 2)


def test_auto_is_what_the_ranks_of_a_node_have_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.fetch.budget.available_bytes", lambda: 32 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert options(memory_budget="auto").fetching().budget_bytes == 1 << 30
    assert options(num_workers="auto").workers == max(1, available_processors() // 8)
    assert options(num_workers=3).workers == 3


# -- rank and world size -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has torch.distributed say that this process is some rank."""

    def join(rank: int, world_size: int) -> None:
        for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": world_size}.items():
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)

    return join


def test_arguments_go_before_the_group_and_that_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, group: Callable[[int, int], None]
) -> None:
    assert rank_and_world_size(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    assert rank_and_world_size(None, None) == (0, 1), "one of the two alone says nothing"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size(None, None) == (2, 4)
    assert rank_and_world_size(1, 3) == (1, 3)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match="rank=4 must be below world_size=4"):
        rank_and_world_size(None, None)
    group(5, 6)
    assert rank_and_world_size(None, None) == (5, 6)
    assert rank_and_world_size(1, 3) == (1, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "kind", "advice"),
    [
        (1, None, ValueError, "rank=1 and world_size=None go together; give both or neither"),
        (None, 2, ValueError, "rank=None and world_size=2 go together; give both or neither"),
        (2, 2, ValueError, "rank=2 must be below world_size=2; ranks are counted from 0"),
        (-1, 2, ValueError, "rank=-1 must be at least 0"),
        (0, 0, ValueError, "world_size=0 must be at least 1"),
        (0, 10**9, ValueError, "world_size=1000000000 must be at most 1,048,576"),
        ("0", 1, TypeError, "rank='0' must be an integer"),
        (0, 1.0, TypeError, "world_size=1.0 must be an integer"),
        (True, 2, TypeError, "rank=True must be an integer"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(rank: Any, world_size: Any, kind: type[Exception], advice: str) -> None:
    with pytest.raises(kind, match=re.escape(advice)):
        rank_and_world_size(rank, world_size)


def test_a_loader_made_before_the_process_group_knows_its_rank(
    tmp_path: Path, group: Callable[[int, int], None]
) -> None:
    source = write_numbers(tmp_path / "shards", [4])
    options: dict[str, Any] = {"fields": ("cls",), "num_workers": 0}
    with (
        StreamLoader(source, 2, **options) as found,
        StreamLoader(source, 2, **options, rank=0, world_size=1) as given,
    ):
        group(1, 2)
        with pytest.raises(RuntimeError, match="rank 0 of 1.*rank 1 of 2.*after init_process_group"):
            iter(found)
        assert next(iter(given))[0].tolist() == [0, 1]


def test_a_cache_that_may_only_be_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(path: str, *, exist_ok: bool) -> None:
        if not os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", make)
    assert options(cache_dir=tmp_path).fetching().cache_folder == os.fspath(tmp_path)
    with pytest.raises(ValueError, match="cannot be used: Permission denied .*; name a writable folder"):
        options(cache_dir=tmp_path / "new")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
def test_a_cache_that_another_user_has_prepared_is_refused(tmp_path: Path) -> None:
    prepared = tmp_path / "streamload-shards"
    prepared.mkdir()
    options(cache_dir=tmp_path)
    os.chown(prepared, 12345, 12345)
    with pytest.raises(ValueError, match=r"cache_dir=.*another user \(uid 12345\).*name one of your own"):
        options(cache_dir=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "lanes": 2, "rank": 1, "world_size": 2},
        {"weights": [1.0] * 50, "shuffle": True},
        {"num_workers": 1, "sampler": [*range(50)]},
    ],
    ids=["plain", "lanes", "weights", "sampler"],
)
def test_a_batch_larger_than_the_dataset_costs_no_more_than_that(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_numbers(tmp_path / "s", [20, 30])
    expected = 50 // options.get("world_size", 1)
    with StreamLoader(source, 1 << 40, fields=("cls", "npy"), **{"num_workers": 0, **options}) as loader:
        assert [[len(labels) for labels, _ in loader] for _ in range(2)] == [[expected], [expected]]
        assert len(loader) == 1
    with StreamLoader(Mixture({"a": (source, 1.0)}), 1 << 40, fields=("cls",), num_workers=0) as loader:
        assert [len(labels) for (labels,) in loader] == [50]
    with pytest.raises(ValueError, match=r"batch_size=10{30} must be at most 1,099,511,627,776"):
        StreamLoader(source, 10**30)


# -- keywords of other loaders, and misspelt ones --------------------------------------------------------------------

TORCHS = list(inspect.signature(DataLoader).parameters)
OURS = inspect.signature(StreamLoader).parameters
PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text()
ADVICE = "help(StreamLoader) lists the arguments"


def refusal(**keywords: Any) -> str:
    with pytest.raises(TypeError) as raised:
        StreamLoader("/no/such/shard.tar", **keywords)
    return str(raised.value)


@pytest.mark.parametrize("name", TORCHS)
def test_every_keyword_of_torchs_loader_has_a_line_on_the_page(name: str) -> None:
    (line,) = re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert (name in OURS) == line.startswith(f"`{name}`")
    for keyword in re.findall(r"`(\w+)=", line):
        assert keyword in OURS or keyword in TORCHS
    if name not in OURS:
        assert refusal(**{name: "spawn"}).endswith(ADVICE)


def test_the_constructor_has_thirty_parameters_and_torchs_first() -> None:
    assert len(OURS) <= 30
    assert list(OURS)[1:3] == TORCHS[1:3] == ["batch_size", "shuffle"]


def test_what_programs_leave_at_the_value_of_torchs_loader_is_accepted(tmp_path: Path) -> None:
    """All of its own values by default, and those that ask for what is done anyway."""
    own = {name: parameter.default for name, parameter in inspect.signature(DataLoader).parameters.items()}
    del own["dataset"], own["pin_memory"]  # this one is always on
    shards = write_numbers(tmp_path, [4])
    with StreamLoader(shards, fields=("cls",), **own) as loader:
        assert [labels.tolist() for (labels,) in loader] == [[0], [1], [2], [3]]
    with StreamLoader(shards, 4, fields=("cls",), num_workers=0, persistent_workers=True, pin_memory=True) as loader:
        assert [labels.tolist() for (labels,) in loader] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("shufle", "shuffle"), ("batchSize", "batch_size"), ("on_errors", "on_error"), ("workers", "num_workers")],
)
def test_typos_are_answered_by_the_nearest_name(written: str, meant: str) -> None:
    said = f"StreamLoader got an unexpected keyword argument {written!r} (did you mean {meant!r}?); {ADVICE}"
    assert refusal(**{written: 1}) == said


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("persistent_workers", ""),
        ("prefetch_factor", " (pass prefetch_batches=, "),
        ("handler", " (pass on_error='skip')"),
        ("feeders", " (leave it out; each rank has its own feeder"),
        ("keys", " (pass them as where="),
        ("timeout", " (leave it out; the log says what a batch waits for"),
    ],
)
def test_keywords_of_others_are_answered_by_what_to_do_instead(name: str, instead: str) -> None:
    said = refusal(**{name: 7})
    assert f"unexpected keyword argument {name!r}{instead}" in said
    assert said.endswith(ADVICE)


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    said = "StreamLoader got an unexpected keyword argument 'wombat', 'shufle' (did you mean 'shuffle'?); "
    assert refusal(wombat=3, shufle=True) == said + ADVICE


@pytest.mark.parametrize("make", [TarDataset, ShardWriter])
def test_the_others_say_so_too(make: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=rf"^{make.__name__} got an unexpected keyword argument 'maxsize'.*; help\({make.__name__}\)"
    ):
        make(tmp_path, maxsize=1)


@pytest.mark.parametrize("make", [StreamLoader, TarDataset])
def test_methods_of_other_loaders_are_answered_by_a_keyword(make: Any, tmp_path: Path) -> None:
    """And still as an attribute that is not there, for those who ask whether it is."""
    with make(write_numbers(tmp_path, [4])) as made:
        said = f"{make.__name__!r} object has no attribute"
        with pytest.raises(AttributeError, match=f"^{said} 'select'; pass where=$"):
            made.select(1)
        with pytest.raises(AttributeError, match=rf"{said} 'decode'; it is a keyword: {make.__name__}\(urls, decode="):
            made.decode("rgb8")
        assert not hasattr(made, "to_tuple")
        assert getattr(made, "wombat", 7) == 7
        with pytest.raises(AttributeError, match=r"no attribute '_wombat'$"):
            made._wombat


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "num_workers"])
def test_what_would_have_no_effect_cannot_be_set(name: str, tmp_path: Path) -> None:
    with StreamLoader(write_numbers(tmp_path, [4]), 2, num_workers=0) as loader:
        with pytest.raises(AttributeError):
            setattr(loader, name, 3)
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, False, 0)


# -- words and sizes -------------------------------------------------------------------------------------------------


def test_counted() -> None:
    counts = [(1, "shard"), (2000, "shard"), (3, "batch"), (2, "class"), (0, "entry"), (2, "key")]
    said = ["1 shard", "2,000 shards", "3 batches", "2 classes", "0 entries", "2 keys"]
    assert [counted(*each) for each in counts] == said


def test_listed() -> None:
    assert listed([]) == ""
    assert listed(["jpg", "a.b", "cls"]) == "jpg, a.b, cls"
    names = [f"{number}.png" for number in range(20)]
    assert listed(names) == ", ".join(names)
    assert listed([*names, "cls"]) == f"cls, {', '.join(names[:19])} and 1 more"
    assert listed(names * 100).endswith(", 19.png and 1,980 more")


def test_no_name_acts_on_a_terminal() -> None:
    assert printable("ünï 日本語 👩\u200d💻\ttab\nline") == "ünï 日本語 👩\u200d💻\ttab\nline"
    assert printable("\x1b[2J\x07\r\x7f\x9b\u202e\u2028\udcff") == r"\x1b[2J\x07\r\x7f\x9b\u202e\u2028\udcff"
    assert listed(["a\x1b[31m"]) == r"a\x1b[31m"
    error = ShardFormatError("the field \x1b[31m", url="\x1b.tar", key="\x1b[2J")
    assert str(error) == r"the field \x1b[31m (at '\x1b.tar', sample '\x1b[2J')"


@pytest.mark.parametrize(
    ("written", "size"),
    [("256MB", 256_000_000), ("1.5 G", 1_500_000_000), ("4096", 4096), (4096, 4096), (" 2gib ", 2**31), ("1e9", 10**9)],
)
def test_sizes_are_read(written: int | str, size: int) -> None:
    assert parse_bytes("--max-bytes", written) == size


@pytest.mark.parametrize("written", ["", "MB", "-1MB", "1 MB 2", "0", "0.1B", "1e999", "nan", 0, -1, True, 1.5, None])
def test_other_sizes_are_refused(written: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match="^--max-bytes=.* must be a positive number of bytes, or a string"
    ):
        parse_bytes("--max-bytes", written)
