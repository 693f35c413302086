"""Print the commands that the README tells a newcomer to type: the ``bash`` blocks marked ``<!-- command -->``, a line
each.
"""

import re
import sys
from pathlib import Path

for block in re.findall(r"<!-- command -->\n```bash\n(.*?)\n```", Path(sys.argv[1]).read_text(), re.DOTALL):
    print(block.replace("\\\n", " "))
