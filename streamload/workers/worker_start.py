"""The entry of a worker process: it binds its life to the feeder's before it imports anything else.

Otherwise the workers of a feeder that is killed early, as when a loader is closed at once, would outlive it until their
imports are done. Started as `python -m streamload.workers.worker_start PROGRAM SOCKET LAST_WORDS FEEDER PROGRESS`: four
descriptors, and the process id of the feeder. On its own because whatever it imports delays the binding.
"""

from __future__ import annotations

from streamload.environment.launch import die_with, take_arguments

__all__ = ["main"]


def main() -> None:
    """Run a worker on the descriptors given as arguments."""
    socket_number, words_number, feeder, progress_number = take_arguments()
    die_with(feeder)
    from streamload.workers.worker import run

    run(socket_number, words_number, progress_number)


if __name__ == "__main__":
    main()
