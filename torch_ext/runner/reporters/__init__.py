"""What becomes of a run's results: reporters behind one Protocol, one file each, over data.

``base``       the Protocol
``text``       what a user reads on stdout, with ``failure`` and ``styled`` below it
``junit``      ``--junit FILE``
``jsonlines``  ``--json FILE``
``html``       ``--html FILE``
``trace``      ``--trace FILE``
``github``     ``--github``

To add one, write a file with a class that satisfies :class:`~torch_ext.runner.reporters.base.Reporter`, and make it in
:func:`~torch_ext.runner.reporters.make.make_reporters`.
"""
