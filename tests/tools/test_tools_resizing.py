"""`shardify --resize`: what becomes of images, and how shards are cut when sizes are not known beforehand."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from image_folders import files_below, pack, packed_samples, refusal
from PIL import Image, ImageOps

from streamload.images.files import decode_image
from streamload.pack.sources.loading import Resizing


def gradient(height: int, width: int) -> np.ndarray:
    """A picture that no turn or mirror leaves as it is."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * y / height, 255 * x / width, 255 * (x + y) / (height + width)], 2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return buffer.getvalue()


def difference(data: bytes, expected: Image.Image) -> float:
    found = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16)
    assert found.shape[:2] == (expected.height, expected.width)
    return float(np.abs(found - np.asarray(expected.convert("RGB"), np.int16)).mean())


@pytest.mark.parametrize(("kind", "field"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")])
def test_larger_images_become_jpeg_of_the_shorter_side(kind: str, field: str) -> None:
    image = Image.fromarray(gradient(60, 90))
    new_field, data = Resizing(20, 90)(field, encoded(image, kind))
    assert new_field == "jpg"
    assert Image.open(io.BytesIO(data)).format == "JPEG"
    assert difference(data, image.resize((30, 20), Image.Resampling.BILINEAR)) < 3


def test_images_that_are_small_enough_stay_as_they_are() -> None:
    data = encoded(Image.fromarray(gradient(20, 90)), "PNG")
    assert Resizing(20, 90)("png", data) == ("png", data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(gradient(60, 90)), exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    size = (upright.width // 3, upright.height // 3)
    _, resized = Resizing(20, 95)("jpg", data)
    assert difference(resized, upright.resize(size, Image.Resampling.BILINEAR)) < 3
    assert not Image.open(io.BytesIO(resized)).getexif()


def test_grey_stays_grey_and_other_kinds_become_colour() -> None:
    picture = Image.fromarray(gradient(60, 90))
    for image in (picture.convert("L"), picture.convert("L").convert("RGB")):
        _, data = Resizing(20, 90)("jpg", encoded(image))
        assert Image.open(io.BytesIO(data)).mode == "L"
    for image, kind in (
        (picture.convert("CMYK"), "JPEG"),
        (picture.convert("RGBA"), "PNG"),
        (picture.quantize(), "PNG"),
    ):
        _, data = Resizing(20, 90)("x", encoded(image, kind))
        assert Image.open(io.BytesIO(data)).mode == "RGB"
        assert difference(data, picture.resize((30, 20), Image.Resampling.BILINEAR)) < 8


def photos(root: Path, count: int) -> Path:
    generator = np.random.default_rng(1)
    for number in range(count):
        size = (40, 60, 3) if number % 5 else (10, 12, 3)
        path = root / f"class{number % 3}" / f"{number}.{'png' if number % 4 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(generator.integers(0, 256, size, np.uint8))
        path.write_bytes(encoded(image, "PNG" if number % 4 == 0 else "JPEG"))
    return root


def test_shards_of_resized_images_are_the_same_with_any_workers(tmp_path: Path) -> None:
    source = photos(tmp_path / "source", 60)
    options = ["--resize", 20, "--max-bytes", "20KB"]
    for workers in (1, 3):
        assert pack(source, tmp_path / str(workers), *options, "--workers", workers)[0] == 0
    assert files_below(tmp_path / "1") == files_below(tmp_path / "3")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "1").glob("*.tar"))]
    samples = packed_samples(tmp_path / "1")
    assert len(sizes) > 3
    assert max(sizes) <= 20_000
    assert sum(sizes) > 0.5 * 20_000 * len(sizes)
    assert len(samples) == 60
    for key, sample in samples.items():
        number = int(key.rpartition("/")[2])
        field = "jpg" if number % 5 or number % 4 else "png"
        height, width, _ = decode_image(memoryview(sample[field])).shape
        assert (height, width) == ((20, 30) if number % 5 else (10, 12))


def test_what_does_not_fit_goes_into_a_further_shard_before_the_next(tmp_path: Path) -> None:
    source, dest = photos(tmp_path / "source", 12), tmp_path / "dest"
    assert pack(source, dest, "--resize", 20, "--max-bytes", "8KB", "--no-shuffle")[0] == 0
    names = sorted(path.name for path in dest.glob("*.tar"))
    assert names[:3] == ["shard-000000.tar", "shard-000000_000001.tar", "shard-000000_000002.tar"]
    assert list(packed_samples(dest)) == [f"class{c}/{n}" for c in range(3) for n in sorted(range(c, 12, 3), key=str)]


def test_a_resized_image_that_is_too_large_for_a_shard_ends_the_run(tmp_path: Path) -> None:
    source, dest = photos(tmp_path / "source", 12), tmp_path / "dest"
    err = refusal(source, dest, "--resize", 100, "--max-bytes", 4000, status=1)
    needed = int(err.split("raise --max-bytes (max_bytes) to at least ")[1].split()[0])
    assert pack(source, dest, "--resize", 100, "--max-bytes", needed)[0] in (0, 1)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    source = photos(tmp_path / "source", 6)
    damaged = source / "class1" / "1.jpg"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2 :] = data[len(data) // 2 - 200 : len(data) // 2 - 100] + b"\xff\xd9"
    damaged.write_bytes(data)
    assert f"{damaged}: the JPEG file is damaged" in refusal(source, tmp_path / "dest", "--resize", 20, status=1)
    assert pack(source, tmp_path / "dest", "--resize", 20, "--skip-bad")[0] == 0
    assert len(packed_samples(tmp_path / "dest")) == 5
