"""Options for remote storage in fsspec's spellings, put into obstore's."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from streamload.errors import without_secrets
from streamload.fetch.storage.option_kinds import check_kinds

__all__ = [
    "CLIENT_OPTIONS",
    "NO_RETRY",
    "RETRY",
    "ObjectConfig",
    "aws_endpoint",
    "client_settings",
    "filesystem_options",
    "object_config",
    "options_of",
    "tls_context",
]

RETRY: dict[str, Any] = {
    "max_retries": 10,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    "retry_timeout": timedelta(seconds=30),
}
"""How obstore writes again what a storage did not take, of a large object only the part; to `patience.py` that is one
try."""

NO_RETRY: dict[str, Any] = RETRY | {"max_retries": 0}
"""For reading and listing: whoever does it must see what fails, to send fewer requests where there are too many."""

CLIENT_OPTIONS: dict[str, Any] = {"timeout": "24h", "read_timeout": "30s", "connect_timeout": "10s"}
"""Time-outs on progress; the one on the whole request, 30 s by default, would end slow bodies that do progress."""

_S3 = frozenset(
    [
        "key",
        "secret",
        "token",
        "anon",
        "endpoint_url",
        "client_kwargs",
        "profile",
        "requester_pays",
        "use_ssl",
        "username",
        "password",
    ]
)
_GCS = frozenset(["token", "endpoint_url", "anon", "project"])
_AZURE = frozenset(
    [
        "account_name",
        "account_key",
        "sas_token",
        "credential",
        "tenant_id",
        "client_id",
        "client_secret",
        "anon",
        "endpoint_url",
        "connection_string",
    ]
)
_HTTP = frozenset(("headers", "client_kwargs"))
_ONLY_FSSPEC = {
    "s3": frozenset(
        [
            "config_kwargs",
            "session",
            "s3_additional_kwargs",
            "default_block_size",
            "default_fill_cache",
            "default_cache_type",
            "version_aware",
            "cache_regions",
            "max_concurrency",
            "fixed_upload_size",
            "asynchronous",
            "loop",
        ]
    ),
    "gs": frozenset(
        [
            "access",
            "consistency",
            "cache_timeout",
            "secure_serialize",
            "check_connection",
            "session_kwargs",
            "requests_timeout",
            "requester_pays",
            "default_location",
            "version_aware",
            "block_size",
        ]
    ),
    "az": frozenset(
        ["request_session", "socket_timeout", "blocksize", "default_fill_cache", "location_mode", "max_concurrency"]
    ),
    "http": frozenset(
        [
            "simple_links",
            "block_size",
            "same_scheme",
            "size_policy",
            "cache_type",
            "cache_options",
            "asynchronous",
            "loop",
            "get_client",
            "encoded",
            "auth",
        ]
    ),
}
_KNOWN = {"s3": _S3, "gs": _GCS, "az": _AZURE, "http": _HTTP}
_FAMILY = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "https": "http"}
_CLIENT_KWARGS = frozenset(("region_name", "endpoint_url", "verify", "use_ssl", "aws_access_key_id"))
_REGION = "client_kwargs={'region_name': ...}"
_FROM_OTHERS = dict.fromkeys(("aws_access_key_id", "access_key_id", "access_key"), "key")
_FROM_OTHERS |= dict.fromkeys(("aws_secret_access_key", "secret_access_key", "secret_key"), "secret")
_FROM_OTHERS |= dict.fromkeys(("aws_session_token", "session_token"), "token")
_FROM_OTHERS |= dict.fromkeys(("aws_endpoint_url", "endpoint_override", "endpoint"), "endpoint_url")
_FROM_OTHERS |= dict.fromkeys(("aws_region", "region_name", "region"), _REGION)
_FROM_OTHERS |= dict.fromkeys(("skip_signature", "anonymous"), "anon")
_ANY_FILESYSTEM = frozenset(["use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"])


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
    """The options for one protocol: those that are for all, and those in a dict of the protocol's name over them."""
    plain = {name: value for name, value in options.items() if not _is_nested(name, value)}
    return plain | dict(options.get(protocol) or {} if _is_nested(protocol, options.get(protocol)) else {})


def filesystem_options(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one protocol as fsspec takes them: of `client_kwargs`, aiohttp does not know `verify`."""
    given = options_of(protocol, options)
    client_kwargs = dict(given.get("client_kwargs") or {})
    if _FAMILY.get(protocol, protocol) != "http" or "verify" not in client_kwargs:
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
    unknown = sorted(given.keys() - _KNOWN[family] - _ONLY_FSSPEC[family] - _ANY_FILESYSTEM)
    if unknown:
        raise ValueError(
            f"storage_options names {', '.join(map(repr, unknown))}, which {protocol}:// does not know; it knows "
            f"{', '.join(sorted(_KNOWN[family] | _ONLY_FSSPEC[family]))}{_meant(unknown) if family == 's3' else ''}"
        )
    check_kinds(family, given)
    if given.keys() & (_ONLY_FSSPEC[family] | _ANY_FILESYSTEM):
        return None
    return {"s3": _s3, "gs": _gcs, "az": _azure, "http": _http}[family](given)


def _meant(unknown: list[str]) -> str:
    """What to write instead, for names as boto3, PyArrow and environment variables have them."""
    told = [f"{name!r} is {_FROM_OTHERS[name.lower()]}" for name in unknown if name.lower() in _FROM_OTHERS]
    return f". Here {', '.join(told)}" if told else ""


def _is_nested(name: str, value: object) -> bool:
    """Whether a value holds the options for the protocol of this name, and is no option that is a mapping itself."""
    is_option = name in ("headers", "token") or name.endswith(("_kwargs", "_options"))
    return isinstance(value, Mapping) and not is_option


def _s3(given: dict[str, Any]) -> ObjectConfig | None:
    client_kwargs = dict(given.get("client_kwargs") or {})
    if client_kwargs.keys() - (_CLIENT_KWARGS | {"aws_secret_access_key", "aws_session_token"}):
        return None
    config: dict[str, Any] = {}
    in_client = client_kwargs.get
    _take(config, "access_key_id", given.get("key"), given.get("username"), in_client("aws_access_key_id"))
    _take(
        config,
        "secret_access_key",
        given.get("secret"),
        given.get("password"),
        in_client("aws_secret_access_key"),
    )
    _take(config, "session_token", given.get("token"), in_client("aws_session_token"))
    region = client_kwargs.get("region_name")
    if "region_name" in client_kwargs:
        config["region"] = region
    from_outside = _endpoint_of_environment(region)
    _take(config, "endpoint", given.get("endpoint_url"), client_kwargs.get("endpoint_url"), from_outside)
    if given.get("anon"):
        config["skip_signature"] = True
    if given.get("requester_pays"):
        config["request_payer"] = True
    client = client_settings(config.get("endpoint"), client_kwargs.get("verify"))
    return ObjectConfig("s3", config, client, given.get("profile"))


def _endpoint_of_environment(region: str | None) -> str | None:
    """The endpoint that AWS's tools take from the environment, where they may.

    Named rather than left to obstore, which may know less of these variables, and prefers one of them to an option.
    """
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if named and os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return aws_endpoint(region)
    return named


def aws_endpoint(region: str | None) -> str:
    """AWS's own endpoint of a region, by default that of the environment."""
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return f"https://s3.{region}.amazonaws.com"


def _gcs(given: dict[str, Any]) -> ObjectConfig | None:
    config: dict[str, Any] = {}
    credentials = given.get("token")
    if given.get("anon") or credentials == "anon":
        config["skip_signature"] = True
    elif isinstance(credentials, str) and os.path.exists(credentials):
        config["service_account"] = credentials
    elif credentials not in (None, "google_default", "cloud"):
        return None
    _take(config, "base_url", given.get("endpoint_url"))
    return ObjectConfig("gs", config, client_settings(config.get("base_url")))


def _azure(given: dict[str, Any]) -> ObjectConfig | None:
    if "connection_string" in given or not isinstance(given.get("credential", ""), str):
        return None
    config: dict[str, Any] = {}
    for name in ("account_name", "account_key", "tenant_id", "client_id", "client_secret"):
        _take(config, name, given.get(name))
    _take(config, "sas_key", given.get("sas_token"), given.get("credential"))
    _take(config, "endpoint", given.get("endpoint_url"))
    if given.get("anon"):
        config["skip_signature"] = True
    return ObjectConfig("az", config, client_settings(config.get("endpoint")))


def _http(given: dict[str, Any]) -> ObjectConfig | None:
    client_kwargs = given.get("client_kwargs") or {}
    if client_kwargs.keys() - {"verify"}:
        return None
    client = client_settings("http://", client_kwargs.get("verify"))
    if given.get("headers"):
        client["default_headers"] = dict(given["headers"])
    return ObjectConfig("http", {}, client)


def _take(config: dict[str, Any], name: str, *values: object) -> None:
    """Set what the first of some values says, if one says anything."""
    value = next((value for value in values if value), None)
    if value is not None:
        config[name] = value


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
