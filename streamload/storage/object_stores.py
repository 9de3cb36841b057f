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
from urllib.parse import quote, unquote

from streamload.errors import StorageError
from streamload.storage.options import CLIENT_OPTIONS, NO_RETRY, RETRY, ObjectConfig, aws_endpoint, client_settings
from streamload.storage.protocol import protocol_of, without_secrets

__all__ = ["ObjectPlace", "locate", "make_store"]

_ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"
_ENDPOINT_VARIABLES = (_ENDPOINT_VARIABLE, "AWS_ENDPOINT_URL")
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

    def unsigned_address(self, config: ObjectConfig) -> str:
        """The object's address for requests without a signature."""
        endpoint = aws_settings(config, self.root)[0].config.get("endpoint")
        return f"{(endpoint or 'https://s3.amazonaws.com').rstrip('/')}/{self.bucket}/{quote(self.key)}"


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


Credentials = Callable[[], dict[str, Any]]
"""Gives credentials as obstore takes them; called again after a while."""

_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Where obstore finds credentials itself."""

_ENDPOINT = "endpoint_url"
_RENEWED_AFTER = timedelta(minutes=10)


def aws_settings(config: ObjectConfig, root: str) -> tuple[ObjectConfig, Credentials | None]:
    """Add what the files in `~/.aws` say to what the options say.

    Args:
        config: from the options and the environment, which come first.
        root: the bucket's url, for errors.

    Returns:
        The settings, and what gives credentials where obstore does not find them itself.

    Raises:
        StorageError: a profile is not there or says what cannot be, or botocore is missing, which reads these files.
    """
    profile = config.profile or os.environ.get("AWS_PROFILE")
    files = [os.path.expanduser(file) for file in _files()]
    given = "access_key_id" in config.config or bool(config.config.get("skip_signature"))
    found_without = given or (config.profile is None and any(os.environ.get(name) for name in _VARIABLES))
    asks_for_endpoint = "endpoint" not in config.config and any(map(_names_endpoint, files))
    if found_without and not asks_for_endpoint:
        return config, None
    if profile is None and not any(map(os.path.exists, files)):
        return config, None
    session = _session(profile, root)
    if asks_for_endpoint and (endpoint := _endpoint(session, root)) is not None:
        config = _with_endpoint(config, endpoint, root)
    if "region" not in config.config and (region := session.get_config_variable("region")):
        config = replace(config, config=config.config | {"region": region})
    credentials = None if found_without else session.get_credentials()
    return config, None if credentials is None else lambda: _frozen(credentials)


def _files() -> tuple[str, str]:
    return (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )


def _names_endpoint(file: str) -> bool:
    """Whether a file may name an endpoint; most don't, and then botocore, which takes long to import, is not needed."""
    try:
        with open(file, "rb") as opened:
            return _ENDPOINT.encode() in opened.read()
    except OSError:
        return False


def _session(profile: str | None, root: str) -> Any:
    try:
        botocore_session = importlib.import_module("botocore.session")
    except ImportError as exc:
        raise StorageError(
            "credentials and endpoints from ~/.aws need botocore: pip install 'streamload[s3]'",
            url=without_secrets(root),
        ) from exc
    session = botocore_session.Session(profile=profile)
    if profile is not None and profile not in session.available_profiles:
        credentials, config = _files()
        raise StorageError(
            f"there is no profile {profile!r} (of storage_options or AWS_PROFILE) in {credentials} or {config}",
            url=without_secrets(root),
        )
    return session


def _endpoint(session: Any, root: str) -> str | None:
    """The endpoint that the profile has: for S3 alone, by its section of services, or else for all of AWS."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = profile.get("services")
    if services is not None and services not in session.full_config.get("services", {}):
        raise StorageError(
            f"the profile in ~/.aws/config names the services {services!r}, and there is no [services {services}]",
            url=without_secrets(root),
        )
    of_services = {} if services is None else session.full_config["services"][services]
    of_s3 = of_services.get("s3") or {}
    endpoint = (of_s3.get(_ENDPOINT) if isinstance(of_s3, dict) else None) or profile.get(_ENDPOINT)
    return endpoint or None


def _with_endpoint(config: ObjectConfig, endpoint: str, root: str) -> ObjectConfig:
    try:
        client = client_settings(endpoint)
    except ValueError as exc:
        raise StorageError(f"{exc}; it comes from ~/.aws/config", url=without_secrets(root)) from None
    return replace(config, config=config.config | {"endpoint": endpoint}, client=client | config.client)


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as they are now; requested again after a while, since botocore renews those that expire."""
    found = credentials.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _RENEWED_AFTER,
    }
