"""Your own program on N simulated devices: ``python -m torch_ext run -n 4 train.py``, and what belongs to it.

``options``     the command line of ``run``
``supervise``   starts the ranks and their store, waits for them and judges them; ``report`` has the words
``rank``        what a rank does before and after its program
``main_module`` runs a program as ``__main__``: for a rank, and for ``TORCH_EXT_SIM=cuda python train.py``
``usage``       what ranks used of their devices and peers, and the words for a job that used neither
``zygote``      which zygote starts the ranks: one of the run's own, or one that ``serve`` has kept warm
``autoload``    the entry point by which programs and torchrun's workers run on ``sim``, and its variables
``doctor``, ``demo``  the commands of that name; ``demo_training`` is the program that is shown

Importing it loads nothing.
"""
