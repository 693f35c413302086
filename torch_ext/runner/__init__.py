"""Discover, select, schedule, execute and report tests; ``run_test.py`` is this package's command.

The rooms, each below the ones that follow it:

``results``    how a test ended, and how a test is named, as data
``options``    what a user can ask for
``selection``  which tests the patterns and keywords of a command line mean
``names``      the test files below a root, and the tests of each; cached for lists
``arguments``  the command line, the configuration and the environment, as options
``schedule``   which tests run when, and on which slots
``choice``     which of them ran last, failed, changed, or belong to a part
``messages``   what the supervisor and the processes that hold tests say to each other
``class_process``   what runs in those processes
``reporters``  results against the plan, and the reports of them
``loop``, ``places``   several tasks on one thread, and what each running class has to itself
``class_runner``, ``execute``   the half that starts processes
``pytest_plugin``   the same for tests that pytest collects
``steps``      from options to a plan, step by step
``cli``        the command itself

Nothing here imports torch or a test module. Import the rooms themselves: this file stays empty, so that each costs
milliseconds.
"""
