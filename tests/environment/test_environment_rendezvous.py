"""The process that ranks of a machine share: found, or started, under one name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from streamload.environment.rendezvous import Listener, join, rendezvous_name
from streamload.errors import WorkerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")


def test_one_that_ends_as_it_starts_is_not_started_again_and_again(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match=r"^the feeder process ended with status 1, 2 times as it started$"):
        join(rendezvous_name("test", str(os.getpid())), "streamload.no_such_module")
    assert capfd.readouterr().err.count("No module named 'streamload.no_such_module'") == 2


def test_one_is_found_whose_starter_has_ended() -> None:
    """Who asks whom it is connected to is told who has called `listen`, and can look at that process only."""
    name = rendezvous_name("test", str(os.getpid()))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    starter = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).listen()"
    subprocess.run([sys.executable, "-c", starter, str(listening.fileno())], pass_fds=[listening.fileno()], check=True)
    words = os.memfd_create("words")
    listener = Listener(os.dup(listening.fileno()), words)
    accepted: list[socket.socket] = []

    def serve() -> None:
        while not accepted:
            if (found := listener.accept()) is not None:
                accepted.append(found[0])

    serving = threading.Thread(target=serve)
    with closing(listening), closing(listener.socket):
        serving.start()
        child = join(name, "streamload.no_such_module")
        serving.join()
    assert child.pid == os.getpid()
    child.forget()
    accepted[0].close()
    os.close(words)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_process_of_another_container_is_turned_away(isolated: bool) -> None:
    """It may have the same user and network, and see the name; what it sends would be unpickled."""
    unshare = ["unshare", "--mount", "--"] if isolated else []
    if isolated and subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("may not unshare")
    name = rendezvous_name("test", str(os.getpid()))
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); print(len(s.recv(8)))"
    )
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    words = os.memfd_create("words")
    listener = Listener(os.dup(listening.fileno()), words)
    with closing(listening), closing(listener.socket):
        client = subprocess.Popen(
            [*unshare, sys.executable, "-c", program, name[1:]], stdout=subprocess.PIPE, text=True
        )
        found = None
        while client.poll() is None and found is None:
            found = listener.accept()
        seen, _ = client.communicate()
        os.close(words)
    assert (found is None) == isolated
    assert seen == ("0\n" if isolated else "8\n")
    if found is not None:
        found[0].close()
