"""Changes torch's code in this process, one line here or there, as a mistake would.

A function's code object is exchanged in place, so that modules which imported the function earlier run the changed code
too. Runs in ranks and in zygotes of the tests that need it; torch_ext does not import it.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
import types
from dataclasses import dataclass


class OtherTorchError(LookupError):
    """This torch does not contain the text that an edit replaces."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old`` by ``new``, once, in the source of ``function`` (``"module:Class.function"``).

    Lines are indented as in the source of the function alone, beginning at column 0.
    """

    function: str
    old: str
    new: str

    def source(self):
        """Return the changed source.

        Raises:
            OtherTorchError: the function is not there, or does not contain ``old`` exactly once.
        """
        text = textwrap.dedent(inspect.getsource(_find(self.function)))
        if text.count(self.old) != 1:
            raise OtherTorchError(f"{self.function} contains {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)

    def apply(self):
        """Give the function the changed code in this process.

        Raises:
            OtherTorchError: see :meth:`source`; or its code cannot be exchanged.
        """
        function = _find(self.function)
        if function.__closure__:
            raise OtherTorchError(f"{self.function} is a closure, whose code cannot be exchanged")
        tree = ast.parse(self.source())
        (definition,) = tree.body
        if not isinstance(definition, ast.FunctionDef):
            raise OtherTorchError(f"{self.function} is no plain function")
        definition.decorator_list = []  # decorators stay in place, around the function
        ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
        namespace = dict(function.__globals__)
        flags = function.__code__.co_flags & __future__.annotations.compiler_flag  # some read annotations within them
        exec(compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True), namespace)
        function.__code__ = namespace[definition.name].__code__


def _find(place):
    module, _, path = place.partition(":")
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
    except (ImportError, AttributeError) as error:
        raise OtherTorchError(f"there is no {place}: {error}") from None
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, types.FunctionType):
        raise OtherTorchError(f"{place} is no function but {found!r}")
    return found
