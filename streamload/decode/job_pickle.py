"""A job in flight to the workers, with what the user's modules hold; and whether it is another one by now."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cloudpickle

from streamload.decode.module_state import ModuleState, StatePickler, set_state, state_of
from streamload.decode.tasks import Job

__all__ = ["PickledJob", "load_job", "pickle_job", "warn_of_lost"]

_log = logging.getLogger("streamload")
_FUNCTIONS = "the functions given to the loader, or what they refer to"
_NAMED = 5
_CODE = "the code of reloaded modules"


@dataclass(frozen=True)
class PickledJob:
    """A job, ready to travel.

    Attributes:
        data: what `load_job` takes.
        parts: a hash of everything that it is made of, by what that is called.
    """

    data: bytes
    parts: Mapping[str, int]

    def changes_since(self, other: PickledJob) -> set[str]:
        """What is not the same, in words."""
        ours, theirs = self.parts, other.parts
        return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


@dataclass(frozen=True)
class _Packed:
    job: bytes
    needed: tuple[str, ...]
    state: ModuleState


def pickle_job(job: Job) -> PickledJob:
    """The user's functions, and the state of the user's modules that they can reach.

    Raises:
        Exception: whatever keeps a function from being pickled.
    """
    file = io.BytesIO()
    pickler = StatePickler(file)
    pickler.dump(job)
    state, code = state_of(pickler.needed | pickler.reached)
    parts = {str(attribute): hash(state.values[attribute.value]) for attribute in state.attributes}
    parts |= {_FUNCTIONS: hash(file.getvalue()), _CODE: hash(code)}
    return PickledJob(pickle.dumps(_Packed(file.getvalue(), tuple(sorted(pickler.needed)), state)), parts)


def load_job(data: bytes) -> tuple[Job, tuple[str, ...]]:
    """The user's functions, in this process, whose modules hold what they held where the job was pickled.

    Returns:
        The job; and what differs in the modules and could not be taken over, in words.
    """
    packed: _Packed = pickle.loads(data)
    lost = set_state(packed.state, packed.needed)
    job: Job = cloudpickle.loads(packed.job)
    return job, tuple(lost)


def warn_of_lost(lost: Sequence[str]) -> None:
    """Log what the user's modules hold in the trainer and not in the workers, for as many of them as one can read."""
    others = f" and {len(lost) - _NAMED} others" if len(lost) > _NAMED else ""
    _log.warning(
        "the program has set %s%s, which cannot be sent to the workers: there it is what importing the module makes of "
        "it. If a transform needs it, set it at the top of the module or in worker_init_fn, or use num_workers=0",
        ", ".join(lost[:_NAMED]),
        others,
    )
