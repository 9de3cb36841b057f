"""Which store of obstore's a url belongs to, and how it is made."""

from __future__ import annotations

import contextlib
import importlib
import os
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import unquote

from streamload.errors import StorageError, without_secrets
from streamload.storage.options import CLIENT_OPTIONS, NO_RETRY, RETRY, ObjectConfig
from streamload.storage.protocol import protocol_of

_ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"
_WEB = ("http", "https")


class ObjectPlace(NamedTuple):
    """Where an object is.

    Attributes:
        root: the url of its bucket or host, with a slash at the end.
        bucket: the bucket's or container's name; the host of a web server.
        key: the object's name in it, as obstore takes it.
        account: of Azure, where the url names one.
    """

    root: str
    bucket: str
    key: str
    account: str | None = None


def locate(url: str) -> ObjectPlace:
    """The place that a url names.

    Raises:
        StorageError: it names no bucket or host, or a key that cannot be requested.
    """
    protocol = protocol_of(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise StorageError("the url names no bucket or host", url=url)
    root = f"{protocol}://{bucket}/"
    if protocol in _WEB:
        return ObjectPlace(root, bucket, unquote(key))
    if key.startswith("/"):  # obstore would leave out the slash, and read what may be another object
        raise StorageError("the key begins with a slash; name the object without it", url=url)
    container, at, account = bucket.partition("@")
    return ObjectPlace(root, container, key, account.partition(".")[0] if at else None)


def make_store(place: ObjectPlace, config: ObjectConfig, *, retries: bool) -> Any:
    """Make the obstore store of a bucket or a host; nothing is requested yet.

    Args:
        place: which bucket or host.
        config: how to reach it.
        retries: it makes requests again that failed.

    Raises:
        StorageError: what it needs is not there: an account's name, a profile, or boto3 for credentials from `~/.aws`.
    """
    from obstore import store
    from obstore.exceptions import BaseError

    stores: Any = store  # which settings there are is obstore's to check
    options: dict[str, Any] = {
        "client_options": CLIENT_OPTIONS | config.client,
        "retry_config": RETRY if retries else NO_RETRY,
    }
    try:
        if config.family == "http":
            return _web_store(stores, place.root, options)
        if config.family == "gs":
            return stores.GCSStore(place.bucket, config=config.config, **options)
        if config.family == "az":
            account = {"account_name": place.account} if place.account else {}
            return stores.AzureStore(place.bucket, config=config.config | account, **options)
        return _s3_store(stores, place, config, options)
    except (BaseError, ValueError) as exc:
        reason = without_secrets(str(exc).partition("\n")[0])
        raise StorageError(
            f"this storage cannot be set up ({reason}); check storage_options", url=without_secrets(place.root)
        ) from None


def _web_store(stores: Any, root: str, options: dict[str, Any]) -> Any:
    """With the user and password of the url as the header that obstore does not make of them.

    A redirect to another host is followed without it, as without any header of this name.
    """
    protocol, _, place = root.partition("://")
    login, at, host = place.rpartition("@")
    headers = options["client_options"].get("default_headers", {})
    if at and "authorization" not in map(str.lower, headers):
        user, _, password = map(unquote, login.partition(":"))
        basic = b64encode(f"{user}:{password}".encode()).decode("ascii")
        headers = headers | {"Authorization": f"Basic {basic}"}
        options = options | {"client_options": options["client_options"] | {"default_headers": headers}}
    return stores.HTTPStore(f"{protocol}://{host}", **options)


def _s3_store(stores: Any, place: ObjectPlace, config: ObjectConfig, options: dict[str, Any]) -> Any:
    from obstore.exceptions import UnknownConfigurationKeyError

    config, credentials = aws_settings(config, place.root)
    options = options | {"credential_provider": credentials}
    endpoint = config.config.get("endpoint")
    if endpoint is not None and _ENDPOINT_VARIABLE in os.environ:
        # Newer releases of obstore prefer the variable to the endpoint, older ones know neither it nor its setting.
        with contextlib.suppress(UnknownConfigurationKeyError):
            over = {_ENDPOINT_VARIABLE.lower(): endpoint}
            return stores.S3Store(place.bucket, config=config.config | over, **options)
    return stores.S3Store(place.bucket, config=config.config, **options)


Credentials = Callable[[], dict[str, Any]]
"""Gives credentials as obstore takes them; called again after a while."""

_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Where obstore finds credentials itself."""

_RENEWED_AFTER = timedelta(minutes=10)


def aws_settings(config: ObjectConfig, root: str) -> tuple[ObjectConfig, Credentials | None]:
    """Add region and credentials of a profile in `~/.aws`, which botocore reads, where no others are given.

    Args:
        config: from the options and the environment, which come first.
        root: the bucket's url, for errors.

    Raises:
        StorageError: there is no such profile, it names an endpoint, or botocore is missing.
    """
    profile = config.profile or os.environ.get("AWS_PROFILE")
    is_given = "access_key_id" in config.config or bool(config.config.get("skip_signature"))
    files = [
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    ]
    if is_given or (config.profile is None and any(map(os.environ.get, _VARIABLES))):
        return config, None
    if profile is None and not any(os.path.exists(os.path.expanduser(file)) for file in files):
        return config, None
    try:
        session = importlib.import_module("botocore.session").Session(profile=profile)
    except ImportError as exc:
        raise StorageError(
            "credentials from ~/.aws need botocore: pip install 'streamload[s3]'", url=without_secrets(root)
        ) from exc
    if profile is not None and profile not in session.available_profiles:
        raise StorageError(
            f"there is no profile {profile!r} (of storage_options or AWS_PROFILE) in {files[0]} or {files[1]}",
            url=without_secrets(root),
        )
    if "endpoint" not in config.config and {"endpoint_url", "services"} & session.get_scoped_config().keys():
        raise StorageError(
            f"the profile in {files[1]} names an endpoint, which is not read from there; give it as `endpoint_url` in "
            "storage_options, or in AWS_ENDPOINT_URL",
            url=without_secrets(root),
        )
    if "region" not in config.config and (region := session.get_config_variable("region")):
        config = replace(config, config=config.config | {"region": region})
    credentials = session.get_credentials()
    return config, None if credentials is None else lambda: _frozen(credentials)


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as they are now; requested again after a while, since botocore renews those that expire."""
    found = credentials.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _RENEWED_AFTER,
    }
