"""Your own program on N simulated devices: ``python -m torch_ext run -n 4 train.py``, and what belongs to it.

``options``     the command line of ``run``, and ``spec``, what each rank is told
``supervise``   starts the ranks, waits for them and judges them; ``report`` has the words
``fake``        words about a program that never used what it was given
``rank``        what happens in a rank before and after the program; ``main_module`` runs the program as ``__main__``;
                ``usage`` says what the rank used
``store``       the store that ranks meet at, as an agent of torchrun has it
``zygote``      which zygote starts the ranks: one of the run's own, or one that ``serve`` has kept warm
``autoload``    the entry point by which torchrun's own workers run on ``sim``; ``interpreter_line`` starts one of them
                anew, as ``as_sim``; ``alone`` says what a worker never used
``doctor``, ``demo``  the commands of that name; ``demo_training`` is the program that is shown

Importing it loads nothing.
"""
