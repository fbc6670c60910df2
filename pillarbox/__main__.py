"""`python -m pillarbox`: the command."""

import sys

from pillarbox import main

if __name__ == "__main__":
    sys.exit(main())
