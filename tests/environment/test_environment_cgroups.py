"""Limits of cgroups, read from small trees of files that look as the kernel's do."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamload.fetch.budget import available_bytes, default_budget
from streamload.limits import free_memory_bytes, processor_quota

MIB = 1 << 20
V1_NO_LIMIT = "9223372036854771712"


def grow(root: Path, files: dict[str, str]) -> str:
    """Write files below `root`/sys/fs/cgroup, or below `root` where their names begin with proc."""
    for name, text in files.items():
        path = root / name if name.startswith("proc/") else root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


def memory_v2(folder: str, limit: str, used: int = 0, **stat: int) -> dict[str, str]:
    return memory("max current stat", folder, limit, used, {"anon": 7, "slab_reclaimable": 9, **stat})


def memory_v1(folder: str, limit: str, used: int = 0, **stat: int) -> dict[str, str]:
    return memory("limit_in_bytes usage_in_bytes stat", folder, limit, used, stat)


def memory(names: str, folder: str, limit: str, used: int, stat: dict[str, int]) -> dict[str, str]:
    texts = limit, str(used), "\n".join(f"{name} {value}" for name, value in stat.items())
    return {f"{folder}memory.{name}": text for name, text in zip(names.split(), texts, strict=True)}


def cpu_v1(folder: str, quota_us: int, period_us: int = 100_000) -> dict[str, str]:
    return {f"{folder}cpu.cfs_quota_us": str(quota_us), f"{folder}cpu.cfs_period_us": str(period_us)}


# -- which cgroups -------------------------------------------------------------------------------------------------


def test_the_least_of_a_cgroup_and_all_above_it_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b/c",
        "a/b/c/cpu.max": "800000 100000",
        "a/b/cpu.max": "max 100000",
        "a/cpu.max": "250000 50000",
        **memory_v2("a/b/c/", "9000", 1000),
        **memory_v2("a/b/", "6000", 5500),
        **memory_v2("a/", "max", 8000),
    }
    root = grow(tmp_path, files)
    assert (processor_quota(root), free_memory_bytes(root)) == (5, 500)
    grow(tmp_path, {"cpu.max": "100000 100000", **memory_v2("", "20000", 19900)})
    assert (processor_quota(root), free_memory_bytes(root)) == (1, 100), "the root of the mount is above it, too"


def test_a_path_that_the_container_cannot_see_leaves_the_root_of_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/1234", "cpu.max": "400000 100000", **memory_v2("", "800", 100)}
    assert (processor_quota(root := grow(tmp_path, files)), free_memory_bytes(root)) == (4, 700)


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "12:cpuset:/\n5:cpuacct,cpu:/docker/1\n4:memory:/slurm/uid_0/job_7\n1:name=systemd:/x",
        **cpu_v1("cpu/docker/1/", 150_000),
        **cpu_v1("cpu/docker/", -1),
        **memory_v1("memory/slurm/uid_0/job_7/", "5000", 1000),
        **memory_v1("memory/slurm/", "4500", 1000),
        **memory_v1("memory/", V1_NO_LIMIT, 10_000),
    }
    root = grow(tmp_path, files)
    assert (processor_quota(root), free_memory_bytes(root)) == (2, 3500)


def test_hybrid_systems_have_both_and_either_may_have_the_limit(tmp_path: Path) -> None:
    own = "proc/self/cgroup"
    root = grow(tmp_path, {own: "4:memory:/job\n0::/job", **memory_v1("memory/job/", "3000", 500)})
    assert (processor_quota(root), free_memory_bytes(root)) == (None, 2500)
    grow(tmp_path, {**memory_v2("unified/job/", "1500", 500), "unified/job/cpu.max": "700000 100000"})
    assert (processor_quota(root), free_memory_bytes(root)) == (7, 1000)
    grow(tmp_path, {own: "4:memory:/job\n0::/", **memory_v2("unified/", "1800", 500)})
    assert (processor_quota(root), free_memory_bytes(root)) == (None, 1300), "each path is of its own hierarchy"


# -- what is read there --------------------------------------------------------------------------------------------


def test_page_cache_counts_as_free_and_other_memory_does_not(tmp_path: Path) -> None:
    kinds = {"inactive_file": 300, "active_file": 200, "inactive_anon": 50, "total_inactive_file": 1, "shmem": 40}
    root = grow(tmp_path / "2", {"proc/self/cgroup": "0::/", **memory_v2("", "1000", 900, **kinds)})
    assert free_memory_bytes(root) == 600
    kinds = {"inactive_file": 1, "active_file": 2, "total_inactive_file": 300, "total_active_file": 200, "cache": 700}
    root = grow(tmp_path / "1", {"proc/self/cgroup": "4:memory:/", **memory_v1("memory/", "1000", 900, **kinds)})
    assert free_memory_bytes(root) == 600


def test_where_a_cgroup_is_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    root = grow(tmp_path, {"proc/self/cgroup": "0::/", "memory.high": "700", **memory_v2("", "max", 100)})
    assert free_memory_bytes(root) == 600
    grow(tmp_path, {"memory.high": "max", **memory_v2("", "500", 100)})
    assert free_memory_bytes(root) == 400


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n0\n::\n4:memory"},
        {"proc/self/cgroup": "0::/", "cpu.max": "max 100000", **memory_v2("", "max", 100)},
        {"proc/self/cgroup": "0::/", "cpu.max": "", "memory.max": ""},
        {"proc/self/cgroup": "0::/", "cpu.max": "x y", "memory.max": "\N{HEAVY CHECK MARK}"},
        {"proc/self/cgroup": "0::/", "cpu.max": "100000 0"},
        {"proc/self/cgroup": "0::/", "cpu.max": "0 100000"},
        {"proc/self/cgroup": "0::/", "cpu.max/is_a_folder": "", "memory.max/is_a_folder": ""},
        {"proc/self/cgroup": "3:cpu:/a\n4:memory:/a", **cpu_v1("cpu/a/", -1), **memory_v1("memory/a/", V1_NO_LIMIT)},
    ],
)
def test_there_is_no_limit_where_none_can_be_read(tmp_path: Path, files: dict[str, str]) -> None:
    root = grow(tmp_path, files)
    assert (processor_quota(root), free_memory_bytes(root)) == (None, None)


# -- the budget that follows ---------------------------------------------------------------------------------------


def test_the_free_memory_is_the_machines_or_what_the_cgroup_leaves_of_it(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\nCached: 1 kB"}
    root = grow(tmp_path, {**files, **memory_v2("", "max", 100)})
    assert available_bytes(root) == 5000 * 1024
    grow(tmp_path, memory_v2("", str(400 * MIB), 390 * MIB, active_file=1000, inactive_file=MIB - 1000))
    assert available_bytes(root) == 5000 * 1024
    grow(tmp_path, memory_v2("", str(400 * MIB), 399 * MIB, active_file=1000, inactive_file=MIB - 1000))
    assert available_bytes(root) == 2 * MIB


def test_a_container_full_of_page_cache_is_not_given_the_least_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"proc/self/cgroup": "0::/", "proc/meminfo": "MemAvailable: 99999999 kB"}
    root = grow(tmp_path, {**files, **memory_v2("", str(8192 * MIB), 8191 * MIB, inactive_file=7167 * MIB)})
    monkeypatch.setattr("streamload.fetch.budget.available_bytes", lambda: available_bytes(root))
    assert default_budget(1) == 1792 * MIB
    assert default_budget(4) == 448 * MIB
    assert default_budget(100) == 64 * MIB
