"""The first lines of a worker's process: it is bound to the feeder's life before it imports what it needs itself.

Else those of a feeder that is killed early, as by a loader that is closed as soon as it was made, would stay for as
long as they import. It is started as `python -m streamload.workers.worker_start SOCKET LAST_WORDS FEEDER PROGRESS`:
three descriptors, and the number of the feeder's process.
"""

from __future__ import annotations

import sys

from streamload.environment.launch import die_with

__all__ = ["main"]


def main() -> None:
    """Run a worker on the descriptors given as arguments."""
    socket_number, words_number, feeder, progress_number = map(int, sys.argv[1:5])
    die_with(feeder)
    from streamload.workers import worker

    worker.run(socket_number, words_number, progress_number)


if __name__ == "__main__":
    main()
