"""Proves which method ran, in the timed process itself, so that no row shows another method's time.

All-Scan: completed scans are counted on the device (AllScan.epochs), and their kernels by torch's profiler. A baseline:
no scan of All-Scan, its own calls, and its NCCL kernels in the profile.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch


class Method:
    """A method to compute the operator: a function of q, k, v, g, and the evidence that it ran.

    comm: the communicator whose scans are counted. scans: number of All-Scan's scans of the state in a pass: 0, 1, or 2
    in the zigzag layout, ascending and descending. nccl: part of the names of the method's NCCL kernels or copies, None
    without any.
    """

    def __init__(self, call, comm, *, scans: int = 0, nccl: str | None = None):
        self.call, self.comm, self.scans, self.nccl = call, comm, scans, nccl

    def __call__(self, q, k, v, g):
        return self.call(q, k, v, g)

    def epochs(self) -> tuple[int, int]:
        """Return the number of All-Scan's scans for this method on this rank, forward and reverse."""
        counted = [scan.epochs for scan in self.comm.collectives] if self.comm.size > 1 else []
        return tuple(map(sum, zip((0, 0), *counted)))

    def prove(self, name: str, before: tuple, steps: int, layers: int, backward: bool, once) -> str:
        """Check that this method made the ``steps`` steps since ``before`` (epochs), each with ``layers`` calls of the
        operator; ``once()`` makes one more step. Raise AssertionError if not; return a sentence with the counts. Not on
        CPUs."""
        made = tuple(now - then for now, then in zip(self.epochs(), before))
        calls = steps * layers
        wanted = {0: (0, 0), 1: (calls, calls * backward), 2: (calls * (1 + backward),) * 2}[self.scans]
        found = kernels(once)
        scans = sum(n for kernel, n in found.items() if kernel.startswith(SCANS))
        ways = {
            kernel: n for kernel, n in found.items() if any(x in kernel for x in ("nccl", "Memcpy", "barrier_kernel"))
        }
        nccl = {kernel: n for kernel, n in ways.items() if self.nccl and self.nccl in kernel}
        if made != wanted or scans != self.scans * layers * (1 + backward):
            raise AssertionError(
                f"{name}: All-Scan made {made} scans, {wanted} were asked for; a step has {scans} kernels"
            )
        if self.nccl and not nccl:
            raise AssertionError(f"{name}: no {self.nccl} in a step, only {sorted(found)}")
        if self.nccl is None and layers == 1 and any("nccl" in kernel for kernel in found):
            raise AssertionError(f"{name}: kernels of NCCL in a step: {sorted(found)}")
        parts = [f"{sum(made)} scans of All-Scan in {steps} steps", f"{scans} kernels of scans a step"]
        parts += [f"{n} {kernel.partition('(')[0]} a step" for kernel, n in sorted(nccl.items())]
        return "; ".join(parts)


class Launched(NamedTuple):
    """A kernel, copy or fill on the GPU, from torch's profiler; us: duration; begin: by the host's clock, in us."""

    name: str
    us: float
    begin: float


def kernels(once) -> collections.Counter:
    """Count how often each GPU kernel runs in ``once()``."""
    return collections.Counter(one.name for one in launched(once))


def launched(once) -> list[Launched]:
    """Return all launches of ``once()``, from the profiler's own records: its ``events()`` take minutes for a long
    step."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        once()
        torch.cuda.synchronize()
    return [
        Launched(event.name(), event.duration_ns() / 1e3, event.start_ns() / 1e3)
        for event in profile.profiler.kineto_results.events()
        if event.device_type() != torch.autograd.DeviceType.CPU and not event.is_user_annotation()
    ]


# Kernels of zeco_gla that scan over the ranks: in the zigzag layout the last rank's first one is segments_kernel
SCANS = "scan_kernel", "segments_kernel", "gated_segments_kernel"
# Between the chunks of a delta rule: KDA, and any rule with fla's kernels inside chunks; Gated DeltaNet
DELTA_STATES = "delta_states_kernel", "scalar_states_kernel"
# Kinds of launches by parts of kernel names; the first match counts
KINDS = {
    "NCCL": "nccl",
    "softmax": "sdpa flash_fwd flash_bwd fmha dot_do_o convert_dq flashattn flash:: "
    "merge_kernel fold_kernel reverse_kernel",
    "cat": "CatArray",
    "recurrences": "scan_kernel segments_kernel ssd_ delta_ kda chunk_ transition_ recompute_w_u prepare_wy merge_16 "
    "solve_ l2norm cumsum summary_kernel adjoint_kernel operands_kernel output_kernel pairs_kernel gradient_kernel "
    "scalar_states_kernel gradients_kernel "
    "normalize_ gate_kernel gate_back sums_kernel",
    "convolutions": "conv dgrad wgrad",  # before GEMM, since cuDNN's convolutions also match GEMM's names
    "copies": "copy Memcpy",
    "GEMM": "gemm nvjet cutlass cublas splitK",
    "AdamW": "multi_tensor adam",
    "loss": "SoftMax nll_loss",
    "reductions": "reduce_kernel",
    "elementwise": "elementwise vectorized Memset fill",
}


def kind_of(name: str) -> str:
    return next((k for k, words in KINDS.items() if any(w.lower() in name.lower() for w in words.split())), "rest")


def breakdown(found: list[Launched]) -> dict[str, float]:
    """Return the milliseconds of each of KINDS, and of the rest."""
    sums = dict.fromkeys([*KINDS, "rest"], 0.0)
    for one in found:
        sums[kind_of(one.name)] += one.us / 1e3
    return sums


def overlapped(found: list[Launched], kind: str, other: str) -> float:
    """Return the milliseconds of a kind's kernels that overlap with kernels of the other kind."""
    ranges = [[(x.begin, x.begin + x.us) for x in found if kind_of(x.name) == some] for some in (kind, other)]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in ranges[0] for c, d in ranges[1]) / 1e3


def ran(name: str, found: collections.Counter, wanted, unwanted) -> str:
    """Return a sentence that lists the kernels of ``wanted`` ("a|b": either) in ``found``. Raise AssertionError if one
    is missing, if its count differs from the value of a dict ``wanted``, or if ``unwanted`` ones ran."""
    numbers = wanted if isinstance(wanted, dict) else dict.fromkeys(wanted)
    counted = {w: sum(n for kernel, n in found.items() if any(x in kernel for x in w.split("|"))) for w in numbers}
    strange = [kernel for kernel in found if any(w in kernel for w in unwanted)]
    if strange or not all(n if numbers[w] is None else n == numbers[w] for w, n in counted.items()):
        raise AssertionError(f"{name} was not what ran: {counted}, wanted {numbers}, and {strange}")
    return "; ".join(f"{n} {w}" for w, n in counted.items()) + f"; of {sum(found.values())} kernels"
