"""What the user's AWS configuration says of a bucket: endpoint, region, credentials, as other tools understand it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from streamload.errors import StorageError
from streamload.storage.options import ObjectConfig, client_settings
from streamload.storage.protocol import without_secrets

__all__ = ["Credentials", "aws_settings"]

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
    """Credentials as they are now; asked for again after a while, since botocore renews those that expire."""
    found = credentials.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _RENEWED_AFTER,
    }
