"""List the samples of a folder: class folders as in torchvision, files that share a stem, or splits of these."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from streamload.pack.run import UsageError
from streamload.pack.sources.loading import read_regular
from streamload.pack.sources.source import (
    Source,
    SourceSample,
    extension_of,
    field_named,
    field_prefix,
    file_at,
    is_data,
    kind_of,
    numbers_of_classes,
    unique_key,
)
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted, listed
from streamload.write.shard_writer import label_of

Roots = list[tuple[str, str]]  # folders whose files are paired by stem, and the prefixes of their fields

_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
_INPUTS = ("images", "image", "imgs", "img", "jpegimages", "photos", "rgb", "inputs", "input", "frames")
_TARGETS = (
    *("masks", "mask", "labels", "label", "annotations", "annotation", "gt", "groundtruth", "ground_truth"),
    *("segmentation", "segmentations", "segmentationclass", "depth", "depths", "targets", "captions", "texts"),
)
_SYSTEM_NAMES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "icon\r")
_NO_SAMPLES = ("csv", "tsv", "jsonl", "ndjson", "parquet", "tar", "zip", "gz", "md", "py", "npz", "html", "")


class Tree(NamedTuple):
    """The paths below a folder, relative to it.

    Attributes:
        files: the files that may be samples, sorted.
        folders: the visible folders, including empty ones.
        notes: on skipped files.
    """

    root: str
    files: list[str]
    folders: list[str]
    notes: list[str]

    def below(self, folder: str) -> list[str]:
        """Return the files below a folder, which is "" or ends with a slash."""
        return [path for path in self.files if path.startswith(folder)] if folder else self.files

    def inside(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders, and the paths of the files, directly in a folder."""
        start = len(folder)
        names = sorted(path[start:] for path in self.folders if path.startswith(folder) and "/" not in path[start:])
        return names, [path for path in self.below(folder) if "/" not in path[start:]]


def walk(root: str, *, follow_links: bool) -> Tree:
    """List the visible files below a folder. Raises OSError."""
    kept, ignored, links, paths = [], [], [], []

    def fail(exc: OSError) -> None:
        raise exc

    for folder, folders, files in os.walk(root, onerror=fail, followlinks=follow_links):
        inside = os.path.join(folder, "")[len(os.path.join(root, "")) :]
        hidden = {name for name in folders + files if name.startswith(".") or name.lower() in _SYSTEM_NAMES}
        ignored += [inside + name for name in hidden]
        paths += [inside + name for name in files if name not in hidden]
        folders[:] = [name for name in folders if name not in hidden]
        linked = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        if follow_links:  # skip only links to a folder above
            linked = {name for name in linked if any(map(Path(folder, name).samefile, Path(folder, name).parents))}
        links += [inside + name for name in linked]
        folders[:] = [name for name in folders if name not in linked]
        kept += [inside + name for name in folders]
    notes = []
    if ignored:
        notes.append(f"ignored {counted(len(ignored), 'hidden or system path')}, such as {min(ignored)!r}")
    if links:
        advice = "they lead back to a folder above them" if follow_links else "--follow-symlinks follows them"
        notes.append(f"skipped folders that are links: {listed(list(map(repr, sorted(links))))}; {advice}")
    return Tree(root, sorted(paths), kept, notes)


def samples_of_folder(tree: Tree, classes: tuple[str, ...] | None, *, by_stem: bool | None) -> Source:
    """Return the samples of a folder, by split if it has splits. Only files of labels are opened.

    If `by_stem` is True, files that share a stem are a sample, and `.cls` is its label; if False, or with
    `classes`, folders are classes; if None, the files decide. Raises OSError, and UsageError for ambiguous or missing
    files.
    """
    layout = _layout(tree, by_stem=False if classes is not None else by_stem)
    by_class = [split for split, roots in layout.items() if not roots]
    known = classes or tuple(sorted({name for split in by_class for name in tree.inside(split)[0]}))
    samples: list[SourceSample] = []
    parts: dict[str, Sequence[int]] = {}
    notes = [*tree.notes]
    for split, roots in layout.items():
        of_split = _by_stem(tree, roots, notes) if roots else _by_class(tree, split, known, notes)
        parts[split.rstrip("/")] = range(len(samples), len(samples) + len(of_split))
        samples += of_split
    if not samples:
        raise UsageError(f"{tree.root!r} holds no file to pack; give a folder of class folders, or of files")
    packed = tuple(folder for split, roots in layout.items() for folder, _ in roots or [(split, "")])
    if outside := [path for path in tree.files if not path.startswith(packed)]:
        notes.append(f"left out {counted(len(outside), 'file')} outside of packed folders, such as {outside[0]!r}")
    if "" not in parts:
        notes.append(f"{', '.join(parts)} are packed as splits of one dataset, into folders of these names")
    if len(by_class) < len(layout):
        folders = dict.fromkeys(folder.rstrip("/") for roots in layout.values() for folder, _ in roots if folder)
        where = f" in {listed(list(folders))}" if folders else ""
        labels = "" if any(sample.label is not None for sample in samples) else " without labels"
        notes.append(
            f"files{where} that share a name up to its first dot are packed as one sample{labels}; --no-stems takes "
            "folders as classes, --labels FILE gives labels"
        )
    if by_class:
        notes.append(f"{counted(len(known), 'class')}: {listed(known)}")
    return Source(tuple(samples), known if by_class else None, tuple(notes), None if "" in parts else parts)


def _layout(tree: Tree, *, by_stem: bool | None) -> dict[str, Roots]:
    """Return roots by split (`train/`; "" without splits); a split of class folders has no roots."""
    folders, loose = tree.inside("")
    if not any(map(is_data, loose)):
        splits = _splits(folders)
        flat = [split for split in splits if not tree.inside(f"{split}/")[0]]
        if splits and not (flat and by_stem is False):
            return {f"{split}/": _roots(tree, f"{split}/", by_stem=by_stem) for split in splits}
    roots = _roots(tree, "", by_stem=by_stem)
    if len(roots) > 1 and (splits := _splits(tree.inside(roots[0][0])[0])):
        return {f"{split}/": [(f"{folder}{split}/", prefix) for folder, prefix in roots] for split in splits}
    return {"": roots}


def _splits(names: list[str]) -> list[str]:
    if len(names) < 2 or not {name.lower() for name in names} <= {*_SPLITS}:
        return []
    return sorted(names, key=lambda name: _SPLITS.index(name.lower()))


def _roots(tree: Tree, folder: str, *, by_stem: bool | None) -> Roots:
    folders, loose = tree.inside(folder)
    if by_stem is False:
        return []
    if len(folders) > 1 and not any(map(is_data, loose)) and (pairs := _pairs(tree, folder, folders)):
        return [(f"{folder}{name}/", field_prefix(name) if number else "") for number, name in enumerate(pairs)]
    if by_stem or (not folders and any(kind_of(path) not in _NO_SAMPLES for path in loose)):
        return [(folder, "")]
    files = tree.below(folder)
    usual = _usual_kind(files)
    stems = {_stem(path) for path in files if kind_of(path) == usual}
    accompanied = stems & {_stem(path) for path in files if kind_of(path) != usual}
    return [(folder, "")] if stems and 2 * len(accompanied) >= len(stems) else []


def _usual_kind(paths: Sequence[str]) -> str:
    kinds = Counter(map(kind_of, paths))
    return max(kinds, key=lambda kind: kinds[kind], default="")


def _pairs(tree: Tree, folder: str, names: list[str]) -> list[str]:
    """Return the folders that hold fields of the same samples, such as `images` and `masks`; [] if they are classes.

    Equal stems are not enough: cat/1.jpg and dog/1.jpg are two images. Usual names or different kinds are required.
    """
    paths: dict[str, list[str]] = {name: [] for name in names}
    for path in tree.below(folder):
        name, slash, inside = path[len(folder) :].partition("/")
        if slash:
            paths[name].append(inside)
    kinds = [{*map(kind_of, inside)} for inside in paths.values()]
    inputs = [name for name in names if name.lower() in _INPUTS]
    targets = [name for name in names if name.lower() in _TARGETS]
    are_named = bool(inputs and targets)
    if not are_named and sum(map(len, kinds)) > len(set().union(*kinds)):
        return []
    stems = {name: {*map(_stem, inside)} for name, inside in paths.items()}
    first = inputs[0] if inputs else names[next((n for n, of_folder in enumerate(kinds) if "image" in of_folder), 0)]
    others = [name for name in names if name != first and 2 * len(stems[name] & stems[first]) >= len(stems[name]) > 0]
    if are_named and not set(others) & set(targets):
        raise UsageError(
            f"{first!r} and {targets[0]!r} look like fields of the same samples, but the names of their files differ: "
            f"{paths[first][:1]}, {paths[targets[0]][:1]}; rename them, list both in a .csv, or give --no-stems"
        )
    return [first, *others] if are_named or len(others) == len(names) - 1 else []


def _stem(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _by_class(tree: Tree, split: str, classes: tuple[str, ...], notes: list[str]) -> list[SourceSample]:
    """Return a sample for each file in a split's class folders. Only the most common kind of file gets a field."""
    names, loose = tree.inside(split)
    where = repr(os.path.join(tree.root, split) if split else tree.root)
    if data := [path for path in loose if is_data(path)]:
        raise UsageError(
            f"files such as {data[0]!r} lie directly in {where} and belong to no class; put them into class folders, "
            "give their labels with --labels FILE, or pack them without labels with --stems"
        )
    if not names:
        hint = f"; if {loose[0]!r} is a table or an array, give its own path" if loose else ""
        hint += "".join(f"; {note}" for note in notes)
        raise UsageError(f"{where} holds no class folder, nor files of another layout (see shardify --help){hint}")
    numbers = dict(zip(names, numbers_of_classes(names, classes, lambda _: f"a class folder in {where}"), strict=True))
    paths = [path for path in tree.below(split) if "/" in path[len(split) :]]
    paths.sort(key=lambda path: (path[len(split) :].partition("/")[0], path))  # a/x before a.b/x
    usual = _usual_kind(paths)
    keys: set[str] = set()
    samples = []
    for path in paths:
        extension, inside = extension_of(path), path[len(split) :]
        name = field_named(extension) if kind_of(path) == usual else None
        member = file_at(os.path.join(tree.root, path), name)
        key = unique_key(inside.removesuffix(f".{extension}"), keys)
        samples.append(SourceSample(key, (member,), numbers[inside.partition("/")[0]]))
    filled = {sample.label for sample in samples}
    if empty := [name for name in names if numbers[name] not in filled]:
        notes.append(f"{counted(len(empty), 'empty class folder')}, numbered like the others: {listed(empty)}")
    if lacking := len(classes) - len(names):
        notes.append(f"{where} has no folder for {counted(lacking, 'class')}")
    if loose:
        notes.append(f"skipped {counted(len(loose), 'file')} outside of the class folders, such as {loose[0]!r}")
    if len(names) == 1 and len(tree.inside(f"{split}{names[0]}/")[0]) > 1:
        notes.append(f"{names[0]!r} is the only class; if the folders in it are the classes, pack that folder")
    return samples


def _by_stem(tree: Tree, roots: Roots, notes: list[str]) -> list[SourceSample]:
    members: dict[str, dict[str, str]] = {}
    strays = []
    for folder, prefix in roots:
        for path in tree.below(folder):
            stem = _stem(path)
            extension = path[len(stem) + 1 :]
            if not extension:
                strays.append(path)
                continue
            name = field_named(prefix + extension)
            if name is None:
                raise UsageError(f"{path!r}: {extension!r} cannot be a field of a sample; rename or remove the file")
            fields = members.setdefault(stem[len(folder) :], {})
            if name in fields:
                message = f"would both be the field {name!r} of one sample; rename or remove one of them"
                raise UsageError(f"{fields[name]!r} and {path!r} {message}")
            fields[name] = path
    if strays:
        notes.append(f"skipped {counted(len(strays), 'file')} without an extension, such as {strays[0]!r}")
    keys: set[str] = set()
    samples = []
    for stem, fields in members.items():
        label = fields.pop(LABEL_FIELD, None)
        files = [file_at(os.path.join(tree.root, path), name) for name, path in fields.items()]
        number = None
        if label is not None:
            content = read_regular(os.path.join(tree.root, label)) or b""
            number = label_of([(LABEL_FIELD, b"", content)])
            if number is None:
                advice = "but a label is an integer; if it is a name, call the file .txt"
                raise UsageError(f"{os.path.join(tree.root, label)!r} holds {content[:40]!r}, {advice}")
        samples.append(SourceSample(unique_key(stem, keys), tuple(files), number))
    return samples
