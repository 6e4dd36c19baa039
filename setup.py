"""Builds the C libraries of allreduce/kernels where there is a compiler; all metadata is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# ctypes loads the libraries, so they need no version of Python; setuptools refuses to say so without the GIL.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")


def library(name: str, *sources: str) -> Extension:
    return Extension(
        f"allreduce.kernels.{name}",
        [f"allreduce/kernels/{source}.c" for source in sources],
        depends=["allreduce/kernels/floats.h", "allreduce/kernels/fixed_point.h"],
        # No fused operations, whose bits differ from NumPy's; the other two flags change no bits.
        extra_compile_args=["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
        py_limited_api=limited,
        optional=True,  # without a compiler NumPy does the same, and Open MPI may crash after a failure
    )


# The second one is loaded for the whole process (RTLD_GLOBAL), so it has no other functions.
libraries = [library("library", "kernels", "fixed_point", "meeting"), library("communicators", "communicators")]
setup(ext_modules=libraries, options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {})
