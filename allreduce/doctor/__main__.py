"""python -m allreduce.doctor: the same as python -m allreduce doctor."""

import sys

from allreduce.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
