"""Whether a call ran what it called. Runs wherever a test's body is called; standard library only."""

from __future__ import annotations

import inspect

__all__ = ["check_fixtures", "check_ran"]

_REMEDY = "Write it as a plain function, or in a subclass of unittest.IsolatedAsyncioTestCase as `async def`."
_FIXTURE_REMEDY = (
    "Write it as a plain function. unittest awaits asyncSetUp() and asyncTearDown() of IsolatedAsyncioTestCase alone."
)
_sound: set[type] = set()
_FIXTURES = ("setUpClass", "setUp", "tearDown", "tearDownClass")


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
    remedy = _FIXTURE_REMEDY if name.startswith(("setUp", "tearDown")) else _REMEDY
    raise TypeError(f"{name}() returned {kind}, so that its body has not run. {remedy}")


def check_fixtures(cls: type) -> None:
    """Return if calling the fixtures of test class ``cls`` runs them, those that its base classes define included.

    A call from an override, such as ``super().setUpClass()``, drops what it returns, so the definitions are looked at.

    Raises:
        TypeError: one of them is an ``async def`` function or a generator function.
    """
    if cls in _sound:
        return
    for base in cls.__mro__:
        for name in _FIXTURES:
            found = vars(base).get(name)
            kind = _definition(getattr(found, "__func__", found))
            if kind:
                raise TypeError(
                    f"{name}() of {base.__name__} is {kind}, so that calling it runs nothing. {_FIXTURE_REMEDY}"
                )
    _sound.add(cls)


def _definition(function: object) -> str:
    if inspect.iscoroutinefunction(function):
        return "`async def`"
    if inspect.isasyncgenfunction(function):
        return "an asynchronous generator function"
    return "a generator function" if inspect.isgeneratorfunction(function) else ""


def _kind(returned: object) -> str:
    if inspect.isgenerator(returned):
        return "a generator"
    if inspect.isasyncgen(returned):
        return "an asynchronous generator"
    if inspect.iscoroutine(returned):
        return "a coroutine"
    return f"something to await ({type(returned).__name__})" if inspect.isawaitable(returned) else ""
