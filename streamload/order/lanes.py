"""Cut a sequence into lanes, and shuffle a lane in a sliding window as a stream that can start anywhere.

**The shuffle.** The sample at position p of its lane has the key `p + u * w`, u uniform in [0, 1), w the window; the
lane emits its samples in the order of their keys, and samples with equal keys in the order of their positions.

**Why a stream can start anywhere.** Float64 addition rounds, but never past a representable bound, so position p's key
lies in [p, p + w] (both ends included: p + u * w may round up to p + w, and positions below 2**53 are exact).
Let K(n) be the n-th smallest key, n counted from 0.

- n <= K(n): a key below n belongs to a position below n, and there are only n of those.
- K(n) <= n + w: the n + 1 positions 0 to n have keys of at most n + w.

So a position below n - w, whose key is below n, is emitted before number n; and a position above n + w after it. To
start at number n, draw the keys from position a = max(0, n - w) on. The positions below a, which are not drawn, are all
among the first n outputs, so exactly n - a of the drawn ones are emitted before number n: skip those. The keys depend
on positions and draws only, so the rest of the stream is the same wherever it was started.

**Why blocks are final.** Once the positions below e are drawn, every later key is at least e, and a later position
with the key e loses the tie. So all drawn keys of at most e are final, and at most w positions are held back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def lane_bounds(n_samples: int, n_lanes: int) -> NDArray[np.int64]:
    """Return the bounds of lanes in the concatenated shards, int64[n_lanes + 1]; lane l is `bounds[l]:bounds[l + 1]`.

    The lengths of two lanes differ by at most one.
    """
    share, extra = divmod(n_samples, n_lanes)
    lanes = np.arange(n_lanes + 1, dtype=np.int64)
    return lanes * share + lanes * extra // n_lanes


def positions_to_draw(number_end: int, window: int) -> int:
    """Estimate how many positions must be drawn before the first `number_end` outputs are final.

    Of the positions below x, about x**2 / 2w have a key below x if x < w, and x - w/2 otherwise.
    """
    if 2 * number_end >= window:
        return number_end + window // 2
    return int((2.0 * window * number_end) ** 0.5)


class SlidingShuffle:
    """Produce the outputs of one lane, in order, from a first number on. Forward only; memory O(window + block).

    Args:
        uniforms: returns the draws of `count` positions from `first` on, float64[count].
        window: how far, in samples, a sample may move; 0 and 1 leave the order as it is.
        first_number: the first output that will be requested.
        first_block: maximum size of the first block, if drawn from position 0; sizes then double up to a full block.
        full_blocks: minimum and maximum size of full blocks, which otherwise have the window's size.
    """

    def __init__(
        self,
        uniforms: Callable[[int, int], NDArray[np.float64]],
        window: int,
        first_number: int = 0,
        *,
        first_block: int = 1_024,
        full_blocks: tuple[int, int] = (4_096, 65_536),
    ) -> None:
        self._uniforms = uniforms
        self._window = window
        self._full_block = min(max(window, full_blocks[0]), full_blocks[1])
        self._first_block = min(first_block, self._full_block)
        self._known_end = 0
        self._ended = False
        self._least: int | None = None
        self._seek(first_number)

    @property
    def least_position(self) -> int:
        """Return a lower bound on the positions of later outputs."""
        if self._least is None:
            waiting = (positions.min(initial=self._drawn_end) for positions in (self._ready, self._waiting[1]))
            self._least = int(min(waiting))
        return self._least

    def _seek(self, number: int) -> None:
        self._least = None
        self._drawn_end = max(0, number - self._window)
        # Outputs below `number` are not those of the whole stream; see the module's docstring.
        self._ready_start = self._drawn_end
        self._ready: NDArray[np.int64] = np.empty(0, np.int64)
        self._waiting: tuple[NDArray[np.float64], NDArray[np.int64]] = np.empty(0, np.float64), np.empty(0, np.int64)
        self._block = self._full_block if self._drawn_end else self._first_block

    def grow(self, known_end: int, ended: bool) -> None:
        """Set how many positions of the lane are known, and whether the lane ends there."""
        self._known_end = known_end
        self._ended = ended

    def finalize(self, number_end: int) -> int:
        """Finalize the outputs below `number_end`, as far as the known positions allow.

        Returns:
            The number below which the outputs are final; it may exceed `number_end`.
        """
        pieces = [self._ready]
        finalized_end = self._ready_start + len(self._ready)
        while finalized_end < number_end and self._can_finalize_more():
            pieces.append(self._finalize_block())
            finalized_end += len(pieces[-1])
        self._ready = np.concatenate(pieces) if len(pieces) > 1 else self._ready
        return finalized_end

    def take(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions (in the lane) of some outputs, and release everything up to the last output.

        `numbers`, int64[k], must ascend within and across calls.

        Raises:
            IndexError: a number is below those of earlier calls, or cannot be finalized yet.
        """
        positions = np.empty(len(numbers), np.int64)
        done = 0
        if len(numbers) and numbers[0] < self._ready_start:
            raise IndexError(f"output {numbers[0]} is gone; the stream is at {self._ready_start}")
        while done < len(numbers):
            if numbers[done] - self._window > self._drawn_end:
                self._seek(int(numbers[done]))
            ready_end = int(np.searchsorted(numbers, self._ready_start + len(self._ready)))
            positions[done:ready_end] = self._ready[numbers[done:ready_end] - self._ready_start]
            done = ready_end
            if done < len(numbers):
                if not self._can_finalize_more():
                    raise IndexError(f"output {numbers[done]} lies beyond the {self._known_end} known samples")
                self._ready_start += len(self._ready)
                self._ready = self._finalize_block()
        if len(numbers):
            self._least = None
            following = int(numbers[-1]) + 1
            self._ready = self._ready[following - self._ready_start :]
            self._ready_start = following
        return positions

    def _can_finalize_more(self) -> bool:
        return self._drawn_end < self._known_end or (self._ended and len(self._waiting[1]) > 0)

    def _finalize_block(self) -> NDArray[np.int64]:
        """Draw the next block of positions and return those that are now final, in the order of output."""
        first, end = self._drawn_end, min(self._drawn_end + self._block, self._known_end)
        self._block = min(2 * self._block, self._full_block)
        drawn = np.arange(first, end, dtype=np.int64)
        keys = np.concatenate((self._waiting[0], drawn + self._uniforms(first, end - first) * self._window))
        positions = np.concatenate((self._waiting[1], drawn))
        order = np.argsort(keys)
        ordered = keys[order]
        if bool((ordered[1:] == ordered[:-1]).any()):
            # Equal keys keep the order of their positions. They are rare, and the unstable sort is three times as fast.
            order = np.argsort(keys, kind="stable")
            ordered = keys[order]
        keys, positions = ordered, positions[order]
        self._drawn_end = end
        is_last = self._ended and end == self._known_end
        finalized = len(keys) if is_last else int(np.searchsorted(keys, end, side="right"))
        self._waiting = keys[finalized:].copy(), positions[finalized:].copy()
        return positions[:finalized]
