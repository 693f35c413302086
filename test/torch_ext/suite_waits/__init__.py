"""Which waits of torch are needed: each is deleted in turn, and tests run with the race check.

Those of FSDP1, FSDP2, DDP and DTensor.

``python -m test.torch_ext.suite_waits`` measures, and writes docs/waits.md.
"""
