"""The hostile network's logic, without UCX and without GPUs: which messages it holds back, and in which order it
delivers."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys

import pytest

from support.network import COUNTS, MODES, build, compiler

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.quick,
    pytest.mark.skipif(not compiler(), reason="needs a C compiler, cc"),
]
PUT, SIGNAL, MESSAGE, FENCE, FLUSH = range(5)
CALLBACK, USER_DATA, FLAGS, MEMORY_TYPE = 2, 4, 16, 64  # bits of ucp_request_param_t
CUDA, HOST = 1, 0
EP, WORKER = 0x1000, 0x2000


class Event(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint64), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64)]

    def __iter__(self):
        return iter((self.kind, self.address, self.value))


class Wire:
    """Calls libhostile.so as NVSHMEM's transport does; one process sends to itself. Each ``progress`` is TICK_NS of its
    time: nothing depends on the machine's speed."""

    TICK_NS = 50_000
    TILES, WORDS, DEPTH = 16, 8, 3

    def __init__(self, folder):
        build(str(folder), "hostile.c", "libhostile.so", "-ldl", "-lpthread")
        build(str(folder), "stub_ucp.c", "libucp.so.0", "-Wl,-soname,libucp.so.0")
        self.ucp = ctypes.CDLL(os.path.join(folder, "libucp.so.0"))
        self.hostile = ctypes.CDLL(os.path.join(folder, "libhostile.so"))
        self.hostile.network_count.restype = self.hostile.network_now.restype = ctypes.c_uint64
        self.hostile.network_tick(ctypes.c_uint64(self.TICK_NS))
        for name in ("ucp_put_nbx", "ucp_am_send_nbx", "ucp_worker_flush_nbx"):
            getattr(self.hostile, name).restype = ctypes.c_void_p
        self.ucp.stub_transports.restype = ctypes.c_char_p
        slots = self.DEPTH * self.TILES
        self.outbox, self.inbox = ((ctypes.c_uint64 * (slots * self.WORDS))() for _ in range(2))
        self.arrived = (ctypes.c_uint64 * slots)()

    def set(self, mode, value=0):
        self.hostile.network_set(MODES.index(mode), ctypes.c_uint64(value))

    def count(self, what):
        return self.hostile.network_count(COUNTS.index(what))

    def now(self):
        """Return the network's time in ns."""
        return self.hostile.network_now()

    def slot(self, tile, epoch):
        return epoch % self.DEPTH * self.TILES + tile

    def fill(self, tile, epoch):
        at = self.slot(tile, epoch) * self.WORDS
        self.outbox[at : at + self.WORDS] = [epoch * 1000 + tile] * self.WORDS

    def put(self, tile, epoch, single=False):
        at = self.slot(tile, epoch) * self.WORDS * 8
        mask = CALLBACK | MEMORY_TYPE | USER_DATA * single
        param = struct.pack("IIQQQQQi44x", mask, 0, 0, 0, 0, 0, 0, CUDA)
        there, here = ctypes.addressof(self.inbox) + at, ctypes.c_void_p(ctypes.addressof(self.outbox) + at)
        return self.hostile.ucp_put_nbx(
            ctypes.c_void_p(EP), here, ctypes.c_size_t(self.WORDS * 8), ctypes.c_uint64(there), None, param
        )

    def signal(self, address, value, operation=9, message=0):
        data = struct.pack("QQQQQQQi4x4x4x", 0, 8, value, 0, 0, address, 0, operation)
        param = struct.pack("IIQQQQQi44x", CALLBACK | USER_DATA | FLAGS, 3, 0, 0, 0, 0, 0, 0)
        return self.hostile.ucp_am_send_nbx(
            ctypes.c_void_p(EP), message, None, ctypes.c_size_t(0), data, ctypes.c_size_t(len(data)), param
        )

    def post(self, tile, epoch, word=None):
        """Send a put with signal, as NVSHMEM's proxy does."""
        self.post_together([(tile, epoch, word)])

    def post_together(self, posts, chance=None):
        """Send puts with signals of several blocks, whose requests come in a random order; each block sends its put,
        fence, signal."""
        waiting = [[0, *post] for post in posts]
        while waiting:
            at = chance.randrange(len(waiting)) if chance else 0
            step, tile, epoch, word = waiting[at]
            waiting[at][0] += 1
            if step == 0:
                self.fill(tile, epoch)
                self.put(tile, epoch)
            elif step == 1:
                self.hostile.ucp_worker_fence(ctypes.c_void_p(WORKER))
            else:
                word = self.slot(tile, epoch) if word is None else word
                self.signal(ctypes.addressof(self.arrived) + 8 * word, epoch)
                waiting.pop(at)

    def progress(self):
        self.hostile.ucp_worker_progress(ctypes.c_void_p(WORKER))

    def flush(self):
        self.hostile.ucp_worker_flush_nbx(ctypes.c_void_p(WORKER), None)

    def events(self):
        """Return the events since the last call."""
        found = (Event * (1 << 16))()
        return [tuple(event) for event in found[: self.ucp.stub_events(found)]]

    def holds(self, tile, epoch):
        """Return whether the inbox has the complete tile of this epoch."""
        at = self.slot(tile, epoch) * self.WORDS
        return set(self.inbox[at : at + self.WORDS]) == {epoch * 1000 + tile}


@pytest.fixture(scope="session")
def wires(tmp_path_factory):
    """The only Wire of this process: a second library that loads libucp.so.0 would get the first stub."""
    return Wire(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def wire(wires):
    wires.set("pass")
    wires.flush()
    wires.events()
    ctypes.memset(wires.arrived, 0, ctypes.sizeof(wires.arrived))
    ctypes.memset(wires.inbox, 0, ctypes.sizeof(wires.inbox))
    return wires


def receive(wire, epochs, taken, word):
    """Receive all epochs of all tiles as over a channel: depth slots, and a credit for each tile taken. Return the
    number of tiles that were wrong, or never taken.

    taken(seen, epoch): whether the receiver takes the tile; word(tile, epoch): index of its arrival word.
    """
    wrong, next_sent, expected = 0, [1] * wire.TILES, [1] * wire.TILES
    before, chance = None, random.Random(0)
    while min(expected) <= epochs and not (wire.count("held") == 0 and before == expected):
        before = list(expected)
        # in order of launches; a launch's blocks run concurrently, and each waits for the credit of its tile
        ready = [t for t in range(wire.TILES) if next_sent[t] <= min(epochs, expected[t] + wire.DEPTH - 1)]
        wire.post_together([(t, next_sent[t], word(t, next_sent[t])) for t in ready], chance)
        next_sent = [epoch + (tile in ready) for tile, epoch in enumerate(next_sent)]
        wire.progress()
        for tile in range(wire.TILES):
            if expected[tile] <= epochs and taken(wire.arrived[word(tile, expected[tile])], expected[tile]):
                wrong += not wire.holds(tile, expected[tile])
                expected[tile] += 1
    wire.flush()
    return wrong + sum(epochs + 1 - epoch for epoch in expected)


def test_pairs_overtake_each_other_and_no_signal_its_data(wire):
    before = wire.count("overtakings"), wire.count("of_groups")
    wire.set("reorder", 300_000)
    assert receive(wire, 200, lambda seen, epoch: seen == epoch, wire.slot) == 0
    counted = wire.count("overtakings") - before[0], wire.count("of_groups") - before[1]
    assert counted[0] > 1000 and counted[1] > 100, counted
    assert wire.count("held") == 0
    moved, brought = wire.events(), {}
    signals = []
    for kind, address, value in moved:
        if kind == PUT:
            assert value == HOST
            slot = (address - ctypes.addressof(wire.inbox)) // (8 * wire.WORDS)
            brought[slot] = brought.get(slot, 0) + 1
        elif kind == SIGNAL:
            brought[(address - ctypes.addressof(wire.arrived)) // 8] -= 1
            assert min(brought.values()) >= 0, "a signal before its data"
            signals.append(value)
    assert len(signals) == 200 * wire.TILES and signals != sorted(signals) and not any(brought.values())


def test_a_receiver_that_takes_a_later_epoch_fails_there(wire):
    """The control takes any epoch that is at least the expected one, with one arrival word a tile: right in order
    only."""

    def word(tile, epoch):
        return tile

    def later(seen, epoch):
        return seen >= epoch

    wire.set("bandwidth", 1 << 40)
    assert receive(wire, 60, later, word) == 0
    ctypes.memset(wire.arrived, 0, ctypes.sizeof(wire.arrived))
    wire.set("reorder", 300_000)
    assert receive(wire, 60, later, word) > 0


def test_requests_of_several_blocks(wire):
    """Two puts precede their signals, which come in reverse order: neither signal passes before both puts."""
    wire.set("stall", 20_000_000)
    for tile in (1, 2):
        wire.fill(tile, 1)
        wire.put(tile, 1)
    wire.signal(ctypes.addressof(wire.arrived) + 8 * wire.slot(2, 1), 1)
    assert wire.count("held") == 0
    wire.signal(ctypes.addressof(wire.arrived) + 8 * wire.slot(1, 1), 1)
    wire.progress()
    assert wire.events() == [] and wire.count("held") == 2
    wire.flush()
    assert [kind for kind, _, _ in wire.events()] == [PUT, PUT, SIGNAL, SIGNAL, FLUSH]


def test_a_put_without_a_signal_arrives(wire):
    """Its endpoint delivers later messages after a short delay."""
    wire.set("reorder", 1000)
    wire.fill(0, 1)
    wire.put(0, 1)
    wire.post(1, 1)
    deadline = wire.now() + 100_000_000
    while not wire.arrived[wire.slot(1, 1)] and wire.now() < deadline:
        wire.progress()
    assert wire.holds(0, 1) and wire.holds(1, 1)
    wire.signal(ctypes.addressof(wire.arrived), 1)  # reset for later tests
    wire.flush()


def test_a_source_is_read_late(wire):
    wire.set("stall", 20_000_000)
    wire.post(3, 1)
    wire.fill(3, 4)  # the same slot
    wire.flush()
    assert wire.holds(3, 4) and not wire.holds(3, 1)


def test_bandwidth(wire):
    wire.set("bandwidth", wire.WORDS * 8 * 1000)  # a tile takes a millisecond
    start = wire.now()
    for tile in range(wire.TILES):
        wire.post(tile, 1)
    wire.flush()
    assert 0 <= wire.now() - start - 1_000_000 * wire.TILES < 10 * wire.TICK_NS
    signals = [address for kind, address, _ in wire.events() if kind == SIGNAL]
    assert signals == sorted(signals) and len(signals) == wire.TILES


def test_a_stall_ends_and_quiet_waits_for_it(wire):
    start = wire.now()
    wire.set("stall", 100_000_000)
    wire.post(1, 1)
    wire.progress()
    assert wire.events() == [] and wire.count("held") == 1
    wire.flush()
    assert 0 <= wire.now() - start - 100_000_000 < 10 * wire.TICK_NS and wire.holds(1, 1)
    assert [kind for kind, _, _ in wire.events()] == [PUT, SIGNAL, FLUSH]
    wire.post(2, 1)
    wire.progress()
    assert wire.holds(2, 1)


def test_never_delivered(wire):
    """NVSHMEM still gets a completion for each of its messages; without it its own shutdown would wait for ever."""
    before = wire.count("lost")
    wire.set("never")
    wire.post(1, 1)
    wire.progress()
    assert [event[::2] for event in wire.events()] == [(SIGNAL, 0)]
    assert not any(wire.arrived) and not any(wire.inbox) and wire.count("lost") == before + 1


def test_what_is_no_pair_passes_at_once(wire):
    wire.set("stall", 50_000_000)
    wire.fill(0, 1)
    wire.put(0, 1, single=True)
    wire.signal(ctypes.addressof(wire.arrived), 5)
    wire.signal(0, 0, message=1)
    assert [kind for kind, _, _ in wire.events()] == [PUT, SIGNAL, MESSAGE] and wire.arrived[0] == 5
    wire.put(0, 1)
    assert wire.events() == []
    wire.signal(ctypes.addressof(wire.arrived), 6, operation=4)
    assert [kind for kind, _, _ in wire.events()] == [MESSAGE] and wire.count("held") == 0
    wire.flush()
    assert [kind for kind, _, _ in wire.events()] == [PUT, FLUSH]
    wire.signal(ctypes.addressof(wire.arrived), 7)  # late, in the required order
    wire.flush()
    assert [kind for kind, _, _ in wire.events()] == [SIGNAL, FLUSH] and wire.arrived[0] == 7


def test_a_fence_passes_where_nothing_is_held(wire):
    wire.post(0, 1)
    wire.progress()
    assert [kind for kind, _, _ in wire.events()] == [PUT, FENCE, SIGNAL]


def test_transports_and_nodes(wire, tmp_path, monkeypatch):
    monkeypatch.setenv("ALLSCAN_UCX_TLS", "tcp,self")
    wire.hostile.ucp_config_modify(None, b"TLS", b"posix,ib")
    assert wire.ucp.stub_transports() == b"tcp,self"
    show = "import os, socket; print(os.uname().nodename, socket.gethostname())"
    library = build(str(tmp_path), "hostile.c", "libhostile.so", "-ldl", "-lpthread")
    environment = os.environ | {"LD_PRELOAD": library, "ALLSCAN_NODE": "node7"}
    done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["node7", "node7"], done
