"""What becomes of a run's results: reporters behind one Protocol, one file each, over data.

``base``       the Protocol, results counted against the plan, and files of reports
``make``       the reporters of a run by its options, results in the order of the plan, and ``--github``
``watch``      what runs at the moment, on a terminal or in a pipe
``text``       what a user reads on stdout, with ``failure`` below it
``junit``      ``--junit FILE``
``jsonlines``  ``--json FILE``
``html``       ``--html FILE``
``trace``      ``--trace FILE``

To add one, write a class that satisfies :class:`~torch_ext.runner.reporters.base.Reporter`, or a function that writes a
:class:`~torch_ext.runner.reporters.base.Tally` when the run is over, and name it in
:class:`~torch_ext.runner.reporters.make.Reporters`.
"""
