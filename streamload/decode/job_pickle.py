"""Pickling a job with the state of the user's modules, and noticing whether it has changed since."""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cloudpickle

from streamload.decode.module_state import ModuleState, StatePickler, set_state, state_of
from streamload.decode.tasks import Job
from streamload.memory.channel import refused_exit

__all__ = ["PickledJob", "load_job", "pickle_job", "warn_of_lost"]

_log = logging.getLogger("streamload")
_FUNCTIONS = "the functions given to the loader, or what they refer to"
_NAMED = 5
_CODE = "the code of reloaded modules"
_OF_FORM = frozenset({"FRAME", "PROTO", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "GET", "PUT"})
"""Codes of a pickle that say how it is written, not what."""


class PickledJob(NamedTuple):
    """A job, ready to travel.

    Attributes:
        data: for `load_job`.
        parts: hashes of everything that it consists of, by name.
    """

    data: bytes
    parts: Mapping[str, int]

    def changes_since(self, other: PickledJob) -> set[str]:
        """The names of the parts that differ, for a message."""
        ours, theirs = self.parts, other.parts
        return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


class _Payload(NamedTuple):
    job: bytes
    needed: tuple[str, ...]
    state: ModuleState


def pickle_job(job: Job) -> PickledJob:
    """Pickle the user's functions, and the state of the user's modules that they can reach.

    Raises:
        Exception: whatever pickling a function raises.
    """
    file = io.BytesIO()
    pickler = StatePickler(file)
    pickler.dump(job)
    state, code = state_of(pickler.needed | pickler.reached)
    parts = {str(attribute): hash(state.values[attribute.value]) for attribute in state.attributes}
    parts |= {_FUNCTIONS: hash(file.getvalue()), _CODE: hash(code)}
    payload = _Payload(file.getvalue(), tuple(sorted(pickler.needed)), state)
    return PickledJob(pickle.dumps(payload), parts)


def _digest(value: object) -> str:
    if not isinstance(value, bytes):
        return repr(value)
    said = sorted(f"{code.name} {arg!r}" for code, arg, _ in pickletools.genops(value) if code.name not in _OF_FORM)
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def load_job(data: bytes) -> tuple[Job, tuple[str, ...]]:
    """Load the user's functions, and set their modules in this process to the pickled state.

    Returns:
        The job; and, as text, what differs in the modules and could not be set.

    Raises:
        WorkerError: what the job holds, or a module that it needs, exits when it is loaded.
        Exception: whatever loading a function raises.
    """
    payload: _Payload = pickle.loads(data)
    try:
        lost = set_state(payload.state, payload.needed)
        job: Job = cloudpickle.loads(payload.job)
    except SystemExit as error:
        raise refused_exit(error) from error
    return job, tuple(lost)


def warn_of_lost(lost: Sequence[str]) -> None:
    """Log which values of the user's modules in the trainer the workers lack, the first few by name."""
    others = f" and {len(lost) - _NAMED} others" if len(lost) > _NAMED else ""
    _log.warning(
        "the program has set %s%s, which cannot be sent to the workers: there it is what importing the module makes of "
        "it. If a transform needs it, set it at the top of the module or in worker_init_fn, or use num_workers=0",
        ", ".join(lost[:_NAMED]),
        others,
    )
