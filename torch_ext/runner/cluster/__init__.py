"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

``messages``     the messages between the driver, the actor of a machine, its supervisor and other machines
``supervisor``   the process that runs classes on one machine
``machines``     the machines of the cluster, each with an actor in front of that process, and where Ray puts a class
``hosts``        the ranks of a class on several machines, on its host 0 and on each other host
``executor``     the driver: sends files and classes, receives results, repeats the tests of a lost machine

Ray schedules classes and carries all messages. ``machines`` alone imports it, on use.
"""
