"""Deletes each wait of FSDP1, FSDP2, DDP and DTensor in turn, and runs tests with the race check to see which are
needed.

``python -m studies.waits`` measures, and writes studies/waits/README.md.
"""
