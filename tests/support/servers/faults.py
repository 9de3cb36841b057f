"""Starts the fault server, and talks to it."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from servers.fault_server import Script

from streamload.memory.unnamed import new_memory

__all__ = ["FaultServer", "Report", "Script"]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What was asked since the script was set.

    Attributes:
        requests: how many, of all methods.
        sent_bytes: of bodies of objects.
        most_beside: the most requests in flight at once.
        log: method, path and Range header of each.
        spans: of each that has been answered: the path, and `time.monotonic` when it came and when its last byte was
            sent.
    """

    requests: int
    sent_bytes: int
    most_beside: int
    log: list[list[Any]]
    spans: list[list[Any]]


class FaultServer:
    """A server process on a port of its own, for as long as the `with` block lasts.

    Args:
        objects: name -> content, or a folder whose files are served by their relative paths. A name's first component
            is its bucket when it is asked as S3 does.
        script: what goes wrong from the start.
        aliases: more names of objects, each with the name of the object.
        port: to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes] | str | os.PathLike[str],
        script: Script | None = None,
        aliases: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        contents = objects if isinstance(objects, Mapping) else _files(Path(objects))
        self._memory = _laid_out(contents)
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("fault_server.py")),
                    str(other.fileno()),
                    str(self._memory),
                    str(port),
                ],
                pass_fds=(other.fileno(), self._memory),
            )
        os.close(self._memory)
        self._control = own.makefile("rwb")
        own.close()
        sizes = {name: len(content) for name, content in contents.items()}
        self.url = f"http://127.0.0.1:{self._ask({'sizes': sizes, 'aliases': dict(aliases or {})})['port']}"
        """Of the server, without a slash at the end."""
        if script is not None:
            self.play(script)

    def play(self, script: Script) -> None:
        """From now on this goes wrong; the record starts over."""
        self._ask({"script": dataclasses.asdict(script)})

    def report(self) -> Report:
        """What was asked since `play`."""
        return Report(**self._ask({}))

    def kill(self) -> None:
        """End it as a machine that fails does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Stop it and wait for its end; twice is fine."""
        with suppress(BrokenPipeError):
            self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ask(self, command: dict) -> dict:
        self._control.write(json.dumps(command).encode() + b"\n")
        self._control.flush()
        line = self._control.readline()
        if not line:
            raise RuntimeError(f"the fault server has ended with status {self._process.wait()}")
        return json.loads(line)


def _laid_out(contents: Mapping[str, bytes]) -> int:
    """A descriptor of memory with all contents one after the other, and then all with each byte inverted."""
    descriptor = new_memory(2 * sum(map(len, contents.values())) or 1)
    inverted = bytes(255 - value for value in range(256))
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(contents.values())
        file.writelines(content.translate(inverted) for content in contents.values())
    return descriptor


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
