"""Runs a plan on the machines of a Ray cluster: ``run_test.py --cluster ADDRESS|local:N``.

The driver (``executor``) has an actor on each machine (``machines``, which alone imports Ray, on use), in front of a
process that runs classes (``supervisor``), or ranks of a class on several hosts (``hosts``). Ray carries all messages.
"""
