"""A world is the set of ranks that one test runs on. This package starts the ranks, follows them and judges them. It
knows nothing of unittest or FSDP, and imports torch only in ranks and zygotes.

A test's process, the *parent half*, asks a *zygote* for ranks: a process that has imported torch and the test's file
and has run nothing, so that it can be forked. Read in this order:

1. ``protocol``: every message between these processes.
2. ``start`` asks for ranks; ``zygote`` forks them, or has ``child`` start a fresh interpreter where a fork is unsafe.
3. ``rank`` applies the order, runs the test and hands in its receipt; ``exits`` is what happens around its end.
4. ``follow`` is the parent half's loop: it takes in what ranks say, and does what ``watch`` decides by ``limits``.
5. ``hangs`` decides whether ranks hang, from what they answer by ``threads`` (which threads may go on), ``operations``
   (what a Python frame waits in) and ``wait_page`` (what a device waits for), and from ``processes`` (who else
   may act).
6. ``outcome`` is how one rank ended; ``verdict`` judges all of them; ``blame`` finds the guilty one by ``collectives``;
   ``render``, ``frames`` and ``wording`` make the text of the report.
7. ``tree``, ``loading`` and ``provider``: where zygotes come from, and which one serves a process.

The rest is what these stand on: ``channel`` and ``callbacks``, ``transports``, ``hosts``, ``files``, ``settings``
(environment variables), ``calls`` (whether a test method has run) and ``_os`` (calls of the system).
"""
