"""Which software and which sources a result is of."""

from __future__ import annotations

import hashlib
import os

FOLDERS = ("shmem_kernels", "bindings", "", "gla", "delta", "tools", "integrations")  # of the package, that have *.py


def source_hash() -> str:
    """sha256 over the bytes of the sorted *.py of FOLDERS."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    digest = hashlib.sha256()
    for folder in (os.path.join(package, name) for name in FOLDERS):
        for name in sorted(name for name in os.listdir(folder) if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()
