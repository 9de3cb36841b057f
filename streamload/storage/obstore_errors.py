"""What obstore's exceptions say, as our errors: status and code are in its texts only."""

from __future__ import annotations

import re

from streamload.errors import ShardChangedError, StorageError, without_secrets
from streamload.storage.errors import (
    connection_error,
    status_error,
    transient_error,
    unknown_length_error,
    whole_answer_error,
)

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TOO_SHORT = "Wanted range starting at"
_NOT_PARTIAL = ("non-partial response", "RangeNotSupported")
_UNKNOWN_LENGTH = re.compile(r"CONTENT_RANGE header: \"?bytes \d+-\d+/\*")
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+|Content-Range|UnexpectedRange")
_BROKEN = re.compile(r"kind: (?:Timeout|Interrupted|Request|Decode|Unknown)|body error|TimedOut|IncompleteMessage")
_ASKS_THE_CLOUD = re.compile(r"//169\.254\.169\.254|//metadata\.google\.internal|//metadata/computeMetadata")
_BY_CLASS = {"PreconditionError": 412, "PermissionDeniedError": 403, "UnauthenticatedError": 401}


def is_whole_answer(exc: Exception) -> bool:
    """Whether the server answered a request for a range with status 200."""
    return any(words in str(exc) for words in _NOT_PARTIAL)


def storage_error(url: str, exc: Exception) -> StorageError:
    """The error to raise for what obstore raised; its text is left out, since it may hold keys and tokens."""
    text = str(exc)
    code = found[1] if (found := _CODE.search(text)) else None
    if _ASKS_THE_CLOUD.search(text):
        return StorageError(
            "no credentials were found: neither in storage_options, nor in the environment, nor from this machine's "
            "cloud; give them, or `anon=True` for a public bucket",
            url=without_secrets(url),
        )
    if found := _STATUS.search(text):
        return status_error(url, int(found[1]), code)
    if "BareRedirect" in text or "redirect without LOCATION" in text:
        return status_error(url, 301, code)
    if isinstance(exc, FileNotFoundError):
        return status_error(url, 404, code)
    if type(exc).__name__ in _BY_CLASS:
        return status_error(url, _BY_CLASS[type(exc).__name__], code)
    if is_whole_answer(exc):
        return whole_answer_error(url)
    if _TOO_SHORT in text:
        return ShardChangedError(
            "the object ends before the bytes that were requested, so it was changed", url=without_secrets(url)
        )
    if _UNKNOWN_LENGTH.search(text):
        return unknown_length_error(url)
    if _WRONG_RANGE.search(text):
        return transient_error(url, "the server sent another part of the object than was requested")
    if "kind: Connect" in text or "tcp connect" in text or "dns error" in text:
        return connection_error(url, text)
    if _BROKEN.search(text):
        what = (
            "the storage did not answer in time" if "TimedOut" in text or "Timeout" in text else "the answer broke off"
        )
        return transient_error(url, what)
    return StorageError(
        f"cannot be read ({_first_words(text)}); check the url and storage_options", url=without_secrets(url)
    )


def _first_words(text: str) -> str:
    """The first line of a message, cut before whatever the server sent or the request held."""
    return without_secrets(re.split(r"[\n<{]|https?://", text, maxsplit=1)[0].strip(" :-"))[:200]
