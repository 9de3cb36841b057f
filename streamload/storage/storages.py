"""The storage for each url of a dataset, from what the user says about storages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from streamload.errors import without_secrets
from streamload.storage.filesystem_storage import FilesystemStorage
from streamload.storage.filesystems import layers
from streamload.storage.local_storage import LocalStorage, local_path
from streamload.storage.object_storage import ObjectStorage
from streamload.storage.options import object_config, options_of
from streamload.storage.protocol import Storage, protocol_of
from streamload.storage.retry_policy import Retries
from streamload.storage.urls import CACHING, chain_links

_OBJECTS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https"))
_IN_MEMORY = frozenset(("memory",))
_WEB = ("http", "https")
# Protocols of filesystems that don't say which urls they know, and of the one that finds another by the url.
_TAKES_ALL = frozenset(("abstract", "generic"))

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")


class Storages:
    """Finds the storage of a url; obstore and fsspec are imported when the first url needs them.

    It can be pickled: its arguments are, and connections are made again.

    Args:
        storage_options: in fsspec's spellings, for all protocols or in a dict for each protocol.
        filesystem: an fsspec filesystem to read everything with: its own paths, and urls of its own protocol, as its
            own methods take them. All other urls are refused, `file://` too unless it is the filesystem's.
        retries: how requests are made again, by all who read and write with these storages.

    Raises:
        TypeError: `storage_options` is not a dict with strings as keys, or `filesystem` not a filesystem.
        ValueError: `filesystem` is one of fsspec's caches, or reads through one.
    """

    def __init__(
        self, storage_options: Mapping[str, Any] | None = None, filesystem: Any = None, retries: Retries | None = None
    ) -> None:
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(f"storage_options must be a dict, not {type(storage_options).__name__}")
        for name in storage_options or ():
            if not isinstance(name, str):
                raise TypeError(f"storage_options has the key {name!r}; keys are the names of options, as strings")
        if filesystem is not None and not hasattr(filesystem, "cat_file"):
            raise TypeError(f"filesystem must be one of fsspec's, not {type(filesystem).__name__}")
        for layer in layers(filesystem):
            if CACHING & _protocols(layer):
                raise ValueError(
                    f"filesystem: {type(layer).__name__} keeps copies that concurrent readers corrupt; give the "
                    "filesystem behind it (`.fs`), and cache_dir to keep what was read"
                )
        self._options = dict(storage_options or {})
        self._filesystem = filesystem
        self.retries = retries or Retries()
        self._local = LocalStorage()
        self._by_protocol: dict[str, Storage] = {}

    def for_url(self, url: str) -> Storage:
        """The storage that a url belongs to.

        Raises:
            TypeError: an option's value is of the wrong kind.
            ValueError: no storage has this protocol, or the filesystem that was given has another one; an option is
                not known; or it is a `file://` url of another host.
        """
        if self._filesystem is not None:
            _refuse_other_protocol(self._filesystem, url)
        if "::" in url:
            _refuse_caches(url)
        if self.is_local(url):
            local_path(url)
            return self._local
        place = self._place(url)
        if place not in self._by_protocol:
            self._by_protocol.setdefault(place, self._make(place, url))  # another thread may have made it meanwhile
        return self._by_protocol[place]

    def check(self, urls: Iterable[str]) -> None:
        """Refuse options that make no sense for these urls, as far as that can be seen without a storage library.

        Raises:
            TypeError: the value of an option is of the wrong kind.
            ValueError: an option is not known, or its value cannot be.
        """
        plain: dict[str, None] = {}
        for url in urls if self._filesystem is None else ():
            _refuse_caches(url)
            if len(chain_links(url)) == 1:
                plain[protocol_of(url)] = None
        for protocol in plain:
            if protocol in _OBJECTS:
                object_config(protocol, options_of(protocol, self._options))

    def is_local(self, url: str) -> bool:
        """Whether a url is a file that is opened by its path; none is where a filesystem was given.

        Raises:
            ValueError: it is a url with one slash too few, and no such path.
        """
        if self._filesystem is not None:
            return False
        explicit = url.startswith(("file:", "/"))
        if explicit or protocol_of(url) != "file" or len(chain_links(url)) > 1:
            return explicit
        _refuse_one_slash(url)
        return True

    def costs_requests(self, url: str) -> bool:
        """Return True if reading the url costs requests to a server, so that its index is trusted, not checked."""
        return not self.is_local(url)

    def is_process_local(self, url: str) -> bool:
        """Whether only this process can read the url: `memory://`, or by a filesystem of the script's own class."""
        if self._filesystem is not None:
            read_by = layers(self._filesystem)
            return any(_IN_MEMORY & _protocols(layer) or type(layer).__module__ == "__main__" for layer in read_by)
        return any(protocol_of(f"{part}://" if "://" not in part else part) in _IN_MEMORY for part in chain_links(url))

    def copy(self) -> Storages:
        """Storages of the same kind without their connections, for another loop."""
        return Storages(self._options, self._filesystem, self.retries)

    async def aclose(self) -> None:
        """Close the connections that belong to the running loop."""
        for storage in self._by_protocol.values():
            await storage.aclose()

    def __getstate__(self) -> tuple[dict[str, Any], Any, Retries]:
        return self._options, self._filesystem, self.retries

    def __setstate__(self, state: tuple[dict[str, Any], Any, Retries]) -> None:
        Storages.__init__(self, *state)

    def _place(self, url: str) -> str:
        """Whose storage reads a url: its protocol's, or whatever fsspec has for it."""
        protocol = protocol_of(url)
        # What follows the question mark of a web address is not part of a path, as obstore takes it.
        queried = protocol in _WEB and "?" in url
        return "fsspec" if self._filesystem is not None or len(chain_links(url)) > 1 or queried else protocol

    def _make(self, place: str, url: str) -> Storage:
        if place in _OBJECTS:
            config = object_config(place, options_of(place, self._options))
            if config is not None:
                return ObjectStorage(config, self.retries)
        elif place != "fsspec":
            _check_protocol(place, url)
        return FilesystemStorage(self._options, self._filesystem, self.retries)


def _protocols(filesystem: Any) -> frozenset[str]:
    protocol = filesystem.protocol
    return frozenset(name.lower() for name in ([protocol] if isinstance(protocol, str) else protocol))


def _refuse_other_protocol(filesystem: Any, url: str) -> None:
    """Refuse a url of another protocol, which a filesystem would take for one of its paths."""
    if protocol_of(url) == "file" and len(chain_links(url)) == 1 and not url.startswith("file:"):
        return  # a path
    name = protocol_of(chain_links(url)[-1])
    known = _protocols(filesystem)
    if known & {name, *_TAKES_ALL} or _is_registered(name, filesystem):
        return
    raise ValueError(
        f"{without_secrets(url)!r} cannot be read with filesystem={type(filesystem).__name__}, which reads everything "
        f"here and knows its own paths and {', '.join(f'{each}://' for each in sorted(known))}; give the path as the "
        "filesystem knows it, or leave `filesystem` out"
    )


def _refuse_caches(url: str) -> None:
    if any(link.partition("://")[0] in CACHING for link in chain_links(url)):
        raise ValueError(
            f"{without_secrets(url)!r}: concurrent readers corrupt fsspec's caches; name the url alone, and use "
            "cache_dir= to keep what was read"
        )


def _is_registered(protocol: str, filesystem: Any) -> bool:
    """Whether fsspec names a filesystem's class for a protocol that it does not name itself, as `az` of adlfs."""
    from fsspec import get_filesystem_class

    try:
        return isinstance(filesystem, get_filesystem_class(protocol))
    except (ImportError, ValueError):
        return False


def _refuse_one_slash(url: str) -> None:
    found = _ONE_SLASH.match(url)
    if found is not None and found[1].lower() in {*_OBJECTS, *_IN_MEMORY, "hf"} and not os.path.exists(f"{found[1]}:"):
        meant = f"{found[0]}/{url[found.end() :]}"
        if url[found.end() :].startswith(".streamload"):  # of the index in a folder that has no name
            raise ValueError(f"{found[0]}/ names no bucket; give one, as in {found[0]}/bucket/train")
        raise ValueError(
            f"{without_secrets(url)!r} has one slash behind the colon; did you mean {without_secrets(meant)!r}? "
            "A pathlib.Path leaves a slash out, so give urls as strings"
        )


def _check_protocol(protocol: str, url: str) -> None:
    from fsspec import available_protocols

    if protocol not in available_protocols():
        raise ValueError(
            f"urls names {without_secrets(url)!r}, but no storage is called {protocol}://; check the spelling (s3://, "
            "gs://, az://, https://, hf://, or any protocol of fsspec)"
        )
