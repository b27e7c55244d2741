"""Arguments that must be equal on all ranks, and gates outside of the kernels' range: every rank raises before a
launch."""

from __future__ import annotations

import functools
import inspect
import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import allscan
from allscan.zigzag import from_zigzag, to_zigzag
from support import ROOT
from support.delta import NAMES, DeltaCase, Whole
from support.fla import import_fla
from support.values import check_errors, error, raised

T, H, K = 8, 2, 16
INF, NAN = float("inf"), float("nan")


def tensors(comm, T=T):
    generator = torch.Generator().manual_seed(comm.rank)
    x, g = (torch.randn(1, T, H, K, generator=generator).to(comm.device) for _ in "xg")
    return F.normalize(x, dim=-1), F.logsigmoid(g)


def factors(g):
    """Return e^g of the first channel in g's type; on GPUs autocast would compute exp in float32."""
    with torch.autocast(g.device.type, enabled=False):
        return g[..., 0].exp()


def kda(comm, x, g, **options):
    return allscan.zeco_kda(x, x, x, g, factors(g), comm=comm, **(dict(chunk="fla") | options))


def gdn(comm, x, g, **options):
    options = dict(chunk="fla") | options
    return allscan.zeco_gated_delta_rule(x, x, x, g[..., 0], factors(g), comm=comm, **options)


def own_kda(comm, x, g, **options):
    return kda(comm, x, g, chunk="allscan", **options)


def own_gdn(comm, x, g, **options):
    return gdn(comm, x, g, chunk="allscan", **options)


def gla(comm, x, g, **options):
    return allscan.zeco_gla(x, x, x, g, comm=comm, **options)


def ssd(comm, x, g, **options):
    return allscan.zeco_ssd(x, factors(g), g[0, 0, :, 0], x, x, 4, comm=comm, **options)


def simple(comm, x, g, gamma=False, **options):
    how = dict(g_gamma=g[0, 0, :, 0]) if gamma else dict(g=g[..., 0])
    return allscan.zeco_simple_gla(x, x, x, **how, comm=comm, **options)


def scan(comm, x, g, **options):
    return allscan.allscan(x[0], g[0, ..., 0].exp(), comm=comm, **options)


def halves(comm, x, g, **options):
    return allscan.allscan((x[0], -x[0]), comm=comm, layout="zigzag", **options)


def neighbours(comm, x, g, n=2, **options):
    return allscan.halo(x, n, comm=comm, **options)


def kinds(comm, x, g, kind):
    """Return calls with equally many words a token, in other dtypes and widths."""
    words = x.flatten(2)
    wide, narrow = words[..., :20], words[..., 20:].contiguous()
    return {
        "floats": lambda: allscan.halo((wide, narrow), 1, comm=comm),
        "other widths": lambda: allscan.halo((narrow, wide), 1, comm=comm),
        "integers": lambda: allscan.halo((wide[..., :10].int(), narrow), 1, comm=comm),
    }[kind]()


X = torch.zeros(1, T, H, K)
MODULES = dict(fla="fla", transformers="transformers", megatron="megatron.core", fla_cp="fla.ops")
MODULES |= dict(ringmaster="ringmaster")


def of_integration(name, function, *given, **options):
    pytest.importorskip(MODULES.get(name, "torch"))
    return getattr(getattr(allscan.integrations, name), function)(*given, **options)


TAKE_A_COMMUNICATOR = {
    "allscan": lambda comm: allscan.allscan(X, comm=comm),
    "allscan, in zigzag": lambda comm: allscan.allscan((X, X), comm=comm, layout="zigzag"),
    "allscan_segments": lambda comm: allscan.allscan_segments(X, comm=comm),
    "halo": lambda comm: allscan.halo(X, 1, comm=comm),
    "zeco_gla": lambda comm: gla(comm, X, X),
    "zeco_kda": lambda comm: kda(comm, X, X),
    "zeco_gated_delta_rule": lambda comm: gdn(comm, X, X),
    "zeco_ssd": lambda comm: ssd(comm, X, X),
    "zeco_simple_gla": lambda comm: simple(comm, X, X),
    "AllScan": lambda comm: allscan.AllScan(comm, (2, 8)),
    "AllScan.size_hint": lambda comm: allscan.AllScan.size_hint(comm, (2, 8)),
    "to_zigzag": lambda comm: to_zigzag(X, comm=comm),
    "from_zigzag": lambda comm: from_zigzag(X, comm=comm),
    "zigzag_positions": lambda comm: allscan.zigzag.zigzag_positions(T, comm=comm),
    "zigzag_first_token": lambda comm: allscan.zigzag.zigzag_first_token(T, comm=comm),
    "cut_batch": lambda comm: of_integration("batches", "cut_batch", dict(input_ids=X[..., 0, 0].long()), comm=comm),
    "check_batch": lambda comm: of_integration("batches", "check_batch", dict(input_ids=X), comm=comm),
    "fla": lambda comm: of_integration("fla", "sequence_parallel", torch.nn.Linear(2, 2), comm=comm),
    "transformers": lambda comm: of_integration("transformers", "sequence_parallel", torch.nn.Linear(2, 2), comm=comm),
    "megatron": lambda comm: of_integration("megatron", "sequence_parallel", (), comm=comm),
    "context_parallel": lambda comm: of_integration("fla_cp", "context_parallel", comm),
    "megatron_chunkwise": lambda comm: of_integration("megatron_chunkwise", "enable", comm=comm),
    "ringmaster": lambda comm: of_integration("ringmaster", "enable", comm),
}


@pytest.fixture(scope="module")
def no_communicators():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield {
        "ProcessGroup": group,
        "DeviceMesh": DeviceMesh.from_group(group, "cpu"),
        "None": None,
        "type": allscan.Communicator,
        "int": 0,
    }
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["ProcessGroup", "DeviceMesh", "None", "type", "int"])
@pytest.mark.parametrize("name", TAKE_A_COMMUNICATOR)
def test_something_else_in_place_of_a_communicator(no_communicators, name, kind):
    """A process group, a mesh, None or the class raises a TypeError that names the right call. None turns a model of an
    integration back into an ordinary one, or lets it create a communicator."""
    if kind == "None" and name in ("fla", "transformers", "megatron", "megatron_chunkwise", "ringmaster"):
        return
    with pytest.raises(TypeError, match=rf"comm must be a Communicator, got (a )?{kind}.*allscan.Communicator\("):
        TAKE_A_COMMUNICATOR[name](no_communicators[kind])


@pytest.mark.cpu
def test_all_functions_that_take_a_communicator_are_looked_at():
    public = {name: getattr(allscan, name) for name in allscan.__all__}
    public |= {
        name: x for name, x in vars(allscan.zigzag).items() if name.endswith(("_zigzag", "_positions", "_token"))
    }
    functions = {name: x for name, x in public.items() if inspect.isfunction(x)}
    taking = {name for name, x in functions.items() if "comm" in inspect.signature(x).parameters}
    assert len(taking) >= 9 and taking <= {*TAKE_A_COMMUNICATOR}, taking


A = torch.zeros(H)
RAW = dict(use_gate_in_kernel=True, A_log=A)
PACKED = dict(cu_seqlens=[0, 3, 2 * T])
# (call, name of the argument, options of other ranks, options of the last rank). These differences would make results
# of all ranks wrong, and change no tensor's shape or dtype.
DIFFER = [
    (gla, "scale", {}, dict(scale=0.5)),
    (gla, "scale", dict(scale=0.5, **PACKED), dict(scale=0.25, **PACKED)),
    (gla, "layout", {}, dict(layout="zigzag")),
    (kda, "scale", {}, dict(scale=0.5)),
    (kda, "scale", dict(scale=0.5, layout="zigzag"), dict(scale=0.25, layout="zigzag")),
    (kda, "use_qk_l2norm_in_kernel", {}, dict(use_qk_l2norm_in_kernel=True)),
    (kda, "use_beta_sigmoid_in_kernel", {}, dict(use_beta_sigmoid_in_kernel=True)),
    (kda, "use_gate_in_kernel", {}, RAW),
    (kda, "lower_bound", dict(RAW, lower_bound=-4.0), dict(RAW, lower_bound=-2.0)),
    (kda, "lower_bound", RAW, dict(RAW, lower_bound=-2.0)),
    (kda, "A_log is None", dict(RAW, lower_bound=-2.0), dict(RAW, lower_bound=-2.0, A_log=None)),
    (kda, "dt_bias is None", RAW, dict(RAW, dt_bias=torch.zeros(H * K))),
    (gdn, "scale", dict(scale=2.0), {}),
    (gdn, "use_qk_l2norm_in_kernel", dict(use_qk_l2norm_in_kernel=True), {}),
    (gdn, "use_gate_in_kernel", {}, RAW),
    (gdn, "use_beta_sigmoid_in_kernel", {}, dict(use_beta_sigmoid_in_kernel=True)),
    (
        gdn,
        "allow_neg_eigval",
        dict(use_beta_sigmoid_in_kernel=True),
        dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    ),
    (gdn, "state_v_first", {}, dict(state_v_first=True)),
    (ssd, "dt_softplus", {}, dict(dt_softplus=True)),
    (ssd, "dt_limit", {}, dict(dt_limit=(0.0, 0.25))),
    (ssd, "dt_bias is None", {}, dict(dt_bias=torch.ones(H))),
    (ssd, "layout", {}, dict(layout="zigzag")),
    (simple, "scale", {}, dict(scale=0.5)),
    (simple, "g is None", {}, dict(gamma=True)),
    (scan, "reverse", {}, dict(reverse=True)),
    (scan, "initial_state is None", {}, dict(initial_state=torch.ones(T, H, K))),
    (halves, "initial_state is None", {}, dict(initial_state=torch.ones(T, H, K))),
    (neighbours, "reverse", {}, dict(reverse=True)),
    (neighbours, "n", {}, dict(n=1)),
    (neighbours, "layout", {}, dict(layout="zigzag")),
    (kinds, "dtypes", dict(kind="floats"), dict(kind="integers")),
    (kinds, "words of a token in each x", dict(kind="floats"), dict(kind="other widths")),
]


def differ_case(comm, i):
    call, _, mine, other = DIFFER[i]
    if call in (kda, gdn):
        import_fla(models=False)
    x, g = tensors(comm)

    def on_device(options):
        return {n: t.to(comm.device) if isinstance(t, torch.Tensor) else t for n, t in options.items()}

    found = raised(call, comm, x, g, **on_device(other if comm.rank == comm.size - 1 else mine))
    launched = [made.epochs for made in comm.collectives]
    call(comm, x, g, **on_device(mine))
    call(comm, x, g, **on_device(other))
    comm.barrier()
    return found, launched


def host(*values):
    """Mark a case of the host's behaviour as CPU-only; GPUs run other cases of the test."""
    return pytest.param(*values, marks=pytest.mark.cpu)


def first_of_each_call(i):
    """Return whether the case is the first of its call, or has a tensor on the device."""
    call, name, *_ = DIFFER[i]
    return call not in [case[0] for case in DIFFER[:i]] or name == "use_gate_in_kernel"


@pytest.mark.parametrize(
    "i",
    [i if first_of_each_call(i) else host(i) for i in range(len(DIFFER))],
    ids=[f"{call.__name__}-{name}" for call, name, *_ in DIFFER],
)
def test_what_must_be_alike(run, i):
    """If an argument differs between ranks, every rank names it with the values of each rank, and nothing is launched;
    afterwards both variants of the call work."""
    name = DIFFER[i][1]
    for found, launched in run(2, differ_case, i):
        assert not launched and found is not None and found[0] == "ValueError", (found, launched)
        assert re.search(rf"different arguments: (.*\. )?{name}: .* on rank 0; .* on rank 1", found[1]), found


def may_differ_case(comm):
    """Arguments that may differ between ranks have no effect on other ranks."""
    import_fla(models=False)
    x, g = tensors(comm)
    calls = [
        (gla, dict(output_final_state=True)),
        (gla, dict(recompute=False)),
        (kda, dict(output_final_state=True)),
        (gdn, dict(output_final_state=True)),
        (ssd, dict(return_final_states=True)),
    ]
    errors = []
    for call, options in calls:
        found = []
        for own in ({}, options if comm.rank else {}, {} if comm.rank else options):
            leaf = x.clone().requires_grad_()
            y = call(comm, leaf, g, **own)
            y = y[0] if isinstance(y, tuple) else y
            found.append((y.detach(), *torch.autograd.grad(y.sum(), [leaf])))
        errors += [error(a, b) for other in found[1:] for a, b in zip(other, found[0])]
    chunks = [allscan.zeco_ssd(x, factors(g), g[0, 0, :, 0], x, x, n, comm=comm) for n in (4, 2 + comm.rank)]
    return *errors, error(*chunks)


@pytest.mark.cpu
def test_what_a_rank_may_choose(run):
    check_errors(run(2, may_differ_case), 1e-5)


def later_case(group, debug):
    """At a later call one rank has another scale: no rank waits for ever or continues with wrong results."""
    with allscan.Communicator(group, timeout=10, debug=debug) as comm:
        x, g = tensors(comm)
        for _ in range(2):
            gla(comm, x, g, scale=0.5)
        answers = [raised(gla, comm, x, g, scale=0.25 if comm.rank else 0.5), raised(comm.barrier)]
        comm.resync()
        o, _ = gla(comm, x, g, scale=0.5)
        comm.barrier()
        return answers, bool(o.isfinite().all())


@pytest.mark.parametrize("debug", [False, True])
def test_another_scale_at_a_later_call(run, debug):
    for answers, good in run(2, later_case, debug):
        assert good
        if debug:
            assert "scale: 0.5 on rank 0; 0.25 on rank 1" in answers[0][1] and answers[1] is None, answers
        else:
            assert any(answer and answer[0] == "AllScanOutOfStep" for answer in answers), answers


def many_scales_case(comm):
    """Use more scales than a communicator caches: all ranks evict them at the same call."""
    x, g = tensors(comm, 2)
    expected, _ = gla(comm, x, g, scale=1.0)
    agreements = comm.agreed.arguments
    for i in range(16 * 256 - len(agreements) + 1):
        agreements["filled", i] = True
    for scale in (2.0, 1.0, 3.0, 1.0):
        o, _ = gla(comm, x[:, : 1 + comm.rank], g[:, : 1 + comm.rank], scale=scale)
    o, _ = gla(comm, x, g, scale=1.0)
    comm.barrier()
    return torch.equal(o, expected), len(agreements)


@pytest.mark.cpu
def test_agreements_are_forgotten_together(run):
    assert run(2, many_scales_case) == [(True, 3)] * 2


def communicators_case(group):
    rank = group.rank()
    return [
        raised(allscan.Communicator, group, debug=bool(rank)),
        raised(allscan.Communicator, group, algorithm="rails" if rank else "chain"),
    ]


@pytest.mark.cpu
def test_communicators_name_what_differs(run):
    for debug, algorithm in run(2, communicators_case):
        assert "debug: False on rank 0; True on rank 1" in debug[1] and "nodes" not in debug[1]
        assert "algorithm: chain on rank 0; rails on rank 1" in algorithm[1] and "nodes" not in algorithm[1]


# Gates


BAD = {
    "NaN": (NAN, "must not be NaN"),
    "positive": (0.5, "must be at most 0"),
    "-inf": (-INF, "at least -1,048,576"),
    "-3e38": (-3e38, "at least -1,048,576"),
    "-1e9": (-1e9, "at least -1,048,576"),
}
WAYS = {"contiguous": {}, "zigzag": dict(layout="zigzag"), "packed": PACKED}
GATES = [(name, how, False) for name in ("NaN", "positive", "-inf") for how in WAYS]  # name, layout, debug
GATES += [("-3e38", "zigzag", False), ("-1e9", "packed", False)]  # rejected by the bound that rejects -inf
GATES += [(name, "contiguous", True) for name in ("NaN", "positive", "-1e9")]
ON_GPUS_TOO = (
    ("NaN", "contiguous", False),
    ("positive", "zigzag", False),
    ("-inf", "packed", False),
    ("-1e9", "contiguous", True),
)


def gates_case(group, call, value, how, debug):
    """Return errors where only the last rank has such a gate: at a first call; in debug mode at a later one, too."""
    if call in (kda, gdn):
        import_fla(models=False)
    with allscan.Communicator(group, timeout=10, debug=debug) as comm:
        x, g = tensors(comm)
        bad = g.clone()
        if comm.rank == comm.size - 1:
            bad[:, 0 if call is ssd else 5] = value
        if call is ssd:  # its gates are A, which may be positive

            def call(comm, x, g, **options):
                return allscan.zeco_ssd(x, x[..., 0].abs(), g[0, 0, :, 0], x, x, 4, comm=comm, **options)

        found = [raised(call, comm, x, bad, **WAYS[how])]
        call(comm, x, g, **WAYS[how])
        if debug:
            found.append(raised(call, comm, x, bad, **WAYS[how]))
            call(comm, x, g, **WAYS[how])
        comm.barrier()
        return found


@pytest.mark.slow(but=("NaN", "positive-packed", "-inf-contiguous-False", "-3e38"))
@pytest.mark.parametrize("call", [kda, gdn, ssd, gla, own_kda, own_gdn], ids=lambda call: call.__name__)
@pytest.mark.parametrize("name, how, debug", [case if case in ON_GPUS_TOO else host(*case) for case in GATES])
def test_gates_that_are_rejected(run, name, call, how, debug):
    """Gates for which kernels return NaN or noise are rejected by every operator with gates; zeco_gla, zeco_ssd and
    our own chunk kernels are exact for strong ones."""
    value, words = BAD[name]
    if call in (gla, ssd, own_kda, own_gdn) and name[0] == "-":
        for found in run(2, gates_case, call, value, how, debug):
            assert all(x is None for x in found), found
        return
    for rank, found in enumerate(run(2, gates_case, call, value, how, debug)):
        for answer in found:
            assert answer[0] == "ValueError" and words in answer[1] and (rank or "rank 1" in answer[1]), answer


def made_gates_case(comm):
    """Return errors for gates that the operator computes from raw ones."""
    import_fla(models=False)
    x, g = tensors(comm)
    strong = dict(use_gate_in_kernel=True, A_log=torch.full((H,), 100.0 if comm.rank else 0.0, device=comm.device))
    found = [raised(call, comm, x, g, **strong) for call in (kda, gdn)]
    comm.barrier()
    return found


def test_gates_that_operators_make(run):
    for rank, found in enumerate(run(2, made_gates_case)):
        for answer in found:
            assert answer[0] == "ValueError" and "at least -1,048,576" in answer[1] and (rank or "rank 1" in answer[1])


def head_first_case(group):
    """For each kind of first calls: the warnings of head-first inputs, and the error of zeco_ssd."""
    heads_of, few = 8, {"right": (20, 19), "few later": (20, 3, 1), "one": (1,), "none": (0,), "few": (3, 2)}
    found = {}

    def texts(call, tokens, heads=heads_of, **options):
        with allscan.Communicator(group, **options) as comm:
            x = F.normalize(torch.ones(1, 20, heads, K, device=comm.device), dim=-1)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for T in tokens:
                    call(comm, x[:, :T], -x[:, :T])
        return [str(w.message) for w in warned if "head-first" in str(w.message)]

    for kind, tokens in few.items():
        found[kind] = texts(gla, tokens)
    found["gla"] = texts(gla, (8, 8, 7), heads=20)
    found["gla, debug"] = texts(gla, (8, 8), heads=20, debug=True)
    found["kda"], found["gated_delta_rule"] = (texts(call, (8,), heads=20) for call in (own_kda, own_gdn))
    with allscan.Communicator(group) as comm:
        x = torch.zeros(1, 8, 20, K, device=comm.device)
        A = torch.zeros(8, device=comm.device)  # has one number for each head
        return found, raised(allscan.zeco_ssd, x, x[..., 0], A, x, x, 4, comm=comm)


def test_inputs_that_look_head_first(run, size=2):
    """Warned of once, on the first rank; few tokens of as many heads as before, one or none are not. zeco_ssd's A tells
    its layout."""
    for rank, (found, of_ssd) in enumerate(run(size, head_first_case)):
        for kind, texts in found.items():
            warns = rank == 0 and kind not in ("right", "few later", "one", "none")
            assert len(texts) == warns, (kind, rank, texts)
            if warns and kind != "few":
                assert f"zeco_{kind.split(',')[0]} got 8 tokens of 20 heads, q [1, 8, 20, 16]" in texts[0], texts
                assert "Expected [B, T, H, ...]" in texts[0], texts
        assert of_ssd[0] == "ValueError" and "is x, [1, 8, 20, 16], [B, H, T, P]" in of_ssd[1], of_ssd


def autocast_case(group, call):
    """Return whether first calls get the same results under torch.autocast to the other 16-bit type."""
    same = []
    for dtype, other in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)):
        for invariant in (0, 64):
            found = []
            for enabled in (False, True):
                with allscan.Communicator(group, timeout=60) as comm:
                    x, g = (y.to(dtype) for y in tensors(comm, 64))
                    with torch.autocast(comm.device.type, other, enabled=enabled):
                        y = call(comm, x, g, invariant=invariant)
                    found.append(y[0] if isinstance(y, tuple) else y)
            same.append(torch.equal(*found) and found[0].dtype == dtype)
    return same


@pytest.mark.parametrize("call", [gla, own_kda, own_gdn, ssd], ids=lambda call: call.__name__)
def test_the_other_16_bit_type_under_autocast(run, call, size=2):
    assert run(size, autocast_case, call) == [[True] * 4] * size


def nan_case(group, call):
    """Return debug mode's errors for NaN in results and gradients on the rank that has them and on the others; other
    calls go on."""
    if call in (kda, gdn):
        import_fla(models=False)
    with allscan.Communicator(group, timeout=10, debug=True) as comm:
        x, g = tensors(comm)
        spoilt = x.clone()
        if comm.rank == comm.size - 1:
            spoilt.fill_(NAN)
        back = call in (scan, neighbours)
        options = dict(reverse=True) if back else {}
        found = [raised(call, comm, spoilt, g, **options)]
        leaf = x.clone().requires_grad_()
        y = call(comm, leaf, g, **options)
        y = y[0] if isinstance(y, tuple) else y
        weights = torch.ones_like(y)
        if comm.rank == (0 if back else comm.size - 1):
            weights.fill_(NAN)
        found.append(raised(y.backward, weights))
        call(comm, x, g, **options)
        comm.barrier()
        return found


@pytest.mark.parametrize("call", [gla, kda, gdn, ssd, scan, neighbours], ids=lambda call: call.__name__)
def test_debug_mode_looks_for_nan(run, call):
    answers = run(2, nan_case, call)
    assert answers[0] == answers[1]
    for kind, text in answers[0]:
        assert kind == "RuntimeError" and "has returned NaN: rank 0: " in text and "; rank 1: " in text, text


def documented(title):
    """Return the rows of a table of docs/delta.md, found by its header."""
    with open(os.path.join(ROOT, "docs", "delta.md"), encoding="utf-8") as file:
        (table,) = (part for part in file.read().split("\n\n") if part.startswith(f"| {title} |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


def strong_case(comm, rule, strength):
    import_fla(models=False)
    whole = Whole(DeltaCase(rule, [160], H=2, HV=2, K=32, gates="mild"), comm.device)
    generator = torch.Generator().manual_seed(1)
    whole.g = torch.where(torch.rand(whole.g.shape, generator=generator) < 0.05, strength, whole.g)
    found = whole.ours(comm, slice(None), chunk="fla")
    return {n: error(a, b) for n, a, b in zip(NAMES, found, whole.reference())}


@pytest.mark.slow(but="-1e5")
@pytest.mark.cpu
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("strength", ["-1e2", "-1e3", "-1e4", "-1e5"])
def test_the_errors_of_strong_gates_are_documented(run, rule, strength):
    """The largest errors of results and gradients, relative to the largest value, are at most the documented ones and
    at least a third of these."""
    figure = documented("gates of")[strength][rule != "kda"]
    [errors] = run(1, strong_case, rule, float(strength))
    assert figure / 3 < max(errors.values()) <= figure, errors


def large_state_case(comm, rule):
    """Return (largest state, largest output, whether all outputs are finite) for float16 inputs, with a state inside
    and one outside of float16's range."""
    import_fla(models=False)
    answers = []
    for size in (2e4, 1e5):
        whole = Whole(DeltaCase(rule, [160], K=32, gates="zero", dtype=torch.float16), comm.device)
        whole.q, whole.k, whole.initial = whole.q / 64, whole.k / 100, torch.full_like(whole.initial, size)
        found, expected = whole.ours(comm, slice(None), chunk="fla"), whole.reference()
        largest = (x.abs().max().item() for x in (expected[1], expected[0]))
        answers.append((*largest, bool(found[0].isfinite().all())))
    return answers


@pytest.mark.cpu
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
def test_large_states_of_float16_inputs(run, rule):
    """As documented: inputs and outputs are within float16's range, and results are not finite if the state exceeds
    it."""
    [(small, large)] = run(1, large_state_case, rule)
    assert small[0] < 65504 < large[0] and max(small[1], large[1]) < 65504
    assert small[2] and not large[2]


# Tokens to the zigzag layout


def moved_case(comm, which):
    """Differing calls of to_zigzag: at a first call all ranks raise; at a later one all return within the time-out."""
    odd = comm.rank == comm.size - 1
    x = torch.arange(2.0 * 3 * T, device=comm.device).view(2, T, 3) + comm.rank
    calls = {
        "tokens": lambda: to_zigzag(x[:, : T - 2 * odd], comm=comm),
        "odd tokens": lambda: to_zigzag(x[:, : T - odd], comm=comm),
        "width": lambda: to_zigzag(x[..., : 3 - odd], comm=comm),
        "dtype": lambda: to_zigzag(x.bfloat16() if odd else x.half(), comm=comm),
        "direction": lambda: (from_zigzag if odd else to_zigzag)(x, comm=comm),
        "no tensor": lambda: to_zigzag(x.tolist() if odd else x, comm=comm),
    }
    first = raised(calls[which])
    leaf = x.clone().requires_grad_()
    moved = to_zigzag(leaf, comm=comm)
    moved.sum().backward()
    good = torch.equal(from_zigzag(moved, comm=comm), x) and bool((leaf.grad == 1).all())
    comm.barrier()
    return first, good


@pytest.mark.parametrize(
    "which", ["tokens", *map(host, ("odd tokens", "width", "dtype")), "direction", host("no tensor")]
)
@pytest.mark.parametrize("size", [2, 3])
def test_moves_that_differ(run, size, which):
    for rank, (first, good) in enumerate(run(size, moved_case, which)):
        assert good and first is not None and first[0] in ("ValueError", "TypeError"), (first, good)
        assert rank == size - 1 or f"rank {size - 1}" in first[1], first


def later_move_case():
    with allscan.Communicator(timeout=2.0) as comm:
        x = torch.ones(1, T, 2, device=comm.device)
        to_zigzag(x, comm=comm)
        odd = comm.rank == comm.size - 1
        return raised(to_zigzag, x[:, : T - 2 * odd], comm=comm)


@pytest.mark.cpu
def test_a_later_move_that_differs(fresh):
    """With another number of tokens on one rank than before, no rank returns a result or waits longer than the
    time-out."""
    known, new = fresh(2).run(later_move_case)
    assert known[0] == "AllScanOutOfStep" and "waited 2 s" in known[1], known
    assert new[0] == "AllScanRejected" and "rank 0 has rejected this call" in new[1], new


def compiled_move_case(comm):
    x = torch.arange(2.0 * 3 * T, device=comm.device).view(2, T, 3) + comm.rank
    answers = []
    for call in (to_zigzag, torch.compile(to_zigzag, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = call(leaf, comm=comm)
        answers.append((y.detach(), *torch.autograd.grad((y * y.detach()).sum(), [leaf])))
    return all(map(torch.equal, *answers))


@pytest.mark.parametrize("size", [host(1), 2])
def test_compiled_moves(run, size):
    assert all(run(size, compiled_move_case))


def captured_case(group):
    """A capture does not check gates, since the host must not wait for the GPU: a first call in it raises, and in debug
    mode a captured call is right."""
    with allscan.Communicator(group, timeout=60) as comm:
        x, g = tensors(comm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = raised(gla, comm, x, g)
        comm.barrier()
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        expected, _ = gla(comm, x, g)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = gla(comm, x, g)
        graph.replay()
        torch.cuda.synchronize()
        return answer, torch.equal(o, expected)


@pytest.mark.gpu
def test_gates_in_a_capture(run, size=2):
    for answer, same in run(size, captured_case):
        assert same and answer[0] == "RuntimeError" and "cannot be captured" in answer[1], answer


def alone_case(comm):
    """Return errors of arguments without the arguments that they need, after a right call that differs in nothing
    else."""
    x = torch.ones(1, 4, 1, 16, device=comm.device)
    beta = torch.ones(1, 4, 1, device=comm.device)
    calls = {
        "zeco_gla": functools.partial(allscan.zeco_gla, x, x, x, -x, comm=comm),
        "halo": functools.partial(allscan.halo, x, 2, comm=comm),
        "zeco_ssd": functools.partial(allscan.zeco_ssd, x, beta, -beta[0, 0], x, x, 4, comm=comm),
        "zeco_kda": functools.partial(allscan.zeco_kda, x, x, x, -x, beta, comm=comm, chunk="allscan"),
    }
    found = {}
    for name, call in calls.items():
        call()
        found[name] = raised(call, first_token=4 * comm.rank)
        call()
    found["lower_bound"] = raised(calls["zeco_kda"], lower_bound=-2.0)
    found["Communicator"] = raised(allscan.Communicator, comm)
    found["ring"] = raised(allscan.Communicator, comm.group, algorithm="auto" if comm.rank else "ring")
    comm.barrier()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_arguments_that_go_with_others(run, size):
    """A missing argument raises a ValueError that names it; otherwise the given argument would have no effect."""
    for found in run(size, alone_case):
        said = dict.fromkeys(("zeco_gla", "halo", "zeco_ssd", "zeco_kda"), "first_token requires cu_seqlens")
        said |= dict(lower_bound="use_gate_in_kernel=True", Communicator="pass comm.group", ring="algorithm must be")
        for name, text in said.items():
            assert found[name] and found[name][0] == "ValueError" and text in found[name][1], (name, found[name])
        assert size > 1 or found["ring"][1].startswith("algorithm must be"), found["ring"]
