"""Communicators and AllScans that are opened, used, broken and closed in a random order: a state machine."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import allscan

from ..values import raised
from .draw import Draw, told
from .halo_calls import HaloCall
from .scan_calls import ScanCall, draw_allscan, draw_shape


class LifeCycle:
    """Operations that all ranks draw alike, each by the ranks of one communicator, and what is to come of them.

    Of memory: what the arena has free is what it had at first, less the AllScans of the communicators that are open.
    """

    MOST_COMMS, MOST_SCANS = 3, 4
    TIMEOUT = 5.0  # of communicators on which a rank rejects a call, so that the others wait for it

    def __init__(self, seed):
        self.seed, self.draw = seed, Draw("cycle", seed)
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.log = []
        self.groups = {tuple(range(self.world)): dist.group.WORLD}
        allscan.init()
        self.begin_arena()

    def begin_arena(self):
        self.comms = []  # dicts, alike on every rank but for what belongs to members
        self.faults = 0
        self.free = None

    def arena(self):
        from allscan.comm.heap import symmetric_heap

        return symmetric_heap().arena

    def run(self):
        with told(self.seed, f"life cycle on {self.world} ranks", LogOf(self.log)):
            self.free = self.arena().free_bytes
            for _ in range(self.draw.randint(12, 22)):
                self.operation()
                self.check_memory()
            self.log.append("close everything")
            while self.comms:
                self.close(self.draw.choice(self.comms))
            self.check_memory()  # all of it is free
            for ranks, group in self.groups.items():
                if len(ranks) < self.world and self.me in ranks:
                    dist.destroy_process_group(group)
            self.finalize()

    def check_memory(self):
        taken = sum(comm["taken"] for comm in self.comms)
        assert self.arena().free_bytes == self.free - taken, (self.arena().free_bytes, self.free, taken)

    # What is drawn is drawn on every rank before any rank leaves

    def operation(self):
        weights = dict(
            open=3,
            make=5,
            scan=8,
            function=4,
            gradients=3,
            halo=2,
            step=1,
            close_scan=2,
            forget=1,
            close=2,
            barrier=2,
            resync=2,
            all_reject=2,
            first_rejected=2,
            one_rejects=3,
            missed=2,
            straggler_backward=1,
            finalize=1,
            anew=1,
        )
        name = self.draw.choices(list(weights), weights.values())[0]
        comm = self.draw.choice(self.comms) if self.comms else None
        number = self.draw.getrandbits(40)
        if name == "open" or comm is None:
            if name in ("finalize", "anew"):
                return self.finalize()
            if len(self.comms) < self.MOST_COMMS:
                return self.open()
            return None
        if name in ("one_rejects", "missed"):
            self.faults += 1
            if self.faults > 2 or len(comm["ranks"]) < 2 or comm["patient"]:
                return None
        self.log.append(f"{name} of communicator {comm['number']} of {comm['ranks']}")
        if not comm["patient"]:
            dist.barrier()  # else a rank of a busy machine may be that late
        getattr(self, "count_step" if name == "step" else name)(comm, Draw(self.seed, name, number))
        if name == "one_rejects":
            dist.barrier()  # those who have not waited would wait elsewhere

    def open(self):
        ranks = tuple(range(self.world))
        if self.draw.happens(0.5):
            ranks = tuple(sorted(self.draw.sample(ranks, self.draw.randint(1, self.world))))
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks))
        number = self.draw.getrandbits(20)
        patient = self.draw.happens(0.6)
        options = dict(max_ctas=self.draw.choice([None, 1, 3]), debug=self.draw.happens(0.1))
        options["timeout"] = 60 if patient else self.TIMEOUT
        self.log.append(f"open communicator {number} of {ranks}, {options}")
        comm = dict(
            number=number,
            ranks=ranks,
            scans=[],
            shapes=set(),
            lengths=set(),
            taken=0,
            patient=patient,
            comm=None,
            debug=options["debug"],
        )
        if self.me in ranks:
            comm["comm"] = allscan.Communicator(self.groups[ranks], **options)
        self.comms.append(comm)

    def member(self, comm):
        return self.me in comm["ranks"]

    def take(self, comm, shape, **options):
        if self.member(comm):
            hint = allscan.AllScan.size_hint(comm["comm"], shape, **options)
            comm["taken"] += hint
            return hint
        return 0

    def make(self, comm, draw):
        if len(comm["scans"]) >= self.MOST_SCANS:
            return
        shape = draw_shape(draw)
        dense, options = draw_allscan(draw, shape)
        self.log.append(f"AllScan {shape} {options}")
        entry = dict(shape=shape, dense=dense, options=options, scan=None, bytes=0)
        comm["scans"].append(entry)
        if self.member(comm):
            entry["scan"] = allscan.AllScan(comm["comm"], shape, **options)
            entry["bytes"] = self.take(comm, shape, **options)
            assert entry["scan"].workspace_bytes == entry["bytes"]

    def scan(self, comm, draw):
        if not comm["scans"]:
            return self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        for _ in range(draw.randint(1, 3)):
            call = ScanCall(draw, len(comm["ranks"]), entry["shape"], entry["dense"], debug=comm["debug"])
            self.log.append(call.text)
            if self.member(comm):
                call.scan(comm["comm"], entry["scan"])

    def function_shape(self, comm, shape):
        """The first call for a shape takes memory."""
        if shape not in comm["shapes"]:
            comm["shapes"].add(shape)
            self.take(comm, shape)

    def function(self, comm, draw):
        shape = draw.choice([(2, 3, 4), (1, 5, 3), (4, 4)])
        call = ScanCall(draw, len(comm["ranks"]), shape, False, debug=comm["debug"])
        call = _without_adjoint(call)
        self.log.append(call.text)
        if self.member(comm):
            call.scan(comm["comm"])
        self.function_shape(comm, call.shape)

    def gradients(self, comm, draw):
        size, shapes = len(comm["ranks"]), [(2, 3, 4), (1, 5, 3)]
        calls = [ScanCall(draw, size, draw.choice(shapes), False, True) for _ in range(draw.randint(1, 2))]
        for call in calls:
            self.log.append(call.text)
        backward_first = draw.happens(0.5)
        halves = []
        for call in calls:
            if self.member(comm):
                halves.append(call.forward(comm["comm"]))
            self.function_shape(comm, call.shape)
        for half in halves if backward_first else halves[::-1]:
            half()

    def halo(self, comm, draw):
        call, simple = None, (["float32"], ["int64"])
        while call is None or call.dtypes not in simple or tuple(call.lengths or ()) in comm["lengths"]:
            call = HaloCall(draw, len(comm["ranks"]), contiguous=True)
        if call.lengths is not None:
            comm["lengths"].add(tuple(call.lengths))
        self.log.append("halo " + call.text)
        if self.member(comm):
            call.check(comm["comm"])
        x = call.wholes[0]
        width = torch.Size(x.shape[2:]).numel() * (4 if call.dtypes[0] == "int64" else 1)
        self.function_shape(comm, (x.shape[0], call.n, width))

    def count_step(self, comm, draw):
        if self.member(comm):
            comm["comm"].step()

    def close_scan(self, comm, draw):
        if not comm["scans"]:
            return
        entry = comm["scans"].pop(draw.randrange(len(comm["scans"])))
        if self.member(comm):
            entry["scan"].close()
            entry["scan"].close()
            comm["taken"] -= entry["bytes"]
            answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
            assert answer and answer[0] == "RuntimeError" and "AllScan is closed" in answer[1], answer

    def forget(self, comm, draw):
        """Its memory stays with the communicator."""
        if comm["scans"]:
            comm["scans"].pop(draw.randrange(len(comm["scans"])))

    def close(self, comm, draw=None):
        self.comms.remove(comm)
        self.log.append(f"close communicator {comm['number']}")
        if self.member(comm):
            comm["comm"].close()
            comm["comm"].close()
            assert comm["comm"].closed
            for call in (comm["comm"].check, comm["comm"].barrier, comm["comm"].resync):
                answer = raised(call)
                assert answer and answer[0] == "RuntimeError" and "closed" in answer[1], answer
            for entry in comm["scans"]:
                entry["scan"].close()

    def barrier(self, comm, draw):
        if self.member(comm):
            comm["comm"].barrier()

    def resync(self, comm, draw):
        if self.member(comm):
            comm["comm"].resync()
            if len(comm["ranks"]) > 1:
                for entry in comm["scans"]:
                    assert entry["scan"].epochs == (0, 0)

    def wrong_call(self, comm, draw):
        """(a call that is rejected, the exception's name, alike on every rank that makes it)"""
        kind = draw.choice(["shape", "dtype", "decay", "both"])
        self.log.append("rejected for its " + kind)
        if not self.member(comm):
            return None
        comm, entry = comm["comm"], draw.choice(comm["scans"])
        scan, state = entry["scan"], torch.zeros(entry["shape"])
        K = state.shape[-2]
        if kind == "shape":
            return lambda: scan.scan(torch.zeros(2, *entry["shape"])), "ValueError"
        if kind == "dtype":
            return lambda: scan.scan(state.double()), "TypeError"
        if kind == "decay":
            return lambda: scan.scan(state, torch.ones(*state.shape[:-2], K + 1)), "ValueError"
        return lambda: scan.scan(state, 0.5, transition=torch.zeros(*state.shape[:-1], K)), "ValueError"

    def all_reject(self, comm, draw):
        """Nothing changes. A rank may reject several before the others have."""
        self.make(comm, draw)
        for _ in range(draw.randint(1, 3)):
            wrong = self.wrong_call(comm, draw)
            if self.member(comm):
                answer = raised(wrong[0])
                assert answer and answer[0] == wrong[1], (answer, wrong[1])
                if draw.happens(0.2):
                    time.sleep(self.draw_wait(comm))
        if draw.happens(0.5):
            self.scan(comm, draw)

    def draw_wait(self, comm):
        return 0.02 * comm["ranks"].index(self.me)

    def first_rejected(self, comm, draw):
        """What is wrong on one rank in a first call is rejected on all, and takes nothing."""
        odd = draw.choice(comm["ranks"])
        kind = draw.choice(["function", "AllScan", "halo", "full"])
        self.log.append(f"{kind} rejected by rank {odd}")
        if not self.member(comm):
            return
        wrong, comm = self.me == odd or comm["comm"].size == 1, comm["comm"]
        if kind == "function":
            answer = raised(
                allscan.allscan, torch.zeros(3, 3, 3, dtype=torch.float64 if wrong else torch.float32), comm=comm
            )
        elif kind == "AllScan":
            answer = raised(allscan.AllScan, comm, (3, 3, 3), depth=0 if wrong else 2)
        elif kind == "halo":
            answer = raised(allscan.halo, torch.zeros(1, 5 if wrong else 4, 77), 2, comm=comm, layout="zigzag")
        elif comm.size > 1:
            answer = raised(allscan.AllScan, comm, (1 << 14, 64, 64))
            assert answer and answer[0] == "MemoryError", answer
            return
        else:
            return
        assert answer and answer[0] in ("TypeError", "ValueError"), answer

    def one_rejects(self, comm, draw):
        """It makes no further calls; the others time out or have what is theirs; resync() brings all back."""
        self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        odd = draw.choice(comm["ranks"])
        call = ScanCall(draw, len(comm["ranks"]), entry["shape"], entry["dense"], debug=comm["debug"])
        wrong = self.wrong_call(comm, draw)
        more = draw.happens(0.5)
        self.log.append(f"rank {odd} rejects {call.text}")
        if not self.member(comm):
            return
        comm = comm["comm"]
        try:
            if self.me == odd:
                wrong[0]()
            else:
                call.scan(comm, entry["scan"])
            rejected = False
        except (TypeError, ValueError):
            assert self.me == odd
            rejected = True
        except allscan.AllScanTimeout:
            assert not comm.debug and self.me != odd
            rejected = None
        except RuntimeError as problem:
            assert comm.debug and self.me != odd, problem
            rejected = None
        assert rejected is not False or self.me != odd
        if more and not comm.debug:
            answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
            assert self.me != odd or answer[0] == "AllScanOutOfStep", answer
            assert answer is None or answer[0] in ("AllScanTimeout", "AllScanOutOfStep"), answer
        comm.resync()

    def missed(self, comm, draw):
        """The last rank leaves out a call; the others, which do not wait for it, hear of it in barrier()."""
        self.make(comm, draw)
        entry = draw.choice(comm["scans"])
        if entry["options"]["depth"] == 1 or not self.member(comm) or comm["comm"].debug:
            return
        comm = comm["comm"]
        if comm.rank < comm.size - 1:
            entry["scan"].scan(torch.zeros(entry["shape"]))
        answer = raised(comm.barrier)
        assert answer and answer[0] == "AllScanOutOfStep", answer
        answer = raised(entry["scan"].scan, torch.zeros(entry["shape"]))
        assert answer and answer[0] == "AllScanOutOfStep", answer
        comm.resync()

    def straggler_backward(self, comm, draw):
        """A backward pass of a call before resync() is rejected, on all ranks alike, and costs nothing."""
        if self.member(comm):
            x = torch.ones(2, 3, 4, requires_grad=True)
            found = allscan.allscan(x, comm=comm["comm"])
            comm["comm"].resync()
            answer = raised(found.sum().backward)
            assert answer and answer[0] == "RuntimeError" and "resync" in answer[1], answer
        self.function_shape(comm, (2, 3, 4))

    def finalize(self, comm=None, draw=None):
        """Rejected while a communicator over several ranks is open, on the ranks that have one; else the arena goes."""
        if any(len(c["ranks"]) > 1 for c in self.comms):
            if any(self.member(c) and c["comm"].size > 1 for c in self.comms):
                answer = raised(allscan.finalize)
                assert answer and answer[0] == "RuntimeError" and "open communicators" in answer[1], answer
            return
        for alone in list(self.comms):
            self.close(alone)
        nbytes = self.draw.choice([None, 32 << 20, 12345678])
        self.log.append(f"finalize, init({nbytes})")
        allscan.finalize()
        allscan.init(nbytes)
        self.begin_arena()
        self.free = self.arena().free_bytes
        if nbytes is not None:
            assert self.free == -(-nbytes // 512) * 512

    def anew(self, comm, draw):
        """Close everything, and begin again."""
        while self.comms:
            self.close(self.draw.choice(self.comms))
        self.check_memory()
        self.finalize()


class LogOf:
    """The operations so far, when they are asked for."""

    def __init__(self, log):
        self.log = log

    def __str__(self):
        return "\n  " + "\n  ".join(self.log)


def _without_adjoint(call):
    call.adjoint = False
    return call


def life_cycle_case(seed):
    LifeCycle(seed).run()
