"""NVSHMEM's device functions for stock Triton, with the names, argument order and meaning of OpenSHMEM and NVSHMEM.

    import triton, triton.language as tl
    from allscan.bindings import nvshmem_device as nvshmem

    @nvshmem.jit                                   # triton.jit + the device library + initialisation of every module
    def shift_kernel(p_dst, p_src, p_signal, nbytes):
        pe = (nvshmem.my_pe() + 1) % nvshmem.n_pes()
        nvshmem.putmem_signal_nbi_block(p_dst, p_src, nbytes, p_signal, 1, nvshmem.SIGNAL_SET, pe)
        nvshmem.signal_wait_until(p_signal, nvshmem.CMP_GE, 1)

``dst`` and ``sig_addr`` are **local symmetric** addresses: NVSHMEM translates them for the target PE. Pointers are
Triton pointers or int64. All threads of a block call a function with the suffix ``_block``, and it synchronises them.
The other functions run in **every thread**: harmless for queries, ``fence`` and waits; wrong for ``signal_op`` with
``SIGNAL_ADD`` in a block of more than one thread, because each thread adds. Triton's interpreter supports only
``putmem_signal_nbi_block`` and ``signal_wait_until``, over a simulated network (``interpreted_network``).

Reference: NVSHMEM API documentation, "Device API"; OpenSHMEM 1.5 specification.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from .nvshmem_module import DEVICE_LIBRARY, Kernel, device_library, extern_libs, initialize_module, jit  # noqa: F401
from .triton_compat import builtin, core, unwrapped

# nvshmem_common_transport.h and nvshmem_constants.h
SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)
CMP_EQ = tl.constexpr(0)
CMP_NE = tl.constexpr(1)
CMP_GT = tl.constexpr(2)
CMP_LE = tl.constexpr(3)
CMP_LT = tl.constexpr(4)
CMP_GE = tl.constexpr(5)

_P, _SIZE, _U64, _INT = core.int64, core.int64, core.uint64, core.int32


interpreted_network: Any = None  # delivers puts in the interpreter: shared_memory.Network


def _number(x: Any) -> int:
    """Convert an interpreter's value to a Python integer."""
    if isinstance(x, core.tensor):
        return int(x.handle.data.item())
    return int(unwrapped(x))


def _extern(symbol: str, args: Any, types: Any, result: Any, semantic: Any) -> core.tensor:
    """Call ``symbol`` of the device library with ``args`` converted to ``types``."""
    converted = []
    for value, dtype in zip(args, types, strict=True):
        value = semantic.to_tensor(value)
        converted.append(core.cast(value, dtype, bitcast=value.dtype.is_ptr(), _semantic=semantic))
    signature = {tuple(types): (symbol, result)}
    return core.extern_elementwise(DEVICE_LIBRARY, "", converted, signature, is_pure=False, _semantic=semantic)


@core.extern
def my_pe(_semantic=None) -> core.tensor:
    """Return the index of this processing element, int32."""
    return _extern("nvshmem_my_pe", [], [], _INT, _semantic)


@core.extern
def n_pes(_semantic=None) -> core.tensor:
    """Return the number of processing elements, int32."""
    return _extern("nvshmem_n_pes", [], [], _INT, _semantic)


@core.extern
def remote_ptr(ptr, pe, _semantic=None) -> core.tensor:
    """Return the address of ``ptr`` on ``pe`` for loads and stores (``nvshmem_ptr``), int64; 0 if it is not mapped."""
    return _extern("nvshmem_ptr", [ptr, pe], [_P, _INT], _P, _semantic)


@core.extern
def putmem_block(dst, src, nbytes, pe, _semantic=None) -> core.tensor:
    """Copy ``nbytes`` from local ``src`` to ``dst`` on ``pe``; ``src`` may be reused on return."""
    return _extern("nvshmemx_putmem_block", [dst, src, nbytes, pe], [_P, _P, _SIZE, _INT], _INT, _semantic)


@core.extern
def putmem_nbi_block(dst, src, nbytes, pe, _semantic=None) -> core.tensor:
    """Copy as ``putmem_block``, but ``src`` may be reused only after ``quiet``."""
    return _extern("nvshmemx_putmem_nbi_block", [dst, src, nbytes, pe], [_P, _P, _SIZE, _INT], _INT, _semantic)


@core.extern
def getmem_block(dst, src, nbytes, pe, _semantic=None) -> core.tensor:
    """Copy ``nbytes`` from ``src`` on ``pe`` to local ``dst``; complete on return."""
    return _extern("nvshmemx_getmem_block", [dst, src, nbytes, pe], [_P, _P, _SIZE, _INT], _INT, _semantic)


@core.extern
def getmem_nbi_block(dst, src, nbytes, pe, _semantic=None) -> core.tensor:
    """Copy as ``getmem_block``, but ``dst`` is complete only after ``quiet``."""
    return _extern("nvshmemx_getmem_nbi_block", [dst, src, nbytes, pe], [_P, _P, _SIZE, _INT], _INT, _semantic)


_PUT_SIGNAL = [_P, _P, _SIZE, _P, _U64, _INT, _INT]


@core.extern
def putmem_signal_block(dst, src, nbytes, sig_addr, signal, sig_op, pe, _semantic=None) -> core.tensor:
    """Copy as ``putmem_block``, then apply ``signal`` to the uint64 ``sig_addr`` on ``pe`` after the data's arrival."""
    args = [dst, src, nbytes, sig_addr, signal, sig_op, pe]
    return _extern("nvshmemx_putmem_signal_block", args, _PUT_SIGNAL, _INT, _semantic)


@builtin
def putmem_signal_nbi_block(dst, src, nbytes, sig_addr, signal, sig_op, pe, _semantic=None) -> core.tensor:
    """Copy as ``putmem_signal_block``, but ``src`` may be reused only after ``quiet`` or the receiver's answer."""
    if _semantic is None:
        if _number(sig_op) != SIGNAL_SET.value:
            raise NotImplementedError("the interpreter's network has SIGNAL_SET only")
        interpreted_network.put_signal(*map(_number, (dst, src, nbytes, sig_addr, signal, pe)))
        return
    args = [dst, src, nbytes, sig_addr, signal, sig_op, pe]
    return _extern("nvshmemx_putmem_signal_nbi_block", args, _PUT_SIGNAL, _INT, _semantic)


@core.extern
def signal_op(sig_addr, signal, sig_op, pe, _semantic=None) -> core.tensor:
    """Apply ``signal`` with ``SIGNAL_SET`` or ``SIGNAL_ADD`` to the uint64 ``sig_addr`` on ``pe``; once per thread."""
    return _extern("nvshmemx_signal_op", [sig_addr, signal, sig_op, pe], [_P, _U64, _INT, _INT], _INT, _semantic)


@builtin
def signal_wait_until(sig_addr, cmp, cmp_value, _semantic=None) -> core.tensor:
    """Wait, without a time limit, until ``value cmp cmp_value`` holds for local ``sig_addr``. Return the value, uint64.

    Before NVSHMEM 3.8 this is no acquire: read the data of the signal by volatile or ``.cg`` loads. The interpreter
    does not wait: call the function only after the signal was seen.
    """
    if _semantic is None:
        return
    return _extern("nvshmem_signal_wait_until", [sig_addr, cmp, cmp_value], [_P, _INT, _U64], _U64, _semantic)


@core.extern
def fence(_semantic=None) -> core.tensor:
    """Order this PE's earlier puts and signals to each PE before its later ones."""
    return _extern("nvshmem_fence", [], [], _INT, _semantic)


@core.extern
def quiet(_semantic=None) -> core.tensor:
    """Complete this PE's earlier non-blocking operations."""
    return _extern("nvshmem_quiet", [], [], _INT, _semantic)


@core.extern
def barrier_all_block(_semantic=None) -> core.tensor:
    """Barrier over all PEs; also completes their operations. Call it in one block per PE."""
    return _extern("nvshmemx_barrier_all_block", [], [], _INT, _semantic)


@core.extern
def sync_all_block(_semantic=None) -> core.tensor:
    """Barrier over all PEs; does not complete operations. Call it in one block per PE."""
    return _extern("nvshmemx_sync_all_block", [], [], _INT, _semantic)
