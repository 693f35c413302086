"""Runs your own program on N simulated devices: ``python -m torch_ext run -n 4 train.py``, and related commands.

``run``             the command: parses options, starts the ranks, waits for them, prints the verdict
``rank``            a rank before and after its program; messages about a job that used no device
``main_module``     runs a program as ``__main__``, in a rank
``serve``           finds the zygote of the ranks: the run's own, or one that ``torch_ext serve`` keeps warm
``autoload``        the entry point by which programs and torchrun's workers run on ``sim``, and its variables
``doctor``, ``demo``  the commands of that name

Importing the package loads nothing else.
"""
