"""Every kernel compiles for sm_90 without a GPU, and its signals are the expected ones."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from allscan.bindings import nvshmem_device as nvshmem
from allscan.shmem_kernels import gla_bwd, gla_fwd
from allscan.shmem_kernels.channel import NONE, PUT, SENTINEL, SIGNAL
from allscan.shmem_kernels.scan import copy_kernel, scan_kernel
from sm90 import Compiled, channel_type

pytestmark = pytest.mark.cpu


def types(names, kind):
    return dict.fromkeys(names.split(), kind)


def compile_scan(recv, send, tile=(1, 128), decay=True, initial=True):
    channel, constants = channel_type(recv.value, send.value, BK=tile[0], BV=tile[1])
    arguments = types("p_state p_decay p_initial p_out", "*fp32") | types("stride_g stride_k", "i32")
    libraries = nvshmem.extern_libs() if PUT.value in (recv.value, send.value) else None
    values = {"channel": constants, "K": 128, "V": 128, "HAS_DECAY": decay, "HAS_INITIAL": initial}
    return Compiled(scan_kernel, arguments | {"channel": channel}, values, num_warps=1, extern_libs=libraries)


@pytest.mark.parametrize(
    "recv, send, acquires, releases",
    [
        # a look at a credit or a signal acquires twice, at once and in the wait's loop; each wait can release a record
        (NONE, NONE, 0, 0),
        (NONE, SENTINEL, 2, 1),
        (SENTINEL, NONE, 0, 1),
        (SENTINEL, SENTINEL, 2, 2),
        (NONE, SIGNAL, 2, 2),
        (SIGNAL, SIGNAL, 4, 3),
        (SIGNAL, NONE, 2, 1),
    ],
)
def test_scan_signals(recv, send, acquires, releases):
    compiled = compile_scan(recv, send)
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= 64  # 32 programs of one warp fit a multiprocessor
    assert compiled.count(r"ld\.global\.sys\.acquire|\.acquire\.sys") == acquires
    assert compiled.count(r"atom.*\.release|\.release\.sys|st\.release") == releases
    assert compiled.count(r"ld\.volatile\.global\.b64") == 0  # no thread looks at a changing word by itself
    # the words of a tile are read past the first-level cache, 16 bytes a thread
    assert (compiled.count(r"ld\.volatile\.global\.v4\.b32") > 0) == (recv != NONE)
    if recv == NONE and send == NONE:
        assert compiled.count(r"atom\.|red\.|volatile|fence|membar") == 0


@pytest.mark.parametrize("tile", [(1, 128), (4, 128), (16, 16)])
def test_scan_tiles_do_not_spill(tile):
    assert compile_scan(SENTINEL, SENTINEL, tile).spilled_bytes == 0


def test_a_tile_too_small_for_its_warps_is_refused():
    channel, constants = channel_type(SENTINEL.value, SENTINEL.value, BK=1, BV=64)
    arguments = types("p_state p_decay p_initial p_out", "*fp32") | types("stride_g stride_k", "i32")
    values = {"channel": constants, "K": 128, "V": 128, "HAS_DECAY": True, "HAS_INITIAL": False}
    with pytest.raises(triton.compiler.errors.CompilationError) as caught:
        Compiled(scan_kernel, arguments | {"channel": channel}, values, num_warps=4)
    problem, messages = caught.value, ""
    while problem is not None:
        messages, problem = messages + str(problem), problem.__cause__
    assert "at least one word for each thread" in messages


def test_scan_over_nvshmem_links_the_device_library():
    compiled = compile_scan(PUT, PUT)
    assert compiled.spilled_bytes == 0
    assert "nvshmemi_device_state_d" in compiled.ptx
    assert compiled.count(r"acquire") >= 4  # credit and arrival, first look and loop


def test_copy():
    arguments = types("p_dst p_src", "*fp32") | {"numel": "i32"}
    assert Compiled(copy_kernel, arguments, {"BLOCK": 2048}).spilled_bytes == 0


GLA = dict(H=4, K=128, V=128, BT=64, BK=128)


@pytest.mark.parametrize("dtype, precision", [("*bf16", "bf16"), ("*fp16", "tf32x3"), ("*fp32", "tf32x3")])
def test_gla_kernels(dtype, precision):
    common = {"PRECISION": precision}
    states = types("p_g p_state p_gate p_own p_gates p_prev", "*fp32") | {"p_segments": "*i32", "scale": "fp32"}
    chunks = {"p_chunks": "*i32", "scale": "fp32"}
    state = dict(GLA, BV=64)
    intra = dict(BC=16, BS=32, RANGE=16.0)
    kernels = [
        *((gla_fwd.state_kernel, types("p_x p_y", dtype) | states, state | {"REVERSE": r, "EVERY_CHUNK": e}, 4)
          for r in (False, True) for e in (False, True)),
        (gla_fwd.intra_kernel, types("p_q p_k", dtype) | types("p_g p_a", "*fp32") | chunks,
         dict(H=4, K=128, BT=64, BK=128) | intra, 4),
        (gla_fwd.output_kernel,
         types("p_q p_k p_v p_o", dtype) | types("p_g p_a p_state p_gates p_prev", "*fp32")
         | {"p_segments": "*i32", "scale": "fp32"}, state, 4),
        (gla_bwd.intra_grad_kernel,
         types("p_q p_k p_v p_do", dtype) | types("p_g p_da p_dq p_dk", "*fp32") | chunks,
         GLA | intra | {"BV": 64}, 4),
        (gla_bwd.value_grad_kernel,
         types("p_k p_do p_dv", dtype) | types("p_g p_a p_dstate", "*fp32") | {"p_chunks": "*i32"}, state, 4),
        (gla_bwd.grad_kernel,
         types("p_q p_k p_v p_do p_dq p_dk", dtype)
         | types("p_g p_state p_dstate p_dq_intra p_dk_intra p_dg", "*fp32") | chunks, state | {"BK": 32}, 4),
    ]  # fmt: skip
    for kernel, arguments, constants, warps in kernels:
        compiled = Compiled(kernel, arguments, constants | common, num_warps=warps, num_stages=1)
        assert compiled.count(r"\bmma\.|wgmma\.mma"), f"{kernel} uses no matrix instruction"
        assert compiled.shared <= 227 << 10


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("recv, send", [(NONE, NONE), (SENTINEL, SENTINEL), (SIGNAL, SIGNAL), (PUT, PUT)])
def test_carry(recv, send, reverse):
    channel, constants = channel_type(recv.value, send.value, BK=1)
    arguments = types("p_state p_gate p_gates p_outside p_prev p_final", "*fp32") | {"channel": channel}
    arguments |= types("p_segments p_slots", "*i32")
    values = {"channel": constants, "H": 4, "K": 128, "V": 128, "HAS_OUTSIDE": True, "HAS_FINAL": True}
    libraries = nvshmem.extern_libs() if recv == PUT else None
    compiled = Compiled(
        gla_fwd.carry_kernel, arguments, values | {"REVERSE": reverse}, num_warps=1, extern_libs=libraries
    )
    assert compiled.spilled_bytes == 0
    assert (compiled.count("acquire") == 0) == (recv == NONE)


@triton.jit
def every_function_kernel(p_dst, p_src, p_signal, p_out, nbytes, op):
    pe = (nvshmem.my_pe() + 1) % nvshmem.n_pes()
    tl.store(p_out, nvshmem.remote_ptr(p_dst, pe))
    nvshmem.putmem_block(p_dst, p_src, nbytes, pe)
    nvshmem.putmem_nbi_block(p_dst, p_src, nbytes, pe)
    nvshmem.getmem_block(p_dst, p_src, nbytes, pe)
    nvshmem.getmem_nbi_block(p_dst, p_src, nbytes, pe)
    nvshmem.putmem_signal_block(p_dst, p_src, nbytes, p_signal, 1, nvshmem.SIGNAL_SET, pe)
    nvshmem.putmem_signal_nbi_block(p_dst, p_src, nbytes, p_signal, 1, op, pe)
    nvshmem.fence()
    nvshmem.quiet()
    nvshmem.signal_op(p_signal, 1, nvshmem.SIGNAL_ADD, pe)
    tl.store(p_out + 1, nvshmem.signal_wait_until(p_signal, nvshmem.CMP_GE, 1).to(tl.int64))
    nvshmem.barrier_all_block()
    nvshmem.sync_all_block()


def test_every_nvshmem_function_links():
    arguments = types("p_dst p_src", "*fp32") | types("p_signal p_out", "*i64") | {"nbytes": "i64", "op": "i32"}
    compiled = Compiled(every_function_kernel, arguments, {}, extern_libs=nvshmem.extern_libs())
    assert "nvshmemi_device_state_d" in compiled.ptx
    assert not compiled.count(r"\.extern \.func .*nvshmem")  # nothing is left unresolved
