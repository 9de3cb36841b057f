"""Archives that other programs made are read as those programs and WebDataset read them."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path

import pytest
import webdataset
from crafted_tar import GNU, V7, Archive, base_256, header, pax_record
from hypothesis import given, settings
from hypothesis import strategies as st
from written_shards import samples_in

from streamload.tar.scan import scan_shard

# WebDataset does not close the shards that it reads.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

Samples = list[tuple[str, dict[str, bytes]]]

LONG = "folder-" + "x" * 60 + "/" + "y" * 60
LONGER = "/".join("z" * 60 for _ in range(5)) + "/last"
NAMES = ["plain", "dir/inner", "dir.with.dots/inner", LONG, LONGER, "ünï/çødé", "日本語", "with space", "line\nfeed"]


def ours(path: Path) -> Samples:
    content = path.read_bytes()
    return samples_in(content, scan_shard(memoryview(content), str(path)))


def by_webdataset(path: Path) -> Samples:
    added = ("__key__", "__url__", "__local_path__")
    dataset = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    return [
        (sample["__key__"], {name: value for name, value in sample.items() if name not in added}) for sample in dataset
    ]


def lay_out(folder: Path) -> Samples:
    """Files for a command-line tar, and the samples that they make."""
    expected: Samples = []
    for number, name in enumerate(NAMES):
        fields = {"bin": os.urandom(number * 300), "cls": b"%d" % number}
        expected.append((name, fields))
        for field, payload in fields.items():
            path = folder / f"{name}.{field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(payload)
    return expected


def skip_without_gnu_tar() -> None:
    version = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=False, timeout=60)
    if "GNU tar" not in version.stdout:
        pytest.skip("tar is not GNU tar here")


@pytest.mark.parametrize(
    ("program", "tar_format", "longest"),
    [
        *(("tar", tar_format, 1000) for tar_format in ("gnu", "oldgnu", "posix")),
        *(("bsdtar", tar_format, 1000) for tar_format in ("gnutar", "pax")),
        *((program, *limited) for program in ("tar", "bsdtar") for limited in (("ustar", 200), ("v7", 90))),
    ],
)
def test_what_a_tar_packs(program: str, tar_format: str, longest: int, tmp_path: Path) -> None:
    if program == "tar":
        skip_without_gnu_tar()
    elif shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    (tmp_path / "files").mkdir()
    expected = [sample for sample in lay_out(tmp_path / "files") if len(os.fsencode(sample[0])) < longest]
    (tmp_path / "list").write_bytes(
        b"".join(os.fsencode(f"{key}.{field}") + b"\0" for key, fields in expected for field in fields)
    )
    subprocess.run(
        [program, f"--format={tar_format}", "-cf", tmp_path / "shard.tar", "--null", "-T", tmp_path / "list"],
        cwd=tmp_path / "files",
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        check=True,
        timeout=60,
    )
    assert ours(tmp_path / "shard.tar") == by_webdataset(tmp_path / "shard.tar") == expected


@pytest.mark.parametrize("mtime", [None, 0])
def test_webdatasets_writer(mtime: float | None, tmp_path: Path) -> None:
    shard = tmp_path / "shard.tar"
    with webdataset.TarWriter(str(shard), mtime=mtime) as writer:
        for number in range(300):
            writer.write({"__key__": f"{number:06d}", "txt": f"text {number}", "cls": number, "left.png": b"p"})
    found = ours(shard)
    assert len(found) == 300
    assert found == by_webdataset(shard)
    table = scan_shard(memoryview(shard.read_bytes()), "", every_byte=True)
    assert table.labels is not None
    assert table.labels.tolist() == list(range(300))
    assert set(table.fields) == {"txt", "cls", "left.png"}


def test_names_and_sizes_from_extension_headers_and_odd_size_fields() -> None:
    records = pax_record(b"comment", b"a=b\nc") + pax_record(b"path", b"by/pax.bin") + pax_record(b"size", b"3")
    archive = Archive()
    archive.add(header(b"g", 14, typeflag=b"g"), pax_record(b"comment", b"me"))
    archive.add(header(b"x", len(records), typeflag=b"x"), records).add(header(b"short.bin", 0), b"pax")
    archive.add(header(b"x", 8, typeflag=b"x"), b"8 path=\n").add(header(b"own.bin", 3), b"own")
    archive.add(header(b"K", 3, typeflag=b"K"), b"to\0").add(header(b"L", 9, typeflag=b"L"), b"long.bin\0")
    archive.add(header(b"lo", 2), b"ln")
    archive.add(header(b"L", 8, typeflag=b"L"), b"mor.bin\0")
    archive.add(header(b"x", 16, typeflag=b"x"), b"16 path=mor.bin\n").add(header(b"m", 1), b"m")
    archive.add(header(b"wide.bin", b"000000000002"), b"wi")
    archive.add(header(b"spaced.bin", 2, magic=V7, space_padded=True), b"sp")
    archive.add(header(b"left.bin", b"2\0\0\0\0\0\0\0\0\0\0\0", magic=GNU), b"le")
    archive.add(header(b"large.bin", base_256(2), magic=GNU), b"la")
    archive.add(header(b"gnu.bin", 1, magic=GNU, prefix=b"12345670123"), b"g")
    archive.add(header(b"posix.bin", 1, prefix=b"some/folder"), b"p")
    content = archive.whole()
    assert samples_in(content, scan_shard(memoryview(content), "")) == [
        ("by/pax", {"bin": b"pax"}),
        ("own", {"bin": b"own"}),
        ("long", {"bin": b"ln"}),
        ("mor", {"bin": b"m"}),
        ("wide", {"bin": b"wi"}),
        ("spaced", {"bin": b"sp"}),
        ("left", {"bin": b"le"}),
        ("large", {"bin": b"la"}),
        ("gnu", {"bin": b"g"}),
        ("some/folder/posix", {"bin": b"p"}),
    ]


def test_what_all_other_readers_read_alike_is_read(tmp_path: Path) -> None:
    name = b"folder/" * 20 + b"twice.bin\0"
    nul = b"folder/" * 20 + b"nul.bin\0behind.x"
    target = b"elsewhere\0"
    size = pax_record(b"size", b"0" * 21 + b"2")
    archive = Archive()
    for _ in range(2):
        archive.add(header(b"L", len(name), typeflag=b"L", magic=GNU), name)
    archive.add(header(b"short.bin", 2, magic=GNU), b"tw").add(header(b"L", len(nul), typeflag=b"L", magic=GNU), nul)
    archive.add(header(b"short.bin", 2, magic=GNU), b"nu")
    archive.add(header(b"x", len(size), typeflag=b"x"), size).add(header(b"sized.bin", 0), b"si")
    for wrong in (b"one", b"another"):
        archive.add(header(b"L", len(wrong), typeflag=b"L", magic=GNU), wrong)
        archive.add(header(b"K", len(target), typeflag=b"K", magic=GNU), target)
    archive.add(header(b"link", 0, typeflag=b"2", magic=GNU)).add(header(b"last.bin", 2), b"la")
    shard = tmp_path / "shard.tar"
    shard.write_bytes(archive.whole())
    assert [payload for _, fields in ours(shard) for payload in fields.values()] == [b"tw", b"nu", b"si", b"la"]
    assert ours(shard) == by_webdataset(shard)


@pytest.mark.parametrize("tar_format", ["gnu", "oldgnu", "posix"])
@pytest.mark.parametrize("option", ["--label=a label", "--blocking-factor=21", "--listed-incremental=snapshot"])
def test_gnu_tars_other_archives(tar_format: str, option: str, tmp_path: Path) -> None:
    skip_without_gnu_tar()
    (tmp_path / "files").mkdir()
    for number in range(3):
        (tmp_path / "files" / f"{number}.bin").write_bytes(b"%d" % number * 700)
    command = ["tar", f"--format={tar_format}", option, "-cf", "s.tar", "files"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert sorted(ours(tmp_path / "s.tar")) == [(f"files/{n}", {"bin": b"%d" % n * 700}) for n in range(3)]


def test_members_without_a_payload_of_their_own_are_counted() -> None:
    archive = Archive()
    for name, typeflag in ((b"dir.d/", b"5"), (b"a.lnk", b"1"), (b"b.lnk", b"2"), (b"c.dev", b"3"), (b"d.dev", b"4")):
        archive.add(header(name, 0, typeflag=typeflag))
    archive.add(header(b"e.fifo", 0, typeflag=b"6")).add(header(b"label.v", 0, typeflag=b"V"))
    archive.add(header(b"dump.d", 700, typeflag=b"D"), b"Yfile\0" * 100 + b"\0" * 100)
    archive.add(header(b"old.dir/", 0, typeflag=b"\0", magic=V7))
    archive.add(header(b"quota.d/", 4096, typeflag=b"5"))
    archive.add(header(b"kept.bin", 2, typeflag=b"7"), b"ok")
    content = archive.whole()
    table = scan_shard(memoryview(content), "")
    assert samples_in(content, table) == [("kept", {"bin": b"ok"})]
    assert table.skipped == {"directory": 4, "link": 2, "special": 3, "volume label": 1}


_names = st.sampled_from(NAMES) | st.text(st.characters(codec="utf-8", exclude_characters="\0./"), max_size=40)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(_names, st.binary(max_size=1500)), max_size=12),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([0, 1.25, 1_700_000_000.75]),
)
def test_what_tarfile_writes_is_read_back(members: list[tuple[str, bytes]], tar_format: int, mtime: float) -> None:
    buffer, kept = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for number, (name, payload) in enumerate(members):
            info = tarfile.TarInfo(f"k{number}{name}.bin")
            info.size, info.mtime = len(payload), mtime  # type: ignore[assignment]
            info.uname, info.gname, info.uid = "üser", "group", 3_000_000 if tar_format else 5
            try:
                archive.addfile(info, io.BytesIO(payload))
            except ValueError:  # too long for ustar
                continue
            kept.append((info.name.removesuffix(".bin"), {"bin": payload}))
    content = buffer.getvalue()
    table = scan_shard(memoryview(content), "memory", every_byte=True)
    assert samples_in(content, table) == kept
    assert table.member_crc32 is not None
    assert table.member_crc32.tolist() == [zlib.crc32(fields["bin"]) for _, fields in kept]


_components = st.text(st.sampled_from("aB.._é/"), min_size=1, max_size=8)


@settings(max_examples=15, deadline=None)
@given(st.lists(_components, max_size=8))
def test_any_names_make_the_samples_that_webdataset_makes(names: list[str]) -> None:
    """Where we refuse or pass over more than WebDataset, that is told apart below."""
    names = [f"{number}{name.replace('//', '/')}" for number, name in enumerate(names)]
    names = [name for name in names if not name.endswith(("/", "__")) and not os.path.basename(name).startswith(".")]
    archive = Archive()
    for name in names:
        archive.add(header(name.encode(), 1), b"x")
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "shard.tar"
        shard.write_bytes(archive.whole())
        assert ours(shard) == by_webdataset(shard)


def test_bytes_behind_the_end_of_a_name_are_no_part_of_it() -> None:
    archive = Archive().add(header(b"a.bin\0junk.x", 0)).add(header(b"b.bin\0/junk", 0, prefix=b"some\0more/x"))
    archive.add(header(b"c.bin\0junk.x", 0, magic=V7))
    assert scan_shard(memoryview(archive.whole()), "").keys() == ["a", "some/b", "c"]
