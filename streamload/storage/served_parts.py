"""Servers that answer with parts of objects, told from those that never do."""

from __future__ import annotations

from collections.abc import Awaitable

from streamload.storage.errors import WholeAnswerError
from streamload.storage.protocol import RangeBody

__all__ = ["ServedParts"]


class ServedParts:
    """Remembers which servers have ever answered with a part."""

    def __init__(self) -> None:
        self._places: set[str] = set()

    async def noted(self, place: str, answer: Awaitable[RangeBody]) -> RangeBody:
        """An answer of the server at some place.

        Raises:
            WholeAnswerError: it was the whole object; with `never_parts`, if no answer of this server was a part yet.
        """
        try:
            body = await answer
        except WholeAnswerError as exc:
            exc.never_parts = place not in self._places
            raise
        self._places.add(place)
        return body
