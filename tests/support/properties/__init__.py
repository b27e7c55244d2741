"""Random cases of the package's properties, and their laws: float64, written here, sharing no code with the package.

A case comes from its seed alone, so that every rank draws the same one.
"""
