"""Files that share a stem are one sample: `0.jpg`, `0.txt`, `0.mask.png`; of any kind, as WebDataset packs a folder.

The key is the path up to the first dot of the file's name, and the field is what follows that dot. A file `.cls` is the
sample's label. Samples may lack what others have.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from streamload.pack.sources.image_folders import visible_files
from streamload.pack.sources.loading import read_regular
from streamload.pack.sources.source import (
    IMAGE_FIELDS,
    KeyedSamples,
    Source,
    SourceError,
    SourceFile,
    SourceSample,
    field_named,
    key_of,
)
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted
from streamload.write.shard_writer import label_of

_MANY_FIELDS = 20
_SHOWN_BYTES = 40


def samples_by_stem(source: str, splits: Sequence[str], *, follow_links: bool) -> Source:
    """The samples of a folder in the order of their keys; no file is opened but those of labels.

    Args:
        source: the folder.
        splits: folders in it that are splits, each with keys of its own; none if it is one dataset.
        follow_links: follow links to folders.

    Raises:
        SourceError: two files would be one field of a sample, a label is no integer, or there is no sample.
        OSError: a folder or the file of a label cannot be read.
    """
    samples: list[SourceSample] = []
    notes: list[str] = []
    parts: dict[str, Sequence[int]] = {}
    for split in splits or ("",):
        found, of_part = _samples_in(os.path.join(source, split), follow_links)
        parts[split] = range(len(samples), len(samples) + len(found))
        samples += found
        notes += [f"{split}: {note}" if split else note for note in of_part]
    if not samples:
        raise SourceError(f"{source!r} holds no file with an extension; there is nothing to pack")
    fields = dict.fromkeys(str(member.field) for sample in samples for member in sample.members)
    if len(fields) > _MANY_FIELDS:
        some = ", ".join(list(fields)[-3:])
        notes.append(
            f"there are {len(fields):,} different fields, such as {some}: a field is all that follows the first dot of "
            "a file's name, so put other characters in place of dots that separate no extension"
        )
    if splits:
        notes.append(f"{', '.join(splits)} are taken as splits of one dataset and packed into folders of these names")
    return Source(
        tuple(samples),
        None,
        "sample",
        tuple(notes),
        parts if splits else None,
        tuple((name,) for name in fields),
    )


def share_stems(paths: Iterable[str]) -> bool:
    """Whether any two of these files share a stem."""
    return max(Counter(map(stem_of, paths)).values(), default=0) > 1


def stem_of(path: str) -> str:
    """A path up to the first dot of its last component."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.partition(".")[0])


def _samples_in(folder: str, follow_links: bool) -> tuple[list[SourceSample], list[str]]:
    paths, notes = visible_files(folder, follow_links=follow_links)
    files: dict[str, dict[str, str]] = {}
    strays = []
    start = len(os.path.join(folder, ""))
    for path in paths:
        place, slash, name = path[start:].rpartition("/")
        stem, _, extension = name.partition(".")
        if not extension:
            strays.append(path)
            continue
        field = field_named(extension)
        if field is None:
            raise SourceError(f"{path!r}: {extension!r} cannot be a field of a sample; rename or remove the file")
        members = files.setdefault(place + slash + stem, {})
        if field in members:
            raise SourceError(
                f"{members[field]!r} and {path!r} would both be the field {field!r} of one sample; rename or remove "
                "one of them"
            )
        members[field] = path
    if strays:
        notes.append(f"skipped {counted(len(strays), 'file')} without an extension, such as {strays[0]!r}")
    keyed = KeyedSamples(IMAGE_FIELDS)
    return [_sample(keyed.unique(key_of(stem)), members) for stem, members in files.items()], notes


def _sample(key: str, members: dict[str, str]) -> SourceSample:
    label = members.pop(LABEL_FIELD, None)
    files = tuple(SourceFile(path, field, decodable=False) for field, path in members.items())
    return SourceSample(key, files, None if label is None else _label_in(label))


def _label_in(path: str) -> int:
    content = read_regular(path) or b""
    label = label_of([(LABEL_FIELD, b"", content)])
    if label is None:
        shown = content[:_SHOWN_BYTES]
        raise SourceError(f"{path!r} holds {shown!r}, and a label is an integer; if it is a name, call the file .txt")
    return label
