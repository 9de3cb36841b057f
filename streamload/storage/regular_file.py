"""Opening local files that others have put there: nothing but regular files, and without waiting."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_regular", "why_not_opened"]


def open_regular(path: str) -> int:
    """A read-only descriptor of a regular file, closed on exec.

    Raises:
        OSError: it cannot be opened, or is no regular file. A pipe in place of a file is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "this is a folder, not a file" if stat.S_ISDIR(mode) else "this is not a regular file"
            raise OSError(errno.EINVAL, what, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def why_not_opened(exc: OSError) -> str:
    """What went wrong where a file that is there could not be opened or read, and what to do about it."""
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        advice = "close files or loaders that are not needed, or raise the limit (`ulimit -n`)"
    elif exc.errno in (errno.EACCES, errno.EPERM):
        advice = "check the rights of the file and its folders"
    elif exc.errno == errno.ENOMEM:
        advice = "free some memory, or use fewer workers"
    else:
        advice = "check the path and the disk"
    return f"{exc.strerror or exc}; {advice}"
