"""What a file is instead of the archive that its name promises, by its first bytes, and what to do about it."""

from __future__ import annotations

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
_TEXTS = {
    b"version https://git-lfs": "a Git LFS pointer in place of the shard; run `git lfs pull`",
    b"<!doctype html": "a web page, perhaps of a server's error; look at it, and fetch the shard again",
    b"<html": "a web page, perhaps of a server's error; look at it, and fetch the shard again",
    b"<?xml": "an XML document, perhaps a bucket's error; look at it, and fetch the shard again",
    b"pk\x03\x04": "a zip archive, not a tar archive; decompress it, and pack the files as tar",
}
_LEADING_BYTES = 64
_USTAR_AT = 257


def what_else(head: bytes, compressed_as: str | None = None) -> str | None:
    """What a file is instead of a tar archive, and what to do; None where its first bytes don't say.

    Args:
        head: the first bytes, a block of 512 at best.
        compressed_as: the compression that it should have ("gzip", "zstd", "xz", "bzip2"); None for a plain archive.
    """
    start = head[:_LEADING_BYTES].lstrip().lower()
    said = next((said for magic, said in _TEXTS.items() if start.startswith(magic)), None)
    if said is not None:
        return f"this is {said}"
    if compressed_as and head[_USTAR_AT : _USTAR_AT + 5] == b"ustar":
        return "this is a plain tar archive, not a compressed one; name it .tar"
    compression = next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), None)
    if compression in (None, compressed_as):
        return None
    if compressed_as:
        return f"this is {compression} data, which is not what its name says; name it by its compression"
    return f"this is {compression} data, not a plain tar archive; decompress it, or name it by its compression"
