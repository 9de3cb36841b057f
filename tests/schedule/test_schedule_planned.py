"""Located rows: where each field of each planned row lies, checked against the bytes of the shards themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload import ShardWriter
from streamload.errors import DatasetIndexError
from streamload.index.listing import list_shards
from streamload.index.tables import Tables
from streamload.order.plan import RowBlock
from streamload.schedule.planned import PlannedRows, locate
from streamload.tar.table import MISSING

SAMPLES = [
    [{"txt": b"a0", "cls": b"10"}, {"cls": b"11"}, {"jpg": b"J2", "cls": b"12"}],
    [{"png": b"P3", "cls": b"13"}, {"png": b"P4", "jpg": b"J4", "txt": b"a4"}],
    [{"jpg": b"J5", "x.cls": b"15"}, {"txt": b"a6"}, {"png": b"P7", "seg.png": b"S7"}, {"cls": b"18"}],
]
PLACES = [(shard, sample) for shard, samples in enumerate(SAMPLES) for sample in range(len(samples))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("located") / "shards"
    for shard, samples in enumerate(SAMPLES):
        with ShardWriter(folder / f"part{shard}-%06d.tar") as writer:
            for number, sample in enumerate(samples):
                writer.write({"__key__": f"s{shard}k{number}", **sample})
    return folder


def tables_of(folder: Path) -> Tables:
    return Tables(list_shards(folder))


def block(rows: list[tuple[int, int]], batches: tuple[int, ...] | None = None) -> RowBlock:
    lengths = (len(rows),) if batches is None else batches
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shards = np.array([shard for shard, _ in rows], np.int64)
    return RowBlock(edges, shards, np.array([sample for _, sample in rows], np.int64), edges[1:] * 7)


def payloads(folder: Path, planned: PlannedRows, column: int) -> list[bytes | None]:
    """What lies at the places found."""
    found = planned.table.columns()[column]
    contents = [(folder / f"part{shard}-000000.tar").read_bytes() for shard in range(len(SAMPLES))]
    return [
        None if offset == MISSING else contents[shard][offset : offset + size]
        for shard, offset, size in zip(
            planned.table.shards.tolist(), found.offsets.tolist(), found.sizes.tolist(), strict=True
        )
    ]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.sampled_from(PLACES), min_size=1, max_size=20),
    names=st.lists(
        st.lists(
            st.sampled_from(["txt", "cls", "jpg", "png", "x.cls", "seg.png", "none"]),
            min_size=1,
            max_size=3,
            unique=True,
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_every_field_of_every_row_is_where_it_is_said_to_be(
    folder: Path, rows: list[tuple[int, int]], names: list[list[str]]
) -> None:
    planned = locate(block(rows), tables_of(folder), tuple(map(";".join, names)), verify=False)
    assert planned.table.shards.tolist() == [shard for shard, _ in rows]
    for number, alternatives in enumerate(names):
        column = planned.table.columns()[number]
        assert (column.name, column.alternatives) == (";".join(alternatives), tuple(alternatives))
        expected, which = [], []
        for shard, sample in rows:
            present = [name for name in alternatives if name in SAMPLES[shard][sample]]
            expected.append(SAMPLES[shard][sample][present[0]] if present else None)
            which.append(alternatives.index(present[0]) if present else None)
        assert payloads(folder, planned, number) == expected
        found = [0] * len(rows) if column.which is None else column.which.tolist()
        assert [place for place, wanted in zip(found, which, strict=True) if wanted is not None] == [
            wanted for wanted in which if wanted is not None
        ]
        assert all(column.sizes[row] == 0 for row, wanted in enumerate(which) if wanted is None)
    assert planned.keys is None


def test_without_fields_all_are_located_in_alphabetical_order_with_keys(folder: Path) -> None:
    rows = [(2, 0), (0, 1), (0, 0)]
    planned = locate(block(rows), tables_of(folder), None, verify=False)
    assert [column.name for column in planned.table.columns()] == ["cls", "jpg", "png", "seg.png", "txt", "x.cls"]
    assert planned.keys == ("s2k0", "s0k1", "s0k0")
    assert payloads(folder, planned, 0) == [None, b"11", b"10"]


def test_only_the_fields_of_the_blocks_shards_are_columns(folder: Path) -> None:
    planned = locate(block([(0, 1)]), tables_of(folder), None, verify=False)
    assert [column.name for column in planned.table.columns()] == ["cls", "jpg", "txt"]


@pytest.mark.parametrize("fields", [("cls", "__key__"), ("__url__", "__key__", "cls"), ("__key__",)])
def test_keys_are_looked_up_where_they_are_requested(folder: Path, fields: tuple[str, ...]) -> None:
    planned = locate(block([(1, 1), (0, 0)]), tables_of(folder), fields, verify=False)
    assert planned.keys == ("s1k1", "s0k0")
    assert [column.name for column in planned.table.columns()] == [name for name in fields if name == "cls"]


def test_checksums_come_with_the_places(folder: Path) -> None:
    import zlib

    rows = [(0, 0), (1, 0), (2, 3), (0, 2)]
    planned = locate(block(rows), tables_of(folder), ("cls",), verify=True)
    assert planned.table.columns()[0].crc32 is not None
    assert planned.table.columns()[0].crc32.tolist() == [
        zlib.crc32(SAMPLES[shard][sample]["cls"]) for shard, sample in rows
    ]


def test_checksums_are_not_looked_up_where_nobody_wants_them(folder: Path) -> None:
    assert locate(block([(0, 0)]), tables_of(folder), ("cls",), verify=False).table.columns()[0].crc32 is None


def test_verifying_without_checksums_is_refused_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    from streamload.memory.mapped import map_memory
    from streamload.tar.scan import scan_shard

    bare = tmp_path / "bare.tar"
    bare.write_bytes((folder / "part0-000000.tar").read_bytes())
    tables = Tables(list_shards(bare))
    with bare.open("rb") as file:
        tables.add(0, scan_shard(map_memory(file.fileno(), bare.stat().st_size, writable=False), str(bare)))
    with pytest.raises(DatasetIndexError, match=r"verify=True needs the checksums.*`streamload index`") as caught:
        locate(block([(0, 0)]), tables, ("cls",), verify=True)
    assert caught.value.url == str(bare)


def test_batches_are_cut_where_the_block_says(folder: Path) -> None:
    planned = locate(block(PLACES[:6], (1, 3, 2)), tables_of(folder), ("cls",), verify=False)
    assert planned.batches == 3
    assert [planned.edges(number) for number in range(3)] == [(0, 1), (1, 4), (4, 6)]


def test_rows_of_the_table_can_be_cut_out(folder: Path) -> None:
    table = locate(block(PLACES), tables_of(folder), ("txt;cls", "cls"), verify=True).table
    part = table.rows(2, 5)
    assert len(part) == 3
    assert part.shards.tolist() == table.shards[2:5].tolist()
    assert part.samples.tolist() == table.samples[2:5].tolist()
    for column, whole in zip(part.columns(), table.columns(), strict=True):
        assert (column.name, column.alternatives) == (whole.name, whole.alternatives)
        assert column.offsets.tolist() == whole.offsets[2:5].tolist()
        assert column.sizes.tolist() == whole.sizes[2:5].tolist()
        assert column.crc32 is not None
        assert whole.crc32 is not None
        assert column.crc32.tolist() == whole.crc32[2:5].tolist()
    which = [column.which for column in part.columns()]
    assert which[0] is not None
    assert which[0].tolist() == [0 if "txt" in SAMPLES[shard][sample] else 1 for shard, sample in PLACES[2:5]]
    assert which[1] is None
