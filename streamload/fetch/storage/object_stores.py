"""Which store of obstore's a url belongs to, how it is made, and where its credentials come from."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

from streamload.errors import StorageError
from streamload.fetch.storage.options import CLIENT_OPTIONS, NO_RETRY, RETRY, ObjectConfig
from streamload.fetch.storage.protocol import protocol_of, without_secrets

__all__ = ["ObjectPlace", "locate", "make_store"]

_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Where obstore finds credentials itself."""

_RENEWED_AFTER = timedelta(minutes=10)
_WEB = ("http", "https")


@dataclass(frozen=True, slots=True)
class ObjectPlace:
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

    def unsigned_address(self, endpoint: str | None) -> str:
        """The object's address for requests without a signature."""
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return f"{(endpoint or 'https://s3.amazonaws.com').rstrip('/')}/{self.bucket}/{quote(self.key)}"


def locate(url: str) -> ObjectPlace:
    """The place that a url names.

    Raises:
        StorageError: it names no bucket or host, or a key that cannot be asked for.
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
    """Make the obstore store of a bucket or a host; nothing is asked yet.

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
            return stores.HTTPStore(place.root, **options)
        if config.family == "gs":
            return stores.GCSStore(place.bucket, config=config.config, **options)
        if config.family == "az":
            account = {"account_name": place.account} if place.account else {}
            return stores.AzureStore(place.bucket, config=config.config | account, **options)
        settings, provider = _aws_credentials(config, place.root)
        return stores.S3Store(place.bucket, config=settings, credential_provider=provider, **options)
    except (BaseError, ValueError) as exc:
        reason = str(exc).partition("\n")[0]
        raise StorageError(
            f"this storage cannot be set up ({reason}); check storage_options", url=without_secrets(place.root)
        ) from None


def _aws_credentials(config: ObjectConfig, root: str) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
    """The settings, and what gives credentials where obstore does not find them itself: in the files in `~/.aws`."""
    settings = config.config
    profile = config.profile or os.environ.get("AWS_PROFILE")
    given = "access_key_id" in settings or settings.get("skip_signature")
    if given or (config.profile is None and any(os.environ.get(name) for name in _AWS_VARIABLES)):
        return settings, None
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    if profile is None and not any(os.path.exists(os.path.expanduser(file)) for file in files):
        return settings, None
    try:
        botocore_session = importlib.import_module("botocore.session")
    except ImportError as exc:
        raise StorageError(
            "credentials from ~/.aws need botocore: pip install 'streamload[s3]'", url=without_secrets(root)
        ) from exc
    session = botocore_session.Session(profile=profile)
    if profile is not None and profile not in session.available_profiles:
        raise StorageError(
            f"there is no profile {profile!r} (of storage_options or AWS_PROFILE) in {files[0]} or {files[1]}",
            url=without_secrets(root),
        )
    if "region" not in settings and (region := session.get_config_variable("region")):
        settings = settings | {"region": region}
    credentials = session.get_credentials()
    if credentials is None:
        return settings, None
    return settings, lambda: _frozen(credentials)


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as they are now; asked for again after a while, since botocore renews those that expire."""
    found = credentials.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _RENEWED_AFTER,
    }
