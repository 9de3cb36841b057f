"""`storage_options`: what they mean, and one message that names a wrong one, wherever it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.errors import StorageError
from streamload.storage.object_storage import object_options
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

NOWHERE = "http://127.0.0.1:1"

WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("s3", {"keyy": "x"}, ValueError, r"names 'keyy', which s3:// does not know; did you mean 'key'\?"),
    ("s3", {"client_kwrgs": {"region_name": "x"}}, ValueError, "did you mean 'client_kwargs'"),
    ("s3", {"config_kwargs": {}}, ValueError, "'config_kwargs', which s3:// does not know.*filesystem="),
    ("gs", {"project": "p"}, ValueError, "'project', which gs:// does not know"),
    ("http", {"headrs": {"a": "b"}}, ValueError, "'headrs', which http:// does not know; did you mean 'headers'"),
    ("https", {"htpp": {"headers": {"a": "b"}}}, ValueError, "names 'htpp', which https:// does not know"),
    ("s3", {"endpoint_url": 5}, TypeError, r"storage_options\['endpoint_url'\] must be a string, not int"),
    ("s3", {"key": b"secret-one"}, TypeError, r"storage_options\['key'\] must be a string, not bytes$"),
    ("s3", {"client_kwargs": 5}, TypeError, r"storage_options\['client_kwargs'\] must be a dict"),
    ("s3", {"client_kwargs": {"region_name": 5}}, TypeError, r"\['client_kwargs'\]\['region_name'\] must be a string"),
    ("s3", {"client_kwargs": {"verify": "/no/such.pem"}}, ValueError, r"'/no/such\.pem', but there is no such file"),
    ("s3", {1: "x"}, TypeError, "storage_options has the key 1"),
    ("gs", {"token": {"type": "service_account"}}, TypeError, r"storage_options\['token'\] must be a string, not dict"),
    ("http", {"headers": {"a": 5}}, TypeError, r"storage_options\['headers'\]\['a'\] must be a string"),
    ("http", {"headers": 5}, TypeError, r"storage_options\['headers'\] must be a dict"),
    *(
        (protocol, {"endpoint_url": "127.0.0.1:9"}, ValueError, "endpoint_url='127.0.0.1:9' must begin with https://")
        for protocol in ("s3", "gs", "az")
    ),
    *(
        (protocol, {name: {option: 5}}, TypeError, rf"storage_options\['{option}'\] must be")
        for name, protocol, option in [
            ("http", "https", "headers"),
            ("gcs", "gs", "endpoint_url"),
            ("s3", "s3a", "key"),
            ("abfs", "az", "account_name"),
        ]
    ),
]


@pytest.mark.parametrize(("protocol", "options", "kind", "message"), WRONG)
def test_the_option_is_named(protocol: str, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        Storages(options).check([f"{protocol}://place/a.tar"])
    assert "secret-one" not in str(raised.value)


@pytest.mark.parametrize(
    ("protocol", "options", "config"),
    [
        (
            "s3",
            {"key": "k", "secret": "s", "token": None, "client_kwargs": {"endpoint_url": "http://e"}},
            {"access_key_id": "k", "secret_access_key": "s", "aws_endpoint_url_s3": "http://e"},
        ),
        ("s3a", {"anon": True, "request_payer": True}, {"skip_signature": True, "request_payer": True}),
        ("s3", {"anon": False, "AWS_REGION": "eu-west-1"}, {"region": "eu-west-1"}),
        ("s3", {"client_kwargs": {"region_name": "eu-west-1"}}, {"region": "eu-west-1"}),
        ("s3", {"default_region": "eu-west-1"}, {"default_region": "eu-west-1"}),
        ("abfs", {"account_name": "a", "sas_token": "t"}, {"account_name": "a", "sas_key": "t"}),
        (
            "gs",
            {"base_url": "http://g", "token": "/key.json"},
            {"base_url": "http://g", "service_account": "/key.json"},
        ),
        ("az", {"container_name": "c"}, {"container_name": "c"}),
    ],
)
def test_names_of_fsspec_and_of_obstore(protocol: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    assert object_options(protocol, options).config == config


def test_client_settings(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"pem")
    verify = {"client_kwargs": {"verify": str(tmp_path / "ca.pem")}, "client_options": {"user_agent": "me"}}
    assert object_options("s3", verify).client == {"root_certificate": b"pem", "user_agent": "me"}
    made = object_options("https", {"headers": {"a": "b"}, "client_kwargs": {"verify": False}})
    assert made.client == {"default_headers": {"a": "b"}, "allow_invalid_certificates": True}


def test_other_urls_are_not_checked() -> None:
    Storages({"nonsense": 1}).check(["/local.tar", "memory://a.tar"])
    Storages({"http": {"headers": {"a": "b"}}, "s3": {"key": "k"}}).check(["https://h/a.tar", "s3://b/a.tar"])


async def test_a_mistake_in_a_filesystem_is_not_blamed_on_options() -> None:
    class Mistaken(MemoryFileSystem):
        cachable = False

        def info(self, path: str, **kwargs: Any) -> Any:
            return self.created(pth=path)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'pth'"):
        Storages({"memory": {}}, Mistaken()).for_url("memory://a.tar").info("memory://a.tar")


def bare(error: Exception) -> bool:
    """Whether an error is its message alone, without words from another process."""
    return error.__cause__ is None and not getattr(error, "__notes__", [])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("url", ["s3://b/a.tar", "nosuch://b/a.tar"])
def test_a_loader_refuses_them_in_one_message(url: str, workers: int) -> None:
    with pytest.raises(ValueError, match="which s3:// does not know|no storage is called nosuch://") as raised:
        StreamLoader(url, num_workers=workers, storage_options={"keyy": "x"})
    assert bare(raised.value)


@pytest.mark.parametrize("make", [TarDataset, ShardWriter])
def test_so_do_dataset_and_writer(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"storage_options\['key'\]") as raised:
        make("s3://b/a-%06d.tar", storage_options={"key": 5})
    assert bare(raised.value)


# -- AWS's files and variables ---------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for `config` and `credentials`, which hold nothing yet, without AWS's variables."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


@pytest.mark.parametrize("named_by", ["default", "profile", "AWS_PROFILE"])
def test_a_bucket_is_read_with_the_keys_of_a_profile(
    named_by: str, rclone_s3: S3Server, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    (rclone_s3.folder / "profiled").mkdir(exist_ok=True)
    (rclone_s3.folder / "profiled" / "a.tar").write_bytes(b"x")
    name = "default" if named_by == "default" else "plain"
    keys = "aws_access_key_id = access-key\naws_secret_access_key = secret-key\n"
    (files / "credentials").write_text(f"[{name}]\n{keys}region = us-east-1\n")
    if named_by == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", "plain")
    options = {"profile": "plain"} if named_by == "profile" else {}
    storage = Storages({**options, "endpoint_url": rclone_s3.endpoint}).for_url("s3://profiled/a.tar")
    assert [match.url for match in storage.list("s3://profiled/*")] == ["s3://profiled/a.tar"]
    assert storage.info("s3://profiled/a.tar").bytes == 1


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_endpoint_of_the_environment_and_one_that_overrides_it(
    name: str, rclone_s3: S3Server, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rclone_s3.folder / "named").mkdir(exist_ok=True)
    (rclone_s3.folder / "named" / "a.tar").write_bytes(b"x")
    keys = {key: value for key, value in rclone_s3.options.items() if key != "endpoint_url"}
    monkeypatch.setenv(name, rclone_s3.endpoint)
    assert Storages(keys).for_url("s3://named/a.tar").info("s3://named/a.tar").bytes == 1
    monkeypatch.setenv(name, NOWHERE)
    assert Storages(rclone_s3.options).for_url("s3://named/a.tar").info("s3://named/a.tar").bytes == 1
    monkeypatch.setenv(name, "")
    with pytest.raises(ValueError, match=f"{name}='' must begin with https:// or http://"):
        Storages(keys).for_url("s3://named/a.tar")


def test_a_profile_that_is_nowhere(files: Path) -> None:
    with pytest.raises(StorageError, match="no profile 'nobody'|'nobody' of `~/.aws` needs boto3") as raised:
        StreamLoader("s3://b/a.tar", num_workers=1, storage_options={"profile": "nobody"})
    assert bare(raised.value)
