"""Reporters of a run: each is a function of one stream of events, or writes a file at the end of the run.

``base``       the type of a reporter, results counted against the plan, and files of reports
``make``       the reporters of a run by its options, results in the order of the plan, and ``--github``
``watch``      the classes that run at the moment, on a terminal or in a pipe
``text``       the report on stdout, with ``failure`` below it
``junit``, ``html``, ``trace``   a file at the end of the run
``jsonlines``  ``--json FILE``

To add one, write a :data:`~torch_ext.runner.reporters.base.Reporter`, or a function that writes a
:class:`~torch_ext.runner.reporters.base.Tally` at the end of the run, and name it in
:class:`~torch_ext.runner.reporters.make.Reporters`.
"""
