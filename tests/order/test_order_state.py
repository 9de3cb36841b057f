import dataclasses
import json

import pytest

from streamload.errors import LoaderStateError
from streamload.order.state import LoaderState, check, fingerprint

STATE = LoaderState(seed=1, epoch=2, position=3072, lanes=4, window=10_000, shuffle=True, fingerprint="ab" * 16)


def compare(saved=STATE, lanes=4, **changes):
    check(saved, dataclasses.replace(STATE, lanes=lanes or 1, epoch=0, position=0, **changes), lanes=lanes)


def test_state_goes_through_json_unchanged():
    text = json.dumps(STATE.to_json())
    assert LoaderState.from_json(json.loads(text)) == STATE
    assert json.loads(text)["format"] == 1
    assert json.loads(text)["kind"] == "streamload"
    assert len(text) < 250


def test_names_it_does_not_know_are_skipped():
    assert LoaderState.from_json({**STATE.to_json(), "note": "from the user"}) == STATE


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(LoaderState) if field.default is dataclasses.MISSING]
)
def test_a_missing_name_is_named(name):
    mapping = STATE.to_json()
    del mapping[name]
    with pytest.raises(LoaderStateError, match=f"lacks '{name}'.*state_dict"):
        LoaderState.from_json(mapping)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", "1", "'seed' is '1', of type str, but must be of type int"),
        ("epoch", True, "'epoch' is True, of type bool, but must be of type int"),
        ("position", 1.0, "'position' is 1.0, of type float, but must be of type int"),
        ("position", None, "'position' is None, of type NoneType"),
        ("shuffle", 1, "'shuffle' is 1, of type int, but must be of type bool"),
        ("fingerprint", 5, "'fingerprint' is 5, of type int, but must be of type str"),
        *[(name, -1, f"{name!r} must be at least 0") for name in ("seed", "epoch", "position", "window")],
        ("lanes", 0, "'lanes' must be at least 1 and at most 1,048,576"),
        *[(name, 10**500, f"{name!r} must be at least . and at most") for name in ("position", "window", "lanes")],
        ("format", 2, "format 2, but this version of streamload reads format 1"),
        ("kind", "other", "not a state of a StreamLoader"),
    ],
)
def test_a_wrong_value_is_named(name, value, message):
    with pytest.raises(LoaderStateError, match=message):
        LoaderState.from_json({**STATE.to_json(), name: value})


@pytest.mark.parametrize("value", [None, [], "state", {}])
def test_what_is_no_state_is_refused(value):
    with pytest.raises(LoaderStateError, match="not a state of a StreamLoader"):
        LoaderState.from_json(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", 7, "seed was 1 and is 7 now"),
        ("shuffle", False, "shuffle was True and is False now"),
        ("window", 5, "window was 10000 and is 5 now"),
        ("lanes", 8, "lanes was 4 and is 8 now"),
    ],
)
def test_a_different_option_is_named_with_both_values(name, value, message):
    with pytest.raises(LoaderStateError, match=message) as caught:
        compare(**{name: value})
    assert "make the StreamLoader with the saved values" in str(caught.value)
    assert "list the same shards" not in str(caught.value)


def test_a_different_dataset_is_named():
    with pytest.raises(LoaderStateError, match="the dataset's shards had other names") as caught:
        compare(fingerprint="cd" * 16)
    assert "list the same shards" in str(caught.value)
    assert "saved values" not in str(caught.value)


def test_all_differences_are_listed():
    with pytest.raises(LoaderStateError) as caught:
        compare(seed=9, shuffle=False, window=1, lanes=2, fingerprint="cd" * 16)
    for name in ("seed", "shuffle", "window", "lanes", "other names", "list the same shards", "saved values"):
        assert name in str(caught.value)


def test_what_has_no_effect_is_not_compared():
    compare(lanes=None)
    compare(dataclasses.replace(STATE, shuffle=False), shuffle=False, window=1)


def test_fingerprint_depends_on_names_sizes_and_order():
    shards = [("a-0.tar", 10), ("a-1.tar", 20)]
    others = [
        shards[::-1],
        shards[:1],
        [("a-0.tar", 11), ("a-1.tar", 20)],
        [("b-0.tar", 10), ("a-1.tar", 20)],
        [("a-0.tar:10;a-1.tar", 20)],
        [],
    ]
    assert fingerprint(shards) == fingerprint(iter(shards)) == "89bfe904f541c2bb365f549916b0e18f"
    assert len({fingerprint(other) for other in [shards, *others]}) == 1 + len(others)
    assert len(fingerprint([("caf\udce9.tar", 1)])) == 32
