"""How often small requests are made again, and what is kept of a file that breaks off."""

from __future__ import annotations

import pytest

from streamload.errors import ShardChangedError, StorageError, TransientStorageError
from streamload.fetch.storage.errors import NoConnectionError
from streamload.fetch.storage.patience import Patience
from streamload.fetch.storage.whole_file import WholeFile

URL = "s3://bucket/set/index.json"


def waits(error: StorageError) -> list[float]:
    patience, found = Patience(), []
    while (wait_s := patience.wait_s(error)) is not None:
        found.append(wait_s)
    return found


def test_what_may_pass_is_tried_ten_times_with_growing_waits() -> None:
    found = waits(TransientStorageError("busy"))
    assert len(found) == 9
    for number, wait_s in enumerate(found):
        longest_s = min(2.0, 0.1 * 2**number)
        assert longest_s / 2 <= wait_s <= longest_s


def test_what_cannot_be_reached_is_tried_three_times_and_what_will_not_pass_once() -> None:
    assert len(waits(NoConnectionError("nobody there"))) == 2
    assert waits(StorageError("denied")) == []


def test_progress_renews_patience() -> None:
    file = WholeFile(URL, 100)
    for _ in range(50):
        assert file.patience.wait_s(TransientStorageError("broken")) is not None
        file.add(b"x")


def test_a_file_is_whole_when_all_of_it_has_come() -> None:
    file = WholeFile(URL, 6)
    file.answered(6, '"a"')
    file.add(b"abc")
    with pytest.raises(TransientStorageError, match="ended after 3 bytes"):
        file.whole()
    file.answered(6, None)  # an answer without a version says nothing
    file.add(b"def")
    assert (file.whole(), file.etag, file.reached) == (b"abcdef", '"a"', 6)


def test_a_file_that_is_too_large_or_another_one_is_refused() -> None:
    with pytest.raises(StorageError, match="more than 5 bytes"):
        WholeFile(URL, 5).answered(6, None)
    for size_bytes, etag in ((7, '"a"'), (6, '"b"')):
        file = WholeFile(URL, 10)
        file.answered(6, '"a"')
        with pytest.raises(ShardChangedError):
            file.answered(size_bytes, etag)
