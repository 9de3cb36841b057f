"""WebDataset's decoders in our loaders, and our loaders in WebDataset's pipelines, beside what WebDataset makes."""

from __future__ import annotations

import io
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

from streamload import StreamLoader, TarDataset
from streamload.errors import DecodeError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fields of several kinds in two samples of a shard, written by WebDataset."""
    path = tmp_path_factory.mktemp("webdataset") / "a.tar"
    with wds.TarWriter(str(path)) as writer:
        for number in range(2):
            file = io.BytesIO()
            Image.fromarray(np.full((4, 6, 3), 100 * number, np.uint8)).save(file, "png")
            image = file.getvalue()
            fields = {"png": image, "seg.png": image, "cls": b"%d" % number, "txt.gz": "text"}
            writer.write({"__key__": f"s{number}", **fields})
    return str(path)


def first(source: str, fields: tuple[str, ...], decode: Any, **options: Any) -> Any:
    with StreamLoader(source, 2, fields=fields, decode=decode, **{"num_workers": 0, **options}) as loader:
        return next(iter(loader))


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def length(key: str, data: bytes) -> int | None:
    return len(data) if key in (".seg.png", ".txt") else None


@pytest.mark.parametrize(
    ("handlers", "workers"),
    [([wds.imagehandler("torchrgb")], 0), ([length, wds.imagehandler("torchrgb")], 1)],
)
def test_decoders_of_webdataset_give_what_they_give_there(source: str, handlers: list[Any], workers: int) -> None:
    fields = ("png", "seg.png", "cls", "txt.gz")
    theirs = map(wds.autodecode.Decoder(handlers), TarDataset(source, decode=False))
    columns = first(source, fields, handlers if len(handlers) > 1 else handlers[0], num_workers=workers)
    ours, samples = list(zip(*columns, strict=True)), TarDataset(source, fields=fields, decode=handlers)
    expected = [[plain(sample[name]) for name in fields] for sample in theirs]
    assert [list(map(plain, sample)) for sample in ours] == expected
    assert [list(map(plain, sample)) for sample in samples] == expected


def test_a_decoder_of_webdataset_may_be_that_of_a_field(source: str) -> None:
    decode = {"seg.png": [lambda key, data: None, wds.imagehandler("l8")], "cls": lambda key, data: key}
    images, masks, classes, texts = first(source, ("png", "seg.png", "cls", "txt.gz"), decode)
    assert (images.shape, masks.shape, classes, texts) == ((2, 4, 6, 3), (2, 4, 6), (".cls",) * 2, ("text",) * 2)


def test_a_decoder_that_continues_hands_its_result_to_the_next_and_to_ours(source: str) -> None:
    def mirrored(key: str, data: bytes) -> Any:
        return wds.autodecode.Continue("cls", b"7" + data) if key == ".cls" else None

    assert first(source, ("cls",), [mirrored])[0].tolist() == [70, 71]
    assert first(source, ("cls",), [mirrored, lambda key, data: data])[0] == (b"70", b"71")


def test_a_failure_of_a_decoder_names_the_sample(source: str) -> None:
    with pytest.raises(DecodeError, match=r"field 'cls': UnidentifiedImageError.*s0"):
        first(source, ("cls",), wds.imagehandler("rgb8", ["cls"]))


@pytest.mark.parametrize("decode", ["rgb8", wds.decode("rgb8"), [length, len], [], wds.autodecode.ImageHandler])
def test_what_is_no_decoder_is_refused_with_an_example(source: str, decode: Any) -> None:
    with pytest.raises(TypeError, match=r"decode=.*wds\.imagehandler\(\"rgb8\"\): functions of \(extension, bytes\)"):
        StreamLoader(source, decode=decode)


def test_stages_of_webdataset_take_our_samples(source: str) -> None:
    stages = (wds.decode("rgb8"), wds.to_tuple("__key__", "__url__", "png", "cls"))
    dataset = TarDataset(source, decode=False)
    with StreamLoader(source, 2, decode=False, collate_fn=list, num_workers=0) as loader:
        for samples in (
            wds.DataPipeline(lambda: loader, chain.from_iterable, *stages),
            wds.DataPipeline(lambda: dataset, *stages),
        ):
            for _ in range(2):
                keys, urls, images, classes = zip(*samples, strict=True)
                assert (keys, classes) == (("s0", "s1"), (0, 1))
                assert all(Path(url) == Path(source) for url in urls)
                assert [image[0, 0, 0] for image in images] == [0, 100]
