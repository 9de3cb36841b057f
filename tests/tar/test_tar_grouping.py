"""From members' names to samples, and from payloads to labels."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from crafted_tar import Archive, header

from streamload.errors import ShardFormatError
from streamload.tar.scan import ShardTable, scan_shard


def archive_of(names: list[bytes], payloads: list[bytes] | None = None) -> Archive:
    archive = Archive()
    for name, payload in zip(names, payloads or [b"x"] * len(names), strict=True):
        archive.add(header(name, len(payload)), payload)
    return archive


def scan(names: list[bytes], payloads: list[bytes] | None = None) -> ShardTable:
    return scan_shard(memoryview(archive_of(names, payloads).whole()), "shard.tar", every_byte=True)


def grouped(names: list[bytes]) -> list[tuple[str, tuple[str, ...]]]:
    table = scan(names)
    return [(table.key(sample), table.sample_fields(sample)) for sample in range(len(table))]


def test_a_column_that_ctrl_c_interrupts_is_complete_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    table = scan([b"a.cls", b"b.cls"])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(np, "flatnonzero", lambda _: signal.raise_signal(signal.SIGINT))
        table.column(["cls"])
    assert table.column(["cls"]).tolist() == [0, 1]


def test_keys_and_fields() -> None:
    assert grouped([b"a.jpg", b"a.CLS", b"a.seg.PNG", b"b.jpg"]) == [("a", ("jpg", "cls", "seg.png")), ("b", ("jpg",))]
    assert grouped([b"v1.0/a.jpg", b"./a.jpg", b"/c.jpg"]) == [
        ("v1.0/a", ("jpg",)),
        ("./a", ("jpg",)),
        ("/c", ("jpg",)),
    ]
    assert grouped([b"a..x", b"b."]) == [("a", (".x",)), ("b", ("",))]
    assert grouped([b"a.__x", b"a.x__", b"a.__x__.y"]) == [("a", ("__x", "x__", "__x__.y"))]
    assert grouped([b"a.b", b"a.b/c.d"]) == [("a", ("b",)), ("a.b/c", ("d",))]
    assert grouped(["é.ÄÖ".encode(), b"\xff.\xfe"]) == [("é", ("äö",)), ("\udcff", ("\udcfe",))]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"README", "no extension"),
        (b"v1.0/README", "no extension"),
        (b".hidden.jpg", "hidden"),
        (b"dir/.hidden", "hidden"),
        (b"./.x.jpg", "hidden"),
        (b"__meta__", "meta"),
        (b"__dir__/x.jpg", "meta"),
        (b"__a.x__", "meta"),
        (b"slash.d/", "directory"),
        (b"x/a.__key__", "reserved field"),
        (b"b.__KEY__", "reserved field"),
        (b"dir/b.__url__", "reserved field"),
    ],
)
def test_each_reason(name: bytes, reason: str) -> None:
    table = scan([b"__a.jpg", name, b"__a.cls"])
    assert table.skipped == {reason: 1}
    assert table.keys() == ["__a"]
    assert table.sample_fields(0) == ("jpg", "cls")


def test_names_that_only_look_like_meta_are_samples() -> None:
    assert scan([b"__a.jpg", b"x/__b__.jpg", b"__c__.jpg"]).keys() == ["__a", "x/__b__", "__c__"]


def test_a_repeated_field_is_an_error_at_its_second_member() -> None:
    for second in (b"b.jpg", b"b.JPG"):
        archive = archive_of([b"a.jpg", b"b.jpg", b"b.cls", second, b"b.cls"])
        with pytest.raises(ShardFormatError, match="'jpg' twice") as caught:
            scan_shard(memoryview(archive.whole()), "shard.tar")
        assert (caught.value.url, caught.value.key, caught.value.offset) == ("shard.tar", "b", archive.headers[3])


def test_a_key_that_comes_again_is_an_error_with_both_places() -> None:
    archive = archive_of([b"z.jpg", b"a.jpg", b"b.jpg", b"a.cls", b"b.cls"])
    with pytest.raises(ShardFormatError, match="tar --sort=name") as caught:
        scan_shard(memoryview(archive.whole()), "shard.tar")
    assert caught.value.key == "a"
    assert caught.value.offset == archive.headers[3]
    assert f"offset {archive.headers[1]} " in caught.value.message


def test_too_many_fields_is_an_error_that_says_why() -> None:
    archive = Archive()
    template = np.frombuffer(header(b"k" * 8 + b".00000", 0), np.uint8)
    blocks = np.tile(template, ((1 << 16) + 1, 1))
    numbers = np.arange(len(blocks))
    for digit in range(5):
        blocks[:, 9 + digit] += (numbers // 10 ** (4 - digit) % 10).astype(np.uint8)
    sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 256
    for digit in range(6):
        blocks[:, 148 + digit] = 48 + sums // 8 ** (5 - digit) % 8
    archive.content += blocks.tobytes()
    with pytest.raises(ShardFormatError, match="65537 different fields"):
        scan_shard(memoryview(archive.whole()), "shard.tar")


@pytest.mark.parametrize(
    ("payloads", "labels"),
    [
        ([b"0", b"17"], [0, 17]),
        ([b" -5\n", b"+6\r\n"], [-5, 6]),
        ([b"9223372036854775807", b"-9223372036854775808"], [2**63 - 1, -(2**63)]),
        ([b"1", b"9223372036854775808"], None),
        ([b"1", b"-9223372036854775809"], None),
        ([b"1", b""], None),
        ([b"1", b"cat"], None),
        ([b"1", b"1.0"], None),
        ([b"1", b"1_0"], None),
        ([b"1", b"1 2"], None),
        ([b"1", b"0x1"], None),
        ([b"1", "\u0661".encode()], None),
        ([b"1", b" " * 65], None),
    ],
)
def test_labels(payloads: list[bytes], labels: list[int] | None) -> None:
    table = scan([b"a.cls", b"b.cls"], payloads)
    assert (table.labels.tolist() if table.labels is not None else None) == labels


def test_labels_need_every_sample_to_have_one() -> None:
    assert scan([b"a.cls", b"a.jpg", b"b.jpg"], [b"1", b"", b""]).labels is None
    assert scan([b"a.jpg"]).labels is None
    labels = scan([b"a.jpg", b"a.cls", b"b.cls", b"b.jpg"], [b"", b"1", b"2", b""]).labels
    assert labels is not None
    assert labels.tolist() == [1, 2]
