"""The mean and deviation of a dataset's images, as saved: on its own because no other operation reads a file."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from streamload.errors import ShardNotFoundError
from streamload.storage.protocol import without_secrets
from streamload.storage.storages import Storages

__all__ = ["STATISTICS_NAME", "measured_channels"]

STATISTICS_NAME = "statistics.json"
_MOST_BYTES = 1 << 28


def measured_channels(
    folder: str | os.PathLike[str], field: str | None, storage_options: dict[str, Any] | None
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, for values in [0, 1]. See `Normalize.of`."""
    place = os.fspath(folder)
    url = place if place.endswith(".json") else f"{place.rstrip('/')}/{STATISTICS_NAME}"
    try:
        saved = json.loads(Storages(storage_options).for_url(url).read_bytes(url, most_bytes=_MOST_BYTES))
        values: dict[str, Any] = saved["values"]
    except ShardNotFoundError:
        raise ShardNotFoundError(
            f"there is no {STATISTICS_NAME}; `streamload stats {without_secrets(place)} --pixels` makes it", url=url
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{without_secrets(url)!r} is not what `streamload stats --pixels` saves; make it again"
        ) from None
    fields = [name for name in values if "." not in name and _is_image(values[name])] if field is None else [field]
    chosen = [values[name] for name in fields if name in values]
    if not chosen or not all(map(_is_image, chosen)):
        raise ValueError(
            f"{without_secrets(url)!r} has no images{'' if field is None else f' of a field {field!r}'}, but "
            f"{', '.join(values) or 'nothing'}; make it again with `streamload stats --pixels`"
        )
    count, means, deviations = (
        np.array([[channel[name] for channel in each["channels"]] for each in chosen])
        for name in ("count", "mean", "std")
    )
    share = count / count.sum(0)
    mean = (means * share).sum(0)
    std = np.sqrt(((deviations**2 + (means - mean) ** 2) * share).sum(0))
    return (mean / 255).tolist(), (std / 255).tolist()


def _is_image(field: dict[str, Any]) -> bool:
    return field["type"] == "uint8" and len(field["channels"]) == 3 and all(each["count"] for each in field["channels"])
