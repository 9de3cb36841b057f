"""Which store of obstore's a url belongs to, and how it is made."""

from __future__ import annotations

import contextlib
import os
from base64 import b64encode
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from streamload.errors import StorageError
from streamload.storage.buckets.aws_settings import aws_settings
from streamload.storage.options import CLIENT_OPTIONS, NO_RETRY, RETRY, ObjectConfig, aws_endpoint
from streamload.storage.protocol import protocol_of, without_secrets

__all__ = ["ObjectPlace", "locate", "make_store"]

_ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"
_ENDPOINT_VARIABLES = (_ENDPOINT_VARIABLE, "AWS_ENDPOINT_URL")
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

    def unsigned_address(self, config: ObjectConfig) -> str:
        """The object's address for requests without a signature."""
        endpoint = aws_settings(config, self.root)[0].config.get("endpoint")
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
    options = options | {
        "credential_provider": credentials,
        "client_options": CLIENT_OPTIONS | config.client,
    }
    endpoint = config.config.get("endpoint")
    if endpoint is None and "" in map(os.environ.get, _ENDPOINT_VARIABLES):
        # To AWS's tools a variable that is set to nothing is not set; obstore takes it for an address, and panics.
        endpoint = aws_endpoint(config.config.get("region"))
        config = replace(config, config=config.config | {"endpoint": endpoint})
    if endpoint is not None and _ENDPOINT_VARIABLE in os.environ:
        # Newer releases of obstore prefer the variable to the endpoint, older ones know neither it nor its setting.
        with contextlib.suppress(UnknownConfigurationKeyError):
            over = {_ENDPOINT_VARIABLE.lower(): endpoint}
            return stores.S3Store(place.bucket, config=config.config | over, **options)
    return stores.S3Store(place.bucket, config=config.config, **options)
