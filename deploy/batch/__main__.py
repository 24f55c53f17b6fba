"""`python -m paceline.deploy.batch IN.jsonl OUT.jsonl ...`, for `ray job submit`: the same as `paceline batch`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
