"""Pack a folder of sound with its class, and read it with decoders of your own.

python examples/sound.py --recordings recordings --shards sound-shards     # recordings are made, if there are none

WAV is decoded by Python's own library. For other formats give a function of yours, here one that uses soundfile:
`DECODERS["flac"] = lambda content: soundfile.read(io.BytesIO(content), dtype="float32")[0]`.
"""

from __future__ import annotations

import argparse
import io
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamload import StreamLoader, pack

RATE = 8000
CLASSES = ("high", "low")
SECONDS = 0.25
FORMATS = ("wav", "flac", "mp3", "ogg")


def write_recording(path: Path, wave_form: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """A WAV file of values between -1 and 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
        file.writeframes((32_767 * wave_form).astype("<i2").tobytes())


def write_recordings(folder: Path, count: int = 60) -> None:
    """Tones of two classes, each in a folder of its own."""
    generator = np.random.default_rng(0)
    times = np.arange(int(RATE * SECONDS)) / RATE
    for number in range(count):
        name = CLASSES[number % 2]
        pitch = generator.uniform(900, 1200) if name == "high" else generator.uniform(200, 400)
        write_recording(folder / name / f"{number:03d}.wav", 0.6 * np.sin(2 * np.pi * pitch * times))


def sample_of(path: str) -> Mapping[str, Any]:
    """What is packed of one file: its bytes as they are, under its extension, and its class."""
    file = Path(path)
    label = CLASSES.index(file.parent.name)
    return {"__key__": f"{file.parent.name}/{file.stem}", file.suffix[1:]: file.read_bytes(), "cls": label}


def pack_recordings(folder: Path, shards: Path) -> None:
    """All files in the folders of the classes."""
    files = [path for path in folder.glob("*/*") if path.suffix[1:] in FORMATS]
    pack(sample_of, sorted(map(str, files)), shards, workers=1)


def decode_wav(content: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[frames], between -1 and 1."""
    with wave.open(io.BytesIO(content)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return (frames / 32_768).astype(np.float32)


DECODERS: dict[str, Callable[[bytes], Any]] = {"wav": decode_wav}


def loader(
    shards: Path, batch_size: int, *, decode: Mapping[str, Callable[[bytes], Any]] = DECODERS, **options: Any
) -> StreamLoader:
    """Batches of float32[batch, frames] and int64[batch]."""
    return StreamLoader(shards, batch_size, fields=(";".join(decode), "cls"), decode=decode, **options)


def main() -> None:
    """Pack, and train a linear classifier on the spectrum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, default=Path("recordings"))
    parser.add_argument("--shards", type=Path, default=Path("sound-shards"))
    given = parser.parse_args()
    if not given.recordings.exists():
        write_recordings(given.recordings)
    if not given.shards.exists():
        pack_recordings(given.recordings, given.shards)
    torch.manual_seed(0)
    model = torch.nn.Linear(int(RATE * SECONDS) // 2 + 1, len(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with loader(given.shards, 12, shuffle=True, where="fraction < 0.8", num_workers=1) as train:
        for _ in range(5):
            for waves, labels in train:
                loss = torch.nn.functional.cross_entropy(model(torch.fft.rfft(waves).abs()), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with loader(given.shards, 12, where="fraction >= 0.8", num_workers=1) as test:
        right = sum(int((model(torch.fft.rfft(waves).abs()).argmax(1) == labels).sum()) for waves, labels in test)
        print(f"{right} of {len(test.dataset)} recordings right")


if __name__ == "__main__":
    main()
