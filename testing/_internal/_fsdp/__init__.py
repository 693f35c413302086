"""The modules behind ``common_fsdp``, which exports what each of them lists in ``__all__``. Import from there.

::

    fsdp2_parity, cases, compiled, ddp, step_log,   FSDP2 against a replica; base classes; a test compiled; collectives
      streams, watched_units, extensions            and a step logged; what overlaps; tensor subclasses
        -> fsdp1_parity, subtests                   FSDP1 against DDP; grids whose points may skip
          -> models, state                          modules to wrap; their parameters and buffers
            -> patches                              contexts that replace what FSDP calls
              -> device                             the device under test

A module imports only from lines below its own, or within its line. The exception is ``device``: when it is used, it
reads ``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` from ``common_fsdp``, because test files assign them
there.
"""
