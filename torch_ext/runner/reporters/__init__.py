"""Reporters of a run: each consumes one stream of events, or writes a file at the end of the run.

``tally``      counts results against the plan, sorts events; the type of a reporter, and report files
``watch``      the running classes, on a terminal or in a pipe
``text``       the report on stdout, and ``--github``
``junit``, ``jsonlines``   ``--junit FILE``, ``--json FILE``

To add one, write a :data:`~torch_ext.runner.reporters.tally.Reporter`, or a function that writes a
:class:`~torch_ext.runner.reporters.tally.Tally` at the end of the run, and name it in
:class:`~torch_ext.runner.rounds.Reporters`.
"""
