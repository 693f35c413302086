"""A world is the set of ranks of one test. This package starts ranks, follows them and judges them. It knows nothing of
FSDP, and imports torch only in ranks and zygotes.

A test's process, the *parent half*, asks a *zygote* for ranks: a process that has imported torch and the test's file
and has run nothing, so that it can be forked. Read in this order:

1. ``protocol``: every message between these processes; ``channel`` carries them.
2. ``follow``: the parent half. Asks for ranks, handles their messages and executes the steps of ``watch``, which also
   detects hangs. ``files`` holds the parent half's ends of each rank.
3. ``zygote`` forks ranks; ``child`` checks that a fork is safe, and starts a fresh interpreter where it is not.
4. ``rank`` applies the order, calls its task and submits the receipt; ``exits`` handles threads and exit functions. The
   task of a test's rank is ``run_rank`` of ``testing/_internal/_distributed/receipts.py``.
5. ``threads`` finds the threads of a process that may go on; ``operations`` names the operation in which a Python frame
   or a device waits.
6. ``outcome``: how one rank ended, which ``watch`` decides, and its collectives. ``verdict`` judges the world and
   renders the report; ``blame`` finds the guilty rank, and ``wording`` has the phrases.
7. ``tree``, the supervisor's zygotes, and ``provider``, the zygotes of other processes.

All use ``settings`` (environment variables, time limits, hosts) and ``_os`` (system calls, and /proc).
"""
