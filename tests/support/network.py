"""What a machine with two GPUs needs for a network of its own: NVSHMEM's UCX transport over TCP on the loopback."""

from __future__ import annotations

import os
import subprocess

SOURCES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "network")
MODES = "pass", "reorder", "bandwidth", "stall", "never"  # of hostile.c
COUNTS = "held", "passed", "overtakings", "lost", "bytes", "most_held", "failed"


def build(folder: str, source: str, library: str, *options: str) -> str:
    """The path of a shared library made of a C source of tests/network."""
    path = os.path.join(folder, library)
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, os.path.join(SOURCES, source), *options]
    subprocess.run(command, check=True, timeout=120)
    return path
