"""Options for remote storage in fsspec's spellings, put into obstore's."""

from __future__ import annotations

import difflib
import inspect
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from streamload.errors import without_secrets
from streamload.limits import MOST_REQUESTS, SMALL_REQUESTS

RETRY: dict[str, Any] = {
    "max_retries": 10,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    "retry_timeout": timedelta(seconds=30),
}
"""How obstore retries a write, of a large object only the part; to `retry_policy.py` all of that is one try."""

NO_RETRY: dict[str, Any] = RETRY | {"max_retries": 0}
"""For reading and listing, where the caller must see each failure to send fewer requests when throttled."""

# No retries of its own, which take up to 15 s before ours: what s3fs fails to write is written again whole. And a
# connection for each request: of 10, its default, copies of whole files would leave none to ask for the next one.
_BOTOCORE: dict[str, Any] = {
    "retries": {"max_attempts": 0},
    "max_pool_connections": MOST_REQUESTS + SMALL_REQUESTS,
}

CLIENT_OPTIONS: dict[str, Any] = {"timeout": "24h", "read_timeout": "30s", "connect_timeout": "10s"}
"""Timeouts on progress; the default of 30 s for a whole request would end slow bodies that still progress."""

# What fsspec's filesystems and their clients call obstore's settings; all other names are obstore's own.
_ALIASES: dict[str, dict[str, str]] = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "anon": "skip_signature",
    },
    "gs": {"token": "service_account", "endpoint_url": "base_url", "anon": "skip_signature"},
    "az": {
        "sas_token": "sas_key",
        "endpoint_url": "endpoint",
        "anon": "skip_signature",
    },
    "http": {},
}

# What fsspec passes on with each request to a web server.
_OF_AIOHTTP = {"allow_redirects", "cookies", "max_redirects", "params", "proxy", "proxy_auth", "proxy_headers", "ssl"}

# What both libraries can be given, and is none of obstore's settings.
_BESIDE = {"s3": {"profile"}, "gs": {"project"}, "az": set[str](), "http": {"headers", *_OF_AIOHTTP}}

# What its filesystems take beyond the arguments that they name.
_FSSPEC_KEYWORDS = frozenset(["use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "auth"])

_STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_FAMILY = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "https": "http"}


@dataclass(frozen=True, slots=True)
class ObjectConfig:
    """What an obstore store is made with.

    Attributes:
        family: `s3`, `gs`, `az` or `http`.
        config: the store's own settings.
        client: settings of its HTTP client.
        profile: the profile of the user's AWS files to take credentials from, where one was named.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    client: dict[str, Any] = field(default_factory=dict, repr=False)
    profile: str | None = None


def options_of(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one protocol: those that are for all, and those in a dict of one of its names over them."""
    nested = {name for name, value in options.items() if _is_nested(name, value)}
    found = {name: value for name, value in options.items() if name not in nested}
    family = _FAMILY.get(protocol, protocol)
    for name in sorted((name for name in nested if _FAMILY.get(name, name) == family), key=protocol.__eq__):
        found |= options[name]
    return found


def filesystem_options(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one protocol as fsspec takes them.

    Of `client_kwargs`, aiohttp does not know `verify`. See `_BOTOCORE` for what botocore is given unless the user has
    set it.
    """
    given, family = options_of(protocol, options), _FAMILY.get(protocol, protocol)
    if family == "s3":
        return given | {"config_kwargs": _BOTOCORE | (given.get("config_kwargs") or {})}
    client_kwargs = dict(given.get("client_kwargs") or {})
    if family != "http" or "verify" not in client_kwargs:
        return given
    settings = client_settings(None, client_kwargs.pop("verify"))
    return given | {"client_kwargs": client_kwargs, "ssl": tls_context(settings)}


def tls_context(client: Mapping[str, Any]) -> ssl.SSLContext | bool:
    """How aiohttp is to check certificates, by the settings of obstore's client."""
    if "root_certificate" in client:
        return ssl.create_default_context(cadata=client["root_certificate"].decode("ascii"))
    return not client.get("allow_invalid_certificates")


def object_config(protocol: str, options: Mapping[str, Any]) -> ObjectConfig | None:
    """Translate options for obstore.

    Args:
        protocol: of the url, as `s3` or `abfss`.
        options: for this protocol, see `options_of`.

    Returns:
        The settings, or None where fsspec knows an option that obstore cannot be given.

    Raises:
        TypeError: a value is of the wrong kind.
        ValueError: neither knows the option, or the endpoint is no address.
    """
    family = _FAMILY.get(protocol, protocol)
    given = {name: value for name, value in options.items() if value is not None}
    _check_mappings(given)
    flat = {name: value for name, value in (given.get("client_kwargs") or {}).items() if value is not None} | given
    flat.pop("client_kwargs", None)
    client: dict[str, Any] = dict(flat.pop("client_options", {}))
    verify, headers, profile = flat.pop("verify", None), flat.pop("headers", None), flat.pop("profile", None)
    flat.pop("project", None)  # only making buckets needs it
    if headers:
        client["default_headers"] = dict(headers)
    if family == "gs" and not _takes_token(flat):
        return None
    unknown = [name for name in flat if not _is_known(family, name)]
    if unknown:
        _check_names(protocol, given, unknown)
        return None
    for name, value in {**flat, "profile": profile or ""}.items():
        if not isinstance(value, str | bool):
            within = "" if name in given else "['client_kwargs']"
            raise TypeError(f"storage_options{within}[{name!r}] must be a string, not {type(value).__name__}")
    config = _translated(family, flat)
    endpoint = "http://" if family == "http" else config.get("base_url" if family == "gs" else "endpoint")
    return ObjectConfig(family, config, client_settings(endpoint, verify) | client, profile)


def _translated(family: str, flat: Mapping[str, str | bool]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in flat.items():
        own = _own_name(family, name)
        if value or own == name:
            config.setdefault(own, value)
    if family == "s3" and "endpoint" not in config and (named := _endpoint_of_environment()):
        config["endpoint"] = named
    return config


def _own_name(family: str, name: str) -> str:
    """Obstore's name of an option; what is set twice under two of its names would be refused."""
    plain = name.lower().removeprefix("aws_") if family == "s3" else name
    return _ALIASES[family].get(plain, plain)


def _is_known(family: str, name: str) -> bool:
    """Whether obstore has a setting of this name; it is consulted for what has no alias here."""
    if _own_name(family, name) != name or family not in _STORES:
        return family in _STORES
    import obstore

    try:
        getattr(obstore.store, _STORES[family])("bucket", config={name: ""})
    except obstore.exceptions.UnknownConfigurationKeyError:
        return False
    except obstore.exceptions.BaseError:  # more would be needed to make one
        return True
    return True


def _takes_token(flat: dict[str, Any]) -> bool:
    """Put gcsfs's kinds of `token` as obstore takes them, if it takes this one: a file, or whatever is found."""
    token = flat.get("token")
    if token == "anon":  # noqa: S105
        flat["anon"] = True
    if token in ("anon", "google_default", "cloud"):
        del flat["token"]
    return "token" not in flat or (isinstance(token, str) and os.path.exists(token))


def _check_names(protocol: str, options: Mapping[str, Any], unknown: Sequence[str]) -> None:
    """Refuse what neither obstore nor fsspec's filesystem knows, which that would pass over.

    Raises:
        ValueError: the filesystem does not know one, or its package is missing.
    """
    import fsspec

    family = _FAMILY.get(protocol, protocol)
    try:
        takes = set(inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters)
    except ImportError as exc:
        raise ValueError(f"storage_options names {_listed(unknown)}, which needs another package: {exc}") from None
    takes |= _FSSPEC_KEYWORDS | _BESIDE[family]
    if wrong := sorted(options.keys() - takes):
        known = sorted((takes | _ALIASES[family].keys()) - {"self", "kwargs", "storage_options"})
        close = difflib.get_close_matches(wrong[0], known, 1, cutoff=0.0)
        raise ValueError(
            f"storage_options names {_listed(wrong)}, which {protocol}:// does not know; did you mean {close[0]!r}?"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _check_mappings(given: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant. Messages name the kind of a value, which may be a secret.

    Raises:
        TypeError: an option that holds others is no dict of strings as keys.
        ValueError: a file with certificates does not exist.
    """
    for name, value in given.items():
        if name in ("headers", "client_options") or name.endswith("_kwargs"):
            if not isinstance(value, Mapping):
                raise TypeError(f"storage_options[{name!r}] must be a dict, not {type(value).__name__}")
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"storage_options[{name!r}] must be a dict with strings as keys, and has other keys")
    for name, value in given.get("headers", {}).items():
        if not isinstance(value, str):
            raise TypeError(f"storage_options['headers'][{name!r}] must be a string, not {type(value).__name__}")
    verify = given.get("client_kwargs", {}).get("verify")
    if isinstance(verify, str) and not os.path.isfile(verify):
        raise ValueError(
            f"storage_options['client_kwargs']['verify'] is {verify!r}, and there is no such file; give the path of a "
            "file with certificates (PEM), or False"
        )


def _is_nested(name: str, value: object) -> bool:
    """Whether a value holds the options for the protocol of this name, and is no option that is a mapping itself."""
    is_option = name in ("headers", "token") or name.endswith(("_kwargs", "_options"))
    if not isinstance(value, Mapping) or is_option:
        return False
    return name in _ALIASES or name in _FAMILY or _is_protocol_of_fsspec(name)


def _is_protocol_of_fsspec(name: str) -> bool:
    import fsspec

    return name in fsspec.available_protocols()


def _endpoint_of_environment() -> str | None:
    """The endpoint that AWS's tools take from the environment; obstore may know less of these variables.

    Raises:
        ValueError: a variable is set to nothing, which obstore takes for an address.
    """
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if name in os.environ:
            if not os.environ[name]:
                raise ValueError(f"{name} is set to nothing; unset it, or give the address of your storage")
            return os.environ[name]
    return None


def client_settings(endpoint: str | None, verify: object = None) -> dict[str, Any]:
    """Settings of obstore's HTTP client that follow from an endpoint, and from how its certificate is checked.

    Args:
        endpoint: the address, or None for the storage's own.
        verify: False to trust any certificate; a file of certificates that are trusted.

    Raises:
        ValueError: the endpoint is no address.
    """
    client: dict[str, Any] = {}
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"endpoint_url={without_secrets(endpoint)!r} (of storage_options or AWS_ENDPOINT_URL) must begin with "
            "https:// or http://"
        )
    if endpoint is not None and endpoint.startswith("http://"):
        client["allow_http"] = True
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        with open(verify, "rb") as file:
            client["root_certificate"] = file.read()
    return client
