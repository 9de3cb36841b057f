"""What does feeding a GPU cost? How much longer a step gets, and how fast batches go to the device.

A step is a fixed amount of work on the device, as long as `--step-ms` says with one batch that is there already. The
same steps are then done with fresh batches: from streamload with `device="cuda"`, from streamload with
`pin_memory=True` and `.to("cuda", non_blocking=True)` in the loop, and from torch's DataLoader (one file a sample)
with the same. They take turns, and each has an epoch to warm up. A second table has the rate at which the memory of one
batch goes to the device: a slot that was page-locked, as much memory that torch page-locked, and ordinary memory.
Before that, streamload's batches are checked on a busy device, which copies late.
Where there is no CUDA device it says so and measures nothing. Run it with

    python benchmarks/bench_gpu.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from decoding import CROP
from peers import WORKERS
from peers.files import Files
from tables import table
from workloads import FOLDER, WORKLOADS, Workload

from streamload import StreamLoader
from streamload.images import RandomResizedCrop

STEP_MS = 50.0
ROUNDS = 5
WARM_UP_STEPS = 5
LEAST_S = 5.0
MATRIX = 4096
BUSY_CYCLES = 20_000_000
"""About ten milliseconds."""

Step = Callable[[Any], None]


def _pictures(samples: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for number in range(samples):
        picture = generator.integers(0, 256, (3, CROP, CROP), dtype=np.uint8)
        yield {"__key__": f"{number:08d}", "npy": picture, "cls": number % 10}


PICTURES = Workload("pictures", 128, ("npy", "cls"), 4_096, _pictures, 512)
"""Pictures that need no decoding: what is measured is the way of their bytes."""

GPU_WORKLOADS = {of.name: of for of in (PICTURES, WORKLOADS["tokens"], WORKLOADS["images"])}


class Feeding(Protocol):
    """Batches on the device, epoch after epoch."""

    def epoch(self) -> Iterator[Any]:
        """Tuples of tensors on the device."""

    def close(self) -> None:
        """End it."""


class Ours:
    """streamload; `moves` says whether it is asked for batches on the device."""

    def __init__(self, of: Workload, *, moves: bool) -> None:
        transform = {"jpg": RandomResizedCrop(CROP)} if "jpg" in of.fields else None
        self._moves = moves
        self._loader = StreamLoader(
            of.shards(),
            of.batch_size,
            shuffle=True,
            fields=of.fields,
            transform=transform,
            num_workers=WORKERS,
            drop_last=True,
            device="cuda" if moves else None,
        )

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader) if self._moves else moved(self._loader)

    def close(self) -> None:
        self._loader.close()


class Theirs:
    """torch's DataLoader."""

    def __init__(self, of: Workload) -> None:
        self._files = Files(of, pin_memory=True)

    def epoch(self) -> Iterator[Any]:
        return moved(self._files.epoch())

    def close(self) -> None:
        self._files.close()


def moved(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield tuple(value.to("cuda", non_blocking=True) for value in batch)


FEEDINGS: dict[str, Callable[[Workload], Feeding]] = {
    'streamload, device="cuda"': lambda of: Ours(of, moves=True),
    "streamload, pin_memory and .to()": lambda of: Ours(of, moves=False),
    "DataLoader, pin_memory and .to()": Theirs,
}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(work: Callable[[], None], times: int) -> float:
    """Milliseconds on the device that one round of some work takes, of so many in a row."""
    work()
    torch.cuda.synchronize()
    began = _event()
    for _ in range(times):
        work()
    ended = _event()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / times


def make_step(milliseconds: float) -> Step:
    """A step that takes that long on the device: products of matrices, and a sum over the batch, which reads it."""
    matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    products = max(1, round(milliseconds / _ms(lambda: torch.mm(matrix, matrix), 50)))

    def step(batch: Any) -> None:
        batch[0].sum()
        for _ in range(products):
            torch.mm(matrix, matrix)

    return step


def step_ms(batches: Iterator[Any], step: Step) -> float:
    """Milliseconds a step, by the clock, over at least LEAST_S; the device is never waited for in between.

    Two steps may be queued at most, as in a training loop that reads its loss now and then.
    """
    for batch in islice(batches, WARM_UP_STEPS):
        step(batch)
    torch.cuda.synchronize()
    queued: list[torch.cuda.Event] = []
    began, steps = perf_counter(), 0
    while perf_counter() - began < LEAST_S:
        step(next(batches))
        steps += 1
        queued.append(_event())
        if len(queued) > 2:
            queued.pop(0).synchronize()
    torch.cuda.synchronize()
    return 1000 * (perf_counter() - began) / steps


def check(of: Workload) -> None:
    """Raise an error if a batch that a busy device copies late differs from the same batch on the host."""
    host = Ours(of, moves=False)
    expected = [int(batch[0].sum()) for batch in host._loader]
    host.close()
    for moves in (False, True):
        ours = Ours(of, moves=moves)
        sums = []
        for batch in ours.epoch():
            torch.cuda._sleep(BUSY_CYCLES)
            sums.append(batch[0].sum())
        wrong = sum(one != other for one, other in zip(torch.stack(sums).tolist(), expected, strict=True))
        ours.close()
        if wrong:
            how = 'device="cuda"' if moves else ".to()"
            raise RuntimeError(f"{wrong} of {len(expected)} batches of {of.name} are wrong with {how}")


def measure_steps(of: Workload, step: Step) -> dict[str, list[float]]:
    """Milliseconds a step, in each of the rounds: with a batch that is there already, and with each kind of feeding."""
    kinds = {name: make(of) for name, make in FEEDINGS.items()}
    found: dict[str, list[float]] = {"a batch that is there": [], **{name: [] for name in kinds}}
    endless = {name: chain.from_iterable(kind.epoch() for _ in repeat(None)) for name, kind in kinds.items()}
    first: Any = None
    for kind in kinds.values():
        for batch in kind.epoch():
            first = batch if first is None else first
    for _ in range(ROUNDS):
        found["a batch that is there"].append(step_ms(repeat(first), step))
        for name in kinds:
            found[name].append(step_ms(endless[name], step))
    endless.clear()
    for kind in kinds.values():
        kind.close()
    return found


def copy_rates(of: Workload) -> dict[str, float]:
    """Bytes a second to the device, of the first field of a batch of this workload."""
    loader = Ours(of, moves=False)._loader
    slot = max((batch[0] for batch in islice(loader, 3)), key=torch.Tensor.numel)
    if not slot.is_pinned():
        raise RuntimeError("the slot is not page-locked; is the limit of locked memory too low?")
    sources = {"slot": slot, "page-locked by torch": slot.clone().pin_memory(), "ordinary memory": slot.clone()}
    target = torch.empty_like(slot, device="cuda")
    rates = {}
    for name, source in sources.items():

        def copy(source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)

        rates[name] = 1000 * slot.nbytes / statistics.median(_ms(copy, 50) for _ in range(ROUNDS))
    loader.close()
    return rates


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(steps: dict[str, dict[str, list[float]]], rates: dict[str, dict[str, float]]) -> str:
    """Both tables.

    Args:
        steps: by workload, what `measure_steps` found; the first is the one that the others are compared with.
        rates: by workload, what `copy_rates` found.
    """
    rows, copies = [], []
    for workload, found in steps.items():
        alone = statistics.median(next(iter(found.values())))
        for name, values in found.items():
            rows.append([workload, name, _range(values), f"{statistics.median(values) / alone - 1:+.1%}"])
    for workload, by_name in rates.items():
        bare = by_name["page-locked by torch"]
        for name, rate in by_name.items():
            copies.append([workload, name, f"{rate / 1e9:.2f}", f"{rate / bare:.2f}"])
    first = table(["workload", "batches from", "a step, ms, median (range)", "longer by"], rows)
    second = table(["workload", "copied from", "GB/s", "of torch's page-locked memory"], copies)
    return f"{first}\n\n{second}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(GPU_WORKLOADS), default=list(GPU_WORKLOADS))
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="how long a step takes by itself")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for datasets and results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here")
        return
    step = make_step(arguments.step_ms)
    steps, rates = {}, {}
    for name in arguments.workloads:
        of = replace(GPU_WORKLOADS[name], root=arguments.folder)
        check(of)
        rates[name] = copy_rates(of)
        steps[name] = measure_steps(of, step)
    text = f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n{report(steps, rates)}"
    (arguments.folder / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
