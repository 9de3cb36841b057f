"""Packing: `shardify`, `pack` and `map_shards`.

The package has the name of the function `streamload.pack`. Python binds that name to the package when something imports
from it first, so the package can be called as the function can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call `streamload.pack`."""
        from streamload.pack.calling import pack

        return pack(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
