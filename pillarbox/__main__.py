"""`python -m pillarbox`: the command."""

import sys

from pillarbox import main

sys.exit(main())
