"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

``messages``     what crosses a channel of the cluster
``supervisor``   the process that runs classes on one machine
``machines``     the machines of the cluster, each with an actor in front of that process, and where Ray puts a class
``spread``       a class on several machines: its host 0, which stands between its parent half and all zygotes
``far``          another machine of such a class: starts ranks, and passes on what they say
``link``         the connection between the two, and the ends of a rank's channel and pipes on either
``executor``     the driver: files and classes out, results in, again what a lost machine took along

Ray schedules. ``machines`` alone imports it, on use.
"""
