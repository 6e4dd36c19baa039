"""Builds the C library of allreduce/kernels where there is a compiler; all metadata is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# ctypes loads the library, so it needs no version of Python; setuptools refuses to say so without the GIL.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
library = Extension(
    "allreduce.kernels.library",
    [f"allreduce/kernels/{name}.c" for name in ("kernels", "meeting", "communicators")],
    # No fused operations, whose bits differ from NumPy's; the other two flags change no bits.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
    py_limited_api=limited,
    optional=True,  # without a compiler NumPy does the same, and failed ranks may crash others (communicators.c)
)

setup(ext_modules=[library], options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {})
