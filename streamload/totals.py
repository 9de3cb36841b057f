"""Sum counts, seconds and bytes of a run by name, and write its events as a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from streamload.errors import without_secrets

# The groups of tracks in a trace, from top to bottom.
_TRACKS = ("loop", "worker", "connection")


class Totals(dict[str, float]):
    """Sums by name, 0 by default. `decode_s/jpg` is the part of `decode_s` for `jpg`."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, amounts: Mapping[str, float]) -> Totals:
        """Add amounts in place, and return the sums."""
        for name, amount in amounts.items():
            self[name] = self[name] + amount
        return self

    def since(self, earlier: Mapping[str, float]) -> Totals:
        """Return the difference from an earlier copy."""
        return Totals({name: amount - earlier.get(name, 0.0) for name, amount in self.items()})

    def parts(self, name: str) -> dict[str, float]:
        """Return the amounts of a name's parts, by the text after the slash, largest first."""
        parts = {key[len(name) + 1 :]: amount for key, amount in self.items() if key.startswith(f"{name}/")}
        return dict(sorted(parts.items(), key=lambda each: -each[1]))


class TimeIntegral:
    """Integrate a changing number over time, for its mean between two calls of `now`."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._value = self._sum = 0.0
        self._since_s = clock()

    def set(self, value: float) -> None:
        """Change the number."""
        self._sum = self.now()
        self._value = value

    def now(self) -> float:
        """Return the integral until now, in seconds times the number's unit."""
        before_s, self._since_s = self._since_s, self._clock()
        self._sum += self._value * (self._since_s - before_s)
        return self._sum


class Event(NamedTuple):
    """A span of time in a trace.

    Attributes:
        kind: "step" or "wait" of the loop, "task" or "scan" of a worker, or "fetch".
        track: "loop", "worker 4711" or "connection". Connections' events may overlap.
        start_s: by `time.perf_counter`, shared by all processes of a machine on Linux.
        details: values to show with the event.
    """

    kind: str
    track: str
    start_s: float
    seconds: float
    details: Mapping[str, Any]


def trace_json(events: Iterable[Event]) -> str:
    """Return the text of a trace file."""
    ordered = sorted(events, key=lambda event: event.start_s)
    origin_s = ordered[0].start_s if ordered else 0.0
    numbers: dict[str, int] = {}
    entries = []
    for event, track in _on_tracks(ordered):
        number = numbers.setdefault(track, (1 + _TRACKS.index(track.split(maxsplit=1)[0])) * 10_000 + len(numbers))
        entries.append(
            {
                "name": event.kind,
                "cat": event.kind,
                "ph": "X",
                "ts": round((event.start_s - origin_s) * 1e6, 3),
                "dur": round(event.seconds * 1e6, 3),
                "pid": 1,
                "tid": number,
                "args": {k: without_secrets(v) if isinstance(v, str) else v for k, v in event.details.items()},
            }
        )
    return json.dumps({"traceEvents": [*_names(numbers), *entries], "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "streamload"}}
    for track, number in numbers.items():
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": number, "args": {"sort_index": number}}


def _on_tracks(ordered: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event with its track; a connection's event gets the first free track."""
    free_at_s: list[float] = []
    for event in ordered:
        if event.track != "connection":
            yield event, event.track
            continue
        number = next((n for n, free_s in enumerate(free_at_s) if free_s <= event.start_s), len(free_at_s))
        free_at_s[number : number + 1] = [event.start_s + event.seconds]
        yield event, f"connection {number + 1}"
