"""Models as ONNX files: the graph of a replica, with the scaling, categories and class names of its data."""
