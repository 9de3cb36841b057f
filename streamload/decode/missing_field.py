"""Messages for missing fields: the existing fields, and which of them may be meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from streamload.decode.tasks import RowFailure
from streamload.tar.table import ShardTable
from streamload.text import listed


def with_fields(failure: RowFailure, table: ShardTable, in_sidecars: Collection[str] = ()) -> RowFailure:
    """Add the existing fields to the message if a field is missing.

    Args:
        failure: any.
        table: of its shard.
        in_sidecars: the fields of sidecars.
    """
    if not failure.missing_field or failure.field is None:
        return failure
    existing = table.sample_fields(failure.sample)
    if any(name in in_sidecars for name in failure.field.split(";")):
        advice = f'write it again, or "{failure.field}?" in fields for samples without'
        message = f"{failure.message}; it has {listed(existing)}; its sidecar has no sample with this key: {advice}"
        return failure._replace(message=message)
    found = those_there_are(failure.field, existing)
    if found == listed(existing):
        found += (
            f'; write "{failure.field};OTHER" in fields to take another field where it is missing, or '
            f'"{failure.field}?" to take samples without it as well'
        )
    return failure._replace(message=f"{failure.message}; it has {found}")


def those_there_are(wanted: str, existing: Sequence[str]) -> str:
    """Return the end of a message: some existing fields, and advice if one of them ends with the wanted name.

    Alternatives in `wanted` are separated by semicolons.
    """
    if not existing:
        return "none"
    ends = tuple(f".{name}" for name in wanted.split(";"))
    longer = next((name for name in existing if name.endswith(ends)), None)
    if longer is None:
        return listed(existing)
    return (
        f"{listed(existing)}. Names are split at the first dot, so the file 'x.{longer}' is the field {longer!r} of "
        f"the sample 'x'; if that was not meant, rename the files, and otherwise request {longer!r}, or take "
        "fields=None and have a transform choose"
    )
