"""Sends work of this tree to PyTorch: what changed, in upstream's files and words, as a patch that a person mails.

::

    command                               what the command line asks for
      -> change, cover, lint, check       what is to go; its words; whether it is right; whether it runs there
        -> write, patch                   texts of files; a commit or a mail
          -> link                         what a change needs upstream
            -> spelled, references, edits, modules, trees, ruff
"""
