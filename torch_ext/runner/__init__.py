"""Discover, select, schedule, execute and report tests; ``run_test.py`` is this package's command.

The rooms, each below the ones that follow it:

``options``, ``arguments``     what a user can ask for; the command line, the configuration and the environment
``names``, ``selection``       the test files below a root and the tests of each; what patterns and keywords mean
``schedule``                   which class runs when, and on which slots
``steps``, ``choice``          the test files that are asked for; which of their tests run, and how they ended last
``messages``                   what the supervisor and the processes that hold tests say to each other
``class_process``              what runs in those processes
``loop``, ``places``, ``zygotes``   tasks on one thread, what each running class has to itself, who starts it
``class_runner``, ``execute``  the half that starts processes
``reporters``, ``rounds``      reports; a run of the chosen tests, from plan to exit code
``cli``, ``pytest_plugin``     the command itself; the same for tests that pytest collects

Nothing here imports torch or a test module. Import the rooms themselves: this file stays empty, so that each costs
milliseconds.
"""
