"""The modules of this process, and the names that a fault plan gives them."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Sequence
from typing import Any


def modules_outermost_first() -> list[Any]:
    """Return all modules of this process, those with the most submodules first."""
    import gc

    import torch

    found: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    return sorted(found, key=lambda module: -sum(1 for _ in module.modules()))


class Names:
    """The qualified names of modules, within the outermost modules that hold them. Prints which of ``wanted`` no module
    has when the first is called.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        import weakref

        self._names: Any = weakref.WeakKeyDictionary()
        self._wanted = list(wanted)

    def of(self, called: Any) -> str:
        """Return the module's name; of a wrapped module a name with a component that begins with ``_``."""
        if called not in self._names:
            for outer in modules_outermost_first():
                for name, inner in outer.named_modules():
                    self._names.setdefault(inner, name)
            self._tell_unknown()
        return str(self._names.get(called, ""))

    def _tell_unknown(self) -> None:
        names = set(self._names.values())
        for wanted in self._wanted:
            if not any(self.fit(name, wanted) for name in names):
                like = ", ".join(map(repr, difflib.get_close_matches(wanted, names - {""}, cutoff=0.0)))
                said = f"torch_ext: no module is called {wanted!r} yet; there are {like}"
                with contextlib.suppress(OSError, ValueError):  # the program has closed its stderr
                    print(said, file=sys.stderr, flush=True)
        self._wanted.clear()

    @staticmethod
    def fit(name: str, wanted: str) -> bool:
        """Whether a module is the one that the plan names: by its whole name, or its end. Wrappers do not count."""
        parts = name.split(".") if name else []
        if parts and parts[-1].startswith("_"):
            return False  # its wrapper is called too
        plain = ".".join(part for part in parts if not part.startswith("_"))
        return plain == wanted or (bool(wanted) and plain.endswith(f".{wanted}"))
