"""Helpers under upstream's names. Installs our Ctrl-C handler first, because
the modules of this package take long to import.
"""

from torch_ext.testing._internal import _ctrl_c

_ctrl_c.install()
