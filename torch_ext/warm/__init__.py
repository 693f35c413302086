"""A zygote that ``torch_ext serve`` keeps warm, for programs and for tests.

``address``  where it listens, and which commands it fits
``loaded``   the files that it has loaded, and whether they have changed
``connect``  how a command gets a channel to it
``root``     a copy of it that is the first zygote of a run of tests, and ``lent``, what that does first
``machine``  what the machine has besides simulated devices, found out before there are any

Importing it loads nothing.
"""
