"""Refuses values of `storage_options` that are of the wrong kind, before a storage library stumbles over them."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["check_kinds"]

_STRINGS = frozenset(
    [
        "key",
        "secret",
        "username",
        "password",
        "endpoint_url",
        "profile",
        "project",
        "account_name",
        "account_key",
        "sas_token",
        "tenant_id",
        "client_id",
        "client_secret",
        "connection_string",
    ]
)
_CLIENT_STRINGS = frozenset(
    ["region_name", "endpoint_url", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
)


def check_kinds(family: str, given: Mapping[str, object]) -> None:
    """Refuse what cannot be meant. Messages name the option and the kind of its value, which may be a secret.

    Args:
        family: `s3`, `gs`, `az` or `http`.
        given: the options for it that are not None.

    Raises:
        TypeError: a value is of the wrong kind.
        ValueError: a file with certificates does not exist.
    """
    strings = _STRINGS | {"token"} if family == "s3" else _STRINGS
    for name, value in given.items():
        if name in strings:
            _check_string(f"storage_options[{name!r}]", value)
        elif name == "headers" or name.endswith("_kwargs"):
            _check_mapping(name, value)
    headers, client = given.get("headers"), given.get("client_kwargs")
    for name, value in headers.items() if isinstance(headers, Mapping) else ():
        _check_string(f"storage_options['headers'][{name!r}]", value)
    if family not in ("s3", "http") or not isinstance(client, Mapping):
        return
    for name, value in client.items() if family == "s3" else ():
        if name in _CLIENT_STRINGS and value is not None:
            _check_string(f"storage_options['client_kwargs'][{name!r}]", value)
    verify = client.get("verify")
    if isinstance(verify, str) and not os.path.isfile(verify):
        raise ValueError(
            f"storage_options['client_kwargs']['verify'] is {verify!r}, and there is no such file; give the path of a "
            "file with certificates (PEM), or False"
        )


def _check_string(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        kind = "a dict with other keys" if isinstance(value, Mapping) else type(value).__name__
        raise TypeError(f"storage_options[{name!r}] must be a dict whose keys are strings, not {kind}")
