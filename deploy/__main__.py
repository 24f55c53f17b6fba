"""`python -m paceline.deploy`: the `paceline` command where no script is on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
