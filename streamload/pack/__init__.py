"""Packing. Importing a module of this package can hide the function `streamload.pack`, so the package is callable."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call `streamload.pack`."""
        from streamload.pack.packing import pack

        return pack(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
