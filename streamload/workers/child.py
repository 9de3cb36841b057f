"""Run a module in a process that `launch` starts: `python -P child.py -m MODULE PROGRAM NUMBER...`.

This script is run as a file, since perhaps only the program's `sys.path` leads to streamload. PROGRAM is a descriptor
of a pickle of the program's `sys.path` and `sys.argv`; `PYTHONPATH` is not used, since programs that user code starts
would inherit it.
"""

import importlib
import pickle
import sys


def main() -> None:
    """Set path and arguments, then call MODULE's `main` with the numbers."""
    _, module, program, *numbers = sys.argv[1:]
    with open(int(program), "rb") as file:
        sys.path[:], sys.argv[:] = pickle.load(file)
    importlib.import_module(module).main(*map(int, numbers))


if __name__ == "__main__":
    main()
