"""The modules behind ``common_fsdp``, which exports what each of them lists in
``__all__``. Import from there.

::

    cases, compiled        base classes; a test that runs compiled too
    fsdp2_parity           FSDP2 against an unsharded replica
    step_log               a log of collectives and training steps
    streams                the order of work on streams
    extension_contract     what tensor subclasses must pass
      extension_hooks      the check of their hooks
      -> fsdp1_parity      FSDP1 against DDP
        -> models          modules to wrap
           state           their parameters and buffers
          -> patches       contexts that replace what FSDP calls
            -> device      the device under test

A module imports only from lines below its own, or within its line. The exception is
``device``: when it is used, it reads ``DEVICE_TYPE``, ``DEVICE_COUNT`` and
``DISTRIBUTED_BACKEND`` from ``common_fsdp``, because test files assign them there.
"""
