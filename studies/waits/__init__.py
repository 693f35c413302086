"""Deletes each wait of FSDP1, FSDP2, DDP and DTensor in turn to see which are needed; see ``__main__``."""
