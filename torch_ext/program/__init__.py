"""Your own program on N simulated devices: ``python -m torch_ext run -n 4 train.py``, and what belongs to it.

``run``             the command: its options, the ranks' start, the wait for them, the verdict
``rank``            a rank before and after its program; the words for a job that used no device
``main_module``     runs a program as ``__main__``, in a rank
``serve``           which zygote starts the ranks: one of the run's own, or one that ``torch_ext serve`` keeps warm
``autoload``        the entry point by which programs and torchrun's workers run on ``sim``, and its variables
``doctor``, ``demo``  the commands of that name

Importing it loads nothing.
"""
