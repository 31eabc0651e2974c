"""`python -m opacus_bc`: the command line."""

import sys

from opacus_bc.cli import main

if __name__ == "__main__":
    sys.exit(main())
