"""`python -m paceline.deploy.batch IN.jsonl OUT.jsonl ...` is `paceline batch ...`, for `ray job submit`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
