"""A world is the set of ranks of one test. This package starts ranks, follows them and judges them. It knows nothing of
unittest or FSDP, and imports torch only in ranks and zygotes.

A test's process, the *parent half*, asks a *zygote* for ranks: a process that has imported torch and the test's file
and has run nothing, so that it can be forked. Read in this order:

1. ``protocol``: every message between these processes; ``channel`` carries them.
2. ``follow``: the parent half. It asks for ranks, handles their messages, and executes the steps of ``watch``, which
   also decides whether they hang; ``files`` has its ends of a rank.
3. ``zygote`` forks ranks; ``child`` checks that a fork is safe, and starts a fresh interpreter where it is not.
4. ``rank`` applies the order, runs the test and hands in its receipt; ``exits`` handles threads and exit functions.
5. ``threads`` tells which threads of a process may go on; ``operations`` the operation that a Python frame or a device
   waits in.
6. ``outcome``: how one rank ended, with its collectives; ``verdict`` judges all of them and renders the report, for
   which ``blame`` finds the guilty rank and ``wording`` has the phrases.
7. ``tree``, the supervisor's zygotes, and ``provider``, the zygotes of other processes.

All stand on ``settings`` (environment variables, time limits, hosts) and ``_os`` (calls of the system, and /proc).
"""
