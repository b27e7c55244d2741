"""What Triton does not promise, and a new version may change: how a compiled kernel is handed its arguments."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from .cuda_driver import KernelNode

SCRATCH = (0, 8)  # bits and bytes of a null pointer: two follow a kernel's arguments, to memory that it does not need
FLOATS = {"fp32": ("<f", 4), "f32": ("<f", 4), "fp64": ("<d", 8)}


def kernel_node(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> KernelNode:
    """The launch of a compiled kernel as a node of a CUDA graph. arguments: all that the Python function has, in its
    order, with addresses for tensors, tuples for tuples, anything for constants.

    Raises NotImplementedError where a launch is more than that: clusters, cooperative grids, tensor descriptors,
    scratch memory. Read in Triton 3.6 to 3.9.
    """
    metadata = compiled.metadata
    for name, usual in (
        ("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False), ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
    ):  # fmt: skip
        if (getattr(metadata, name, usual) or usual) != usual:
            raise NotImplementedError(f"{compiled.name} has {name}={getattr(metadata, name)}")
    given = words(tuple(compiled.src.signature.values()), arguments)
    return KernelNode(compiled.function, grid, 32 * metadata.num_warps, metadata.shared, given)


def words(types: Sequence[Any], values: Sequence[Any]) -> list[tuple[int, int]]:
    """(bits, bytes) of each parameter of a kernel with arguments of these types."""
    return [*_words(types, values), SCRATCH, SCRATCH]


def _words(types: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _words(kind, value)
        elif kind == "constexpr":
            continue
        elif kind.startswith("*"):
            yield value or 0, 8
        elif kind in FLOATS:
            form, size = FLOATS[kind]
            yield int.from_bytes(struct.pack(form, value), "little"), size
        elif kind[0] in "iu" and kind[1:].isdigit():
            size = max(1, int(kind[1:]) // 8)
            yield int(value) & ((1 << 8 * size) - 1), size
        else:
            raise NotImplementedError(f"a parameter of type {kind}")
