"""Discover, select, schedule, execute and report tests; ``run_test.py`` is this package's command.

The rooms, each below the ones that follow it:

``results``    what became of a test, and how a test is named
``discovery``  the test files below a root
``keywords``, ``nearest``, ``selection``   which of them a command line means
``names``      the tests of each file, remembered between runs
``schedule``   the order in which they run
``options``    the command line
``rerun``, ``report``   what the user sees
``execute``    the half that starts processes (the only room that knows :mod:`torch_ext.world`)
``cli``        the command itself

Nothing here imports torch or a test module. Import the rooms themselves: this file stays empty so that one of them
costs milliseconds.
"""
