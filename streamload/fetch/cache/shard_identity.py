"""Which shard, in which version: what a disk cache finds it by, and the file name that follows from it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

from streamload.errors import without_secrets

_KEY_BYTES = 8
_DIGEST_BYTES = 16
_TAIL_LETTERS = 48
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-.*")
"""The files of a cache, temporary ones included; all others in its folder are the user's."""


def url_key(url: str) -> str:
    """A short digest of a URL, the same in every version of the shard: 16 hexadecimal digits.

    A URL that is signed anew has the same key, so what was kept of it is known for what it is. The key says which
    file may be given up first, and not what a file holds.
    """
    place = without_secrets(url).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(place, digest_size=_KEY_BYTES).hexdigest()


def key_in_name(name: str) -> str:
    """The `url_key` that a cached file's name begins with."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class ShardIdentity:
    """One version of one shard.

    Attributes:
        url: where it is.
        etag: the storage's name for this version.
        bytes: its size.
    """

    url: str
    etag: str
    bytes: int

    @cached_property
    def file_name(self) -> str:
        """The name of its file in a cache: the URL's key, a digest of all three, and for people the shard's name.

        Of the URL only the last component of its path is readable, because queries may hold secrets. How it is signed
        is not part of the digest: the ETag tells objects apart if what looks like a signature chooses among them.
        """
        identity = repr((without_secrets(self.url), self.etag, self.bytes)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()
        last = urlsplit(self.url).path.rpartition("/")[2]
        tail = re.sub(r"[^A-Za-z0-9._]", "_", last)[-_TAIL_LETTERS:]
        return f"{url_key(self.url)}-{digest}-{tail}"
