"""Commands on the nodes of a Ray cluster: the bytes of one machine, also where a node is killed in the middle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import Ended, run_python
from ray_cluster import RayCluster, ray_cluster
from remote_places import new_place
from servers.rclone import S3Server

from streamload import ShardWriter
from streamload.index.dataset_index import DatasetIndex

pytest.importorskip("ray", reason="needs the extra: pip install 'streamload[ray]'")
pytestmark = pytest.mark.timeout(240)

HERE = Path(__file__).parent
COUNT = 60
TASK = "ray::streamload"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes with a processor each."""
    with ray_cluster({"a": 1, "b": 1, "c": 1}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small shards of ten samples."""
    folder = tmp_path_factory.mktemp("mapped") / "source"
    with ShardWriter(folder, max_count=10) as writer:
        for number in range(COUNT):
            values = np.arange(number, number + 4, dtype=np.float32)
            writer.write({"__key__": f"k{number:04d}", "npy": values, "cls": number % 3})
    return folder


def streamload(*arguments: object) -> Ended:
    return run_python("-m", "streamload", *map(str, arguments), environment={"PYTHONPATH": str(HERE)})


def shardify(*arguments: object) -> Ended:
    return run_python("-m", "streamload_tools.shardify", *map(str, arguments))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_storage(found: dict[str, bytes]) -> dict[str, object]:
    """Files by name; of an index what does not depend on where the shards lie."""
    return {
        name: [(s.name, s.bytes, s.samples) for s in DatasetIndex.from_json(content, "").shards]
        if name.endswith("index.json")
        else content
        for name, content in found.items()
    }


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Running:
    """`map` with `held_functions.held`, in a process of its own."""

    def __init__(self, cluster: RayCluster, folder: Path, source: object, dest: object, *options: object) -> None:
        self.folder = folder
        self.arguments = [str(source), str(dest), "--ray", cluster.address, *map(str, options)]
        self.process: subprocess.Popen[str]

    def start(self, *more: str) -> None:
        program = (
            "import sys, held_functions; held_functions.FOLDER = sys.argv[1]\n"
            "held_functions.held.__module__ = '__main__'\n"  # pickled by value, with what is set here
            "from streamload_tools.commands import streamload\n"
            "sys.argv[:2] = ['streamload', 'map', 'held_functions:held']; streamload()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.folder), *self.arguments, *more],
            env={**os.environ, "PYTHONPATH": str(HERE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def began(self) -> int:
        return len(list(self.folder.glob("began-*")))

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=100)
        return self.process.returncode, output


def test_map_is_the_same_where_a_node_is_killed(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    assert streamload("map", "held_functions:held", source, tmp_path / "one").status == 0
    held = tmp_path / "held"
    held.mkdir()
    running = Running(cluster, held, source, tmp_path / "many")
    running.start()
    wait_for(lambda: running.began() == 3)
    cluster.kill_node("a")
    running.let_go()
    status, output = running.end()
    assert status == 0, output
    assert running.began() == COUNT / 10 + 1, "the killed node's task ran again"
    assert files(tmp_path / "many") == files(tmp_path / "one")
    cluster.add_node("a", 1)


def test_index_verify_stats_and_show_are_the_same(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(source, shards)
    on_ray = ("--ray", cluster.address)
    before = files(shards)
    shutil.rmtree(shards / ".streamload")
    done = streamload("index", shards, *on_ray)
    assert done.status == 0, done.output
    indexed = files(shards)
    assert streamload("index", shards).status == 0
    assert files(shards) == indexed
    assert without_storage(indexed).keys() == without_storage(before).keys()


def test_pack_into_a_bucket_from_its_shards(
    cluster: RayCluster, source: Path, tmp_path: Path, rclone_s3: S3Server
) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    shutil.copytree(source, bucket.folder / "source")
    done = streamload("index", f"{bucket.url}/source", *bucket.options, "--ray", cluster.address)
    assert done.status == 0, done.output
    for options in ([], ["--max-count", "15"]):
        assert streamload("map", "held_functions:held", source, tmp_path / "one", "--overwrite", *options).status == 0
        done = streamload(
            "map", "held_functions:held", f"{bucket.url}/source", f"{bucket.url}/new", "--overwrite", *bucket.options,
            *options, "--ray", cluster.address,
        )  # fmt: skip
        assert done.status == 0, done.output
        assert without_storage(files(bucket.folder / "new")) == without_storage(files(tmp_path / "one"))
