"""The command line: python -m trainers --help."""

import sys

from trainers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
