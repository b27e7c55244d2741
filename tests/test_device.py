"""All-Scan inside a user's own kernels."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import traceback

import pytest
import torch
import triton
import triton.language as tl

import allscan
from allscan import device
from support.segments import bits
from support.values import error, late, raised, value_or_error

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

recv, send = device.recv, device.send


@triton.jit
def dense_kernel(p_state, p_transition, p_initial, p_out, channel, V, K: tl.constexpr):
    """R_{p+1} = A_p R_p + S_p with a dense A [K, K]: columns of the state are sent whole, rows cannot be split."""
    tile = tl.program_id(0)
    NV = (V + channel.BV - 1) // channel.BV
    head, v = tile // NV, tile % NV * channel.BV + tl.arange(0, channel.BV)
    k = tl.arange(0, K)
    offsets = head * K * V + k[:, None] * V + v[None, :]
    inside = (v < V)[None, :]
    b_transition = tl.load(p_transition + head * K * K + k[:, None] * K + k[None, :])  # [K, K]
    b_state = tl.load(p_state + offsets, mask=inside, other=0.0)  # [K, BV]
    b_first = tl.load(p_initial + offsets, mask=inside, other=0.0)
    b_prev = recv(channel, tile, b_first)
    send(channel, tile, tl.dot(b_transition, b_prev, input_precision="ieee") + b_state)
    tl.store(p_out + offsets, b_prev, mask=inside)


def dense_case(comm, protocol):
    heads, K, V = 2, 16, 40
    scan = allscan.AllScan(comm, (heads, K, V), tile=(K, 16), protocol=protocol)
    worst = 0.0
    for epoch in range(6):
        generator = torch.Generator().manual_seed(epoch)
        states = [torch.randn(heads, K, V, generator=generator) for _ in range(comm.size)]
        transitions = [torch.randn(heads, K, K, generator=generator) / 4 for _ in range(comm.size)]
        initial = torch.randn(heads, K, V, generator=generator)
        expected = initial.double()
        for state, transition in zip(states[: comm.rank], transitions):
            expected = transition.double() @ expected + state
        late(epoch, comm.rank, 5)
        mine = (x.to(comm.device) for x in (states[comm.rank], transitions[comm.rank], initial))
        out = torch.full((heads, K, V), float("nan"), device=comm.device)
        scan.launch(dense_kernel, (scan.num_tiles,), *mine, out, scan.channel(), V, K, num_warps=2)
        worst = max(worst, error(out, expected))
    return worst


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_dense_combine_between_recv_and_send(run, size, protocol):
    assert max(run(size, dense_case, protocol)) < 1e-5


@triton.jit
def tiles_kernel(p_state, p_out, channel):
    """The exclusive sum over ranks, a tile a program."""
    tile = tl.program_id(0)
    i, j = tl.arange(0, channel.BK)[:, None], tl.arange(0, channel.BV)[None, :]
    at = (tile * channel.BK + i) * channel.BV + j
    b_prev, _ = device.allscan(
        channel, tile, tl.load(p_state + at), 1.0, tl.zeros([channel.BK, channel.BV], tl.float32)
    )
    tl.store(p_out + at, b_prev)


TILES = dict(shape=(4 * 2, 32), tile=(2, 32))


@triton.jit
def segments_kernel(p_states, p_decays, p_incoming, p_outgoing, channel, n, K: tl.constexpr, V: tl.constexpr):
    """Incoming states of this rank's n segments, and the outgoing state; a tile of whole rows a program."""
    tile = tl.program_id(0)
    i, j = tile * channel.BK + tl.arange(0, channel.BK), tl.arange(0, V)
    at = i[:, None] * V + j[None, :]
    b_prev = recv(channel, tile, tl.zeros([channel.BK, V], tl.float32))
    for s in range(n):
        tl.store(p_incoming + s * K * V + at, b_prev)
        b_prev = device.fold(tl.load(p_states + s * K * V + at), tl.load(p_decays + s * K + i)[:, None], b_prev)
    send(channel, tile, b_prev)
    tl.store(p_outgoing + at, b_prev)


def segments_case(comm, counts):
    """Return segments' incoming states and the outgoing one: [by an own kernel, by allscan_segments]."""
    K, V = TILES["shape"]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(sum(counts), K, V, generator=generator)
    decays = torch.rand(sum(counts), K, generator=generator)
    states[torch.rand(states.shape, generator=generator) < 0.2] = -0.0
    decays[torch.rand(decays.shape, generator=generator) < 0.2] = 0.0
    begin, n = sum(counts[: comm.rank]), counts[comm.rank]
    mine = [x[begin : begin + n].to(comm.device) for x in (states, decays)]
    scan = allscan.AllScan(comm, **TILES)
    found = [torch.full((many, K, V), float("nan"), device=comm.device) for many in (n, 1)]
    for epoch in range(3):
        late(epoch, comm.rank, 5)
        scan.launch(segments_kernel, (scan.num_tiles,), *mine, *found, scan.channel(), n, K, V, num_warps=1)
    comm.barrier()
    expected = allscan.allscan_segments(*mine, comm=comm)
    return [[bits(x) for x in some] for some in ((found[0], found[1][0]), expected)]


@pytest.mark.parametrize("size, counts", [(1, [7]), (2, [3, 4]), (4, [1, 3, 2, 1])])
def test_segments_in_an_own_kernel(run, size, counts):
    """With the step of allscan_segments, an own kernel gets its bits, on any number of ranks."""
    [(_, whole)] = run(1, segments_case, [7])
    parts = run(size, segments_case, counts)
    for own, packages in parts:
        assert all(torch.equal(a, b) for a, b in zip(own, packages, strict=True))
    assert torch.equal(torch.cat([own[0] for own, _ in parts]), whole[0])
    assert torch.equal(parts[-1][0][1], whole[1])


def misuse_case(group):
    """Return [(expected type, a text, the error)] of launches and scans with wrong grids and channels."""
    with allscan.Communicator(group, timeout=60) as comm:
        scan, other, closed = (allscan.AllScan(comm, TILES["shape"], tile=TILES["tile"]) for _ in range(3))
        state = torch.ones(TILES["shape"], device=comm.device)
        out = torch.full_like(state, -1.0)
        channel, of_closed, fwd_epoch = scan.channel(), closed.channel(), scan.fwd_epoch()
        closed.close()

        def launch(grid=(4,), given=channel, on=scan, **named):
            on.launch(tiles_kernel, grid, state, out, *(() if named else (given,)), num_warps=1, **named)

        grids = (4, torch.tensor(4), "4", [4], (), (1,) * 4), ((0,),), ((4.0,), (True,))
        no_tuple, too_small, no_integers = ([raised(launch, grid) for grid in some] for some in grids)
        method, closed_one = "got the method itself: call it", "this AllScan is closed"
        found = [
            *(("TypeError", "grid must be a tuple of one to three integers", answer) for answer in no_tuple),
            *(("ValueError", "at least 1", answer) for answer in too_small),
            *(("TypeError", "integer", answer) for answer in no_integers),
            ("TypeError", method, raised(launch, given=scan.channel)),
            ("TypeError", method, raised(launch, channel=scan.channel)),
            ("TypeError", method, raised(scan.scan, state, channel=scan.channel)),
            ("TypeError", "expected a Channel from AllScan.channel(), got AllScan", raised(launch, given=scan)),
            ("ValueError", "must come from this AllScan", raised(launch, given=other.channel())),
            ("ValueError", "must come from this AllScan", raised(launch, channel=of_closed)),
            ("ValueError", "from this AllScan and have the direction", raised(scan.scan, state, channel=of_closed)),
            ("RuntimeError", closed_one, raised(launch, given=of_closed, on=closed)),
            ("RuntimeError", closed_one, raised(closed.channel)),
            ("RuntimeError", closed_one, raised(closed.channel, adjoint_of=fwd_epoch)),
            ("TypeError", "a triton.jit function, got <function", raised(scan.launch, misuse_case, (4,))),
        ]
        launched = scan.epochs, other.epochs
        launch(lambda constants: (4,), channel=channel)
        launch((4, 1), given=channel)
        assert torch.equal(out, comm.rank * state)
        comm.barrier()
        return found, launched


def test_wrong_grids_and_channels(run):
    """Every rank raises before a launch: for an int as grid; for the method or the AllScan in place of the channel; for
    the channel of another AllScan, or of a closed one."""
    for found, launched in run(2, misuse_case):
        for kind, text, answer in found:
            assert answer is not None and answer[0] == kind and text in answer[1], (text, answer)
        assert launched == ((0, 0), (0, 0))


def direction_case(group):
    with allscan.Communicator(group) as comm, allscan.AllScan(comm, (2, 8)) as scan:
        found = []
        for reverse in (False, True):
            fwd_epoch = scan.fwd_epoch()
            scan.channel(reverse, fwd_epoch=fwd_epoch)
            found.append(raised(scan.channel, reverse, adjoint_of=fwd_epoch))
            scan.channel(not reverse, adjoint_of=fwd_epoch)
            scan.channel(not reverse, fwd_epoch=fwd_epoch)
            scan.channel(reverse, adjoint_of=fwd_epoch)
            copies = fwd_epoch.clone()  # an unknown forward epoch
            scan.channel(reverse, adjoint_of=copies)
        return found, raised(scan.channel, fwd_epoch=3)


@pytest.mark.cpu
@pytest.mark.parametrize("size", [1, 2])
def test_an_adjoint_in_the_direction_of_its_forward_launch(run, size):
    """The forward epoch of a launch is rejected as adjoint_of in the same direction."""
    for found, number in run(size, direction_case):
        for reverse, answer in zip((False, True), found):
            assert answer is not None and answer[0] == "ValueError", answer
            assert f"a launch with reverse={reverse}" in answer[1] and f"reverse={not reverse}, adj" in answer[1]
        assert number[0] == "TypeError" and "a forward epoch must be a tensor" in number[1]


def left_out_case(group, ranks, debug):
    """Launch a grid that is too small on some ranks; then resync() and scan."""
    with allscan.Communicator(group, timeout=3.0, debug=debug) as comm:
        scan = allscan.AllScan(comm, TILES["shape"], tile=TILES["tile"])
        state = torch.ones(TILES["shape"], device=comm.device)
        out = torch.full_like(state, -1.0)
        for _ in range(2):
            scan.launch(tiles_kernel, (4,), state, out, scan.channel(), num_warps=1)
        grid = (3,) if comm.rank in ranks else (4,)
        launch = functools.partial(scan.launch, tiles_kernel, grid, state, out, channel=scan.channel(), num_warps=1)
        found = [raised(launch), raised(scan.scan, state), raised(comm.barrier)]
        comm.resync()
        scan.launch(tiles_kernel, (4,), state, out, scan.channel(), num_warps=1)
        return found, torch.equal(out, comm.rank * state)


@pytest.mark.slow(but=("ranks0", "ranks1-True", "ranks2"))
@pytest.mark.parametrize("debug", [True, pytest.param(False, marks=pytest.mark.cpu)])
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_a_grid_that_leaves_tiles_out(run, ranks, debug):
    """The launch returns, with old values in missing tiles. It is an error in debug mode, and on CPU ranks always;
    ranks that wait for such a tile get an error, too."""
    text = "tiles_kernel with a grid of (3,) has not handled each of the 4 tiles exactly once"
    for rank, (found, good) in enumerate(run(2, left_out_case, ranks, debug)):
        assert good and found[-1] is not None
        if rank in ranks:
            kind, message = found[0]
            assert kind == "AllScanOutOfStep" and text in message and "but tile 3 has 2" in message, found
        else:  # the first rank waits in debug mode and in the barrier only
            heard = next(answer for answer in found if answer is not None)
            assert heard[0] in ("AllScanTimeout", "AllScanOutOfStep") and text in heard[1], found


@triton.jit
def received_kernel(p_out, channel, SENDS: tl.constexpr):
    """Receives each tile, adds 1, and sends it if SENDS."""
    tile = tl.program_id(0)
    at = tile * channel.BK * channel.BV + tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)
    b_prev = recv(channel, tile, tl.zeros([channel.BK, channel.BV], tl.float32))
    if SENDS:
        send(channel, tile, b_prev + 1.0)
    tl.store(p_out + at, b_prev)


def unsent_case(group, debug):
    """Between two right launches the first rank sends no tile."""
    with allscan.Communicator(group, timeout=3.0, debug=debug) as comm:
        scan = allscan.AllScan(comm, TILES["shape"], tile=TILES["tile"])
        out = torch.empty(TILES["shape"], device=comm.device)

        def launch(sends=True):
            scan.launch(received_kernel, (4,), out, scan.channel(), SENDS=sends, num_warps=1)

        launch()
        found = raised(launch, comm.rank > 0)
        comm.resync()
        launch()
        return found, bool((out == comm.rank).all())


@pytest.mark.parametrize("debug", [True, pytest.param(False, marks=pytest.mark.cpu)])
def test_a_kernel_that_receives_and_does_not_send(run, debug):
    """The rank of the launch gets an error, not only the rank that waits for the tile."""
    (first, good), (second, also_good) = run(2, unsent_case, debug)
    assert good and also_good
    assert first[0] == "AllScanOutOfStep" and "received_kernel" in first[1], first
    assert "but tile 0 has 1, tile 1 has 1" in first[1], first
    assert second[0] in ("AllScanTimeout", "AllScanOutOfStep") and "received_kernel" in second[1], second


@triton.jit
def descending_kernel(p_state, p_out, channel, FIRST: tl.constexpr):
    """Like tiles_kernel, but each program takes its tiles in descending order. FIRST: calls begin() with its first
    tile, not with its lowest."""
    SIZE: tl.constexpr = channel.BK * channel.BV
    at = tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :]
    tile = channel.num_tiles - tl.num_programs(0) + tl.program_id(0)
    begun = device.begin(channel, tile if FIRST else tl.program_id(0))
    while tile >= 0:
        b_state, b_first = tl.load(p_state + tile * SIZE + at), tl.zeros([channel.BK, channel.BV], tl.float32)
        device.send_ahead(channel, tile, begun, b_state, 1.0)
        b_prev, _ = device.allscan_begun(channel, tile, begun, b_state, 1.0, b_first)
        tl.store(p_out + tile * SIZE + at, b_prev)
        tile -= tl.num_programs(0)


def descending_case(group, depth, protocol, first):
    """Make two more launches than a tile has slots. Return (number of right ones before an error, the error)."""
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        scan = allscan.AllScan(comm, TILES["shape"], tile=TILES["tile"], depth=depth, protocol=protocol)
        state, right = torch.ones(TILES["shape"], device=comm.device), 0
        for epoch in range(depth + 2):
            late(epoch, comm.rank, 5)
            out = torch.full_like(state, -1.0)
            answer = raised(scan.launch, descending_kernel, (2,), state, out, scan.channel(), first, num_warps=1)
            if answer is not None:
                return right, answer
            right += torch.equal(out, comm.rank * state)
        return right, None


@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
@pytest.mark.parametrize("depth", [1, 3])
def test_tiles_in_descending_order(run, depth, protocol):
    """Any order of tiles is right if begin() was called with the lowest."""
    assert run(3, descending_case, depth, protocol, False) == [(depth + 2, None)] * 3


@triton.jit
def ascending_kernel(p_state, p_out, channel):
    """Like tiles_kernel, with any number of programs."""
    SIZE: tl.constexpr = channel.BK * channel.BV
    at = tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :]
    tile = tl.program_id(0)
    begun = device.begin(channel, tile)
    while tile < channel.num_tiles:
        b_state, b_first = tl.load(p_state + tile * SIZE + at), tl.zeros([channel.BK, channel.BV], tl.float32)
        device.send_ahead(channel, tile, begun, b_state, 1.0)
        b_prev, _ = device.allscan_begun(channel, tile, begun, b_state, 1.0, b_first)
        tl.store(p_out + tile * SIZE + at, b_prev)
        tile += tl.num_programs(0)


def programs_case(group, depth, programs):
    """Return the number of right launches, each with another number of programs."""
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        scan = allscan.AllScan(comm, TILES["shape"], tile=TILES["tile"], depth=depth)
        state, right = torch.ones(TILES["shape"], device=comm.device), 0
        for epoch, count in enumerate(programs):
            late(epoch, comm.rank, 5)
            out = torch.full_like(state, -1.0)
            scan.launch(ascending_kernel, (count,), state, out, scan.channel(), num_warps=1)
            right += torch.equal(out, comm.rank * state)
        return right


@pytest.mark.parametrize("depth", [1, 3])
def test_more_programs_than_tiles(run, depth):
    """Programs without a tile begin, too; they read no counter of a tile that does not exist, and give no credit."""
    programs = (1, 3, 4, 5, 40, 7, 40)
    assert run(3, programs_case, depth, programs) == [len(programs)] * 3


@triton.jit
def shift_kernel(p_x, p_out, channel):
    at = tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :]
    b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
    tl.store(p_out + at, device.shift(channel, 0, tl.load(p_x + at), b_first))


def error_with_causes(launch, *arguments):
    """Return the text of a launch's error and of its causes, such as the compiler's; "" without an error."""
    try:
        launch(*arguments, num_warps=1)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


def dtypes_case(comm, protocol):
    """Return the error of a launch that sends a tile of each of some dtypes, and whether float32 arrives after that."""
    scan = allscan.AllScan(comm, (2, 8), tile=(2, 8), protocol=protocol)
    x, found = torch.full((2, 8), 1.0 + comm.rank, device=comm.device), []
    out = torch.zeros_like(x)
    for dtype in (torch.int32, torch.uint32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        found.append(error_with_causes(scan.launch, shift_kernel, (1,), x.to(dtype), out, scan.channel()))
    scan.launch(shift_kernel, (1,), x, out, scan.channel(), num_warps=1)
    return found, torch.equal(out, torch.full_like(x, comm.rank))


@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_tiles_that_are_not_float32(run, protocol):
    """Over sentinel links the bits of an int32 block would be taken for float32."""
    for found, arrives in run(2, dtypes_case, protocol):
        assert len(found) == 6 and all("b_value must be a tile, float32 [2, 8]" in error for error in found), found
        assert arrives


@triton.jit
def any_kernel(p_out, channel, BK: tl.constexpr, BV: tl.constexpr, WHICH: tl.constexpr):
    """A launch with one block [BK, BV] in the place WHICH, of [BV] without BK, of a number without both."""
    b_tile, b_other = tl.zeros([channel.BK, channel.BV], tl.float32), 0.5
    if BK:
        b_other = tl.full([BK, BV], 0.5, tl.float32)
    elif BV:
        b_other = tl.full([BV], 0.5, tl.float32)
    if WHICH == "b_state":
        b_prev, _ = device.allscan(channel, 0, b_other, 1.0, b_tile)
    elif WHICH == "b_decay":
        b_prev, _ = device.allscan(channel, 0, b_tile, b_other, b_tile)
    elif WHICH == "b_first":
        b_prev = recv(channel, 0, b_other)
        send(channel, 0, b_tile)
    elif WHICH == "b_value":
        b_prev = device.shift(channel, 0, b_other, b_tile)
    elif WHICH == "sent":
        b_prev = recv(channel, 0, b_tile)
        send(channel, 0, b_other)
    elif WHICH == "begun":
        begun = device.begin(channel, 0)
        device.send_ahead(channel, 0, begun, b_tile, b_other)
        b_prev, _ = device.allscan_begun(channel, 0, begun, b_tile, b_other, b_tile)
    at = tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :]
    tl.store(p_out + at, b_prev)


# (place, BK, BV) of blocks for tiles [8, 8]: a square one, where rows and columns are not told apart by their sizes
SIZES = (0, 8), (1, 8), (8, 1), (8, 4), (0, 0)
OTHERS = [(name, *size) for name in ("b_state", "b_first", "b_value") for size in SIZES]
OTHERS += [(name, *size) for name in ("b_decay", "begun") for size in ((0, 8), (8, 4), (2, 8))]


def shapes_case(comm, others):
    """Return the error of a launch for each of ``others``, and those of launches with decays of all allowed shapes."""
    scan, out, found = allscan.AllScan(comm, (8, 8), tile=(8, 8)), torch.zeros(8, 8, device=comm.device), []
    allowed = [("b_decay", *size) for size in ((8, 8), (8, 1), (1, 8), (1, 1), (0, 0))]
    for which, BK, BV in (*others, *allowed):
        found.append(error_with_causes(scan.launch, any_kernel, (1,), out, scan.channel(), BK, BV, which))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_that_are_no_tiles(run, size):
    """Triton would broadcast them: every rank raises before a launch, also where it sends or receives nothing."""
    # in the interpreter recv() runs before send() raises, and a next rank would wait
    others = OTHERS + [("sent", *sizes) for sizes in SIZES if size == 1]
    for found in run(size, shapes_case, others):
        for (which, BK, BV), message in zip(others, found):
            name = dict(begun="b_decay", sent="b_value").get(which, which)
            got = f"[{BK}, {BV}]" if BK else f"[{BV}]" if BV else "a number"
            assert f"{name} must be" in message and "[8" in message and got in message, (which, BK, BV, message)
        assert found[len(others) :] == [""] * 5, found


def opposite_case(group):
    """The last rank makes the first of four launches in the other direction. Return the later ones' values or errors,
    and whether a launch is right after resync()."""
    with allscan.Communicator(group, timeout=4.0) as comm:
        scan, found = allscan.AllScan(comm, (2, 8), tile=(2, 8)), []

        def launch(value, reverse):
            out = torch.full((2, 8), -1.0, device=comm.device)
            channel = scan.channel(reverse=reverse)
            scan.launch(shift_kernel, (1,), torch.full_like(out, value), out, channel, num_warps=1)
            received = out[0, 0].item()
            comm.check()
            return received

        for i in range(4):
            found.append(value_or_error(launch, 10.0 * i + comm.rank, i == 0 and comm.rank == comm.size - 1))
        comm.resync()
        return found, launch(7.0 + comm.rank, False) == (7.0 + comm.rank - 1 if comm.rank else 0.0)


def test_a_launch_in_the_other_direction(run):
    """A later launch would receive the tile of the one before: the tag shows it."""
    (first, again), (last, last_again) = run(2, opposite_case)
    assert again and last_again
    assert not {10.0 * i for i in range(4)} & {*last[1:]} and "AllScanOutOfStep" in last, (first, last)


@pytest.mark.cpu
@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_a_launch_that_has_not_begun_with_tile_0(run, protocol):
    """The launch gives no credit: it is an error after the first launch that should have given one, before a rank
    waits."""
    for rank, (right, answer) in enumerate(run(2, descending_case, 3, protocol, True)):
        assert answer is not None and "has not called begin() with tile 0" in answer[1], answer
        assert right < 3 and (rank == 0 or (right == 1 and answer[0] == "AllScanOutOfStep")), (rank, right, answer)


def torchrun(script: str, ranks: int, on_gpu: bool) -> str:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    if not on_gpu:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(page: str, language: str) -> list:
    text = open(os.path.join(ROOT, page), encoding="utf-8").read()
    return [part.split("```")[0] for part in text.split(f"```{language}\n")[1:]]


@pytest.mark.slow
def test_programs_of_readme_and_own_kernels_run_as_pasted(request, tmp_path, size=2):
    found = [*blocks("README.md", "python"), *blocks("docs/own_kernels.md", "python")]
    programs = [block for block in found if "init_process_group" in block and not block.startswith("# needs GPUs")]
    assert len(programs) == 2
    for i, program in enumerate(programs):
        path = tmp_path / f"readme{i}.py"
        path.write_text(program)
        assert "difference" in torchrun(str(path), size, request.config.getoption("--gpu"))
