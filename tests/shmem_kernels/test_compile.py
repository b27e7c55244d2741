"""Every kernel compiles for sm_90 without a GPU, kernels with products also for sm_100; signals are as expected."""

from __future__ import annotations

import ast
import functools
import os
import re
import traceback
import types

import pytest
import torch
import triton
import triton.language as tl

from allscan import device
from allscan.base.tiling import default_tile, scan_num_warps, transition_blocks, transition_tile
from allscan.bindings import nvshmem_device as nvshmem
from allscan.bindings.versions import number, version_of
from allscan.ops.carrier import AllScanCarrier, IncomingStates
from allscan.ops.delta import delta_passes
from allscan.ops.delta.delta_passes import ChunkOperands, DeltaShape, LocalGrads
from allscan.shmem_kernels import (
    blocks,
    delta_state,
    device_tables,
    gates,
    gdn,
    gla_bwd,
    gla_fwd,
    gla_strong,
    kda_bwd,
    kda_fwd,
    short_convolution,
    ssd_bwd,
    ssd_fwd,
)
from allscan.shmem_kernels.cross_entropy import cross_entropy_kernel
from allscan.shmem_kernels.links import NONE, PUT, SENTINEL, SIGNAL
from allscan.shmem_kernels.rails import RAILS, Slice, rails_kernel
from allscan.shmem_kernels.scan import scan_kernel, shift_rows_kernel, transition_kernel
from allscan.shmem_kernels.slots import copy_slots_kernel
from allscan.shmem_kernels.softmax_parts import fold_kernel, merge_kernel, reverse_kernel
from allscan.tokens.packing import Layout, TokenRange
from allscan.tools import compiled as tool
from allscan.tools.compiled import channel_type
from allscan.tools.timing import copy_kernel
from support.delta import saved_states_for
from support.launches import (
    VERSION,
    Launches,
    NoScan,
    compiled_for_both,
    compiled_launches,
    launch_chunks,
    launch_gla,
    launch_ssd,
    most,
    record_launches,
    with_gpu_blocks,
)
from support.sm90 import Compiled
from support.values import pairs
from support.virtual import gated_rails_kernel

pytestmark = pytest.mark.cpu


# Spilled bytes of a thread depend on Triton's code and on the register allocator. For sm_90 that is ptxas 12.8 with
# Triton 3.6 and 3.7, 12.9 with 3.8, 13.4 with 3.9; for sm_100 12.9, 13.1, 13.3 and 13.4. From 3.7 on Triton passes
# --regAllocOptLevel=2, which has no effect before 13: there the same PTX spills more (adjoint_kernel with K=256, V=512
# on 3.9: 152 bytes instead of 72 by ptxas' default).
def pointers(names, kind):
    return dict.fromkeys(names.split(), kind)


def compile_scan(
    recv, send, tile=(1, 128), decay=True, initial=True, neighbour_shift=False, num_warps=1, adjoint=False, V=128, **how
):
    channel, constants = channel_type(recv.value, send.value, BK=tile[0], BV=tile[1], ADJOINT=adjoint)
    arguments = pointers("p_state p_decay p_initial p_out", "*fp32") | pointers("stride_g stride_k", "i32")
    libraries = nvshmem.extern_libs() if PUT.value in (recv.value, send.value) else None
    values = {
        "channel": constants,
        "K": 128,
        "V": V,
        "HAS_DECAY": decay,
        "HAS_INITIAL": initial,
        "NEIGHBOUR_SHIFT": neighbour_shift,
    }
    how |= dict(num_warps=num_warps, extern_libs=libraries)
    return Compiled(scan_kernel, arguments | {"channel": channel}, values, **how)


@pytest.mark.parametrize(
    "tile, num_warps, most_registers, adjoint", [((1, 128), 1, 64, False), ((16, 128), 4, 128, True)]
)
@pytest.mark.parametrize(
    "recv, send, waits_signal, posts, faults",
    [
        # number of waits for a signal, of posts of a tile as a release, and of possible fault records: in each wait,
        # and for a tile of another call
        (NONE, NONE, 0, 0, 0),
        (NONE, SENTINEL, 1, 0, 1),
        (SENTINEL, NONE, 0, 0, 2),
        (SENTINEL, SENTINEL, 1, 0, 3),
        (NONE, SIGNAL, 1, 1, 1),
        (SIGNAL, SIGNAL, 2, 1, 3),
        (SIGNAL, NONE, 1, 0, 2),
    ],
)
@pytest.mark.parametrize("neighbour_shift", [False, True])
def test_scan_signals(
    recv, send, waits_signal, posts, faults, neighbour_shift, tile, num_warps, most_registers, adjoint
):
    compiled = compile_scan(recv, send, tile, not neighbour_shift, True, neighbour_shift, num_warps, adjoint)
    # 3.8: two words, which keeps 72 registers; with 80 one program fewer fits on a multiprocessor
    assert compiled.spilled_bytes <= (0 if num_warps == 1 else most(0, v37=8, v38=8))
    assert compiled.registers <= most_registers
    # a wait for a signal polls once at first, and in its loop
    assert compiled.count(r"ld\.global\.sys\.acquire|\.acquire\.sys") == 2 * waits_signal
    middle = recv != NONE and send != NONE and not neighbour_shift  # sends early, or when the tile has arrived
    releases = faults + posts * (2 if middle else 1)
    assert compiled.count(r"atom.*\.release|\.release\.sys|st\.release") == releases
    # a tile's words are read past the first-level cache, 16 bytes a thread
    assert (compiled.count(r"ld\.volatile\.global\.v4\.b32") > 0) == (recv != NONE)
    if recv == NONE and send == NONE:
        assert compiled.count(r"atom\.|red\.|volatile|fence|membar") == 0


@pytest.mark.quick
@pytest.mark.parametrize("tile", [(1, 128), (4, 128), (16, 16)])
def test_scan_tiles_do_not_spill(tile):
    assert compile_scan(SENTINEL, SENTINEL, tile).spilled_bytes == 0


@pytest.mark.parametrize("V", [1, 2, 3, 126, 127])
def test_words_that_pass(V):
    """A poll loads each word of a thread once, and the arrival word once; no branch may take that word for uniform.
    Rows that are not aligned are not stored by fours."""
    tile = default_tile(128, V, 128)
    compiled, aligned = (compile_scan(SENTINEL, SENTINEL, tile, V=n) for n in (V, tile[1]))
    assert compiled.spilled_bytes == 0
    assert compiled.count(r"ld\.volatile\.global\.b64") == 1 and compiled.count(r"mov\.b64 %rd\d+, %rd\d+;") == 1
    assert compiled.count(r"ld\.volatile\.global(\.v4)?\.b32") == (1 if tile[1] >= 4 else 4)
    of_out = 2 * (V != tile[1])  # its words, or NaN in place of them
    assert compiled.count(r"st\.global\.v4\.b32") == aligned.count(r"st\.global\.v4\.b32") - of_out


@pytest.mark.parametrize("link", [NONE, SENTINEL, SIGNAL, PUT])
@pytest.mark.parametrize("tile, num_warps", [((1, 128), 1), ((16, 128), 4)])
def test_shifted_rows(tile, num_warps, link):
    channel, constants = channel_type(link.value, link.value, BK=tile[0], BV=tile[1], ADJOINT=True)
    arguments = pointers("p_state p_unused p_initial p_out", "*fp32") | {"rows": "i32", "channel": channel}
    values = {"channel": constants, "K": 128, "V": 128, "HAS_INITIAL": True}
    libraries = nvshmem.extern_libs() if link == PUT else None
    compiled = Compiled(shift_rows_kernel, arguments, values, num_warps=num_warps, extern_libs=libraries)
    assert compiled.spilled_bytes == 0
    assert compiled.count(r"bar\.sync") > 0  # before rows written by other threads are read


def compile_transitions(K, one, passes=False):
    BK, BV = transition_tile(K)
    channel, constants = channel_type(SENTINEL.value, SENTINEL.value, BK=BK, BV=BV)
    arguments = pointers("p_state p_transition p_initial p_out", "*fp32") | pointers("stride_i stride_j", "i32")
    del arguments[one]
    blocks = transition_blocks(K)
    values = {"channel": constants, "K": K, "V": 128, "HAS_INITIAL": True, one: 1}
    values |= {name: blocks.pop(name) for name in ("BJ", "STAGES")} | ({} if passes else {"p_passes": None})
    arguments |= pointers("p_passes", "*i32") if passes else {}
    return Compiled(transition_kernel, arguments | {"channel": channel}, values, **blocks)


@pytest.mark.slow(but=("64-stride_i", "128", "256-stride_j", "512"))
@pytest.mark.parametrize("one", ["stride_i", "stride_j"])  # the transition's columns or rows are contiguous
@pytest.mark.parametrize("K", [16, 64, 128, 256, 512])
def test_transitions(K, one, passes=False):
    compiled = compile_transitions(K, one, passes)
    # a transition fills the registers: for some K addresses are spilled, once a tile. 3.7 and 3.8 compute more of them
    # before they wait
    assert compiled.spilled_bytes <= {128: most(48, v37=136, v38=112, v39=0), 256: most(0, v39=16)}.get(K, 0)
    assert not compiled.spilled_beside_products()
    assert compiled.count(r"\bmma\.|wgmma\.mma") and not compiled.unset_registers()


@pytest.mark.parametrize("K", [128, 256])
def test_transitions_that_pass_or_not(K):
    """With p_passes, of lengths on the device."""
    test_transitions(K, "stride_j", passes=True)


@pytest.mark.parametrize("K", [256, 512])
def test_transitions_by_mma(K):
    """The code has no barriers after wgmma; Triton 3.9 adds one for each product of more than 4 warps."""
    compiled = compile_transitions(K, "stride_j")
    assert compiled.count(r"\bmma\.sync") and not compiled.count("wgmma")


def test_a_tile_too_small_for_its_warps_is_rejected():
    with pytest.raises(triton.CompilationError) as caught:
        compile_scan(SENTINEL, SENTINEL, (1, 64), initial=False, num_warps=4)
    assert "at least one word for each thread" in "".join(traceback.format_exception(caught.value))


@pytest.mark.quick
def test_scan_over_nvshmem_links_the_device_library():
    compiled = compile_scan(PUT, PUT)
    # from 3.6 on NVSHMEM's own functions have 80 to 136 bytes of stack; for their call ptxas 13.4 (Triton 3.9) spills 7
    # registers
    bound = 0 if number(version_of("NVSHMEM")) < (3, 6) else 144 if VERSION < (3, 9) else 160
    assert compiled.spilled_bytes <= bound
    assert "nvshmemi_device_state_d" in compiled.ptx
    assert compiled.count(r"acquire") >= 4  # credit and arrival, first poll and loop


def compile_rails(rail, rounds=0, link=SENTINEL, round_link=SENTINEL, tile=(16, 128), adjoint=False, gated=False):
    """Compile an owner in the middle, with ``rail`` on both sides."""
    node, constants = channel_type(RAILS.value, RAILS.value, BK=tile[0], BV=tile[1], ADJOINT=adjoint)
    rails, of_rails = channel_type(rail.value, rail.value, num_tiles=8, BK=tile[0], BV=tile[1], ADJOINT=adjoint)
    arguments = pointers("p_state p_decay p_initial p_out", "*fp32")
    arguments |= pointers("p_gate p_delay p_times", "*i64")
    arguments |= pointers("stride_g stride_k", "i32") | {"node": node, "rail": rails}
    warps = scan_num_warps(tile)
    BD = max(1, 32 * warps // tile[0])
    of_own = dict(SLICE=8, BD=BD, LINK=link.value, ROUNDS=rounds, ROUND_LINK=round_link.value)
    kinds = dict(table="*i64", states="*fp32", states_arrived="*i64", decays="*fp32", decays_arrived="*i64")
    arguments["own"] = Slice(**kinds, **dict.fromkeys(of_own, "constexpr"))
    values = dict(
        node=constants,
        rail=of_rails,
        K=128,
        V=128,
        HAS_DECAY=True,
        HAS_INITIAL=True,
        own=of_own,
    )
    libraries = nvshmem.extern_libs() if PUT.value in (rail.value, round_link.value) else None
    kernel = gated_rails_kernel if gated else rails_kernel
    arguments = {name: kind for name, kind in arguments.items() if name in kernel.arg_names}
    return Compiled(kernel, arguments, values, num_warps=warps, extern_libs=libraries)


@pytest.mark.parametrize(
    "tile, adjoint, gated", [((1, 128), False, True), ((16, 128), True, False), ((32, 128), False, False)]
)
def test_rails(tile, adjoint, gated):
    """Registers leave space for many virtual ranks on a multiprocessor; no word is polled by weak loads."""
    for rail, rounds in ((SENTINEL, 0), (NONE, 0), (NONE, 3)):
        compiled = compile_rails(rail, rounds, tile=tile, adjoint=adjoint, gated=gated)
        # with one warp and 80 registers ptxas spills up to two addresses; so it does with 128 and Triton 3.7
        assert compiled.spilled_bytes <= (16 if tile[0] == 1 else most(0, v37=8)), compiled.registers
        # of a member, its decays, an owner, and of the chain or of each round, whose decays are another
        takes = 3 + (rail != NONE) + 2 * rounds
        loads = tile[0] * tile[1] // (128 * scan_num_warps(tile))  # of a thread, of four words each
        assert compiled.count(r"ld\.volatile\.global\.v4\.b32") >= loads * (takes - 1 - rounds)
        assert compiled.count(r"ld\.volatile\.global\.b64") == takes  # arrival words
        # no release after a tile's stores, which need none; only faults release
        faults = 1 + takes * 2 + (rail != NONE) + rounds * 2
        assert compiled.count(r"atom.*\.release|\.release\.sys|st\.release") == faults


def test_rails_over_nvshmem():
    for rail, rounds in ((PUT, 0), (NONE, 2)):
        compiled = compile_rails(rail, rounds, round_link=PUT)
        # around calls of NVSHMEM's functions
        assert compiled.spilled_bytes <= most(88, v37=0, v38=0, v39=112)
        assert "nvshmemi_device_state_d" in compiled.ptx
    assert compile_rails(SIGNAL, link=SIGNAL).count(r"atom.*\.release|\.release\.sys") > 4


@pytest.mark.quick
def test_a_builtin_that_has_changed_is_compiled_again(monkeypatch):
    def key():
        return triton.jit(gla_fwd.keys_kernel.fn).cache_key

    before = key()
    assert key() == before
    monkeypatch.setattr(blocks.exp2, "hash_attrs", blocks.cast.hash_attrs)
    assert key() != before


@triton.jit
def own_kernel(p_x, p_out, channel, D):
    d = tl.program_id(0) * channel.BV + tl.arange(0, channel.BV)[None, :]
    b_x = tl.load(p_x + d, mask=d < D, other=0.0)
    b_prev, _ = device.allscan(channel, tl.program_id(0), b_x, 1.0, tl.zeros([1, channel.BV], tl.float32))
    tl.store(p_out + d, b_prev, mask=d < D)


@pytest.mark.quick
def test_an_own_kernel_by_the_tool():
    """As in docs/testing_kernels.md; missing arguments are named."""
    channel, fixed = channel_type(BK=1, BV=512)
    arguments = {"p_x": "*fp32", "p_out": "*fp32", "channel": channel, "D": "i32"}
    found, wide = (tool.Compiled(own_kernel, arguments, {"channel": fixed}, num_warps=n) for n in (4, 1))
    assert found.spilled_bytes == 0 < found.registers < wide.registers and found.count(r"ld\.volatile") > 0
    for given, constants in ((arguments, {}), ({"channel": channel, "D": "i32"}, {"channel": fixed})):
        with pytest.raises(ValueError, match="the kernel's arguments are"):
            tool.Compiled(own_kernel, given, constants)
    with pytest.raises(TypeError, match="a triton.jit function"):
        tool.Compiled(print, arguments, {"channel": fixed})


@triton.jit
def own_wrong_kernel(p_x, p_out, channel, ROW: tl.constexpr, DECAYS: tl.constexpr):
    at = tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :]
    b_state = tl.load(p_x + (tl.arange(0, channel.BV) if ROW else at))
    b_decay = tl.load(p_x + tl.arange(0, channel.BK)) if DECAYS else 1.0
    b_prev, _ = device.allscan(channel, 0, b_state, b_decay, tl.zeros([channel.BK, channel.BV], tl.float32))
    tl.store(p_out + at, b_prev)


@pytest.mark.quick
def test_an_own_kernel_with_blocks_that_are_no_tiles():
    """Triton would broadcast them. tests/test_device.py has the other places of blocks."""
    channel, fixed = channel_type(BK=8, BV=64)
    arguments = {"p_x": "*fp32", "p_out": "*fp32", "channel": channel}
    for row, decays, words in (
        (1, 0, r"b_state must be a tile, float32 \[8, 64\] \(channel.BK, channel.BV\), got fp32 \[64\]"),
        (0, 1, r"b_decay must be a number or a block \[8 or 1, 64 or 1\] .* got \[8\]"),
    ):
        with pytest.raises(triton.CompilationError) as found:
            tool.Compiled(own_wrong_kernel, arguments, {"channel": fixed, "ROW": row, "DECAYS": decays})
        assert re.search(words, "".join(traceback.format_exception(found.value)))
    tool.Compiled(own_wrong_kernel, arguments, {"channel": fixed, "ROW": 0, "DECAYS": 0})


@pytest.mark.quick
def test_copy():
    arguments = pointers("p_dst p_src", "*fp32") | {"numel": "i32"}
    assert Compiled(copy_kernel, arguments, {"BLOCK": 2048}).spilled_bytes == 0


@pytest.mark.parametrize("kind, V", [("*bf16", 128), ("*fp16", 96), ("*fp32", 128)])
def test_merge(kind, V):
    arguments = pointers("p_o p_more", kind) | pointers("p_lse p_more_lse", "*fp32")
    arguments |= pointers("rows T H tokens", "i32")
    compiled = Compiled(merge_kernel, arguments, {"V": V, "BV": 128, "ROWS": 32})
    assert compiled.spilled_bytes == 0 and compiled.registers <= 128
    accesses = re.findall(r"(ld\.global|st\.global|bar\.sync)", compiled.ptx)
    first_store, barrier = accesses.index("st.global"), accesses.index("bar.sync")
    assert barrier < first_store and "ld.global" not in accesses[barrier:], accesses  # warps load the same lse


@pytest.mark.parametrize("kind", ["*bf16", "*fp32"])
def test_cross_entropy(kind):
    arguments = pointers("p_logits", kind) | pointers("p_labels", "*i64") | pointers("p_loss p_factor", "*fp32")
    arguments |= pointers("ignored", "i32") | pointers("scale smoothing z_loss", "fp32")
    constants = {"V": 151936, "GRAD": True, "BV": 4096}
    compiled = Compiled(cross_entropy_kernel, arguments, constants, num_warps=8)
    assert compiled.spilled_bytes == 0 and compiled.registers <= 64 and compiled.count(r"ld\.global\.v4") > 0


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_slots(write, transposed):
    """Copies between a pool of bfloat16 and states of 128 x 128, the pool as it is and transposed."""
    arguments = pointers("p_pool", "*bf16") | pointers("p_states", "*fp32") | pointers("p_slots", "*i32")
    arguments |= pointers("p_begun", "*i8") | pointers("p_fault p_record", "*i64") | pointers("num_slots", "i32")
    strides = "stride_slot stride_head stride_row stride_column"
    arguments |= pointers(strides, "i32") | pointers("N H", "i32")
    one = "stride_row" if transposed else "stride_column"
    constants = dict(R=128, C=128, WRITE=write, BN=4, BR=32, BC=64)
    compiled = Compiled(copy_slots_kernel, arguments, constants | {one: 1}, num_warps=4)
    assert compiled.spilled_bytes == 0 and compiled.registers <= 128


@pytest.mark.parametrize("kind", ["*i32", "*i64"])
@pytest.mark.parametrize("N", [4, 256, 4096])
def test_tables_from_lengths_on_the_device(N, kind):
    """Few and many requests: a program has fewer rows of the tables then."""
    arguments = pointers("p_boundaries p_cut", kind) | pointers("p_segments p_chunks p_counts", "*i32")
    arguments |= pointers("p_step p_own_step p_fault p_record", "*i64") | pointers("rank P N T NS NC", "i32")
    constants = dict(SEGMENT=4096, BT=64, BN=N, BP=4, BI=max(1, min(512, 4096 // N)))
    compiled = Compiled(device_tables.tables_kernel, arguments, constants, num_warps=max(4, min(16, N // 256)))
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("kind", ["*bf16", "*fp32"])
def test_cleared_padding(kind):
    arguments = pointers("p_x", kind) | pointers("p_counts", "*i32") | pointers("T", "i32")
    compiled = Compiled(device_tables.clear_padding_kernel, arguments, dict(W=4096, BR=16, BW=512), num_warps=4)
    assert compiled.spilled_bytes == 0 and compiled.registers <= 64 and compiled.count(r"st\.global\.v4") > 0


def fields_read(function) -> set[str]:
    """Return the fields of ``d`` that are read by a function and by those to which it passes ``d``."""
    found = set()
    for node in ast.walk(function.parse()):
        match node:
            case ast.Attribute(value=ast.Name(id="d"), attr=field):
                found.add(field)
            case ast.Call(func=ast.Name(id=name), args=args) if "d" in map(ast.unparse, args):
                found |= fields_read(function.fn.__globals__[name])
    return found


@pytest.mark.parametrize(
    "module", [delta_state, gdn, kda_fwd, kda_bwd, gla_fwd, gla_bwd, gla_strong, ssd_fwd, ssd_bwd, short_convolution]
)
def test_kernels_name_the_constants_that_they_read(module):
    kernels = {x for name, x in vars(module).items() if name.endswith("_kernel") and "d" in x.arg_names}
    for kernel in kernels:
        [names] = re.findall(r"^    d: tl\.constexpr,  # (.*)$", kernel.src, re.M)
        assert {*names.split()} == fields_read(kernel), kernel
    assert kernels


@pytest.mark.parametrize("kind", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", [gates.normalize_kernel, gates.normalize_back_kernel])
def test_norms(kernel, kind):
    arguments = {"p_factors": "*fp32", "rows": "i32"}
    arguments |= {name: kind for name in kernel.arg_names if name.startswith("p_") and name not in arguments}
    compiled = Compiled(kernel, arguments, {"D": 128, "BD": 128, "ROWS": 16})
    assert compiled.spilled_bytes == 0 and compiled.registers <= 128
    assert compiled.count(r"ld\.global\.v4\.b32") and not compiled.count(r"(ld|st)\.global\.b16")


@pytest.mark.parametrize(
    "kernel, W, K, kind, bounded",
    pairs([gates.gate_kernel, gates.gate_back_kernel], [(4096, 128), (32, 1)], ["*bf16", "*fp32"], [False, True]),
)
def test_gates(kernel, W, K, kind, bounded):
    arguments = pointers("p_A_log p_dt_bias p_g p_dg p_parts", "*fp32") | pointers("p_x p_dx", kind)
    arguments |= dict(rows="i32", bound="fp32")
    BW = min(128, W)
    constants = dict(W=W, K=K, BW=BW, ROWS=2048 // BW, BLOCKS=16, BOUNDED=bounded)
    arguments, constants = ({n: x for n, x in y.items() if n in kernel.arg_names} for y in (arguments, constants))
    compiled = Compiled(kernel, arguments, constants)
    assert compiled.spilled_bytes == 0 and compiled.registers <= 128
    assert compiled.count(r"ld\.global\.v4\.b32") and not compiled.count(r"(ld|st)\.global\.b16")


def test_sums_of_gates():
    arguments = pointers("p_parts p_dA_log p_ddt_bias", "*fp32") | {"parts": "i32"}
    compiled = Compiled(gates.sums_kernel, arguments, {"W": 4096, "K": 128, "BN": 16, "BK": 128})
    assert compiled.spilled_bytes == 0 and not compiled.count(r"\b(atom|red)\.")


@pytest.mark.parametrize("kind", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", [short_convolution.conv_kernel, short_convolution.conv_back_kernel])
def test_convolutions(kernel, kind):
    arguments = pointers("p_first p_second p_dfirst p_dsecond p_parts", "*fp32")
    arguments |= pointers("p_x p_weight p_bias p_y p_dy p_dx", kind) | {"L": "i32", "blocks": "i32"}
    arguments = {n: x for n, x in arguments.items() if n in kernel.arg_names}
    constants = dict(d=short_convolution.ConvSizes(N=3, C=12288, PIECES=2, SILU=True, RUNS=1, BC=256))
    compiled = Compiled(kernel, arguments, constants, num_warps=2)
    most = 136 if kernel is short_convolution.conv_kernel else 248
    assert compiled.spilled_bytes == 0 and compiled.registers <= most
    assert compiled.count(r"ld\.global\.v[24]\.b32") and not compiled.count(r"st\.global\.b16")
    assert not compiled.count(r"\b(atom|red)\.")


@pytest.mark.parametrize("back", [False, True])
def test_edges_of_convolutions(back):
    arguments = pointers("p_first p_second", "*fp32") | {"p_x": "*bf16", "L": "i32"}
    sizes = short_convolution.ConvSizes(N=3, C=12288, PIECES=2, SILU=True, RUNS=1, BC=256)
    compiled = Compiled(short_convolution.conv_edges_kernel, arguments, dict(BACK=back, d=sizes))
    assert compiled.spilled_bytes == 0


def test_sums_of_convolutions():
    arguments = pointers("p_parts", "*fp32") | pointers("p_dweight p_dbias", "*bf16") | {"parts": "i32"}
    sizes = short_convolution.ConvSizes(N=3, C=12288, PIECES=2, SILU=True, RUNS=1, BC=256)
    compiled = Compiled(short_convolution.conv_sums_kernel, arguments, dict(BN=32, d=sizes))
    assert compiled.spilled_bytes == 0 and not compiled.count(r"\b(atom|red)\.")


@pytest.mark.parametrize("kernel, names", [(reverse_kernel, "p_x p_out"), (fold_kernel, "p_x p_reversed p_out")])
def test_triangles(kernel, names):
    """Accesses have 16 bytes, with tokens and heads at multiples of at least 16 bytes."""
    constants = {"W": 192, "BW": 256, "ROWS": 16, "MANY": 2, "WITHOUT_LAST": True, "n": 8192, "H": 16, "blocks": 2}
    constants |= {name: 16 * 192 for name in kernel.arg_names if name.endswith(("batch", "block", "token"))}
    constants |= {name: 192 for name in kernel.arg_names if name.endswith("head")}
    compiled = Compiled(kernel, pointers(names, "*bf16") | {"shift": "i32"}, constants)
    assert compiled.spilled_bytes == 0 and compiled.registers <= 128
    assert compiled.count(r"ld\.global\.v4\.b32") >= len(names.split()) - 1 and compiled.count(r"ld\.global\.b16") == 0


@pytest.mark.slow(but="64-64")
@pytest.mark.parametrize(
    "K, V, dtype, keeps",
    [
        (64, 64, torch.float32, [False]),
        (128, 128, torch.bfloat16, [False, True]),
        (256, 256, torch.bfloat16, [False, True]),
        (64, 128, torch.float16, [False]),
        (32, 32, torch.bfloat16, [False]),
        (512, 16, torch.float32, [False]),
    ],
)
def test_gla_kernels(K, V, dtype, keeps, monkeypatch):
    """All kernels of forward and backward compile with zeco_gla's block sizes on a GPU. keeps: whether the chunks'
    operands are saved for backward."""
    seen = []
    more = most(64, v37=136, v38=136, v39=384) if dtype == torch.bfloat16 and K > 32 else None
    kernels = {
        gla_fwd.keys_kernel,
        gla_fwd.operands_kernel,
        gla_fwd.state_kernel,
        gla_fwd.state_passing_kernel,
        gla_fwd.final_kernel,
        gla_fwd.output_kernel,
        gla_bwd.da_kernel,
        gla_bwd.grad_kernel,
        gla_strong.strong_decay_kernel,
        gla_strong.strong_decay_grad_kernel,
        *([gla_bwd.value_grad_kernel] if K > 128 else []),
    }
    for kept in keeps:
        launch_gla(K, V, dtype, kept, monkeypatch)
        assert {kernel for kernel, *_ in Launches.made} == kernels
        for kernel, compiled in compiled_launches(more_on_sm_100=None if kept else more, seen=seen):
            if kernel not in (gla_fwd.keys_kernel, gla_fwd.state_passing_kernel, gla_fwd.final_kernel):
                assert compiled.count(r"\bmma\.|wgmma\.mma"), f"{kernel} uses no matrix instruction"


@pytest.mark.slow(but="128-8")
@pytest.mark.parametrize(
    "H, G, P, N, dtype, z, num_sms, most_spilled",
    [
        (128, 8, 64, 128, torch.bfloat16, False, 1, 160),  # programs of two heads fill one multiprocessor
        (80, 1, 64, 128, torch.bfloat16, True, 132, 240),
        (64, 64, 128, 128, torch.bfloat16, False, 132, 400),
        (6, 2, 96, 256, torch.bfloat16, False, 132, 900),
        (8, 2, 64, 128, torch.float32, True, 132, 2500),
        (4, 4, 64, 128, torch.float32, False, 132, 1600),
        (3, 1, 16, 16, torch.float16, False, 132, 64),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_ssd_kernels(H, G, P, N, dtype, z, num_sms, most_spilled, monkeypatch):
    """All kernels of forward and backward compile with zeco_ssd's block sizes on a GPU and fit its shared memory."""
    launch_ssd(H, G, P, N, dtype, monkeypatch, z, channels=z, num_sms=num_sms)
    products = {
        ssd_fwd.ssd_state_kernel,
        ssd_fwd.ssd_output_kernel,
        ssd_bwd.ssd_adjoint_kernel,
        ssd_bwd.ssd_gradients_kernel,
        ssd_bwd.ssd_pairs_kernel,
    }
    products |= {ssd_fwd.ssd_scores_kernel} if G < H else set()
    others = {ssd_fwd.ssd_steps_kernel, ssd_bwd.ssd_step_grad_kernel, ssd_bwd.ssd_sums_kernel}
    others |= {gla_fwd.state_passing_kernel, gla_fwd.final_kernel}
    assert {kernel for kernel, *_ in Launches.made} == products | others
    for kernel, compiled in compiled_launches():
        assert kernel not in products or compiled.count(r"\bmma\.|wgmma\.mma"), kernel
        assert compiled.spilled_bytes <= most_spilled, (kernel, compiled.spilled_bytes)
        if VERSION == (3, 6) and kernel in products and compiled.options["num_stages"] == 1:
            assert not compiled.lost_operands(), kernel
        if (
            kernel is ssd_bwd.ssd_pairs_kernel and dtype != torch.bfloat16
        ):  # contracted, a difference of 0 would not be 0
            assert compiled.count(r"sub\.rn\.f32"), kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "K, V, scalar, most_spilled",
    [(128, 128, False, most(16, v38=24)), (128, 128, True, most(0, v39=8)), (256, 512, True, most(96, v39=152))],
    ids=["KDA", "Gated DeltaNet", "Gated DeltaNet, K=256"],
)
def test_delta_kernels(K, V, scalar, most_spilled, monkeypatch):
    """All kernels between the chunks compile, forward and backward, with a GPU's block sizes."""
    seen, more = set(), most(216, v37=280, v38=296, v39=304)
    launch = functools.partial(launch_states, K, V, scalar)
    for kernel, compiled in compiled_for_both(launch, monkeypatch, most_spilled, more):
        seen.add(kernel)
        assert compiled.count(r"\bmma\.|wgmma\.mma"), kernel
    kernels = {
        delta_state.summary_kernel,
        delta_state.delta_state_passing_kernel,
        delta_state.delta_states_kernel,
        delta_state.adjoint_kernel,
    }
    assert seen == kernels | ({delta_state.scalar_gradient_kernel} if scalar else set())


def launch_states(K, V, scalar, monkeypatch, capability):
    """Record in Launches the launches of both passes over the states of chunks."""
    record_launches(monkeypatch, delta_passes)
    dtype, H, T = torch.bfloat16, 4, 130
    with_gpu_blocks(monkeypatch, capability)
    layout = Layout([TokenRange(0, T)], 1, 64, "cpu")  # in the middle of a sequence
    device = torch.device("cpu")
    carriers = {(AllScanCarrier, True): NoScan()}
    comm = types.SimpleNamespace(size=3, device=device, attributes=carriers)
    states = delta_passes.StatePass(comm, layout, DeltaShape(1, H, H, K, V, dtype, scalar))
    narrow, wide = (torch.zeros(1, T, H, width, dtype=dtype) for width in (K, V))
    sums = torch.zeros((1, T, H) if scalar else (1, T, H, K))
    outside = torch.zeros(1, H, K, V)
    kept = saved_states_for(states)
    states.forward(ChunkOperands(narrow, narrow, wide, sums), outside, outside, kept)
    between, d, scores = (
        ChunkOperands(narrow, narrow, wide, sums, narrow),
        LocalGrads(wide, wide),
        torch.zeros(1, T, H, 64, dtype=dtype),
    )
    _, _, *incoming = states.turn(between, d if scalar else LocalGrads(wide, None, scores), outside, kept, 0.1)
    states.backward(between, d, IncomingStates(*incoming), outside, 0.1)
    if scalar:
        chunks = torch.zeros(layout.num_chunks, H, K, V, dtype=dtype)
        states.gradients(between, wide, d, (chunks, chunks), 0.1)


@pytest.mark.slow(but="Gated DeltaNet, K=V=32")
@pytest.mark.parametrize(
    "scalar, K, V, dtype",
    [
        (False, 128, 128, torch.bfloat16),
        (True, 128, 128, torch.bfloat16),
        (False, 256, 64, torch.bfloat16),
        (True, 64, 256, torch.bfloat16),
        (True, 32, 32, torch.bfloat16),
        (True, 32, 64, torch.bfloat16),
        (False, 128, 128, torch.float32),
        (True, 128, 128, torch.float32),
    ],
    ids=[
        "KDA",
        "Gated DeltaNet",
        "KDA, K=256, V=64",
        "Gated DeltaNet, K=64, V=256",
        "Gated DeltaNet, K=V=32",
        "K=32, V=64",
        "KDA in float32",
        "Gated DeltaNet in float32",
    ],
)
def test_delta_chunk_kernels(scalar, K, V, dtype, monkeypatch):
    """Our own chunk kernels compile; no product reads unset registers."""
    if scalar:
        pipelined = (
            gdn.scalar_summary_kernel,
            gdn.scalar_states_kernel,
            gdn.scalar_adjoint_kernel,
        )
        ours = *pipelined, gdn.scalar_operands_kernel, gdn.scalar_gradients_kernel
    else:
        pipelined = (kda_fwd.output_kernel,)
        ours = *pipelined, kda_fwd.operands_kernel, kda_bwd.pairs_kernel
        ours += (kda_bwd.gradient_kernel,)

    def launch(patch, capability):
        launch_chunks(K, V, dtype, scalar, patch, capability)
        Launches.made = [launched for launched in Launches.made if launched[0] in ours]

    seen = set()
    for kernel, compiled in compiled_for_both(launch, monkeypatch, more_on_sm_100=360):
        seen.add(kernel)
        assert compiled.count(r"\bmma\.|wgmma\.mma"), kernel
        if VERSION == (3, 6) and kernel not in pipelined:
            assert not compiled.lost_operands(), kernel
        if VERSION == (3, 6) and kernel is gdn.scalar_gradients_kernel:
            # with loops over blocks of values written out 1,288 in float32, whose products have three parts
            # in bfloat16 400 of addresses and sums over the columns; one program for each 64 columns spilled 160
            assert compiled.spilled_bytes <= (640 if dtype == torch.float32 else 400), compiled.spilled_bytes
    assert seen == set(ours)


@pytest.mark.slow(but="128-128-dtype0")
@pytest.mark.parametrize(
    "K, V, dtype", [(128, 128, torch.bfloat16), (256, 64, torch.bfloat16), (128, 128, torch.float32)]
)
def test_states_beside_outputs(K, V, dtype, monkeypatch):
    """With recompute=False forward of Gated DeltaNet stores outputs and states in one kernel."""

    def launch(patch, capability):
        launch_chunks(K, V, dtype, True, patch, capability, saves=True)
        Launches.made = [launched for launched in Launches.made if launched[0] is gdn.scalar_states_kernel]

    bound = 64 if dtype == torch.bfloat16 else most(320, v38=400, v39=400)
    assert len(list(compiled_for_both(launch, monkeypatch, bound, more_on_sm_100=360))) == 1


@pytest.mark.parametrize("link", [SENTINEL, SIGNAL, PUT])
def test_scans_compile_for_an_a100(link):
    for adjoint in (False, True):
        assert compile_scan(link, link, (32, 128), adjoint=adjoint, num_warps=4, capability=80).spilled_bytes == 0


RULES = ["GLA", "KDA", "Gated DeltaNet", "SSD", "simple GLA"]


def launch_rule(rule, K, V, dtype, capability, monkeypatch, saves=False):
    """Record in Launches the launches of both passes of a rule on a GPU of this compute capability."""
    if rule == "GLA":
        launch_gla(K, V, dtype, saves, monkeypatch, capability=capability)
    elif rule in ("SSD", "simple GLA"):
        G = 8 if rule == "SSD" else 64  # groups of heads with the same B and C; none
        launch_ssd(64, G, V, K, dtype, monkeypatch, capability=capability)
    else:
        launch_chunks(K, V, dtype, rule == "Gated DeltaNet", monkeypatch, capability, saves)


def products_fit(capability, bound):
    """Compile the recorded launches; each fits the GPU's shared memory and spills at most ``bound`` bytes a thread, the
    kernel of KDA's chunks of strong decay 400."""
    products = 0
    for kernel, compiled in compiled_launches(400, capability=capability):
        products += compiled.count(r"\bmma\.sync") > 0
        assert compiled.options.get("STRONG") or compiled.spilled_bytes <= bound, (kernel, compiled.spilled_bytes)
    assert products >= 5


@pytest.mark.slow(but="KDA-False")
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_fit_an_a100(rule, saves, monkeypatch):
    launch_rule(rule, 128, 128, torch.bfloat16, 80, monkeypatch, saves)
    products_fit(80, 152)


@pytest.mark.slow(but="120-Gated DeltaNet")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("capability", [89, 120])
def test_kernels_fit_99_kib(rule, capability, monkeypatch):
    """Of GPUs of consumers, as their drivers report it."""
    launch_rule(rule, 128, 128, torch.bfloat16, capability, monkeypatch)
    products_fit(capability, 152)


@pytest.mark.slow(but="64-Gated DeltaNet")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("K, V", [(16, 16), (64, 64), (128, 32), (32, 128)])
def test_smaller_states_fit_99_kib(rule, K, V, monkeypatch):
    launch_rule(rule, K, V, torch.bfloat16, 120, monkeypatch)
    products_fit(120, 400)


def test_products_that_ptxas_gets_wrong_are_found():
    """With 16 channels at a time this kernel's operands have rows of 64 and of 128 bytes."""
    if VERSION != (3, 6):
        pytest.skip("which products are wrong differs with ptxas")
    names = "p_q p_k p_weights p_states p_dstates p_v_new p_do p_r p_pairs p_dq p_dk"
    arguments = pointers(names, "*bf16") | pointers("p_g p_beta p_parts p_dg p_dbeta", "*fp32")
    arguments |= pointers("p_chunks p_strong", "*i32") | dict(scale="fp32")
    d = delta_state.DeltaSizes(H=32, HK=32, K=128, V=128, BT=64, BJ=16, BV=128)
    compiled = Compiled(kda_bwd.gradient_kernel, arguments, dict(d=d, REST=False, PRECISION="bf16"))
    assert compiled.lost_operands()


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
    """The library of functions called by kernels links, and gives the same code as NVSHMEM's whole library."""
    arguments = pointers("p_dst p_src", "*fp32") | pointers("p_signal p_out", "*i64") | {"nbytes": "i64", "op": "i32"}
    libraries = nvshmem.extern_libs()
    assert os.path.getsize(libraries[nvshmem.DEVICE_LIBRARY]) < os.path.getsize(nvshmem.device_library()) / 20
    whole = {nvshmem.DEVICE_LIBRARY: nvshmem.device_library()}
    compiled, of_all = (Compiled(every_function_kernel, arguments, {}, extern_libs=x) for x in (libraries, whole))
    assert "nvshmemi_device_state_d" in compiled.ptx and compiled.ptx == of_all.ptx
    assert not compiled.count(r"\.extern \.func .*nvshmem")  # no unresolved symbol
