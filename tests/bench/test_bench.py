"""Benchmark code: baselines return the right result; the performance model stays near measurements."""

from __future__ import annotations

import collections
import csv
import inspect
import json
import re
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime.autotuner import Autotuner

import allscan
from allscan.comm import topology
from allscan.launch.compiled_kernel import Launch
from allscan.scan.launcher import name_of
from allscan.shmem_kernels import ssd_fwd
from allscan.tools.ranks import Ranks
from bench import (
    against,
    baselines,
    cold,
    delta,
    harness,
    host,
    hybrid,
    local,
    local_delta,
    long,
    loss,
    megatron,
    model,
    packed,
    plots,
    prefill,
    proof,
    scaling,
    segments,
    ssd_split,
    timeline,
    transitions,
    tuning,
    versions,
)
from bench.harness import ROOT, results
from support.gla import BF16, F32, LIMIT, NAMES, GLACase, Whole
from support.launches import Launches, launch_chunks
from support.values import check_errors, place, relative_all

pytestmark = pytest.mark.cpu
_alone = {}


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return printed(main, *options): the lines that a benchmark prints."""

    def printed(main, *options):
        monkeypatch.setattr(sys, "argv", ["bench", *options])
        assert main() == 0
        return capsys.readouterr().out.splitlines()

    return printed


def baseline_case(group, method, dtype):
    if group not in _alone:  # a group of this rank only, created by its own ranks alone
        ranks = dist.get_process_group_ranks(group)
        groups = [dist.new_group([r], use_local_synchronization=True) for r in ranks if r == dist.get_rank()]
        _alone[group] = groups[0]
    with allscan.Communicator(group) as comm, allscan.Communicator(_alone[group]) as alone:
        tokens = [150] * comm.size
        B, H = (1, comm.size) if method == "all_to_all" else (2, 2)
        whole = Whole(GLACase(tokens, B=B, H=H, K=32, dtype=dtype), comm.device)
        whole.initial.zero_()
        whole.dfinal.zero_()
        mine = place(comm, tokens)
        expected = [x[:, mine] for i, x in enumerate(whole.reference()) if i in (0, 2, 3, 4, 5)]
        own = [x[:, mine].contiguous().requires_grad_() for x in (whole.q, whole.k, whole.v, whole.g)]
        if method == "all_to_all":
            o = baselines.all_to_all(*own, comm=comm, alone=alone)
            o.backward(whole.do[:, mine])
        else:
            carrier = baselines.Baseline(comm, method)
            o = baselines.gla(*own, carrier=carrier)
            o.backward(whole.do[:, mine])
            assert carrier.scans == 2 and not comm.collectives  # the scans are the method's, none is an AllScan
            assert comm.agreed.arguments  # a later call does not read the gates again, so that it can be captured
        return relative_all([NAMES[i] for i in (0, 2, 3, 4, 5)], [o] + [x.grad for x in own], expected)


@pytest.mark.slow(but=("ring-2", "all_to_all-2", "all_gather overlapped-2"))
# bench.operator checks these methods on GPUs, with groups that all ranks of the job have created
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", ["all_gather", "all_gather overlapped", "ring", "all_to_all"])
def test_baselines_of_the_operator(run, size, method, dtype=F32):
    check_errors(run(size, baseline_case, method, dtype), LIMIT[dtype])


def chain_case(group, kind, shape):
    return versions.Chain(kind, shape).check()


@pytest.mark.parametrize(
    "kind, shape", [("scan", (2, 8, 16)), ("transitions", (1, 16, 32)), ("transitions", (1, 256, 16))]
)
def test_virtual_ranks_whose_scans_are_timed(run, kind, shape):
    """bench.versions runs these on one GPU."""
    [error] = run(1, chain_case, kind, shape)
    assert error < 1e-6


@pytest.mark.quick
def test_names_of_torchs_symmetric_memory():
    """The baselines that take it run on GPUs only."""
    from torch.distributed import _symmetric_memory

    found = set(re.findall(r"_symmetric_memory\.(\w+)\(", inspect.getsource(baselines)))
    assert found and all(hasattr(_symmetric_memory, name) for name in found)


@pytest.mark.quick
def test_the_model_predicts_sizes_that_it_was_not_fitted_to():
    for method, points in scaling.measured(scaling.SCAN).items():
        ranks, nbytes, us = map(np.asarray, points)
        assert len(set(nbytes)) > 5
        for size in set(nbytes):
            others = nbytes != size
            fitted = scaling.fit(method, ranks[others], nbytes[others], us[others])
            predicted = scaling.terms(method, ranks[~others], nbytes[~others]) @ fitted
            inside = min(nbytes) < size < max(nbytes)
            most = (
                0.2 if method == "sentinel" and inside else 0.35
            )  # tile sizes, and NCCL's algorithms, depend on the state's size
            assert np.abs(predicted / us[~others] - 1).max() < most, (method, size)
    ranks, us = np.asarray(scaling.PUBLISHED_RANKS), np.asarray(scaling.PUBLISHED["All-Scan"])
    for count in ranks:  # the paper's figures, by a chain with its own latency a rank
        others = ranks != count
        fitted = scaling.fit("sentinel", ranks[others], 0 * ranks[others], us[others])
        predicted = scaling.terms("sentinel", ranks[~others], 0 * ranks[~others]) @ fitted
        assert np.abs(predicted / us[~others] - 1).max() < 0.15, count


def test_the_models_table_of_algorithms(monkeypatch):
    fits = {method: scaling.fit(method, *values) for method, values in scaling.measured(scaling.SCAN).items()}
    table = scaling.choices(fits, 8, 5.0, 50.0)
    assert table[-1] == (2, topology.ANY_SIZE, "rails") and (4, 1 << 20, "recursive_doubling") in table
    monkeypatch.setattr(topology, "MEASURED", table)
    for nodes in (2, 3, 4, 8, 12, 16, 32, 100, 128):  # between rows, within 20 % of the model's choice
        over = topology.Topology([(0, 8 * nodes - 1)] * (8 * nodes), (8,) * nodes)
        for size in (1 << i for i in range(14, 28)):
            us = scaling.beyond(fits, 8 * nodes, size, 8, 5.0, 50.0)
            best = min(us[method] for method in scaling.SCANS)
            assert us[over.algorithm_for(size)] <= 1.2 * best, (nodes, size)
    us = [scaling.beyond(fits, P, 2 << 20, 8, 7.0, 47.0)["recursive_doubling"] for P in (256, 1024)]
    assert us[0] < 120 and us[1] < 150  # the targets of issue 23


def test_what_the_model_writes(tmp_path):
    assert scaling.main(["--out", str(tmp_path / "scaling")]) == 0
    with open(tmp_path / "scaling.csv") as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "scaling.png").stat().st_size > 0
    assert {row["kind"] for row in rows} == {"measured", "published", "extrapolated"}
    assert all(row["us"] == "" for row in rows if row["kind"] == "extrapolated")


def test_time_of_a_scan_that_nothing_covers():
    kernels = [("scan_kernel", 1, 10.0, 20.0), ("a", 0, 0.0, 12.0), ("b", 0, 15.0, 5.0), ("c", 0, 18.0, 4.0)]
    assert timeline.exposed(kernels) == pytest.approx(20 - 2 - 5 - 2)
    assert torch.isfinite(torch.tensor(timeline.exposed([("a", 0, 0.0, 1.0)])))


@pytest.mark.slow
def test_host_times_against_other_sources(tmp_path, capsys):
    """The other sources are these; nothing is timed."""
    archive = tmp_path / "before.tgz"
    command = ["tar", "czf", str(archive), "allscan", "shmem_kernels", "bindings"]
    subprocess.run(command, cwd=ROOT, check=True)
    assert against.main([str(archive), "--runs", "1"]) == 0
    head, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert [row[0] for row in rows] == [*METHODS] and all(len(row) == len(head) for row in rows)


METHODS = "allscan", "allscan, forward+backward", "halo", "zeco_gla", "zeco_gla, forward+backward"


def test_the_count_of_a_kernels_work(capsys):
    counted = local.work(1, 16384, 16, 128, 128)
    q = 16384 * 16 * 128 * 2  # bytes of a bfloat16 input; g has twice as many
    assert counted["operands_kernel"][0] == 2 * (4 * q + 2 * q) + 3 * 16384 * 16 * 64 * 2
    assert counted["state_passing_kernel"] == (4 * 16 * 16 * 128 * 128 * 4, 0)
    assert all(nbytes > 0 and flops >= 0 for nbytes, flops in counted.values())
    assert local.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(local.SHAPES)


def test_a_check_lets_no_nan_pass():
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert harness.checked("equal", [good, good], [good, good], 1e-9) == 0
    for actual in ([good, bad], [bad, good], [good, 2 * good]):
        with pytest.raises(AssertionError, match="other is wrong by"):
            harness.checked("other", actual, [good, good], 1e-3)


@pytest.mark.slow
def test_calls_from_python_on_cpu_ranks(printed):
    said = "\n".join(printed(host.main))
    assert "AllScan.scan(out=)" in said and "zeco_gla, forward+backward" in said


def test_the_loss_in_slices_without_gpus(printed):
    errors = re.findall(r"(torch, whole|linear_cross_entropy) .* error (\S+)", "\n".join(printed(loss.main)))
    assert len(errors) == 4 and max(float(error) for _, error in errors) < 4e-3, errors


@pytest.mark.parametrize("name", ["gla", "qwen3_next"])
def test_long_sequences_are_checked(run, name):
    """Loss and gradients of the split model, with everything recomputed and in slices, are those of one rank."""
    assert max(run(2, long.check, name, 24, {})) < 1e-4


@pytest.mark.slow(but="qwen3_next")
@pytest.mark.parametrize("name", prefill.SIZES)
def test_prompts_are_checked(run, name):
    """The last logits and a decoded token, of a prompt that two ranks read in one and two calls."""
    assert max(run(2, prefill.check, name, 24)) < 1e-5


def prefill_rows(group):
    """Return what bench.prefill measures with a small model, without the GPU's counters."""
    counters = dict(reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 0)
    with (
        mock.patch.dict(prefill.SIZES, qwen3_next=prefill.SMALL),
        mock.patch.multiple(torch.cuda, **counters),
        mock.patch.object(prefill, "launched", lambda once: [once()][1:]),
    ):
        return prefill.measure(group, "qwen3_next", 48, [1, 2], 1)


@pytest.mark.parametrize("size, method, scans", [(1, "one GPU", (0, 0)), (2, "split, zigzag", (9, 18))])
def test_times_of_prompts(run, size, method, scans):
    for rows in run(size, prefill_rows):
        assert [(x["method"], x["ranks"], x["pieces"]) for x in rows] == [(method, size, n) for n in (1, 2)]
        assert [int(x["proof"].split()[0]) for x in rows] == list(scans) and rows[0]["first_token_ms"] > 0


def test_the_scan_over_segments_without_gpus(capsys):
    segments.main([])
    assert "checked on CPU ranks" in capsys.readouterr().out


def test_a_wrong_scan_over_segments_has_no_row(run):
    assert run(1, wrong_segments_case) == [True]


def wrong_segments_case(comm):
    [_, one, *_] = segments.cases(comm, segments.SMALL)
    wrong = one._replace(call=lambda: one.call() + 1e-3)
    segments.check(comm, segments.SMALL, one)
    with pytest.raises(RuntimeError, match="allscan_segments of 1 segments is wrong"):
        segments.check(comm, segments.SMALL, wrong)
    return True


@pytest.mark.slow
def test_the_first_step_of_a_process_without_gpus(printed):
    assert "ran in the interpreter" in "\n".join(printed(cold.main))


def test_transitions_are_checked_on_cpu_ranks(capsys):
    assert transitions.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_committed_results_can_be_drawn(tmp_path):
    for name, draw in (("scan", plots.scan), ("operator", plots.operator), ("prefill", plots.prefill)):
        draw(plots.rows(results(f"{name}.csv")), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    tables = [plots.rows(results(f"{name}.csv")) for name in ("model", "long", "hybrid", "hybrid_short")]
    plots.training(*tables, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_a_softmax_layer_can_be_drawn(tmp_path):
    """A drawing of a step has the kernels of the first layer's forward pass and of the last layer's backward pass."""
    names = "sdpa_fprop", "sdpa_fprop", "merge_kernel", "sdpa_bprop", "ncclDevKernel", "gemm"
    begins = 10e3, 50e3, 51e3, 90e3, 91e3, 300e3
    found = [proof.Launched(name, 1e3, begin) for name, begin in zip(names, begins, strict=True)]
    late = [one._replace(begin=one.begin + 4e3) for one in found]  # by another clock
    answers = [dict(zigzag=(0, 0, 0, "", profile)) for profile in (found, late)]
    drawn = hybrid.timeline(answers, "zigzag", "a title")
    kinds = {what: [kind for kind, *_ in ranks[1]] for what, ranks in drawn["panels"].items()}
    assert kinds == dict(forward=["softmax"], backward=["softmax", "NCCL"])
    assert all(ranks[0] == ranks[1] for ranks in drawn["panels"].values())
    assert drawn["panels"]["backward"][0][1] == ("NCCL", "ncclDevKernel", 3.0, 1.0)
    plots.hybrid(json.loads(json.dumps(drawn)), tmp_path / "hybrid.png")
    assert (tmp_path / "hybrid.png").stat().st_size > 10_000


def test_every_method_trains_the_model_alike():
    with Ranks(2, "cpu") as ranks:
        errors = ranks.run(model.check, 2, 40)[0]
    assert set(errors) == {*baselines.METHODS, "zeco", "all_to_all"} and max(errors.values()) < 1e-5


def test_the_split_of_scalar_decays(printed):
    assert [line.split()[0] for line in printed(ssd_split.main)[1:]] == [*ssd_split.RULES]


@pytest.mark.slow
def test_every_method_trains_the_hybrid_alike(printed):
    pytest.importorskip("transformers", minversion="5.23", reason="needs transformers")
    lines = printed(hybrid.main, *"--model kimi_linear qwen3_next nemotron_h --mla 128 192".split())[1:]
    models = ["kimi_linear, MLA 128", "kimi_linear, MLA 192", "qwen3_next", "nemotron_h"]
    assert [line[23:45].rstrip() for line in lines] == ["allscan", "allscan, zigzag", "heads", "gathered"] * 4
    assert [line[:22].rstrip() for line in lines[::4]] == models
    assert all(float(line.split()[-1]) < 1e-5 for line in lines), lines


def test_every_method_trains_megatrons_hybrid_alike(printed):
    for name in ("megatron", "fla"):
        pytest.importorskip(name)
    lines = printed(megatron.main)[1:]
    assert [line[:22].rstrip() for line in lines] == [*megatron.METHODS]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines), lines


@pytest.mark.slow
def test_both_cuts_of_packed_rows_train_alike(printed):
    pytest.importorskip("transformers", minversion="5.23", reason="needs transformers")
    lines = printed(packed.main)[1:]
    assert len(lines) == len(packed.packings(64)) and all(float(line.split()[-1]) < 1e-5 for line in lines), lines


def test_a_rehearsal(capsys, monkeypatch):
    """Each method runs on its own ranks. An error is reported, and the ranks of that method are ended."""
    pytest.importorskip("transformers", minversion="5.23", reason="needs transformers")
    made = []
    monkeypatch.setattr(hybrid, "Ranks", lambda count, _: made.append(Ranks(count, "cpu")) or made[-1])
    monkeypatch.setattr(hybrid, "CHECKED", 16)
    hybrid.rehearse(2, [hybrid.Hybrid("kimi_linear", 128)], ("heads", "no method"), 2, 16)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rehears")]
    assert len(said) == 3 and all("no method: no method: All-Scan made" in line for line in said[:2]), said
    assert [[process.exitcode for process in ranks.processes] for ranks in made] == [[0, 0], [-9, -9]]


def test_the_first_configuration():
    """A rehearsal runs autotuned kernels with the first remaining configuration, without tuning."""
    made, config = [], types.SimpleNamespace(all_kwargs=lambda: dict(BK=32, num_warps=2))

    def pruned(given):
        assert kernel.nargs == dict(x=1, n=2) and given["grid"] == (3,)
        return [config]

    kernel = types.SimpleNamespace(
        arg_names=["x", "n"],
        configs=[None, config, None],
        prune_configs=pruned,
        fn=types.SimpleNamespace(run=lambda *args, **given: made.append((args, given))),
    )
    hybrid.first_configuration(kernel, 1, 2, grid=(3,), warmup=False)
    assert made == [((1, 2), dict(grid=(3,), warmup=False, BK=32, num_warps=2))]


def proven_case(group):
    """Return the proof that zeco_gla ran in the zigzag layout, with launches in place of torch's profile."""
    counted, launch = collections.Counter(), Launch.__call__

    def counting(self, *arguments):
        counted[name_of(self.kernel)] += 1
        return launch(self, *arguments)

    def once():
        counted.clear()
        o, _ = allscan.zeco_gla(x, x, x, -x.detach(), comm=comm, layout="zigzag")
        o.sum().backward()
        return counted

    with mock.patch.object(Launch, "__call__", counting), allscan.Communicator(group) as comm:
        x = torch.rand(1, 64, 1, 16).requires_grad_()
        once()
        method = proof.Method(None, comm, scans=2)
        before = method.epochs()
        once()
        with mock.patch.object(proof, "kernels", lambda step: step()):
            return method.prove("zeco, zigzag", before, 1, 1, True, once)


def test_both_scans_of_the_zigzag_layout_are_counted_on_every_rank(run, size=3):
    assert run(size, proven_case) == ["4 scans of All-Scan in 1 steps; 4 kernels of scans a step"] * size
    assert {proof.kind_of(name) for name in proof.SCANS} == {"recurrences"}


def test_what_ran():
    found = collections.Counter({"ncclDevKernel_SendRecv()": 4, "scan_kernel": 2})
    assert proof.ran("a", found, ("SendRecv", "scan_kernel|other"), ("AllGather",)).startswith("4 SendRecv; 2 scan")
    assert proof.ran("a", found, {"SendRecv": 4, "scan_kernel": None}, ()).endswith("of 6 kernels")
    for wanted, unwanted in (({"SendRecv": 3}, ()), (("AllGather",), ()), ((), ("scan_kernel",))):
        with pytest.raises(AssertionError, match="was not what ran"):
            proof.ran("a", found, wanted, unwanted)


@pytest.mark.quick
def test_configurations_are_compiled_by_one_process_each(tmp_path, monkeypatch):
    class Function:
        arg_names, compiled = ["x", "H", "W", "BLOCK"], []

        def fn(self):
            pass

        fn = staticmethod(fn)

        def run(self, x, H, W, *, BLOCK, grid, warmup, **options):
            assert warmup and BLOCK != 32 and H == 4
            self.compiled.append((x.dtype, W, BLOCK, options["num_warps"]))
            return self

    function = Function()
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32, 64) for warps in (1, 2)]
    tuner = Autotuner(function, function.arg_names, configs, ["W"], None, None)

    def each(jobs, *_):
        for dtype, H, W in (
            (torch.float32, 4, 1),
            (torch.bfloat16, 4, 1),
            (torch.float32, 4, 2),
            (torch.float32, 8, 1),
        ):
            tuner[(1,)](torch.ones(1, dtype=dtype), H, W)  # the last call has the key of the first
        return []

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tuning, "_each", each)
    run = Autotuner.run
    for _ in range(2):
        assert tuning.compile_share(str(tmp_path), [(0, [])]) == []
    assert Autotuner.run is run and len(list(tmp_path.iterdir())) == 18
    assert len(function.compiled) == len(set(function.compiled)) == 12  # this GPU's share, without errors
    assert tuning.compile_share(str(tmp_path), [(1, [])]) == []
    assert len(function.compiled) == 24  # the share of another GPU


@pytest.mark.quick
def test_what_the_delta_rules_are_measured_at():
    plan = delta.points(list(delta.RULES), None, list(delta.GATES), None, "fla")
    assert [at.gates for at in plan] == ["near 1"] * 24 + ["0"] * 2
    assert {at.names[-1] for at in plan if at.rule == "kda"} == {"fla, one rank"}
    assert {job.kind for job in plan[0].jobs()} == {"one rank", "cp_context", "halves"}
    (gated,) = (at for at in plan if at[:3] == ("gated_delta_rule", 4096, 32) and at.backward)
    assert gated.names == ["zeco", "zeco, middle rank's work", "zeco, one rank"]
    assert delta.points(["kda"], [(64, 1)], ["0"], ["zeco"], "fla")[1] == (
        *("kda", 64, 1, "0", True),
        *(["zeco", "fla, one rank"], "fla"),
    )
    ours = delta.points(["kda"], [(64, 1)], ["0"], None, "allscan")
    assert not any("fla" in name for at in ours for name in at.names) and not any(at.jobs() for at in ours)
    assert {*delta.INVARIANT} < {*ours[0].names} and not {*delta.INVARIANT} & {*plan[0].names}
    assert delta.seen("zeco, one rank", "allscan")[0] == ("operands_kernel",)
    of_fla = delta.points(list(delta.OF_FLA), None, ["near 1"], None, "fla")
    passes = {rule: sum(at.rule == rule for at in of_fla) for rule in delta.OF_FLA}
    forward_only = not delta.fla_trains("gated_delta_product")
    assert passes == dict(gdn2=4, gated_delta_product=4 - 2 * forward_only, dplr=4, rwkv7=4)
    assert all(at.names == ["fla cp_context", "fla cp_context, All-Scan", "fla, one rank"] for at in of_fla)
    assert {job.kind for job in of_fla[0].jobs()} == {"one rank", "cp_context"}
    assert not delta.points(list(delta.OF_FLA), None, ["near 1"], None, "allscan")


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
def test_kernels_that_delta_benches_expect_are_those_of_the_plans(rule):
    """Our own chunk kernels of both passes, and the kernels of all methods' communication."""
    assert {*hybrid.FAMILIES["nemotron_h"].kernels, megatron.RECURRENT["M"]} < {*dir(ssd_fwd)}
    counted = []
    for saves in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            launch_chunks(128, 128, BF16, rule == "gated_delta_rule", patch, saves=saves)
            counted.append(collections.Counter(kernel.__name__ for kernel, *_ in Launches.made))
    found, kept = counted
    for name, method in local_delta.METHODS.items():
        if method.rule == rule and name.endswith("chunk=allscan"):
            proof.ran(name, found, method.wanted, method.unwanted)
        if method.rule == rule and name.endswith("recompute=False"):
            proof.ran(name, kept, method.wanted, method.unwanted)
            with pytest.raises(AssertionError, match="was not what ran"):  # backward has computed again
                proof.ran(name, found, method.wanted, method.unwanted)
    scans = found + collections.Counter(scan_kernel=2, delta_segments_kernel=2)
    for name in (name for name in delta.SEEN if name.startswith("zeco") and "one rank" not in name):
        communication = collections.Counter(SendRecv=2) if "moved" in name else collections.Counter()
        proof.ran(name, scans + communication, *delta.seen(name, "allscan"))
    gathers = collections.Counter(AllGather=3, ReduceScatter=3)
    for name in ("allscan", "allscan, zigzag"):
        proof.ran(name, scans + gathers, *hybrid.seen(12)[name])
        if rule == "gated_delta_rule":
            proof.ran(name, scans, *megatron.seen(types.SimpleNamespace(pattern="GGGG"))[name])
    with pytest.raises(AssertionError, match="was not what ran"):  # a method without a state must not launch them
        proof.ran("heads", found + collections.Counter(SendRecv=48), *hybrid.seen(12)["heads"])
