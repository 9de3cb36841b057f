"""A small object whole, by obstore: as few bytes as possible come twice where an answer breaks off."""

from __future__ import annotations

from typing import Any

from streamload.fetch.storage.buckets.body import body_error
from streamload.fetch.storage.buckets.meta import version_in
from streamload.fetch.storage.buckets.obstore_errors import is_whole_answer
from streamload.fetch.storage.http_range import strong_etag
from streamload.fetch.storage.whole_file import WholeFile

__all__ = ["read_object_on"]


def read_object_on(file: WholeFile, store: Any, key: str) -> bytes:
    """Ask for what has not come of a file, or for all of it where the server gives no part of it.

    Args:
        file: what has come; more of it afterwards, also where this raises.
        store: obstore's.
        key: the object's name in it.

    Raises:
        TransientStorageError: it broke off.
        StorageError: it is too large, or has changed.
    """
    import obstore

    try:
        answer = obstore.get(store, key, options=_rest_of(file))
    except obstore.exceptions.BaseError as exc:
        if not (file.reached and is_whole_answer(exc)):
            raise
        file.begin_anew()
        answer = obstore.get(store, key)
    file.answered(answer.meta["size"], version_in(answer.meta))
    try:
        for piece in answer.stream(min_chunk_size=1):
            file.add(piece)
    except (obstore.exceptions.BaseError, OSError) as exc:
        if not file.is_whole:  # else only the end mark is missing
            raise body_error(file.url, exc) from None
    return file.whole()


def _rest_of(file: WholeFile) -> Any:
    if not file.reached:
        return {}
    strong = strong_etag(file.etag)
    return {"range": {"offset": file.reached}} | ({} if strong is None else {"if_match": strong})
