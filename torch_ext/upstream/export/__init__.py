"""Sends work of this tree to PyTorch: the changes, in upstream's files and words, as a patch that a person mails.

``command``             one export: the arguments, the check, the message, the patch
``link``, ``tables``    the definitions that a change needs, and upstream's names for them
``modules``, ``scopes`` Python files as data
``targets``, ``lint``   the new texts, as upstream formats them
``check``, ``git``      a run on plain torch; a commit or a mail
"""
