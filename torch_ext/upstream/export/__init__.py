"""Sends work of this tree to PyTorch: what changed, in upstream's files and words, as a patch that a person mails."""
