"""Print the README's commands for newcomers, one per line: the ``bash`` blocks marked ``<!-- command -->``."""

import re
import sys
from pathlib import Path

for block in re.findall(r"<!-- command -->\n```bash\n(.*?)\n```", Path(sys.argv[1]).read_text(), re.DOTALL):
    print(block.replace("\\\n", " "))
