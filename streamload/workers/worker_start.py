"""Enter a worker process: before other imports, make it die with the feeder.

Otherwise the workers of a feeder that is killed early would outlive it until their imports are done.
"""

from __future__ import annotations

from streamload.workers.launch import die_with


def main(socket_number: int, words_number: int, progress_number: int, feeder: int) -> None:
    """Run a worker on three descriptors; `feeder` is the process ID of its parent."""
    die_with(feeder)
    from streamload.workers.worker import run

    run(socket_number, words_number, progress_number)
