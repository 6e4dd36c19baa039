"""python -m allreduce.doctor: the same as python -m allreduce doctor."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "doctor")
    runpy.run_module("allreduce", run_name="__main__")
