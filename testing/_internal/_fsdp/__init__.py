"""The rooms behind ``common_fsdp``: import names from there, not from here.

::

    common_fsdp  ->  cases, compiled
                 ->  ddp_parity, subcases, patches
                 ->  training, parity
                 ->  models, state
                 ->  modes, delays, collectives
                 ->  device

Modules import from lines below their own (a family of models from another one). ``device`` alone looks back at the
front door, and on use only, because ``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` are names that test
files patch there.
"""
