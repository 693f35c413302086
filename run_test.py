# PYTHON_ARGCOMPLETE_OK
from torch_ext.__main__ import main

raise SystemExit(main())
