"""The demonstration: a training run that is killed and resumed ends exactly as one that was left alone.

It writes handwritten digits as an ImageFolder, packs them with `shardify`, trains on them with `train.py`, then trains
again with a SIGKILL in the middle of an epoch, resumes, and compares. Everything it writes is in the folder `.demo`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from proof import Comparison, compare, read_steps

WORK = ".demo"
HERE = os.path.dirname(os.path.abspath(__file__))


class DemoError(Exception):
    """A step of the demonstration did not do what it should."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", metavar="FOLDER", help="use this ImageFolder of grey 28 x 28 PNG files instead")
    parser.add_argument("--images-per-shard", type=int, default=500, metavar="COUNT")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--kill-at-step", type=int, default=110, metavar="STEP", help="one between two checkpoints")
    parser.add_argument("--least-accuracy", type=float, default=0.95, help="what the trained network must reach")
    return parser.parse_args()


def main() -> None:
    """Run it, say what was proven, and exit with status 1 if something was not."""
    arguments = parse_arguments()
    start = time.monotonic()
    try:
        proven = tell(demonstrate(arguments), arguments.least_accuracy)
    except DemoError as error:
        sys.exit(f"the demonstration failed: {error}")
    print(f"in {time.monotonic() - start:.0f} s; everything is in {WORK}/")
    if not proven:
        sys.exit("the demonstration failed: something above is `NO` that should be `yes`")


def demonstrate(arguments: argparse.Namespace) -> Comparison:
    """Prepare the shards, make the two runs, and compare them.

    Raises:
        DemoError: a program ended otherwise than it should.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    os.makedirs(WORK)
    data, uninterrupted, resumed = (os.path.join(WORK, name) for name in ("shards", "uninterrupted", "resumed"))
    pack(arguments, data)

    training = [sys.executable, os.path.join(HERE, "train.py"), data]
    options = ["--epochs", str(arguments.epochs), "--batch-size", str(arguments.batch_size)]
    options += ["--checkpoint-every", str(arguments.checkpoint_every)]
    title("a run that is left alone")
    run([*training, uninterrupted, *options])
    title(f"the same run, killed with SIGKILL at step {arguments.kill_at_step}")
    run([*training, resumed, *options, "--kill-at-step", str(arguments.kill_at_step)], status=-signal.SIGKILL)
    last = read_steps(resumed)[-1][0]
    print(f"killed behind step {last}; the last checkpoint is of step {last - last % arguments.checkpoint_every}")
    title("the killed run, started again, with one worker where it had two")
    run([*training, resumed, *options, "--num-workers", "1"])
    return compare(uninterrupted, resumed)


def pack(arguments: argparse.Namespace, data: str) -> None:
    """Write the images, unless there are some already, and pack them into shards for training and evaluation."""
    images = arguments.images
    if images is None:
        title("5,000 handwritten digits as an ImageFolder")
        images = os.path.join(WORK, "images")
        run([sys.executable, os.path.join(HERE, "prepare.py"), images])
    title("the ImageFolder as shards")
    packing = ["shardify", images, data, "--split", "train=0.9,val=0.1"]
    packing += ["--max-count", str(arguments.images_per_shard)]
    print("$ " + " ".join(packing), flush=True)
    run([os.path.join(os.path.dirname(sys.executable), packing[0]), *packing[1:]])


def run(command: Sequence[str], status: int = 0) -> None:
    """Run a program to its end.

    Raises:
        DemoError: its exit status is another than `status`.
    """
    found = subprocess.run(command, check=False).returncode
    if found != status:
        raise DemoError(f"{' '.join(command)} ended with status {found} where {status} was expected")


def title(text: str) -> None:
    """Say what comes next."""
    print(f"\n== {text}", flush=True)


def tell(found: Comparison, least_accuracy: float) -> bool:
    """Print what was found out, and return whether all of it is as it should be."""
    redone = found.redone
    title("what was proven")
    again = f"; steps {redone[0]} to {redone[-1]} were lost in the kill and redone" if redone else ""
    print(f"{found.steps} steps{again}")
    verdicts = {
        "same samples in the same order, with the same augmentation": found.same_order,
        "steps were lost in the kill, and redone": bool(redone),
        "same accuracy after each epoch": found.same_accuracy,
        "same trained weights, bit for bit": found.same_weights,
        f"final accuracy {found.accuracy:.2%}, at least {least_accuracy:.0%}": found.accuracy >= least_accuracy,
    }
    for what, holds in verdicts.items():
        print(f"  {what}: {'yes' if holds else 'NO'}")
    return all(verdicts.values())


if __name__ == "__main__":
    main()
