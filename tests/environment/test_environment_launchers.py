"""Ranks, those beside them and processors, as launchers say them; and the warning where nobody listens to one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from streamload import StreamLoader
from streamload.workers.launchers import available_processors, local_ranks, processors_of_rank

VARIABLES = re.compile("RANK|WORLD_SIZE|LOCAL_|OMPI_|PMI_|MPI_|SLURM_")


@pytest.fixture(autouse=True)
def nobody_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no GPU, whatever runs these tests."""
    for name in [name for name in os.environ if VARIABLES.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def say(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def make_group(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)


def bind(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100, 100 + processors)), raising=False)


# -- ranks on this machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": 4, "LOCAL_SIZE": 2, "WORLD_SIZE": 8}, 4),  # torchrun
        ({"LOCAL_SIZE": 2, "WORLD_SIZE": 8}, 2),  # DeepSpeed
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": 4, "OMPI_COMM_WORLD_SIZE": 8}, 4),  # Open MPI
        ({"MPI_LOCALNRANKS": 3, "PMI_SIZE": 6}, 3),  # MPICH, Intel MPI
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_STEP_NUM_TASKS": 8}, 8),  # srun
        # mpirun within a Slurm job starts its own processes by srun, one on each machine
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": 4, "OMPI_COMM_WORLD_SIZE": 8, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 4),
        ({"MPI_LOCALNRANKS": 4, "PMI_SIZE": 8, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 4),
        # torchrun within a task of srun
        ({"LOCAL_WORLD_SIZE": 8, "WORLD_SIZE": 16, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": 2}, 8),
        # what makes no sense is skipped
        ({"LOCAL_WORLD_SIZE": "x", "LOCAL_SIZE": 0, "OMPI_COMM_WORLD_LOCAL_SIZE": "", "MPI_LOCALNRANKS": 2}, 2),
        ({"LOCAL_WORLD_SIZE": -1, "WORLD_SIZE": "many"}, 1),
    ],
)
def test_the_launcher_says_how_many_ranks_are_on_this_node(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, object], ranks: int
) -> None:
    say(monkeypatch, **said)
    assert local_ranks() == ranks


@pytest.mark.parametrize(("said", "ranks"), [("4(x2),3", 4), ("2,8,5", 8), ("8(x10)", 8), ("4(x2)),3", 1), ("4,,4", 1)])
def test_of_slurms_machines_the_one_with_the_most_tasks_counts(
    monkeypatch: pytest.MonkeyPatch, said: str, ranks: int
) -> None:
    say(monkeypatch, SLURM_STEP_TASKS_PER_NODE=said)
    assert local_ranks() == ranks


def test_where_no_launcher_says_it_all_ranks_are_here_or_one_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, WORLD_SIZE=4)  # as Lightning's own launcher
    assert local_ranks() == 4
    make_group(monkeypatch, 3, 16)
    assert local_ranks() == 16, "the process group goes before WORLD_SIZE"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert local_ranks() == 8, "two machines with eight GPUs each"
    make_group(monkeypatch, 1, 2)
    assert local_ranks() == 2
    monkeypatch.delitem(sys.modules, "torch.cuda")
    make_group(monkeypatch, 3, 16)
    assert local_ranks() == 16, "torch is not imported for this"


def test_a_task_that_has_started_the_ranks_itself_is_not_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, SLURM_STEP_TASKS_PER_NODE="1", SLURM_STEP_NUM_TASKS=1)  # a shell that srun has opened
    assert local_ranks() == 1
    make_group(monkeypatch, 0, 8)
    assert local_ranks() == 8


# -- processors ----------------------------------------------------------------------------------------------------


def quota(root: Path, processors: float) -> str:
    (root / "sys" / "fs" / "cgroup").mkdir(parents=True, exist_ok=True)
    (root / "sys" / "fs" / "cgroup" / "cpu.max").write_text(f"{round(processors * 100_000)} 100000\n")
    return str(root)


def test_processors_are_those_of_the_mask_and_no_more_than_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind(monkeypatch, 6)
    assert available_processors(str(tmp_path)) == processors_of_rank(str(tmp_path)) == 6
    assert available_processors(quota(tmp_path, 2.1)) == processors_of_rank(str(tmp_path)) == 3
    assert available_processors(quota(tmp_path, 64)) == processors_of_rank(str(tmp_path)) == 6


def test_a_machine_that_binds_nobody_has_as_many_as_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert available_processors(str(tmp_path)) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_processors(str(tmp_path)) == 1


SRUN = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": 4}
MPIRUN = {"OMPI_COMM_WORLD_LOCAL_SIZE": 4, "OMPI_COMM_WORLD_SIZE": 4}


@pytest.mark.parametrize(
    ("said", "bound", "share"),
    [
        ({"LOCAL_WORLD_SIZE": 4}, 32, 8),
        ({"LOCAL_WORLD_SIZE": 64}, 32, 1),
        (SRUN, 32, 8),  # nothing says what the job has
        ({**SRUN, "SLURM_CPUS_ON_NODE": 32}, 32, 8),  # the tasks share all processors of the job
        ({**SRUN, "SLURM_CPUS_ON_NODE": 16}, 32, 8),  # Slurm may count cores, and the mask their threads
        ({**SRUN, "SLURM_CPUS_ON_NODE": 32}, 8, 8),  # each has its own
        ({**SRUN, "SLURM_CPUS_ON_NODE": 32}, 16, 8),  # bound to sockets, each of which two tasks share
        ({**MPIRUN, "SLURM_CPUS_ON_NODE": 32}, 8, 8),
        (MPIRUN, 8, 2),
        # one task of srun is bound to a part of the machine, which torchrun's ranks share
        ({"LOCAL_WORLD_SIZE": 4, "SLURM_STEP_NUM_TASKS": 1, "SLURM_CPUS_ON_NODE": 64}, 32, 8),
    ],
)
def test_the_processors_are_divided_unless_they_are_the_tasks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, object], bound: int, share: int
) -> None:
    say(monkeypatch, **said)
    bind(monkeypatch, bound)
    assert processors_of_rank(str(tmp_path)) == share


def test_a_quota_is_divided_since_a_jobs_cgroup_holds_all_of_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, **SRUN, SLURM_CPUS_ON_NODE=32)
    bind(monkeypatch, 8)
    assert processors_of_rank(quota(tmp_path, 12)) == 3


# -- a launcher that nobody listens to -----------------------------------------------------------------------------


def make_loader(source: str, **options: Any) -> StreamLoader:
    return StreamLoader(source, 2, fields=("cls",), num_workers=0, **options)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": 8, "SLURM_PROCID": 3},
            '8 tasks that srun has started reads all samples.*os.environ["SLURM_PROCID"]) and world_size=8',
        ),
        ({"OMPI_COMM_WORLD_SIZE": 2}, '2 tasks that mpirun.*os.environ["OMPI_COMM_WORLD_RANK"]) and world_size=2'),
        ({"PMI_SIZE": 4, "SLURM_STEP_NUM_TASKS": 2}, '4 tasks that mpirun.*os.environ["PMI_RANK"]) and world_size=4'),
        ({"SLURM_STEP_NUM_TASKS": 8, "WORLD_SIZE": 8}, "8 tasks.*init_process_group"),
    ],
)
def test_a_task_among_several_that_does_not_know_its_rank_is_warned(
    source: str, monkeypatch: pytest.MonkeyPatch, said: dict[str, object], words: str
) -> None:
    say(monkeypatch, **said)
    with pytest.warns(UserWarning, match=re.escape(words).replace(r"\.\*", ".*")) as given:
        loader = make_loader(source)
    with loader:
        assert [warning.filename for warning in given] == [__file__]
        assert (loader.rank, loader.world_size) == (0, 1), "it does not guess"
        assert sum(len(batch[0]) for batch in loader) == 60


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_STEP_NUM_TASKS": 1, "OMPI_COMM_WORLD_SIZE": 1, "PMI_SIZE": 1},
        {"SLURM_STEP_NUM_TASKS": "some"},
        {"SLURM_NTASKS": 8},  # the shell of an allocation, not a task
        {"SLURM_STEP_NUM_TASKS": 8, "RANK": 1, "WORLD_SIZE": 2},
    ],
)
def test_nothing_is_said_to_a_task_that_is_alone_or_knows_its_rank(
    source: str, monkeypatch: pytest.MonkeyPatch, said: dict[str, object]
) -> None:
    say(monkeypatch, **said)
    make_loader(source).close()  # a warning would be an error


def test_no_warning_if_the_rank_is_given_or_a_group_knows_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1)
    make_loader(source, rank=0, world_size=1).close()
    make_group(monkeypatch, 1, 2)
    make_loader(source).close()
