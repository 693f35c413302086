"""Discover, select, schedule, execute and report tests; ``run_test.py`` is this package's command.

The rooms, each below the ones that follow it:

``results``    what became of a test, and how a test is named, as data
``discovery``  the test files below a root
``keywords``, ``selection``   which of them a command line means
``names``      the tests of each file; cached for lists
``schedule``   which of them run when, and on which slots
``options``    the command line
``messages``   what the supervisor and the processes that hold tests say to each other
``collect``, ``class_process``   what runs in those processes
``reporters``  results against the plan, and what becomes of them
``loop``, ``places``   several tasks on one thread, and what each running class has to itself
``class_runner``, ``execute``   the half that starts processes
``pytest_plugin``   the same for tests that pytest collects
``steps``      from options to a plan, step by step
``cli``        the command itself

Nothing here imports torch or a test module. Import the rooms themselves: this file stays empty, so that each costs
milliseconds.
"""
