"""Find the storage of a url."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from streamload.errors import without_secrets
from streamload.storage.download import Retries
from streamload.storage.local_files import LocalStorage, local_path
from streamload.storage.protocol import FAMILY, Storage, layers, protocol_of, protocols_of
from streamload.storage.urls import CACHING

_IN_MEMORY = frozenset(("memory",))
# Protocols of filesystems that don't say which urls they know, and of the one that finds another by the url.
_TAKES_ALL = frozenset(("abstract", "generic"))

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")


class Storages:
    """Finds the storage of a url; obstore and fsspec are imported when the first url needs them.

    Pickles and copies have no connections.

    Args:
        storage_options: options by their names, for all protocols or in a dict for each protocol.
        filesystem: an fsspec filesystem for everything: its own paths, and urls of its own protocol.
        retries: how requests are retried.

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
            if CACHING & protocols_of(layer):
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
        """Return the storage of a url.

        Raises:
            TypeError: an option's value is of the wrong kind.
            ValueError: the protocol is unknown, or not that of `filesystem`; an option is unknown; or it is a `file://`
                url of another host.
        """
        if self._filesystem is not None:
            _refuse_other_protocol(self._filesystem, url)
        if not self.costs_requests(url):
            local_path(url)
            return self._local
        protocol = "fsspec" if self._filesystem is not None else protocol_of(url)
        if protocol not in self._by_protocol:
            # Another thread may have made it meanwhile.
            self._by_protocol.setdefault(protocol, self._make(protocol, url))
        return self._by_protocol[protocol]

    def check(self, urls: Iterable[str]) -> None:
        """Raise TypeError or ValueError for options that do not fit urls."""
        if self._filesystem is not None or not self._options:
            return
        for protocol in dict.fromkeys(map(protocol_of, urls)):
            if protocol in FAMILY and (options := self._options_of(protocol)):
                from streamload.storage.object_storage import object_options

                object_options(protocol, options)

    def costs_requests(self, url: str) -> bool:
        """Return True if reading a url costs requests; False if it is a file that is opened by its path.

        With a `filesystem` everything does. Raises ValueError for a url with one slash too few.
        """
        if self._filesystem is not None:
            return True
        explicit = url.startswith(("file:", "/"))
        if explicit or protocol_of(url) != "file":
            return not explicit
        _refuse_one_slash(url)
        return False

    def is_process_local(self, url: str) -> bool:
        """Return True if only this process can read a url: `memory://`, or a class of the script."""
        if self._filesystem is not None:
            read_by = layers(self._filesystem)
            return any(_IN_MEMORY & protocols_of(layer) or type(layer).__module__ == "__main__" for layer in read_by)
        return protocol_of(url) in _IN_MEMORY

    def copy(self) -> Storages:
        """Return the same storages without their connections, for another loop."""
        return Storages(self._options, self._filesystem, self.retries)

    async def aclose(self) -> None:
        """Close the connections that belong to the running loop."""
        for storage in self._by_protocol.values():
            await storage.aclose()

    def __reduce__(self) -> tuple[type[Storages], tuple[dict[str, Any], Any, Retries]]:
        # Times of answers are by the clock of this machine.
        return Storages, (self._options, self._filesystem, Retries(self.retries.policy))

    def _make(self, protocol: str, url: str) -> Storage:
        if protocol in FAMILY:
            from streamload.storage.object_storage import ObjectStorage, object_options

            return ObjectStorage(object_options(protocol, self._options_of(protocol)), self.retries)
        import fsspec

        from streamload.storage.filesystem_storage import FilesystemStorage

        if protocol == "fsspec":
            return FilesystemStorage(self._options, self._filesystem, self.retries)
        if protocol not in fsspec.available_protocols():
            raise ValueError(
                f"urls names {without_secrets(url)!r}, but no storage is called {protocol}://; check the spelling "
                "(s3://, gs://, az://, https://, hf://, or any protocol of fsspec)"
            )
        return FilesystemStorage(self._options_of(protocol), None, self.retries)

    def _options_of(self, protocol: str) -> dict[str, Any]:
        dicts = [name for name, value in self._options.items() if isinstance(value, Mapping)]
        if dicts:
            import fsspec

            dicts = [name for name in dicts if name in FAMILY or name in fsspec.available_protocols()]
        options = {name: value for name, value in self._options.items() if name not in dicts}
        family = FAMILY.get(protocol, protocol)
        for name in sorted((name for name in dicts if FAMILY.get(name, name) == family), key=protocol.__eq__):
            options |= self._options[name]
        return options


def _refuse_other_protocol(filesystem: Any, url: str) -> None:
    name, known = protocol_of(url), protocols_of(filesystem)
    if name == "file" and not url.startswith("file:"):
        return  # a path
    if known & _TAKES_ALL or FAMILY.get(name, name) in {FAMILY.get(each, each) for each in known}:
        return
    raise ValueError(
        f"{without_secrets(url)!r} cannot be read with filesystem={type(filesystem).__name__}, which reads everything "
        f"here and knows its own paths and {', '.join(f'{each}://' for each in sorted(known))}; give the path as the "
        "filesystem knows it, or leave `filesystem` out"
    )


def _refuse_one_slash(url: str) -> None:
    match = _ONE_SLASH.match(url)
    if match is not None and match[1].lower() in {*FAMILY, *_IN_MEMORY, "hf"} and not os.path.exists(f"{match[1]}:"):
        rest = url[match.end() :]
        if rest.startswith(".streamload"):  # of the index in a folder that has no name
            raise ValueError(f"{match[0]}/ names no bucket; give one, as in {match[0]}/bucket/train")
        meant = without_secrets(f"{match[0]}/{rest}")
        raise ValueError(
            f"{without_secrets(url)!r} has one slash after the colon; did you mean {meant!r}? A pathlib.Path leaves a "
            "slash out, so give urls as strings"
        )
