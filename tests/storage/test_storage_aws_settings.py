"""What stands in `~/.aws` and in AWS's variables counts here as it does for AWS's own tools: endpoints above all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from servers.rclone import S3Server

from streamload.errors import StorageError
from streamload.storage.object_stores import ObjectPlace, aws_settings, locate, make_store
from streamload.storage.options import ObjectConfig, object_config
from streamload.storage.storages import Storages

NOWHERE = "http://127.0.0.1:1"
CONFIG = """
[default]
region = eu-west-1
endpoint_url = https://default.test
[profile minio]
endpoint_url = http://minio.test:9000
[profile r2]
endpoint_url = https://all.test
services = at-r2
[profile half]
services = at-none
endpoint_url = https://half.test
[profile ignoring]
endpoint_url = https://ignored.test
ignore_configured_endpoint_urls = true
[profile plain]
region = eu-west-2
[profile wrong]
endpoint_url = minio.test
[profile lost]
services = nowhere
[services at-r2]
s3 =
  endpoint_url = https://r2.test
dynamodb =
  endpoint_url = https://other.test
[services at-none]
dynamodb =
  endpoint_url = https://other.test
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


def of_botocore(profile: str | None) -> str:
    client = botocore.session.Session(profile=profile).create_client("s3", region_name="eu-west-9")
    return str(client.meta.endpoint_url)


@pytest.mark.parametrize(
    ("profile", "endpoint"),
    [
        (None, "https://default.test"),
        ("minio", "http://minio.test:9000"),
        ("r2", "https://r2.test"),
        ("half", "https://half.test"),
        ("ignoring", None),
        ("plain", None),
    ],
)
def test_the_endpoint_of_a_profile_is_that_of_other_tools(
    profile: str | None, endpoint: str | None, configure: Configure
) -> None:
    configure(CONFIG)
    found = settings({} if profile is None else {"profile": profile})
    assert found.config.get("endpoint") == endpoint
    assert found.client.get("allow_http", False) == (profile == "minio")
    assert of_botocore(profile) == (endpoint or "https://s3.eu-west-9.amazonaws.com")


def test_what_is_given_comes_first_then_the_environment(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(CONFIG)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all.test")
    assert settings({"profile": "r2"}).config["endpoint"] == "http://all.test" == of_botocore("r2")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.test")
    assert settings({"profile": "r2"}).config["endpoint"] == "https://s3.test" == of_botocore("r2")
    given = settings({"profile": "r2", "endpoint_url": "https://given.test"})
    assert given.config["endpoint"] == "https://given.test"


def test_the_environment_may_say_that_none_counts(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(CONFIG)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "True")
    assert "endpoint" not in settings({"profile": "r2"}).config
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all.test")
    region = {"client_kwargs": {"region_name": "eu-west-9"}}
    assert settings({"profile": "r2", **region}).config["endpoint"] == of_botocore("r2")
    assert settings({"profile": "r2", **region, "endpoint_url": NOWHERE}).config["endpoint"] == NOWHERE


@pytest.mark.parametrize("options", [{"key": "a", "secret": "b"}, {"anon": True}])
def test_it_counts_for_keys_that_are_given_and_for_none(options: dict[str, Any], configure: Configure) -> None:
    configure(CONFIG)
    config = object_config("s3", options)
    assert config is not None
    found, credentials = aws_settings(config, "s3://bucket/")
    assert (found.config["endpoint"], credentials) == ("https://default.test", None)
    place = ObjectPlace("s3://bucket/", "bucket", "a b.tar")
    assert place.unsigned_address(config) == "https://default.test/bucket/a%20b.tar"


def test_botocore_is_left_alone_where_no_file_names_an_endpoint(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("[default]\nregion = eu-west-1\n")
    monkeypatch.delattr(botocore.session, "Session")
    assert "endpoint" not in settings({"key": "a", "secret": "b"}).config


@pytest.mark.parametrize(
    ("profile", "message"),
    [("wrong", r"endpoint_url='minio\.test'.* must begin with https"), ("lost", r"no \[services nowhere\]")],
)
def test_what_cannot_be_is_one_error(profile: str, message: str, configure: Configure) -> None:
    configure(CONFIG)
    with pytest.raises(StorageError, match=message):
        settings({"profile": profile})


@pytest.mark.parametrize("named_by", ["default", "profile", "AWS_PROFILE"])
def test_a_bucket_is_read_where_the_profile_says(
    named_by: str, rclone_s3: S3Server, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rclone_s3.folder / "profiled").mkdir(exist_ok=True)
    (rclone_s3.folder / "profiled" / "a.tar").write_bytes(b"x")
    section = "default" if named_by == "default" else "profile minio"
    configure(f"[{section}]\nregion = us-east-1\nendpoint_url = {rclone_s3.endpoint}\n")
    if named_by == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", "minio")
    storages = Storages({"profile": "minio"} if named_by == "profile" else {})
    storage = storages.for_url("s3://profiled/a.tar")
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


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_variable_that_is_set_to_nothing_is_not_set(
    name: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("")
    monkeypatch.setenv(name, "")
    for given, endpoint in (
        ({"region": "eu-west-9"}, "https://s3.eu-west-9.amazonaws.com"),
        ({"endpoint": NOWHERE}, NOWHERE),
    ):
        config = ObjectConfig("s3", {"access_key_id": "a", "secret_access_key": "b", **given}, {})
        store = make_store(locate("s3://bucket/a.tar"), config, retries=False)
        assert store.config["endpoint"] == endpoint
    configure(CONFIG)
    assert settings({"profile": "r2"}).config["endpoint"] == of_botocore("r2")
