"""Decoders by extension: what each gives, what each refuses, and that columns equal sample by sample."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from webdataset import autodecode, writer

from streamload.decode.decoders import DECODED_EXTENSIONS, decode_npz, decoder_for, decompress_gzip
from streamload.tar.extensions import IMAGE_FORMATS, KIND_OF, Kind, applies_to, decodes_as_built_in, is_image
from streamload.write.shard_writer import ENCODED_EXTENSIONS, encode_field

DTYPES = st.sampled_from(["u1", "<i2", ">i4", "<i8", "<f2", "<f4", "<f8", "?", "<c8", "<U3", "S5", "<M8[s]"])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def npy_bytes(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


def decode(field: str, data: bytes, **options: Any) -> Any:
    own = decodes_as_built_in(field, options.get("decode", True))
    return decoder_for(field, **options)(memoryview(data) if own else data)


def assert_same(got: NDArray[Any], expected: NDArray[Any]) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def written(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


# npy


@settings(deadline=None)
@given(array=ARRAYS, version=st.sampled_from([(1, 0), (2, 0), (3, 0)]), fortran=st.booleans())
def test_npy_is_what_numpy_loads(array: NDArray[Any], version: tuple[int, int], fortran: bool) -> None:
    data = npy_bytes(np.asfortranarray(array) if fortran and array.ndim else array, version)
    got = decode("npy", data)
    expected = np.load(io.BytesIO(data))
    assert_same(got, expected)
    assert got.flags.f_contiguous == expected.flags.f_contiguous
    assert got.flags.writeable
    assert got.flags.aligned


def test_npy_of_structured_dtype() -> None:
    array = np.array([(1, 2.5, b"x"), (3, 4.5, b"y")], dtype=[("a", "<i4"), ("b", "<f8"), ("é", "S1")])
    assert_same(decode("npy", npy_bytes(array, (3, 0))), array)


def test_npy_owns_its_memory() -> None:
    shard = bytearray(npy_bytes(np.arange(6)))
    got = decoder_for("npy")(memoryview(shard))
    shard[-48:] = bytes(48)  # as if the shard's pages were freed
    np.testing.assert_array_equal(got, np.arange(6))


def test_npy_with_an_odd_header_length_is_aligned() -> None:
    data = npy_bytes(np.arange(4.0))
    header = data[10:128].rstrip() + b"  \n"
    odd = data[:8] + len(header).to_bytes(2, "little") + header + data[128:]
    got = decode("npy", odd)
    assert got.flags.aligned
    np.testing.assert_array_equal(got, np.arange(4.0))


def with_header(header: str, payload: bytes = bytes(100)) -> bytes:
    text = header.encode("latin-1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + payload


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}", "cut off.*1000000000000"),
        ("{'descr': '<f8', 'fortran_order': True, 'shape': (100, 100)}", "cut off"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "Python objects.*decode="),
        ("{'descr': [('a', '<i4'), ('b', '|O')], 'fortran_order': False, 'shape': (1,)}", "Python objects"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -2)}", "no valid shape"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (True,)}", "no valid shape"),
        ("{'descr': '|u1', 'fortran_order': 0, 'shape': (1,)}", "fortran_order"),
        ("{'descr': '|u1', 'fortran_order': False}", "header cannot be read"),
        ("__import__('os').getpid()", "header cannot be read"),
        ("{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,)}", "header cannot be read"),
        ("[" * 100, "header cannot be read"),
    ],
)
def test_npy_refuses_a_header_before_believing_it(header: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode("npy", with_header(header))


@pytest.mark.parametrize("size", [0, 5, 11, 50, 127, 128, 131])
def test_npy_cut_off_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="npy"):
        decode("npy", npy_bytes(np.arange(9, dtype=np.uint8))[:size])


def test_npy_refuses_a_giant_header_and_other_versions() -> None:
    with pytest.raises(ValueError, match="limit"):
        decode("npy", b"\x93NUMPY\x02\0" + (20_000).to_bytes(4, "little") + b" " * 30_000)
    with pytest.raises(ValueError, match="version 9"):
        decode("npy", b"\x93NUMPY\x09\0" + (4).to_bytes(4, "little") + b" " * 60)
    with pytest.raises(ValueError, match="not an npy file"):
        decode("npy", b"PNG is not NPY" * 10)


# npz


def npz_with(name: str, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def test_npz_refuses_bombs_objects_damage_and_other_methods() -> None:
    objects = written(lambda file: np.savez(file, a=np.array([{}], object)))
    with pytest.raises(ValueError, match="Python objects"):
        decode("npz", objects)
    with pytest.raises(ValueError, match="zip method"):
        decode("npz", npz_with("a", b"x" * 50, zipfile.ZIP_LZMA))
    stored = npz_with("a", b"hello there", zipfile.ZIP_STORED)
    assert decode("npz", stored) == {"a": b"hello there"}
    with pytest.raises(ValueError, match="CRC"):
        decode("npz", stored.replace(b"hello there", b"hello where"))
    with pytest.raises(ValueError, match="npz"):
        decode("npz", stored[:-10])
    bomb = npz_with("a", bytes(5000))
    with pytest.raises(ValueError, match=f"limit is {1000 + len(bomb)}.*decode="):
        decode_npz(memoryview(bomb), 1000)


def test_what_hardly_expands_is_read_whatever_its_size() -> None:
    array = np.frombuffer(os.urandom(5000), np.uint8)
    stored, packed = io.BytesIO(), gzip.compress(npy_bytes(array))
    np.savez(stored, array=array)
    assert_same(decode_npz(memoryview(stored.getvalue()), 100)["array"], array)
    assert decompress_gzip(memoryview(packed), 200) == npy_bytes(array)


def test_npz_refuses_a_name_that_occurs_twice() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a", b"2")
    with pytest.raises(ValueError, match="same name"):
        decode("npz", file.getvalue())
    np.savez(file := io.BytesIO(), a=np.arange(3))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("a", b"1")
    with pytest.raises(ValueError, match="same name"):
        decode("npz", file.getvalue())


# integers, text, json


@pytest.mark.parametrize("field", ["cls", "cls2", "index", "inx", "id", "label.cls"])
def test_integers(field: str) -> None:
    texts = {b"7": 7, b"-12": -12, b" 3\n": 3, b"007": 7, b"9223372036854775807": 2**63 - 1}
    assert {text: decode(field, text) for text in texts} == texts


@pytest.mark.parametrize("text", [b"", b"-", b"1.5", b"1_000", b"cat", b"9223372036854775808", b"9" * 10_000, b"\xff"])
def test_what_is_no_integer_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not an integer"):
        decode("cls", text)


def test_text_and_json() -> None:
    assert decode("txt", "zażółć".encode()) == decode("transcript", "zażółć".encode()) == "zażółć"
    assert decode("txt", b"\xef\xbb\xbfcat") == "cat"
    assert decode("json", b'{"a": [1, null]}') == {"a": [1, None]}
    with pytest.raises(ValueError, match="utf-8"):
        decode("text", b"\xff\xfe")
    for bad in (b"{", b"", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"Expecting value|property name|nested too deeply"):
            decode("json", bad)


# torch and the codecs


class Touch:
    """Creates a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_torch_files_load_and_never_execute(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4.0)
    data = written(lambda file: torch.save({"x": tensor}, file))
    assert torch.equal(decode("pt", data)["x"], tensor)
    assert torch.equal(decode("pth", data)["x"], tensor)
    evil = written(lambda file: torch.save(Touch(str(tmp_path / "executed")), file))
    with pytest.raises(ValueError, match="weights_only"):
        decode("pt", evil)
    assert not (tmp_path / "executed").exists()
    for bad in (b"", b"nonsense", data[:-30]):
        with pytest.raises(ValueError, match="weights_only"):
            decode("pt", bad)
    sized = written(lambda file: torch.save([bytearray(9)], file))
    with pytest.raises(ValueError, match="it holds a bytearray"):
        decode("pt", sized)
    unknown = written(lambda file: torch.save(defaultdict(dict, a=1), file))
    with pytest.raises(ValueError, match="collections.defaultdict"):  # in torch's words
        decode("pt", unknown)


@pytest.mark.parametrize("new", [True, False])
def test_torch_files_may_not_expand_beyond_the_limit(new: bool) -> None:
    torch = pytest.importorskip("torch")
    small, large = torch.ones(1).expand(10, 3), torch.ones(4, 1).expand(4, 100_000_000)
    for view in (small, large):
        data = written(lambda file, view=view: torch.save(view, file, _use_new_zipfile_serialization=new))
        if view is small:
            assert torch.equal(decode("pt", data), small)
        else:
            with pytest.raises(ValueError, match=r"expand from \d+ bytes to 1600000000.*limit is 5379\d+\."):
                decode("pt", data)


@pytest.mark.parametrize("new", [True, False])
def test_torch_files_whose_tensors_lie_beyond_what_is_stored_are_refused(new: bool) -> None:
    torch = pytest.importorskip("torch")
    plain = written(lambda file: torch.save(torch.zeros(77), file, _use_new_zipfile_serialization=new))
    length, more = b"K\x4d", b"K\xc8"
    for behind in (b"t" if new else b"N", b"\x85"):  # of the storage, and of the tensor in it
        old, crafted = length + behind, more + behind
        data = with_pickle(plain, lambda pickled, old=old, crafted=crafted: pickled.replace(old, crafted))
        assert data != plain
        with pytest.raises(ValueError, match=r"beyond the 308 bytes|torch\.load\(weights_only=True\) cannot read it"):
            decode("pt", data)


def with_pickle(torch_file: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same file with another pickle of what was saved."""
    if not zipfile.is_zipfile(io.BytesIO(torch_file)):
        return change(torch_file)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_file)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return out.getvalue()


def test_a_torch_file_that_is_a_bomb_is_refused_before_it_expands(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(3 << 20))
    monkeypatch.setattr("streamload.decode.decoders.DECOMPRESSED_LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(ValueError, match=f"decompresses to {3 << 20} bytes"):
        decode("pt", out.getvalue())


def test_torch_files_of_every_kind_still_load() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(12.0).reshape(3, 4)
    values = {
        "view": base[1:, ::2],
        "shared": [base, base.T],
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "narrow": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64)],
        "plain": {"a": (1, 2.5, None, True, 1j, "text", b"bytes"), "size": torch.Size([2, 3])},
        "large number": 1 << 40,
        "set": {1, 2},
        "ordered": OrderedDict(a=torch.ones(1)),
        "sparse": torch.eye(3).to_sparse(),
    }
    new_only = torch.ones(3, dtype=torch.uint16)  # the older format has no such type
    assert torch.equal(decode("pt", written(lambda file: torch.save(new_only, file))), new_only)
    for new in (True, False):
        got = decode("pt", written(lambda file, new=new: torch.save(values, file, _use_new_zipfile_serialization=new)))
        assert list(got) == list(values)
        assert torch.equal(got["view"], values["view"])
        assert torch.equal(got["shared"][1], base.T)
        assert got["plain"] == values["plain"]
        assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
        assert [each.dtype for each in got["narrow"]] == [each.dtype for each in values["narrow"]]


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd", "ten", "class", "bin", "mp4", "unknown", "x.pkl", "gz"])
def test_pickles_and_unknown_kinds_stay_bytes(field: str, tmp_path: Any) -> None:
    data = pickle.dumps(Touch(str(tmp_path / "executed")))
    raw = gzip.compress(data) if field == "gz" else data
    assert decode(field, raw) == data
    assert isinstance(decode(field, raw), bytes)
    assert not (tmp_path / "executed").exists()


def test_codecs() -> None:
    msgpack = pytest.importorskip("msgpack")
    cbor2 = pytest.importorskip("cbor2")
    safetensors = pytest.importorskip("safetensors.numpy")
    value = {"a": [1, 2.5, b"x", "y"], 5: None}
    assert decode("msgpack", msgpack.packb(value)) == value
    assert decode("cbor", cbor2.dumps(value)) == value
    tensors = decode("safetensors", safetensors.save({"w": np.arange(3)}))
    assert tensors["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("msgpack", b"\xdd\xff\xff\xff\xff\x01"),
        ("msgpack", b"\x91" * 100_000),
        ("cbor", b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff\x01"),
        ("cbor", b"\x5b\x00\x00\x00\xff\xff\xff\xff\xff\x01"),
        ("cbor", b"\x81" * 100_000),
        ("safetensors", b"\xff" * 16),
    ],
)
def test_codecs_refuse_what_is_claimed_but_not_there(field: str, data: bytes) -> None:
    pytest.importorskip({"cbor": "cbor2"}.get(field, field))
    with pytest.raises(ValueError, match=f"not a {field}"):
        decode(field, data)


# gzip and the choice of a decoder


def test_gzip_is_undone_before_the_inner_decoder() -> None:
    array = np.arange(5)
    assert_same(decode("depth.npy.gz", gzip.compress(npy_bytes(array))), array)
    members = gzip.compress(b"[1,") + gzip.compress(b"2]") + bytes(512)
    assert decode("json.gz", members) == [1, 2]
    assert decode("json.gz.gz", gzip.compress(members)) == [1, 2]


def test_gzip_refuses_bombs_cuts_and_damage() -> None:
    data = gzip.compress(os.urandom(40_000))
    for whole in (gzip.compress(bytes(1100)), gzip.compress(bytes(600)) * 2):
        with pytest.raises(ValueError, match=f"limit of {1000 + len(whole)}"):
            decompress_gzip(memoryview(whole), 1000)
    assert decompress_gzip(memoryview(gzip.compress(bytes(1000))), 1000) == bytes(1000)
    for size in (0, 1, 10, 20_000, len(data) - 1):
        with pytest.raises(ValueError, match="cut off"):
            decompress_gzip(memoryview(data[:size]))
    damaged = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    with pytest.raises(ValueError, match="damaged"):
        decompress_gzip(memoryview(damaged))
    with pytest.raises(ValueError, match="damaged"):
        decompress_gzip(memoryview(data + b"tail"))


def test_users_decoders_add_and_replace() -> None:
    seen: list[Any] = []

    def record(data: bytes) -> str:
        seen.append(data)
        return "mine"

    assert decode("cls", b"5", decode={"cls": record}) == "mine"
    assert decode("x.pkl", b"5", decode={".PKL": record}) == "mine"
    assert decode("json.gz", gzip.compress(b"5"), decode={"json": record}) == "mine"
    assert seen == [b"5"] * 3
    assert {type(each) for each in seen} == {bytes}
    assert decode("cls", b"5", decode={"txt": record}) == 5
    both = {"seg.png": lambda data: "full", "png": lambda data: "extension"}
    assert decode("seg.png", b"", decode=both) == "full"
    assert decode("png", b"", decode=both) == "extension"


@pytest.mark.parametrize("field", ["jpg", "PNG", "x.png"])
def test_one_function_may_decode_several_fields(field: str) -> None:
    assert decode(field, b"5", decode={"jpg;png": int}) == 5
    assert applies_to("jpg;png", field)
    assert not applies_to("jpg;png", "txt")


# -- what extensions mean --------------------------------------------------------------------------------------------

PIXELS = np.full((6, 4, 3), 80, np.uint8)
NAMED_ARRAYS = {"a": np.arange(5), "b": np.eye(2)}
TENSOR = torch.arange(4.0)
PLAIN = {"a": [1, "é", None], "b": {"c": 1.5}}


def of(wanted: Kind) -> set[str]:
    return {extension for extension, kind in KIND_OF.items() if kind is wanted}


def value_for(extension: str) -> Any:
    """A value that goes and comes back as it is; of an extension that no kind has, an error."""
    return next(
        value
        for kind, value in (
            (of(Kind.TEXT), "zażółć\n1,2\n"),
            (of(Kind.INTEGER), -7),
            (of(Kind.JSON) | of(Kind.MSGPACK) | of(Kind.CBOR), PLAIN),
            (of(Kind.ARRAY), NAMED_ARRAYS["a"]),
            (of(Kind.ARRAYS) | of(Kind.SAFETENSORS), NAMED_ARRAYS),
            (of(Kind.TORCH), TENSOR),
            (IMAGE_FORMATS, PIXELS),
        )
        if extension in kind
    )


def as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("extension", sorted(ENCODED_EXTENSIONS))
def test_what_is_written_is_read_back(extension: str) -> None:
    value = value_for(extension)
    for field in (extension, f"x.{extension}", f"X.{extension.upper()}"):
        got = decoder_for(field)(memoryview(encode_field(field.lower(), value)))
        assert (type(got) is type(value)) or extension == "safetensors"
        assert as_plain(got) == as_plain(value)


def test_only_images_are_read_that_cannot_be_written() -> None:
    assert ENCODED_EXTENSIONS <= DECODED_EXTENSIONS
    assert {"avif", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"} == DECODED_EXTENSIONS - ENCODED_EXTENSIONS
    assert all(map(is_image, DECODED_EXTENSIONS - ENCODED_EXTENSIONS))


@pytest.mark.parametrize("extension", sorted(ENCODED_EXTENSIONS))
def test_a_str_is_read_back_as_a_str_where_nothing_else_is_meant(extension: str) -> None:
    try:
        data = encode_field(extension, "12")
    except TypeError:
        assert extension not in of(Kind.TEXT)
        return
    got = decoder_for(extension)(memoryview(data))
    meant = {**dict.fromkeys(of(Kind.INTEGER) | of(Kind.JSON), 12), **dict.fromkeys(of(Kind.MSGPACK), "12")}
    assert got == meant.get(extension, "12")


def test_text_in_another_encoding_says_how_to_read_it() -> None:
    with pytest.raises(ValueError, match=r"not text in utf-8 .*0xe9.*decode=\{\.\.\.\}.*bytes"):
        decoder_for("html")(memoryview("né".encode("latin-1")))
    assert decoder_for("html", {"html": bytes})(memoryview(b"n\xe9")) == b"n\xe9"


def test_the_extensions_that_are_promised() -> None:
    texts = "txt text transcript caption jsonl csv tsv xml html md yaml"
    assert set(texts.split()) <= of(Kind.TEXT)
    assert IMAGE_FORMATS.keys() >= {"jpg", "jpeg", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"}


NEVER = of(Kind.PICKLE) | {"ten", "tb"}


@pytest.mark.parametrize("extension", sorted(autodecode.decoders.keys() - NEVER - {"cbor", "npz"}))
def test_what_webdataset_reads_is_read_as_it_reads_it(extension: str) -> None:
    data = encode_field(extension, value_for(extension))
    ours, theirs = decoder_for(extension)(memoryview(data)), autodecode.decoders[extension](data)
    assert type(ours) is type(theirs)
    assert as_plain(ours) == as_plain(theirs)


@pytest.mark.parametrize("extension", sorted(writer.default_handlers.keys() & ENCODED_EXTENSIONS - {"cbor"}))
def test_what_webdataset_writes_is_read_back(extension: str) -> None:
    value = value_for(extension)
    got = decoder_for(extension)(memoryview(writer.default_handlers[extension](value)))
    assert type(got) is type(value)
    assert as_plain(got) == as_plain(value)


def test_what_webdataset_reads_or_writes_is_left_out_by_intention_only() -> None:
    named = autodecode.decoders.keys() | writer.default_handlers.keys()
    assert named - DECODED_EXTENSIONS == {*NEVER, "tenbin", "class", "img", "image"}
