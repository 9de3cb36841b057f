"""Actors in the test's own process, so that a relay can be tested without Ray: what is between them is the same."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from functools import partial
from typing import Any

import pytest
from feeder_in_thread import ThreadAsProcess

import streamload.environment.launch
from streamload.environment.launch import Child, EarlyWorkers
from streamload.feeder.process import serve
from streamload.memory.unnamed import new_memory
from streamload.remote.actor import Greeting, HostedFeeder
from streamload.remote.relay import make_relay
from streamload.remote.wire import WireListener


class ActorHere:
    """Hosts a feeder in the running event loop."""

    def __init__(self, listener: WireListener) -> None:
        self._listener = listener

    async def serve(self) -> None:
        hosted = HostedFeeder(await self._listener.accept(), forwards_logs=False)
        try:
            await hosted.serve()
        finally:
            hosted.close()


class ClusterHere:
    """A cluster of one node, which is this process."""

    async def connect(self) -> None:
        pass

    async def place(self, *, relaxed: bool = False, again: bool = False) -> tuple[ActorHere, Greeting]:
        listener = WireListener("127.0.0.1")
        return ActorHere(listener), Greeting({}, "here", listener.address, listener.token, 1 << 40, 0.0)

    def end(self, actor: Any) -> None:
        pass

    def close(self) -> None:
        pass


def use_feeders_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders with RayFeeders start their relay in a thread, with actors in it; feeders are processes, as ever."""
    launch_process = streamload.environment.launch.launch

    def launch(module: str, workers: int) -> Child:
        if module != "streamload.remote.start":
            return launch_process(module, workers)
        ours, theirs = socket.socketpair()
        relays = partial(make_relay, cluster=ClusterHere())
        run = serve(theirs, os.getpid(), EarlyWorkers(), lambda: relays)
        thread = threading.Thread(target=asyncio.run, args=(run,))
        thread.start()
        process: Any = ThreadAsProcess(thread)
        return Child(process, ours, new_memory(0))

    monkeypatch.setattr("streamload.trainer.connection.launch", launch)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr("streamload.feeder.process.forward_records", lambda take: None)
