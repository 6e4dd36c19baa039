"""Builds the C library of allreduce/kernels where there is a compiler; all metadata is in pyproject.toml."""

from setuptools import Extension, setup

library = Extension(
    "allreduce.kernels.library",
    ["allreduce/kernels/kernels.c"],
    # No fused operations, whose bits differ from NumPy's; the other two flags change no bits.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
    py_limited_api=True,  # ctypes loads it, so it needs no version of Python
    optional=True,  # without a compiler NumPy does the same
)

setup(ext_modules=[library], options={"bdist_wheel": {"py_limited_api": "cp310"}})
