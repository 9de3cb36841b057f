"""`loader.show()`: a picture of what the loop gets, which changes nothing of where the loop stands; and notebooks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import RandomSampler

from streamload import Mixture, Portion, ShardWriter, StreamLoader, TarDataset
from streamload.errors import DecodeError, TransformError
from streamload.images import Compose, Normalize, RandomCrop, ToTensor

SAMPLES = 40
BELOW_TITLE = 45
NORMALIZE = Normalize((0.5, 0.5, 0.5), (0.1, 0.1, 0.1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos") / "shards"
    with ShardWriter(folder, max_count=10) as writer:
        for number in range(SAMPLES):
            pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
            writer.write({"__key__": f"photo/{number:03d}", "png": pixels, "cls": number % 2})
    (folder / "classes.json").write_text('{"classes": ["cat", "dog"]}')
    return folder


@pytest.fixture(autouse=True)
def the_generators_are_as_they_were() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    yield
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def augment(sample: Any) -> Any:
    """A random transform that draws from the global generators."""
    image, label = sample
    return np.roll(image, random.randrange(40) + np.random.randint(40), 0), label + torch.randint(100, ()).item()


def below_title(picture: Image.Image) -> bytes:
    return picture.crop((0, BELOW_TITLE, *picture.size)).tobytes()


@pytest.mark.parametrize("transform", [augment, {"png": Compose([RandomCrop(24), ToTensor(), NORMALIZE])}])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "weights": "balanced"}, {"drop_last": True}])
def test_it_shows_the_first_batch_as_the_loop_gets_it_and_changes_nothing(
    photos: Path, transform: Any, options: dict[str, Any]
) -> None:
    fields = ("png", "cls")
    if isinstance(transform, dict):
        fields = ("png", "cls", "__key__")  # of the loop's batch too
    with StreamLoader(photos, 8, fields=fields, transform=transform, num_workers=0, seed=3, **options) as loader:
        before = loader.state_dict()
        shown = loader.show()
        assert loader.state_dict() == before
        assert loader.statistics().batches == 0
        batches = iter(loader)
        first = next(batches)
        assert below_title(loader.show(batch=first)) == below_title(shown)
        standing = loader.state_dict()
        assert below_title(loader.show()) == below_title(shown)  # in the middle of the epoch too
        assert loader.state_dict() == standing
        assert loader.statistics().batches == 1
        assert len(list(batches)) == len(loader) - 1  # the pass goes on
        assert below_title(loader.show()) != below_title(shown) or not options.get("shuffle")


def test_a_picture_is_written_and_has_the_size_asked_for(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("subprocess.Popen")  # no process is started
    with StreamLoader(photos, 16, fields=("png", "cls"), num_workers=2) as loader:
        picture = loader.show(tmp_path / "sheet.png", samples=6, columns=3)
        assert (picture.mode, picture.width) == ("RGB", 16 + 3 * 208)
        in_one_row = loader.show(samples=6)
        assert in_one_row.height < picture.height
    with Image.open(tmp_path / "sheet.png") as written:
        assert np.array_equal(np.asarray(written), np.asarray(picture))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    shown = np.asarray(in_one_row)[BELOW_TITLE : BELOW_TITLE + 160, 32 : 32 + 160]  # in the middle of 192
    assert np.array_equal(shown, pixels.repeat(4, 0).repeat(4, 1))  # 40 pixels are enlarged to 160


def collate_targets(samples: list[Any]) -> Any:
    return torch.stack([torch.as_tensor(image) for image, _ in samples]), [
        [[2, 2, 9, 9, label]] for _, label in samples
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"fields": None},
        {"fields": ("png", "cls"), "collate_fn": collate_targets},
        {"fields": ("png",), "transform": lambda sample: sample[0]},
        {"fields": ("png", "txt?"), "collate_fn": list},
        {"fields": ("__key__",)},
        {"fields": ("cls",), "decode": False},
        {"fields": ("png", "cls"), "where": "label == 1", "samples": slice(3, 9)},
        {"fields": ("png", "cls"), "epoch_size": 7, "shuffle": True},
        {"fields": ("png", "cls"), "rank": 1, "world_size": 2, "lanes": 4},
    ],
    ids=lambda options: ", ".join(f"{name}" for name in options),
)
def test_batches_of_all_kinds_can_be_shown(photos: Path, options: dict[str, Any]) -> None:
    with StreamLoader(photos, 4, num_workers=0, **options) as loader:
        shown = loader.show()
        if options["fields"] in (None, ("__key__",)) or "collate_fn" in options or "transform" in options:
            assert below_title(shown) == below_title(loader.show(batch=next(iter(loader))))


def test_keys_are_shown_where_no_function_of_the_users_would_get_them(photos: Path) -> None:
    pictures = []
    for fields in (("png", "cls"), ("png", "cls", "__key__")):
        with StreamLoader(photos, 4, fields=fields, num_workers=0) as loader:
            pictures.append(below_title(loader.show()))
    with StreamLoader(photos, 4, fields=("png", "cls"), num_workers=0) as loader:
        assert pictures[0] == pictures[1] != below_title(loader.show(batch=next(iter(loader))))


def test_classes_have_their_names_unless_folders_have_different_ones(photos: Path, tmp_path: Path) -> None:
    for name, classes in (("a", '["cat", "dog"]'), ("b", '["dog", "cat"]'), ("c", "")):
        shutil.copytree(photos, tmp_path / name)
        (tmp_path / name / "classes.json").unlink()
        if classes:
            (tmp_path / name / "classes.json").write_text(f'{{"classes": {classes}}}')

    def shown(*names: str) -> bytes:
        with StreamLoader([tmp_path / name for name in names], 4, fields=("png", "label?"), num_workers=0) as loader:
            return below_title(loader.show(batch=[torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])]))

    assert len({shown("a"), shown("b"), shown("c")}) == 3
    assert shown("a", "b") == shown("c")


def test_the_lanes_are_those_of_a_resumed_run(photos: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "fields": ("png", "cls", "__key__"), "num_workers": 0}
    with StreamLoader(photos, 2, rank=0, world_size=4, **options) as of_four:
        state = of_four.state_dict()
    with StreamLoader(photos, 8, **options) as loader:
        alone = below_title(loader.show())
        loader.load_state_dict(state)
        shown = below_title(loader.show())
        assert shown == below_title(loader.show(batch=next(iter(loader)))) != alone


def test_a_mixture_and_its_transforms(photos: Path) -> None:
    def darker(sample: Any) -> Any:
        return sample[0] // 4, sample[1]

    one, *others = sorted(photos.glob("*.tar"))
    mixture = Mixture({"a": (one, 0.5), "b": Portion(others, 0.5, transform=darker)})
    with StreamLoader(mixture, 8, shuffle=True, fields=("png", "cls"), num_workers=0) as loader:
        shown = loader.show()
        assert below_title(shown) == below_title(loader.show(batch=next(iter(loader))))


def test_a_sampler_is_not_drawn_from(photos: Path) -> None:
    drawn = []

    class Counting(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            drawn.append(1)
            return super().__iter__()

    sampler = Counting(range(SAMPLES), generator=torch.Generator().manual_seed(0))
    with StreamLoader(photos, 8, fields=("png", "cls"), sampler=sampler, num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
        loader.show()
        assert (loader.state_dict(), len(drawn)) == (state, 1)


def test_what_cannot_be_shown_is_one_error(photos: Path, tmp_path: Path) -> None:
    def fails(_: Any) -> Any:
        raise ValueError("it is odd")

    with StreamLoader(photos, 4, fields=("png", "cls"), transform={"png": fails}, num_workers=0) as loader:
        with pytest.raises(TransformError, match=r"it is odd.*photo/000"):
            loader.show()
        loader.transform = None
        loader.show()  # the new transform is used
        for wrong, said in (
            ({"path": tmp_path / "a.gif"}, r"path='.*a.gif' must end in .png, .jpg or .webp"),
            ({"path": "s3://bucket/a.png"}, "is a url; name a file on a local disk"),
            ({"samples": 0}, "samples=0 must be from 1 to 500"),
            ({"columns": 0}, "columns=0 must be at least 1"),
            ({"batch": 3}, "this one is of int"),
        ):
            with pytest.raises(ValueError, match=said):
                loader.show(**wrong)
        with pytest.raises(FileNotFoundError, match="there is no such folder; make it first"):
            loader.show(tmp_path / "nowhere" / "a.png")
        (tmp_path / "a.png").mkdir()
        with pytest.raises(IsADirectoryError, match="name a file in it"):
            loader.show(tmp_path / "a.png")
    with StreamLoader(photos, 64, fields=("png",), drop_last=True, num_workers=0) as loader:
        with pytest.warns(UserWarning, match="no batch"), pytest.raises(ValueError, match="there is no batch to show"):
            loader.show()


def test_a_damaged_sample_is_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "bad") as writer:
        writer.write({"__key__": "torn", "png": b"\x89PNG\r\n\x1a\n torn"})
    with StreamLoader(tmp_path / "bad", 4, fields=("png",), num_workers=0) as loader:
        with pytest.raises(DecodeError, match="'torn'"):
            loader.show()


def in_notebook(shown: object) -> str:
    """What a notebook asks an object for."""
    html: str = getattr(shown, "_repr_html_")()
    return html


def test_notebooks_get_a_table_that_reads_nothing(photos: Path, tmp_path: Path) -> None:
    moved = tmp_path / "a <b> & 'c'"
    with ShardWriter(moved) as writer:
        writer.write({"__key__": "one", "cls": 1})

    def fails(_: Any) -> Any:
        raise AssertionError

    with (
        StreamLoader(moved, 4, fields=("cls",), transform=fails, num_workers=2) as loader,
        TarDataset(moved, fields=("cls",), transform=fails) as dataset,
    ):
        next(moved.glob("*.tar")).unlink()
        for shown in (in_notebook(loader), in_notebook(dataset)):
            assert "a &lt;b&gt; &amp; &#x27;c&#x27;" in shown
            assert '<td style="text-align:left">1</td>' in shown
    with StreamLoader(photos, 4, shuffle=True, samples=slice(7), num_workers=0) as loader:
        assert ">7<" in in_notebook(loader)
        next(iter(loader))
        assert "epoch 0, sample 4" in in_notebook(loader)
