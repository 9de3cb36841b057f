"""Keys and regions of profiles in `~/.aws`, and the endpoints of AWS's variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.rclone import S3Server

from streamload.errors import StorageError
from streamload.storage.object_storage import aws_settings
from streamload.storage.options import ObjectConfig, object_config
from streamload.storage.storages import Storages

NOWHERE = "http://127.0.0.1:1"
CONFIG = """
[profile minio]
endpoint_url = http://minio.test:9000
[profile r2]
services = at-r2
[services at-r2]
s3 =
  endpoint_url = https://r2.test
"""

Configure = Callable[[str], None]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Writes `~/.aws/config`, beside a file of credentials with keys for each profile."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(config: str) -> None:
        (tmp_path / "config").write_text(config)
        profiles = [line.removeprefix("[").removeprefix("profile ") for line in config.splitlines() if line[:1] == "["]
        keys = "aws_access_key_id = access-key\naws_secret_access_key = secret-key\n"
        named = [profile for profile in profiles if not profile.startswith("services")]
        (tmp_path / "credentials").write_text("".join(f"[{profile}\n{keys}" for profile in named))

    return write


def settings(options: dict[str, Any]) -> ObjectConfig:
    config = object_config("s3", options)
    assert config is not None
    return aws_settings(config, "s3://bucket/")[0]


@pytest.mark.parametrize("profile", ["minio", "r2"])
def test_an_endpoint_of_a_profile_is_not_left_out_in_silence(profile: str, configure: Configure) -> None:
    configure(CONFIG)
    with pytest.raises(StorageError, match="names an endpoint, .*`endpoint_url`.*AWS_ENDPOINT_URL"):
        settings({"profile": profile})
    assert settings({"profile": profile, "endpoint_url": NOWHERE}).config["endpoint"] == NOWHERE


def test_an_endpoint_of_the_environment_is_taken(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(CONFIG)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all.test")
    assert settings({"profile": "r2"}).config["endpoint"] == "http://all.test"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.test")
    assert settings({"profile": "r2"}).config["endpoint"] == "https://s3.test"
    assert settings({"profile": "r2", "endpoint_url": "https://given.test"}).config["endpoint"] == "https://given.test"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
    with pytest.raises(ValueError, match="AWS_ENDPOINT_URL_S3 is set to nothing; unset it"):
        settings({})


@pytest.mark.parametrize("named_by", ["default", "profile", "AWS_PROFILE"])
def test_a_bucket_is_read_with_the_keys_of_a_profile(
    named_by: str, rclone_s3: S3Server, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rclone_s3.folder / "profiled").mkdir(exist_ok=True)
    (rclone_s3.folder / "profiled" / "a.tar").write_bytes(b"x")
    configure(f"[{'default' if named_by == 'default' else 'profile plain'}]\nregion = us-east-1\n")
    if named_by == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", "plain")
    options = {"profile": "plain"} if named_by == "profile" else {}
    storage = Storages({**options, "endpoint_url": rclone_s3.endpoint}).for_url("s3://profiled/a.tar")
    assert [match.url for match in storage.list("s3://profiled/*")] == ["s3://profiled/a.tar"]
    assert storage.info("s3://profiled/a.tar").bytes == 1


def test_a_given_endpoint_overrides_the_environment(
    rclone_s3: S3Server, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("")
    (rclone_s3.folder / "given").mkdir()
    (rclone_s3.folder / "given" / "a.tar").write_bytes(b"x")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, NOWHERE)
    assert Storages(rclone_s3.options).for_url("s3://given/a.tar").info("s3://given/a.tar").bytes == 1
