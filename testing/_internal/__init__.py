"""Upstream's helper names. Takes Ctrl-C over first, since whatever is imported from
here takes long.
"""

from torch_ext.testing._internal import _ctrl_c

_ctrl_c.install()
