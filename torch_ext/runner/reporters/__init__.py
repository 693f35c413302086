"""Reporters of a run: ``text`` writes for people, ``junit`` and ``jsonlines`` for programs.

To add one, write a :data:`~torch_ext.runner.reporters.tally.Reporter`, or a function that writes a
:class:`~torch_ext.runner.reporters.tally.Tally` at the end of the run, and name it in
:class:`~torch_ext.runner.rounds.Reporters`.
"""
