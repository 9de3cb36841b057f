"""Whether the rank that was found by itself can be relied on."""

from __future__ import annotations

from streamload.environment.launchers import dataloader_worker, found_rank, launched_tasks, rank_of_group
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller

__all__ = ["check_found_rank", "goes_by_found_rank"]


def check_found_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that was found before there was a process group, and in one of several workers of a DataLoader.

    Raises:
        RuntimeError: this process would read the samples of another one.
    """
    now = rank_of_group()
    if now is not None and now != (rank, world_size):
        raise RuntimeError(
            f"the loader was made as rank {rank} of {world_size}, and torch.distributed says now that this is rank "
            f"{now[0]} of {now[1]}; make the loader after init_process_group (with Lightning in train_dataloader), or "
            "give rank= and world_size="
        )
    worker = dataloader_worker()
    if worker is not None and worker[1] > 1:
        raise RuntimeError(
            f"this is worker {worker[0]} of {worker[1]} of a torch DataLoader, and each of them would read all "
            "samples: iterate over the StreamLoader itself, which has workers of its own, or give the DataLoader "
            "num_workers=0; or make the StreamLoader in the worker, with its share as rank= and world_size="
        )


def goes_by_found_rank(rank: int | None, *, is_divided: bool) -> bool:
    """Whether a loader's samples depend on a rank that it was not given.

    It warns at the user's line where there is none to be found although this is one of several tasks: each of them
    would read everything. What the launcher says is not taken for the rank, since tasks beside each other need not be
    one training.

    Args:
        rank: as it was given.
        is_divided: whether a sampler names the samples of this rank alone.
    """
    if rank is not None or is_divided:
        return False
    launched = None if found_rank() is not None else launched_tasks()
    if launched is not None:
        warn_at_caller(
            f"this is one of {counted(launched.tasks, 'task')} that {launched.launcher} has started, and each of them "
            "reads all samples as rank 0 of 1: there is no process group, and RANK and WORLD_SIZE are not both set. "
            f'Make the loader after init_process_group, or give rank=int(os.environ["{launched.task_variable}"]) and '
            f"world_size={launched.tasks}; where each task is to read everything, rank=0 and world_size=1"
        )
    return True
