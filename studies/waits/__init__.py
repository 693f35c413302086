"""Which waits of torch are needed: each is deleted in turn, and tests run with the race check.

Those of FSDP1, FSDP2, DDP and DTensor.

``python -m studies.waits`` measures, and writes studies/waits/README.md.
"""
