"""Runs your own program on N simulated devices: ``python -m torch_ext run -n 4 train.py``, and related commands.

``run`` is the command. A rank runs the program as ``__main__`` (``main_module``) between the two halves of ``rank``; it
starts from a zygote of the run's own, or one that ``serve`` keeps warm. ``autoload`` is the entry point by which
torchrun's workers run on ``sim``. Importing the package loads nothing else.
"""
