"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

``messages``     what crosses a channel of the cluster
``supervisor``   the process that runs classes on one machine
``node``         the actor that Ray keeps on each machine, in front of that process
``placing``      where Ray puts a class, by what it needs
``ship``         what of the user's files every machine gets
``executor``     the driver: classes out, results in, again what a lost machine took along

Ray schedules. ``executor`` and ``placing`` alone import it, on use; ``node`` runs inside it and does not.
"""
