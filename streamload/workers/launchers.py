"""Detect the rank of this process, and its share of the processors."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from streamload.limits import processor_quota
from streamload.text import counted, warn_at_caller


class _Launcher(NamedTuple):
    """A program that starts a task for each rank, and the environment variables that it sets."""

    name: str
    tasks: str
    task: str
    tasks_here: str


# Launchers that may bind each task to processors of its own. Within a Slurm job srun starts mpirun's processes, so
# mpirun's variables take precedence.
_BINDING_LAUNCHERS = (
    _Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
)

# Variables in which torchrun and DeepSpeed set the number of ranks on this machine. The ranks share the processors.
_SHARING_LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")

_REPEATED = re.compile(r"([0-9]+)(?:\(x[0-9]+\))?")


# -- ranks ---------------------------------------------------------------------------------------------------------


def rank_of_group() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed's process group; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def detected_rank() -> tuple[int, int] | None:
    """Return rank and world size from torch.distributed, else from RANK and WORLD_SIZE, else None."""
    group = rank_of_group()
    if group is not None:
        return group
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and world_size is not None and rank.isdecimal() and world_size.isdecimal():
        return int(rank), int(world_size)
    return None


def local_ranks() -> int:
    """Return the number of ranks on this machine, at least 1.

    If the launcher does not set the number, or has started fewer tasks than there are ranks, return the world size,
    limited by the number of CUDA devices.
    """
    return _local_ranks()[0]


def _local_ranks() -> tuple[int, bool]:
    """Return the number of ranks on this machine, and True if each may be bound to its own processors."""
    for name in _SHARING_LAUNCHERS:
        if count := _number(name):
            return count, False
    group = rank_of_group()
    world_size = max(1, (_number("WORLD_SIZE") or 1) if group is None else group[1])
    for launcher in _BINDING_LAUNCHERS:
        count, tasks = _tasks_here(launcher.tasks_here), _number(launcher.tasks)
        if count and (tasks is None or tasks >= world_size):
            return count, True
    cuda = sys.modules.get("torch.cuda")  # importing torch to count devices would take too long
    return min(world_size, (cuda and cuda.device_count()) or world_size), False


def _tasks_here(variable: str) -> int | None:
    """Return a variable's number, or the greatest number in Slurm's list by machine, such as "4(x2),3"."""
    entries = os.environ.get(variable, "").split(",")
    counts = [_REPEATED.fullmatch(entry) for entry in entries]
    return None if None in counts else max(int(count[1]) for count in counts if count)


# -- processors ----------------------------------------------------------------------------------------------------


def available_processors(root: str = "/") -> int:
    """Return the number of processors that this process is bound to, limited by its CPU quota."""
    quota = processor_quota(root)
    return _bound_processors() if quota is None else min(_bound_processors(), quota)


def processors_of_rank(root: str = "/") -> int:
    """Return the number of processors for this rank, at least 1.

    Bound processors are divided among ranks, unless `SLURM_CPUS_ON_NODE` shows that each rank has as many of its own.
    """
    (ranks, may_be_bound), bound, quota = _local_ranks(), _bound_processors(), processor_quota(root)
    of_all = max(bound, _number("SLURM_CPUS_ON_NODE") or 0) if may_be_bound else bound
    share = min(bound, of_all // ranks)
    return max(1, share if quota is None else min(share, quota // ranks))


def _bound_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def check_detected_rank(rank: int, world_size: int) -> None:
    """Raise RuntimeError if a detected rank is wrong: several processes would then read the same samples.

    This happens if the loader was created before the process group, or in one of several workers of a DataLoader.
    """
    now = rank_of_group()
    if now is not None and now != (rank, world_size):
        raise RuntimeError(
            f"the loader was made as rank {rank} of {world_size}, but this process now has rank {now[0]} of {now[1]}: "
            "make it after init_process_group (with Lightning in train_dataloader), or give rank= and world_size="
        )
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise RuntimeError(
            f"each of the {worker.num_workers} workers of a torch DataLoader would read all samples: iterate over the "
            "StreamLoader itself, give the DataLoader num_workers=0, or make one in each worker with rank="
        )


def depends_on_detected_rank(rank: int | None) -> bool:
    """Return True if a loader's samples depend on the detected rank.

    Warn if no rank is detected in one of several tasks. The launcher's number is not used as the rank, since the tasks
    may belong to different trainings.
    """
    if rank is not None:
        return False
    started = [(launcher, tasks) for launcher in _BINDING_LAUNCHERS if (tasks := _number(launcher.tasks) or 0) > 1]
    if started and detected_rank() is None:
        launcher, tasks = started[0]
        warn_at_caller(
            f"each of {counted(tasks, 'task')} that {launcher.name} has started reads all samples: there is no process "
            f'group, nor both RANK and WORLD_SIZE; give rank=int(os.environ["{launcher.task}"]) and world_size={tasks},'
            " make the loader after init_process_group, or give rank=0 and world_size=1 if each should read all"
        )
    return True
