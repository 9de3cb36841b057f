"""A small file on its way, whole: what has come of it is kept when an answer breaks off, and the rest asked for."""

from __future__ import annotations

from streamload.errors import StorageError
from streamload.fetch.storage.errors import changed_error, transient_error
from streamload.fetch.storage.patience import Patience, Retries
from streamload.fetch.storage.protocol import same_etag, without_secrets

__all__ = ["WholeFile"]


class WholeFile:
    """The bytes that have come.

    Args:
        url: of the file.
        most_bytes: it may not be larger.
        patience: with the requests for it.

    Attributes:
        url: of the file.
        etag: the version that is read; None before the first answer, or where the storage has none.
    """

    def __init__(self, url: str, most_bytes: int, patience: Patience | None = None) -> None:
        self.url = url
        self.etag: str | None = None
        self.patience = patience or Retries().begin(url)
        self._most_bytes = most_bytes
        self._total_bytes: int | None = None
        self._content = bytearray()
        self._furthest = 0

    @property
    def reached(self) -> int:
        """The first byte that has not come."""
        return len(self._content)

    def answered(self, total_bytes: int | None, etag: str | None) -> None:
        """An answer begins, of a file of that size and version; None where the answer does not tell.

        Raises:
            StorageError: it is too large.
            ShardChangedError: it is not the file whose first bytes have come.
        """
        self._check_size(total_bytes or 0)
        if self._total_bytes not in (None, total_bytes) or not same_etag(self.etag, etag):
            raise changed_error(self.url, self.etag, etag)
        self._total_bytes, self.etag = total_bytes, etag if self.etag is None else self.etag

    def add(self, piece: bytes) -> None:
        """The next bytes. Raises StorageError if that are too many."""
        self._content += piece
        self._check_size(self.reached)
        if self.reached > self._furthest:  # else a file that breaks off and begins anew would do so for ever
            self._furthest = self.reached
            self.patience.progressed()

    def begin_anew(self) -> None:
        """Forget what has come: the next answer is of the whole file, and of whichever version there is."""
        self._content.clear()
        self._total_bytes = self.etag = None

    def ended(self) -> None:
        """An answer has ended as it should, so it was all of the file where it has told no size."""
        if self._total_bytes is None:
            self._total_bytes = self.reached

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._total_bytes == len(self._content)

    @property
    def can_go_on(self) -> bool:
        """Whether the rest of it can be asked for alone."""
        return self._total_bytes is not None and self.reached > 0

    def whole(self) -> bytes:
        """All of it. Raises TransientStorageError if the answers have ended before."""
        if not self.is_whole:
            raise transient_error(self.url, f"the answer ended after {self.reached:,} bytes")
        return bytes(self._content)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._most_bytes:
            raise StorageError(
                f"this has more than {self._most_bytes:,} bytes, so it is not what it should be",
                url=without_secrets(self.url),
            )
