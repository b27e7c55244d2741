"""The kernels of scans over segments compile for sm_90 without a GPU, and round as documented."""

from __future__ import annotations

import pytest

from allscan.base.tiling import transition_tile
from allscan.bindings import nvshmem_device as nvshmem
from allscan.scan.segment_launches import dense_blocks, segments_ahead
from allscan.shmem_kernels.links import NONE, PUT, SENTINEL, SIGNAL
from allscan.shmem_kernels.segments import (
    INITIAL,
    NOTHING,
    delta_segments_kernel,
    dense_segments_kernel,
    gated_segments_kernel,
    outer_products_kernel,
    row_sums_kernel,
    segments_kernel,
)
from allscan.tools.compiled import channel_type
from support.launches import most
from support.sm90 import Compiled

pytestmark = pytest.mark.cpu

POINTERS = "p_states p_external p_incoming p_outgoing"


def compiled(kernel, factor, tile, links, values, numbers, **options):
    channel, constants = channel_type(*(link.value for link in links), BK=tile[0], BV=tile[1])
    arguments = dict.fromkeys([*POINTERS.split(), factor], "*fp32") | dict.fromkeys(numbers, "i32")
    values = {"channel": constants, "MATRICES": 32, "V": 128, "DESCENDING": False} | values
    libraries = nvshmem.extern_libs() if PUT in links else None
    return Compiled(kernel, arguments | {"channel": channel}, values, extern_libs=libraries, **options)


@pytest.mark.parametrize(
    "tile, num_warps, links, n",
    [
        ((1, 128), 1, (NONE, NONE), 9),
        ((16, 128), 4, (SENTINEL, SENTINEL), 9),
        ((32, 128), 8, (SENTINEL, SENTINEL), 8),
        ((32, 128), 8, (SENTINEL, SENTINEL), 9),
        ((32, 128), 8, (SENTINEL, NONE), 1),  # the last rank's ascending scan in the zigzag layout
        ((64, 128), 8, (SIGNAL, NONE), 9),
        ((16, 128), 4, (PUT, PUT), 9),
    ],
)
def test_segments(links, tile, num_warps, n):
    one = n == 1
    external, ahead = NOTHING if one else INITIAL, segments_ahead(n, tile, num_warps)
    values = {"K": 128, "HAS_DECAY": True, "EXTERNAL": external.value, "stride_k": 1, "AHEAD": ahead, "MORE": n > ahead}
    found = compiled(segments_kernel, "p_decays", tile, links, values, ("n", "stride_g"), num_warps=num_warps)
    assert found.spilled_bytes <= (most(0, v39=112) if PUT in links else 0)
    small = num_warps == 1 or one  # in others the states that are loaded ahead fill the registers
    assert found.registers <= (most(80, v37=83, v38=87, v39=87) if small else most(250, v37=254, v38=255, v39=255))
    assert not one or found.shared < 1 << 10
    if SENTINEL == links[0]:  # words are polled in fours
        assert found.count(r"ld\.volatile\.global\.v4\.b32") > 0 == found.count(r"ld\.volatile\.global\.b32")
    # each step rounds once, with all links
    assert found.count(r"fma\.rn\.f32") > 0 and found.count(r"\bmul\.(rn\.)?f32") == 0


@pytest.mark.slow(but="16")
@pytest.mark.parametrize("K", [16, 64, 128, 256])
def test_dense_segments(K):
    blocks, tile = dense_blocks(transition_tile(K)[0]), transition_tile(K)
    values = {"K": K, "EXTERNAL": NOTHING.value, "stride_j": 1} | {name: blocks.pop(name) for name in ("BJ", "STAGES")}
    found = compiled(
        dense_segments_kernel,
        "p_transitions",
        tile,
        (SENTINEL, SENTINEL),
        values,
        ("n", "stride_i"),
        **blocks,
    )
    assert not found.spilled_beside_products() and not found.lost_operands() and not found.unset_registers()


def test_gradients_of_factors():
    pointers = dict.fromkeys(("p_x", "p_y"), "*fp32")
    for product in (False, True):
        Compiled(
            row_sums_kernel, pointers | {"p_sums": "*fp32"}, {"W": 128, "BW": 128, "PRODUCT": product}, num_warps=1
        )
    values = {"K": 128, "V": 128, "BK": 64, "BV": 32}
    assert Compiled(outer_products_kernel, pointers | {"p_out": "*fp32"}, values).spilled_bytes == 0


@pytest.mark.parametrize("tile, num_warps", [((32, 128), 8), ((32, 64), 4), ((8, 16), 1)])
@pytest.mark.parametrize("links", [(NONE, NONE), (SENTINEL, SENTINEL)])
def test_gated_segments(links, tile, num_warps):
    channel, constants = channel_type(*(link.value for link in links), BK=tile[0], BV=tile[1], ADJOINT=True)
    arguments = dict.fromkeys("p_state p_segment_gate p_edge_gate p_outside p_final p_outgoing".split(), "*fp32")
    arguments |= dict.fromkeys(("p_segments", "p_segments_of_states"), "*i32") | {"channel": channel}
    values = {"channel": constants, "p_external": None, "H": 16, "K": tile[0] * 4, "V": tile[1], "STATES": 2, "HALF": 0}
    found = Compiled(gated_segments_kernel, arguments, values | {"REVERSE": True}, num_warps=num_warps)
    assert found.spilled_bytes == 0 and found.registers <= most(168, v37=180, v38=172, v39=178)
    assert found.count(r"fma\.rn\.f32") > 0 and found.count(r"\bmul\.(rn\.)?f32") == 0
    assert found.count(r"cp\.async") > 0  # states are loaded ahead


@pytest.mark.slow(but=("16", "64-False", "128-True"))
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("K", [16, 64, 128, 256])
def test_delta_segments(K, reverse):
    tile = transition_tile(K)
    blocks = dense_blocks(tile[0])
    channel, constants = channel_type(SENTINEL.value, SENTINEL.value, BK=tile[0], BV=tile[1], ADJOINT=reverse)
    arguments = dict.fromkeys("p_transition p_local p_outside p_incoming p_outgoing".split(), "*fp32")
    arguments |= dict.fromkeys(("p_segments", "p_segments_of_states"), "*i32") | {"channel": channel}
    values = {"channel": constants, "p_external": None, "H": 16, "K": K, "V": 128, "STATES": 2, "HALF": 1}
    values |= {name: blocks.pop(name) for name in ("BJ", "STAGES")} | {"REVERSE": reverse}
    found = Compiled(delta_segments_kernel, arguments, values, **blocks)
    assert found.spilled_bytes <= 64 and not found.spilled_beside_products()
    assert not found.lost_operands() and not found.unset_registers()
