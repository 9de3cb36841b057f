"""Commands on the nodes of a Ray cluster: the bytes of one machine, also where a node is killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import held_functions
import numpy as np
import pytest
from launched import Ended, run_python
from processes import wait_until
from ray_cluster import LocalRayCluster, ray_cluster
from remote_places import new_place
from servers.rclone import S3Server

from streamload import ShardWriter, map_shards, pack
from streamload.index.dataset_index import DatasetIndex

if importlib.util.find_spec("ray") is None:  # importing it would have every test of this process begin with it
    pytest.skip("needs the extra: pip install 'streamload[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(240)]

HERE = Path(__file__).parents[1] / "support"
COUNT, SHARDS, HELD = 60, 6, 3
NODES = {"a": 1, "b": 1, "c": 1}
TASK = "ray::streamload"


@pytest.fixture(scope="module")
def cluster_to_harm() -> Iterator[LocalRayCluster]:
    """Three nodes with a processor each, for tests that kill nodes."""
    with ray_cluster(NODES) as started:
        yield started


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small shards of ten samples."""
    folder = tmp_path_factory.mktemp("mapped") / "source"
    with ShardWriter(folder, max_count=COUNT // SHARDS) as writer:
        for number in range(COUNT):
            values = np.arange(number, number + 4, dtype=np.float32)
            score = {"score": number / 10}
            writer.write({"__key__": f"k{number:04d}", "npy": values, "cls": number % 3, "json": score})
    return folder


def streamload(*arguments: object) -> Ended:
    return run_python("-m", "streamload", *map(str, arguments), environment={"PYTHONPATH": str(HERE)})


def files(folder: Path) -> dict[str, object]:
    """All files by name; of an index what does not depend on where and when the shards were written."""
    return {
        str(path.relative_to(folder)): [
            (s.name, s.bytes, s.samples) for s in DatasetIndex.from_json(path.read_bytes(), "").shards
        ]
        if path.name == "index.json"
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class HeldMap:
    """`streamload map` with `held_functions.held`, in a process of its own.

    The first three shards are done at once; the tasks of three wait then.
    """

    def __init__(self, cluster: LocalRayCluster, folder: Path, source: object, dest: object, *options: object) -> None:
        self.folder, self.cluster = folder, cluster
        folder.mkdir()
        self._arguments = [str(source), str(dest), "--ray", cluster.address, *map(str, options)]
        self.process: subprocess.Popen[str]

    def start(self, *more: str) -> None:
        program = (
            "import sys, held_functions; held_functions.FOLDER = sys.argv[1]\n"
            "from streamload.__main__ import streamload\n"
            "sys.argv[:2] = ['streamload', 'map', 'held_functions:held']; streamload()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.folder), *self._arguments, *more],
            env={**os.environ, "PYTHONPATH": str(HERE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_until_held(self) -> None:
        assert wait_until(lambda: self.began() == SHARDS and len(self.tasks()) == HELD)

    def began(self) -> int:
        return len(list(self.folder.glob("began-*")))

    def tasks(self) -> list[int]:
        return self.cluster.processes(TASK)

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=100)
        return self.process.returncode, output


@pytest.mark.parametrize("killed", ["task", "node"])
def test_map_is_the_same_where_a_task_or_a_node_is_killed(
    cluster_to_harm: LocalRayCluster, source: Path, tmp_path: Path, killed: str
) -> None:
    map_shards(held_functions.held, os.fspath(source), tmp_path / "one", workers=1)
    running = HeldMap(cluster_to_harm, tmp_path / "held", source, tmp_path / "many")
    running.start()
    running.wait_until_held()
    if killed == "task":
        os.kill(running.tasks()[0], signal.SIGKILL)
    else:
        cluster_to_harm.kill_node("a")
    running.let_go()
    status, output = running.end()
    if killed == "node":
        cluster_to_harm.add_node("a", 1)
    assert status == 0, output
    assert running.began() == SHARDS + 1, "the killed task ran again"
    assert files(tmp_path / "many") == files(tmp_path / "one")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_bucket_gets_the_same_where_the_command_is_ended_and_resumed(
    cluster: LocalRayCluster, source: Path, tmp_path: Path, rclone_s3: S3Server, how: signal.Signals
) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    shutil.copytree(source, bucket.folder / "source")
    map_shards(held_functions.held, os.fspath(source), tmp_path / "one", workers=1)
    running = HeldMap(cluster, tmp_path / "held", f"{bucket.url}/source", f"{bucket.url}/new", *bucket.options)
    running.start()
    running.wait_until_held()
    assert wait_until(lambda: len(list((bucket.folder / "new/.streamload-packing").glob("*.record"))) == SHARDS - HELD)
    running.process.send_signal(how)
    status, output = running.end()
    if how == signal.SIGINT:
        assert status == 130, output
        assert "--resume" in output
        assert running.tasks() == []
    assert wait_until(lambda: running.tasks() == [])
    assert not list((bucket.folder / "new").glob("shard-00000[345].tar")), "no task has gone on"
    running.let_go()
    running.start("--resume")
    status, output = running.end()
    assert status == 0, output
    assert running.began() == SHARDS + HELD, "what was finished was not done again"
    assert files(bucket.folder / "new") == files(tmp_path / "one")


@pytest.mark.parametrize("cut", [{}, {"max_count": 15}], ids=["one for each", "cut anew"])
def test_pack_and_map_from_python(
    cluster: LocalRayCluster, source: Path, tmp_path: Path, rclone_s3: S3Server, cut: dict[str, int]
) -> None:
    """Functions of modules that the nodes do not have, into a bucket."""
    bucket = new_place(rclone_s3, tmp_path)
    program = (
        "import sys, held_functions, streamload\n"
        "def made(number): return {'__key__': str(number), 'txt': str(number)}\n"
        "source, dest, address, options, cut = sys.argv[1], sys.argv[2], sys.argv[3], *map(eval, sys.argv[4:6])\n"
        "options = {'ray': address, 'storage_options': options, **cut}\n"
        "streamload.map_shards(held_functions.held, source, f'{dest}/map', **options)\n"
        "streamload.pack(made, range(300), f'{dest}/pack', **options)\n"
    )
    arguments = [str(source), bucket.url, cluster.address, repr(bucket.storage_options), repr(cut)]
    done = run_python("-c", program, *arguments, environment={"PYTHONPATH": str(HERE)})
    assert done.status == 0, done.output
    map_shards(held_functions.held, os.fspath(source), tmp_path / "one/map", workers=1, **cut)
    pack(lambda number: {"__key__": str(number), "txt": str(number)}, range(300), tmp_path / "one/pack", **cut)
    assert files(bucket.folder) == files(tmp_path / "one")


def test_verify_and_index_are_the_same(cluster: LocalRayCluster, source: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(source, shards)
    data = bytearray((shards / "shard-000004.tar").read_bytes())
    data[520] ^= 1
    (shards / "shard-000004.tar").write_bytes(data)
    with ShardWriter(shards / "bad-%06d.tar") as writer:
        writer.write({"__key__": "x", "npy": b"no array"})
    commands = [
        ("verify", shards, "--decode", "--json"),
        ("index", source, "--columns", "json:score", "--json"),
    ]
    index = source / ".streamload"
    for command in commands:
        found = []
        for options in ((), ("--ray", cluster.address)):
            done = streamload(*command, *options)
            written = {
                path.name: path.read_bytes() for path in (*tmp_path.iterdir(), *index.iterdir()) if path.is_file()
            }
            lines = [line for line in done.output.splitlines() if not re.search(r"[\d.]+ \w+/s|on_error", line)]
            found.append((done.status, sorted(lines), written))
        assert found[0] == found[1]
    assert (index / "columns.npz").exists()


def test_the_commands_of_the_page(cluster: LocalRayCluster, source: Path, tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs/ray.md").read_text().partition("## Packing")[2].partition("\n## ")[0]
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(source, tmp_path / "shards")
    (tmp_path / "photos/cat").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "photos/cat/0.jpg"), np.zeros((20, 20, 3), np.uint8))
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, env={**os.environ, "PATH": path, "RAY_ADDRESS": cluster.address},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "packed/shard-000000.tar").exists()


def test_a_destination_that_nodes_do_not_see_is_refused(cluster: LocalRayCluster, source: Path, tmp_path: Path) -> None:
    """The path of a descriptor leads every process to something else."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.set_inheritable(folder, True)
        done = subprocess.run(
            [sys.executable, "-m", "streamload", "map", "held_functions:held", source, f"/dev/fd/{folder}/new",
             "--ray", cluster.address],
            env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, pass_fds=[folder], timeout=100,
        )  # fmt: skip
    finally:
        os.close(folder)
    assert done.returncode == 1, done.stderr
    assert re.search("was finished, but is not here; name a bucket|cannot write to", done.stderr), done.stderr
    assert "finished shards are kept" not in done.stderr  # it ends with the first shard


def test_errors_of_nodes_are_those_of_one_machine(cluster: LocalRayCluster, source: Path, tmp_path: Path) -> None:
    done = streamload("map", "held_functions:on_a_full_disk", source, tmp_path / "new", "--ray", cluster.address)
    assert done.status == 1
    assert "No space left on device: '/tmp/somewhere' (sample 'k0000')" in done.output
    assert "on the Ray node " in done.output
    assert not (tmp_path / "new").exists()
    old = "import streamload as module; module.__version__ = '9.9'\n"
    old += "from streamload.__main__ import streamload; streamload()"
    done = run_python("-c", old, "verify", source, "--ray", cluster.address)
    assert done.status == 1
    assert "but 9.9 here; install the same on all nodes" in done.output
