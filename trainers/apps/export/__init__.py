"""Writes models as ONNX files, which run without this package; see metadata.py for what such a file contains."""
