"""Filesystems of fsspec for the tests, which start no thread of fsspec's and make no request twice by themselves."""

from __future__ import annotations

from typing import Any

import fsspec


def through_fsspec(protocol: str, **options: Any) -> Any:
    """The filesystem to pass as `filesystem=`."""
    if protocol == "s3":
        # Rclone sends parts with status 200, so that botocore would check them by the checksum of the whole.
        checks = dict.fromkeys(("response_checksum_validation", "request_checksum_calculation"), "when_required")
        options["config_kwargs"] = {"retries": {"max_attempts": 0}, **checks}
    return fsspec.filesystem(protocol, **options, asynchronous=True)
