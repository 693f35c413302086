"""Discover, select, schedule, execute and report tests; ``run_test.py`` is this package's command.

The modules, each below those that follow:

``options``, ``arguments``     the table of options; reads command line, configuration and environment
``names``, ``selection``       test files below a root and the tests of each; meaning of patterns and keywords
``schedule``                   which class runs when, and on which slots
``steps``, ``choice``          the requested test files; which of their tests run, and the history of their results
``messages``                   messages between the supervisor and the processes that hold tests
``class_process``              runs in those processes
``loop``, ``places``, ``zygotes``   tasks on one thread; the resources of a running class; the zygotes that start it
``class_runner``, ``execute``  the half that starts processes
``reporters``, ``rounds``      reports; a run of the chosen tests, from plan to exit code
``cli``, ``pytest_plugin``     the command itself; the same for tests that pytest collects

No module here imports torch or a test module. Import the modules directly: this file stays empty, for fast imports.
"""
