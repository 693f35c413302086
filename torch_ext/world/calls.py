"""Whether a call ran what it called. Runs wherever a test's body is called; standard library only."""

from __future__ import annotations

import inspect

__all__ = ["check_ran"]

_REMEDY = "Write it as a plain function, or in a subclass of unittest.IsolatedAsyncioTestCase as `async def`."


def check_ran(returned: object, name: str) -> None:
    """Return if the call of function ``name``, which returned ``returned``, has run its body.

    A call of an ``async def`` function or of a generator function runs nothing: it returns an object that somebody
    would have to await or iterate. Such an object is closed.

    Raises:
        TypeError: the body has not run.

    >>> check_ran(None, "test_a")
    >>> try:
    ...     check_ran((number for number in range(3)), "test_a")
    ... except TypeError as error:
    ...     print(str(error).partition(". ")[0])
    test_a() returned a generator, so that its body has not run
    """
    kind = _kind(returned)
    if not kind:
        return
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
        returned.close()  # otherwise Python warns, at some later time, that nobody awaited it
    raise TypeError(f"{name}() returned {kind}, so that its body has not run. {_REMEDY}")


def _kind(returned: object) -> str:
    if inspect.isgenerator(returned):
        return "a generator"
    if inspect.isasyncgen(returned):
        return "an asynchronous generator"
    if inspect.iscoroutine(returned):
        return "a coroutine"
    return f"something to await ({type(returned).__name__})" if inspect.isawaitable(returned) else ""
