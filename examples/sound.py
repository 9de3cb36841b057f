"""Pack a folder of WAV files with their class, and read them with a decoder of your own.

python examples/sound.py --recordings recordings --shards sound-shards     # recordings are made, if there are none
"""

from __future__ import annotations

import argparse
import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamload import StreamLoader, pack

RATE = 8000
CLASSES = ("high", "low")
SECONDS = 0.25


def write_recordings(folder: Path, count: int = 60) -> None:
    """Tones of two classes, each in a folder of its own."""
    generator = np.random.default_rng(0)
    times = np.arange(int(RATE * SECONDS)) / RATE
    for number in range(count):
        name = CLASSES[number % 2]
        pitch = generator.uniform(900, 1200) if name == "high" else generator.uniform(200, 400)
        path = folder / name / f"{number:03d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
            file.writeframes((20_000 * np.sin(2 * np.pi * pitch * times)).astype("<i2").tobytes())


def sample_of(path: str) -> Mapping[str, Any]:
    """What is packed of one file: its bytes as they are, and its class."""
    file = Path(path)
    label = CLASSES.index(file.parent.name)
    return {"__key__": f"{file.parent.name}/{file.stem}", "wav": file.read_bytes(), "cls": label}


def decode_wav(content: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[frames], between -1 and 1."""
    with wave.open(io.BytesIO(content)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return (frames / 32_768).astype(np.float32)


def main() -> None:
    """Pack, and train a linear classifier on the spectrum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, default=Path("recordings"))
    parser.add_argument("--shards", type=Path, default=Path("sound-shards"))
    given = parser.parse_args()
    if not given.recordings.exists():
        write_recordings(given.recordings)
    if not given.shards.exists():
        pack(sample_of, sorted(map(str, given.recordings.rglob("*.wav"))), given.shards, workers=1)
    model = torch.nn.Linear(int(RATE * SECONDS) // 2 + 1, len(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"fields": ("wav", "cls"), "decode": {"wav": decode_wav}, "num_workers": 1}
    with StreamLoader(given.shards, 12, shuffle=True, where="fraction < 0.8", **options) as train:
        for _ in range(5):
            for waves, labels in train:
                loss = torch.nn.functional.cross_entropy(model(torch.fft.rfft(waves).abs()), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with StreamLoader(given.shards, 12, where="fraction >= 0.8", **options) as test:
        right = sum(int((model(torch.fft.rfft(waves).abs()).argmax(1) == labels).sum()) for waves, labels in test)
        print(f"{right} of {len(test.dataset)} recordings right")


if __name__ == "__main__":
    main()
