"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

``messages``     what crosses a channel of the cluster
``supervisor``   the process that runs classes on one machine
``node``         the actor that Ray keeps on each machine, in front of that process
``placing``      where Ray puts a class, by what it needs
``ship``         what of the user's files every machine gets
``machines``     the machines of the cluster, each with its actor
``spread``       a class on several machines: its host 0, which stands between its parent half and all zygotes
``stand_in``     this end of a rank that runs on another machine
``far``          another machine of such a class: starts ranks, and passes on what they say
``link``         the connection between the two
``executor``     the driver: classes out, results in, again what a lost machine took along

Ray schedules. ``machines`` and ``placing`` alone import it, on use; ``node`` runs inside it and does not.
"""
