"""`python -m fastamp` is the console script `fastamp`."""

import sys

from fastamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
