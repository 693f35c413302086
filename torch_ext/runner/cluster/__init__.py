"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

``messages``     what crosses a channel of the cluster
``supervisor``   the process that runs classes on one machine
``node``         the actor that Ray keeps on each machine, in front of that process
``machines``     the machines of the cluster, each with its actor, and where Ray puts a class, by what it needs
``spread``       a class on several machines: its host 0, which stands between its parent half and all zygotes
``far``          another machine of such a class: starts ranks, and passes on what they say
``ends``         the ends of one such rank's channel and pipes, on either machine
``link``         the connection between the two
``executor``     the driver: files and classes out, results in, again what a lost machine took along

Ray schedules. ``machines`` alone imports it, on use; ``node`` runs inside it and does not.
"""
