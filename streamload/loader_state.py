"""The state that a loader saves, and whether a saved one is of the order that a loader reads in."""

from __future__ import annotations

from streamload.choosing.choosing import Choosing
from streamload.options import Options
from streamload.order.state import LoaderState, check

__all__ = ["check_same_order", "state_to_save"]


def state_to_save(
    epoch: int, position: int, *, options: Options, choosing: Choosing, lanes: int, fingerprint: str
) -> LoaderState:
    """The state at a position of an epoch, with all that names the order."""
    return LoaderState(
        seed=options.seed,
        epoch=epoch,
        position=position,
        lanes=lanes,
        window=options.shuffle_window,
        shuffle=options.shuffle,
        fingerprint=fingerprint,
        **choosing.state(epoch),
    )


def check_same_order(state: LoaderState, *, options: Options, choosing: Choosing, fingerprint: str) -> None:
    """Refuse a state of another order. Its lanes are taken over, unless the user has given a number of lanes.

    Raises:
        LoaderStateError: something differs; the message says what.
    """
    check(
        state,
        seed=options.seed,
        shuffle=options.shuffle,
        window=options.shuffle_window,
        lanes=options.lanes,
        fingerprint=fingerprint,
        choice=choosing.state(state.epoch),
    )
