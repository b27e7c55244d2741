"""Records the kernel launches of operators without a GPU, and compiles them for sm_90."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import torch
import triton

from allscan.base.tiling import H100_MULTIPROCESSORS
from allscan.bindings.triton_compat import OPTIONS
from allscan.launch.plan import words_of
from allscan.launch.streams import Streams
from allscan.ops import operator
from allscan.ops.delta import delta_passes, gdn_plans, kda_plans
from allscan.ops.delta.delta_passes import DeltaShape, Inputs, LocalGrads
from allscan.ops.gla import GLA, gla_operator, gla_plans
from allscan.ops.gpu_blocks import A100, BLACKWELL, HOPPER, SHARED_MEMORY, SMALL
from allscan.ops.operator import Call
from allscan.ops.ssd import ssd_plans
from allscan.ops.ssd.ssd_operator import SSD
from allscan.shmem_kernels.gla_strong import strong_decay_grad_kernel, strong_decay_kernel
from allscan.shmem_kernels.ssd_bwd import ssd_adjoint_kernel, ssd_gradients_kernel, ssd_pairs_kernel, ssd_sums_kernel
from allscan.shmem_kernels.ssd_fwd import ssd_state_kernel
from allscan.tokens.packing import Layout, TokenRange, flags_of

from .delta import saved_states_for
from .sm90 import Compiled

# by compute capability
KINDS = {80: A100, 86: SMALL, 89: SMALL, 90: HOPPER, 100: BLACKWELL, 120: SMALL}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


class Launches:
    """Replaces a kernel and records its launches."""

    made = []

    def __init__(self, kernel):
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid):
        return lambda *values, **options: Launches.made.append((self.kernel, values, options))


class NoCalls(frozenset):
    """A cache that keeps nothing."""

    def remember(self, *_):
        pass


class NoCarrier:
    """A carrier that sends nothing."""

    handle = 0

    class comm:  # noqa: N801
        size, device, streams, debug = 2, torch.device("cpu"), Streams(torch.device("cpu")), False
        checked, rank, algorithm, order = NoCalls(), 0, "chain", types.SimpleNamespace()

        @staticmethod
        @contextlib.contextmanager
        def call(*_):
            yield

    def get_or_create_scan(self, *_, **__):
        pass

    def stream(self, *_):
        return contextlib.nullcontext(lambda: None)

    def neighbours(self, *_):
        return True, True

    def record(self, *_):
        pass

    def expected_us(self, *_):
        return 1.0

    def pending(self, *_):
        return []


def most(usual, **others):
    """Return ``usual``, or what ``others`` say for the Triton at hand: v37 for 3.7, and so on."""
    return others.get("v{}{}".format(*VERSION), usual)


def compiled_launches(most_spilled=None, more_on_sm_100=None, seen=None, look=True, capability=90):
    """Return (kernel, Compiled) of each different recorded launch that is not in ``seen``. more_on_sm_100: also compile
    for sm_100, with so many more spilled bytes per thread allowed; one launch of those that differ in dtypes only.
    look: fail if code for sm_90 reads registers that are not set."""
    kinds = {
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.int32: "*i32",
        torch.int8: "*i8",
    }
    seen = [] if seen is None else seen
    integers = {kernel: [("N", "i32")] for kernel in (strong_decay_kernel, strong_decay_grad_kernel)}
    integers[ssd_sums_kernel] = [("parts", "i32"), ("width", "i32")]
    integers[ssd_pairs_kernel] = [("tokens", "i32")]
    integers[ssd_gradients_kernel] = [("first_chunk", "i32"), ("tokens", "i32")]
    firsts = [("first_segment", "i32"), ("first_chunk", "i32")]
    integers[ssd_state_kernel] = integers[ssd_adjoint_kernel] = firsts
    for kernel, values, options in Launches.made:
        given = dict(zip(kernel.arg_names, values)) | options
        arguments = {n: kinds[x.dtype] for n, x in given.items() if isinstance(x, torch.Tensor)}
        options = {n: x for n, x in options.items() if n not in arguments}
        arguments |= {
            n: kind
            for n, kind in (("scale", "fp32"), ("least", "fp32"), ("most", "fp32"), *integers.get(kernel, ()))
            if options.pop(n, None) is not None
        }
        launch = {n: options.pop(n) for n in ("num_warps", "num_stages", "maxnreg", *OPTIONS) if n in options}
        if (kernel, options, arguments) in seen:
            continue
        other_dtypes = any(x[:2] == (kernel, options) for x in seen)
        seen.append((kernel, options, arguments))
        compiled = Compiled(kernel, arguments, options, **launch, capability=capability)
        compiled.options = options | launch
        assert compiled.shared <= SHARED_MEMORY[KINDS[capability]], (kernel, options, compiled.shared)
        assert compiled.tensor_memory <= 512, (kernel, options, compiled.tensor_memory)
        assert not look or capability != 90 or not compiled.unset_registers(), (kernel, options)
        assert most_spilled is None or compiled.spilled_bytes <= most_spilled, (kernel, options, compiled.spilled_bytes)
        if more_on_sm_100 is not None and not other_dtypes:
            other = Compiled(kernel, arguments, options, **launch, capability=100)
            assert other.shared <= 227 << 10 and other.tensor_memory <= 512, (kernel, options, other.tensor_memory)
            assert other.spilled_bytes <= compiled.spilled_bytes + more_on_sm_100, (kernel, options)
        yield kernel, compiled


def compiled_for_both(launch, monkeypatch, most_spilled=None, more_on_sm_100=0):
    """As compiled_launches, of the launches that ``launch(monkeypatch, capability)`` records; those for sm_100, with
    its block sizes, are compiled too. more_on_sm_100: bytes that a thread may spill more than on sm_90, with other
    block sizes than in any launch of the kernel there."""
    on_sm_90 = []
    with monkeypatch.context() as patch:
        launch(patch, 90)
        for kernel, compiled in compiled_launches(most_spilled):
            on_sm_90.append((kernel, compiled))
            yield kernel, compiled
    with monkeypatch.context() as patch:
        launch(patch, 100)
        others = list(compiled_launches(capability=100))
    for (kernel, compiled), (other, on_sm_100) in zip(on_sm_90, others, strict=True):
        most_there = compiled.spilled_bytes
        if compiled.options != on_sm_100.options:
            most_there = max(x.spilled_bytes for which, x in on_sm_90 if which is kernel)
        assert kernel is other and on_sm_100.spilled_bytes <= most_there + more_on_sm_100, (kernel, most_there)


def record_launches(monkeypatch, *modules):
    """Record in Launches the launches of all kernels of these modules, instead of earlier ones."""
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and not isinstance(kernel, Launches):
                monkeypatch.setattr(module, name, Launches(kernel))
    monkeypatch.setattr(Launches, "made", [])


def of_one_rank(monkeypatch, T, *modules):
    """Record the launches of an operator on T tokens of one sequence, without other ranks."""
    record_launches(monkeypatch, *modules)
    layout = Layout([TokenRange(0, T, flags=flags_of(True, True))], 1, 1024, "cpu")
    monkeypatch.setattr(operator, "carrier_of", lambda *_: NoCarrier())
    monkeypatch.setattr(operator.SequenceOperator, "check_first", lambda *_: None)
    monkeypatch.setattr(operator, "find_layout", lambda *_, **__: layout)


def launch_gla(K, V, dtype, kept, monkeypatch, H=4, T=130, capability=90):
    """Record in Launches the launches of both passes of zeco_gla on a GPU."""
    of_one_rank(monkeypatch, T, gla_plans)
    with_gla_blocks(monkeypatch, capability)
    q, k, v, do = (torch.zeros(1, T, H, w, dtype=dtype) for w in (K, K, V, V))
    g, initial, text = torch.zeros(1, T, H, K), torch.zeros(1, H, K, V), Call("zeco_gla", 0.1, saves=kept).text
    fixed = 0, 0.1, None, None, text
    with torch.no_grad():
        _, final, *made = GLA._forward(q, k, v, g, initial, None, True, *fixed)
        GLA._backward(None, do, final, q, k, v, g, *made, None, True, g.dtype, g.dtype, *fixed)


def launch_ssd(H, G, P, N, dtype, monkeypatch, z=False, channels=False, num_sms=H100_MULTIPROCESSORS, capability=90):
    """Record in Launches the launches of both passes of zeco_ssd on a GPU, with x, B and C as columns of one tensor."""
    T = 130
    of_one_rank(monkeypatch, T, gla_plans, ssd_plans)
    with_ssd_blocks(monkeypatch, capability, num_sms)
    mixed = torch.zeros(1, T, H * P + 2 * G * N, dtype=dtype)
    x, B, C = mixed.split([H * P, G * N, G * N], 2)
    x, B, C = x.unflatten(2, (H, P)), B.unflatten(2, (G, N)), C.unflatten(2, (G, N))
    of_heads, dt = torch.zeros(H), torch.zeros(1, T, H, dtype=dtype)
    tensors = x, dt, of_heads, B, C, torch.zeros(H, P) if channels else of_heads, x if z else None, of_heads
    initial, more = torch.zeros(1, H, P, N), "dt_softplus=True,dt_limit=0.0 to inf"
    fixed = 0, 1.0, None, None, Call("zeco_ssd", 1.0, more=more).text
    with torch.no_grad():
        _, final, saved = SSD._forward(*tensors, initial, None, True, *fixed)
        dy = torch.zeros(1, T, H, P, dtype=dtype)
        SSD._backward(None, dy, final, *tensors, saved, None, True, B.dtype, x.dtype, *fixed)


class NoScan:
    """Replaces the carrier of a StatePass."""

    def record(self, *_):
        pass

    def stream(self):
        return contextlib.nullcontext(lambda: None)


def with_gla_blocks(monkeypatch, capability):
    """Give zeco_gla of CPU tensors the block sizes of a GPU."""
    for sizes in ("SUB_BLOCK", "STEP", "LOOK", "STATE_PASSING_WORDS"):
        if (of := getattr(gla_plans, sizes)).keys() > {"cpu"}:
            monkeypatch.setattr(gla_plans, sizes, {"cpu": of["cuda"]})
    monkeypatch.setattr(gla_operator, "multiprocessors", lambda device: H100_MULTIPROCESSORS)
    monkeypatch.setattr(gla_operator, "gpu_kind", lambda device: KINDS[capability])


def with_ssd_blocks(monkeypatch, capability, num_sms=H100_MULTIPROCESSORS):
    """Give zeco_ssd of CPU tensors the block sizes of a GPU."""
    find = SSD.shape

    def on_gpu(*arguments):
        return dataclasses.replace(find(*arguments), device="cuda", num_sms=num_sms, gpu=KINDS[capability])

    monkeypatch.setattr(SSD, "shape", on_gpu)


def with_gpu_blocks(monkeypatch, capability):
    """Give passes over CPU tensors the block sizes of a GPU."""
    fitted, comm = delta_passes.StatePass._fitted, types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))

    def on_gpu(states, *blocks):
        of_gpu = types.SimpleNamespace(d=states.d, V=states.V, dtype=states.dtype, comm=comm)
        return fitted(of_gpu, *blocks)

    monkeypatch.setattr(delta_passes, "gpu_kind", lambda device: KINDS[capability])
    monkeypatch.setattr(delta_passes.StatePass, "_fitted", on_gpu)


def chunk_pass(layout, K, V, dtype, scalar, monkeypatch, capability=90, saves=False):
    """Return a ChunkPass with a GPU's block sizes whose launches are all recorded."""
    record_launches(monkeypatch, delta_passes, kda_plans, gdn_plans)
    with_gpu_blocks(monkeypatch, capability)
    monkeypatch.setattr(delta_passes.AllScanCarrier, "of", lambda *_, **__: NoScan())
    device = torch.device("cpu")
    comm = types.SimpleNamespace(size=3, device=device, streams=Streams(device))
    cls = gdn_plans.ScalarChunkPass if scalar else kda_plans.ChunkPass
    return cls(comm, layout, DeltaShape(1, 4, 4, K, V, dtype, scalar, saves=saves))


def launch_chunks(K, V, dtype, scalar, monkeypatch, capability=90, saves=False):
    """Record in Launches the launches of both passes of a delta rule on a GPU, with allscan's own chunk kernels."""
    H, T = 4, 130
    layout = Layout([TokenRange(0, T)], 1, 64, "cpu")  # in the middle of a sequence
    states = chunk_pass(layout, K, V, dtype, scalar, monkeypatch, capability, saves)
    x, v = (torch.zeros(1, T, H, width, dtype=dtype) for width in (K, V))
    outside = torch.zeros(1, H, K, V)
    beta = torch.zeros(1, T, H)
    words = sum(words_of(states.saved(v.shape, K, layout.num_chunks, dtype, saves)))
    kept = saved_states_for(states)._replace(intermediates=torch.empty(words, dtype=torch.int32))
    inputs = Inputs(x, x, v, beta if scalar else torch.zeros(1, T, H, K), beta)
    _, _, *solved = states.whole_forward(inputs, outside, outside, kept, 0.1)
    states.whole_backward(inputs, LocalGrads(v, None, *solved), outside, outside, kept, 0.1)
