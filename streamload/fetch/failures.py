"""What could not be fetched, and why, until it is requested again."""

from __future__ import annotations

from collections.abc import Collection


class Failures:
    """Errors by the numbers of what they were met for. It is not tried again before they are taken."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._errors

    def note(self, number: int, error: Exception) -> None:
        """Something cannot be fetched."""
        self._errors[number] = error

    def check(self, numbers: Collection[int]) -> None:
        """Raise the error that was met for the first of some numbers that have one."""
        for number in numbers if self._errors else ():
            if number in self._errors:
                raise self._errors[number].with_traceback(None)  # it would grow each time

    def take(self) -> dict[int, Exception]:
        """All of them, which are not known any more then."""
        taken, self._errors = self._errors, {}
        return taken
