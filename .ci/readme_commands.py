"""Print the commands in the first shell block below the heading "Two commands" of a README, one per line."""

import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
block = re.search(r"^## Two commands\n.*?^```(?:sh|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
print(block.group(1).strip() if block else "")
