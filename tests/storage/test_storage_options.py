"""Wrong `storage_options` are wrong arguments: one message that names the option, wherever they are found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.errors import StorageError
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("s3", {"keyy": "x"}, ValueError, "names 'keyy', which s3:// does not know"),
    ("s3", {"endpoint_url": 5}, TypeError, r"storage_options\['endpoint_url'\] must be a string, not int"),
    ("s3", {"key": b"secret-one"}, TypeError, r"storage_options\['key'\] must be a string, not bytes$"),
    ("s3", {"s3": {"secret": 5}}, TypeError, r"storage_options\['secret'\]"),
    ("s3", {"token": 5}, TypeError, r"storage_options\['token'\]"),
    ("s3", {"client_kwargs": 5}, TypeError, r"storage_options\['client_kwargs'\] must be a dict"),
    ("s3", {"config_kwargs": {1: 2}}, TypeError, r"storage_options\['config_kwargs'\] must be a dict .* other keys"),
    ("s3", {"client_kwargs": {"region_name": 5}}, TypeError, r"\['client_kwargs'\]\['region_name'\] must be a string"),
    ("s3", {"client_kwargs": {"verify": "/no/such.pem"}}, ValueError, r"'/no/such\.pem', and there is no such file"),
    ("s3", {1: "x"}, TypeError, "storage_options has the key 1"),
    ("http", {"headers": {"a": 5}}, TypeError, r"storage_options\['headers'\]\['a'\] must be a string"),
    ("http", {"headers": 5}, TypeError, r"storage_options\['headers'\] must be a dict"),
    ("az", {"account_name": 5}, TypeError, r"storage_options\['account_name'\] must be a string"),
    ("http", {"headrs": {"a": "b"}}, ValueError, "names 'headrs', which http:// does not know"),
    ("s3", {"client_kwrgs": {"region_name": "x"}}, ValueError, "names 'client_kwrgs', which s3:// does not know"),
    ("https", {"htpp": {"headers": {"a": "b"}}}, ValueError, "names 'htpp', which https:// does not know"),
]


@pytest.mark.parametrize(("protocol", "options", "kind", "message"), WRONG)
def test_the_option_is_named(protocol: str, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        Storages(options).check([f"{protocol}://place/a.tar"])
    assert "secret-one" not in str(raised.value)


def test_what_only_the_library_behind_a_filesystem_refuses_is_named() -> None:
    options = {"client_kwargs": {"agent": "me"}}
    with pytest.raises(ValueError, match="storage_options do not fit http://: .* argument 'agent'") as raised:
        TarDataset("http://127.0.0.1:1/a.tar", storage_options=options)
    assert bare(raised.value)


def test_what_is_right_passes(tmp_path: Path) -> None:
    certificates = tmp_path / "ca.pem"
    certificates.write_text("")
    right: dict[str, Any] = {
        "s3": {"key": "a", "token": None, "client_kwargs": {"verify": str(certificates), "region_name": None}},
        "gs": {"token": {"type": "service_account"}},
        "http": {"headers": {"a": "b"}},
    }
    Storages(right).check(
        ["s3://b/a.tar", "gs://b/a.tar", "https://h/a.tar", "/local.tar", "zip://a.tar::s3://b/a.zip"]
    )


async def test_a_mistake_in_a_filesystem_is_not_blamed_on_options() -> None:
    class Mistaken(MemoryFileSystem):
        cachable = False

        def info(self, path: str, **kwargs: Any) -> Any:
            return self.created(pth=path)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'pth'"):
        Storages({"memory": {}}, Mistaken()).for_url("memory://a.tar").info("memory://a.tar")


@pytest.mark.parametrize(
    ("given", "protocol", "option"),
    [("http", "https", "headers"), ("gcs", "gs", "endpoint_url"), ("s3", "s3a", "key"), ("abfs", "az", "account_name")],
)
def test_a_protocols_options_are_those_of_all_its_names(given: str, protocol: str, option: str) -> None:
    with pytest.raises(TypeError, match=rf"storage_options\['{option}'\] must be"):
        Storages({given: {option: 5}}).check([f"{protocol}://place/a.tar"])


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


def test_a_profile_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(StorageError, match="there is no profile 'nobody'") as raised:
        StreamLoader("s3://b/a.tar", num_workers=1, storage_options={"profile": "nobody"})
    assert bare(raised.value)
