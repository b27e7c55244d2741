"""Identifies the software versions and sources of a result."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.util
import os


@functools.cache
def source_hash() -> str:
    """sha256 over the bytes of the package's *.py, in the order of their paths."""
    package, files = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), {}
    for name in ("", "bindings", "shmem_kernels"):
        spec = importlib.util.find_spec(f"allscan.{name}") if name else None
        folder = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else package
        for path in glob.glob(os.path.join(folder, "**", "*.py"), recursive=True):
            files[os.path.join(name, os.path.relpath(path, folder))] = path
    digest = hashlib.sha256()
    for _, path in sorted(files.items()):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()
