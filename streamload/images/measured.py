"""The mean and deviation of a dataset's images: imported late, because no other operation needs a storage."""

from __future__ import annotations

import json
import os
from typing import Any

from streamload.errors import ShardNotFoundError, without_secrets
from streamload.storage.storages import Storages

STATISTICS_NAME = "statistics.json"
_MOST_BYTES = 1 << 20


def measured_channels(
    folder: str | os.PathLike[str], storage_options: dict[str, Any] | None
) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation of each channel that `streamload stats --pixels` saved. See `Normalize.of`."""
    place = os.fspath(folder)
    url = place if place.endswith(".json") else f"{place.rstrip('/')}/{STATISTICS_NAME}"
    try:
        saved = json.loads(Storages(storage_options).for_url(url).read_bytes(url, most_bytes=_MOST_BYTES))
        return saved["mean"], saved["std"]
    except ShardNotFoundError:
        raise ShardNotFoundError(
            f"there is no {STATISTICS_NAME}; `streamload stats {without_secrets(place)} --pixels` makes it", url=url
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{without_secrets(url)!r} is not what `streamload stats --pixels` saves; make it again"
        ) from None
