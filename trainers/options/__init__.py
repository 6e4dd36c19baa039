"""The options of a training as objects: one object for each feature, in the place of several keywords.

Each is a frozen dataclass, which raises ArgumentError when it is made with an invalid value.
"""
