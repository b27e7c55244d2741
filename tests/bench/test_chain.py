"""bench.chain without GPUs: values of its kernel, order of its clocks, arithmetic."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch

from allscan.reference import allscan_reference
from bench import chain, harness, scaling
from support import virtual
from support.values import raised
from support.virtual import VirtualRanks

pytestmark = pytest.mark.cpu


def inputs(size, shape):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator) for _ in range(size)],
        [torch.rand(shape[:-1], generator=generator) for _ in range(size)],
    ]


def clocked_case(group):
    """Return (largest error of a chain of the clocked kernel, clocks of each rank)."""
    ranks = chain.ClockedRanks(3, (2, 4, 8), tile=(4, 8), devices=["cpu"] * 3)
    states, decays = inputs(3, (2, 4, 8))
    outs = ranks.scan(states, decays)
    ranks.check()
    expected = allscan_reference(states, decays)
    return max((a - b).abs().max().item() for a, b in zip(outs, expected)), [x[-1] for x in ranks.clocks]


def test_the_clocked_kernel_is_a_scan(run):
    [(worst, clocks)] = run(1, clocked_case)
    assert worst < 1e-6
    for of_rank in clocks:
        noted = of_rank[:, : chain.ENDED + 1]
        assert of_rank.shape == (2, chain.STEPS.value) and (noted > 0).all() and (noted.diff(dim=1) > 0).all()


def devices_case(group, devices):
    states, decays = inputs(3, (2, 4, 8))
    try:
        ranks = VirtualRanks(3, (2, 4, 8), tile=(4, 8), devices=devices)
    except ValueError as error:
        return str(error)
    outs = [ranks.scan(states, decays, reverse=reverse) for reverse in (False, True)]
    return [
        (x - y).abs().max().item()
        for r in (0, 1)
        for x, y in zip(outs[r], allscan_reference(states, decays, reverse=bool(r)))
    ]


def test_a_device_for_each_rank(run):
    assert max(run(1, devices_case, ["cpu"] * 3)[0]) < 1e-6
    for devices in (["cpu"] * 2, [0, 1, 0]):
        assert "name the cpu device of each" in run(1, devices_case, devices)[0]


def streams_case(group):
    """Return ([(rank, devices whose current stream its stream waits for before the launch)], errors of rejected calls).
    Two GPUs are mocked; ranks are assigned to them in turns."""
    ranks = VirtualRanks(3, (2, 4, 8), tile=(4, 8))
    states, decays = inputs(3, (2, 4, 8))
    ranks.scan(states, decays)  # later scans load no module
    gpus = [torch.device("cuda", i) for i in range(2)]
    ranks.devices = [gpus[i % 2] for i in range(3)]
    for tables in (*ranks._gates.values(), ranks._zeros, ranks._unread):
        word = tables.pop(torch.device("cpu"))
        tables.update(dict.fromkeys(gpus, word))
    found, waits = [], {}
    for rank in ranks.ranks:
        rank.stream = mock.Mock()
        rank.stream.wait_stream.side_effect = waits.setdefault(rank.rank, []).append
    launch = mock.patch.object(ranks, "_launch", lambda rank, *_: found.append((rank, sorted(waits[rank]))))
    on = mock.patch.object(ranks, "_on", lambda rank: contextlib.nullcontext())
    with launch, on, mock.patch.object(torch.cuda, "current_stream", lambda device: f"of {device}"):
        ranks.scan(states, decays, join=False)
    words = [torch.zeros(2, dtype=torch.int64)] * 3
    return found, [
        raised(ranks.scan, states, decays, **options)
        for options in (dict(times=words, ranks=[0, 1]), dict(times=words[:2]), dict(ranks=[1, 3]))
    ]


def test_ranks_on_several_gpus_wait_for_inputs_of_all(run):
    [(found, answers)] = run(1, streams_case)
    assert found == [(rank, ["of cuda:0", "of cuda:1"]) for rank in range(3)]
    assert [kind for kind, _ in answers] == ["ValueError"] * 3
    assert all("each of 3 ranks" in why for _, why in answers[:2]) and "0 .. 2" in answers[2][1]


def timed_case(group):
    ranks = VirtualRanks(1, (1, 4, 8), tile=(4, 8), programs=1)
    states, decays = inputs(1, (1, 4, 8))
    [times], _ = ranks.timed(states, decays, epochs=3)
    return times.flatten()


def test_a_timed_scan_begins_when_all_have_met(run):
    """The clock is read at each epoch's begin and end, here with one program: the interpreter runs programs in
    sequence."""
    [times] = run(1, timed_case)
    assert times.shape == (6,) and times[0] > 0 and (times.diff() > 0).all()


def test_a_further_hop_is_of_three_ranks_less_two():
    rows = [
        dict(kind=kind, ranks=ranks, bytes=nbytes, p50_us=us)
        for kind, ranks, nbytes, us in (
            ("chain", 2, 64, 5.0),
            ("chain", 3, 64, 6.5),
            ("chain", 3, 128, 9.0),
            ("hop", 2, 128, 1.0),
        )
    ]
    assert chain.further_hops(rows) == {64: 1.5}


def test_what_matters_most_comes_first():
    found = chain.cases(["chain", "hop"], [0.25, 2], [2, 3, 4])
    assert [(kind, size) for kind, _, size in found] == [("chain", 2), ("chain", 3)] * 2 + [("hop", 3)] * 2 + [
        ("chain", 4)
    ] * 2
    assert chain.cases(["hop"], [2], [2]) == [("hop", mib, 3) for mib in chain.HOP_MIB]


def test_a_run_that_is_cut_keeps_its_rows(tmp_path, capsys, monkeypatch):
    """An interrupted run reports the rows that were begun and the names of the others. Process and GPUs are mocked."""

    def run(function, kind, mib, size, timeout):
        assert function is chain.rows_of
        clock.append(clock[-1] + 10)
        times = dict.fromkeys(("p20_us", "p50_us", "p80_us"), float(size))
        return [[dict(kind=kind, ranks=size, bytes=int(mib * 2**20), programs=66, error_us=0.0) | times]]

    clock = [0]
    monkeypatch.setattr(chain, "Ranks", lambda *_, **__: contextlib.nullcontext(mock.Mock(run=run)))
    monkeypatch.setattr(chain.time, "monotonic", lambda: clock[-1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(harness, "machine", lambda: dict(gpu="none", torch="", triton="", sources=""))
    given = ["--mib", "0.25", "--ranks", "2", "3", "4", "--seconds", "15", "--csv", str(tmp_path / "chain.csv")]
    assert chain.main(given) == 0
    said = capsys.readouterr().out
    assert "a further hop, us: 0.25 MiB 1.00" in said and "not begun: [('hop', 0.0625, 3)" in said
    assert len((tmp_path / "chain.csv").read_text().splitlines()) == 3


def test_the_model_is_fitted_to_it(tmp_path, capsys):
    """The fit leaves out points whose hops send too many bytes over one direction of a link."""
    lines = ["kind,ranks,bytes,p50_us"]
    for ranks, exponent in itertools.product((2, 3, 4, 5, 8, 9), range(16, 22)):
        nbytes = 1 << exponent
        shared = ranks > 5 and exponent > 18 or ranks in (4, 5) and exponent > 19
        lines.append(f"chain,{ranks},{nbytes},{1.5 + 1.25 * (ranks - 1) + nbytes / 350e3 + 100 * shared}")
    (tmp_path / "chain.csv").write_text("\n".join([*lines, "hop: loads,3,65536,1.0"]))
    assert scaling.main(["--chain", str(tmp_path / "chain.csv"), "--out", str(tmp_path / "scaling")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if scaling.CHAIN in line]
    assert "t   1.50 us  a  1.25 us  B   350 GB/s" in line and "worst error   0%" in line.replace(
        "error 0%", "error   0%"
    )
    assert scaling.CHAIN in (tmp_path / "scaling.csv").read_text()


def test_two_clocks_are_aligned_by_messages():
    """The second clock is 40 us ahead, a message takes 700 ns, and every fourth message 900 ns more."""
    sent = 10_000 * torch.arange(200)
    late = torch.tensor([0, 0, 0, 900]).repeat(50)
    offset, error, way = chain.aligned(sent, sent + 1_400 + late, sent + 40_700 + late)
    assert (offset, way) == pytest.approx((40.0, 0.7)) and error == pytest.approx(0.0)


def rows_case(group):
    """Return the rows of a chain and of its hops, on CPU ranks in place of GPU ranks; they begin at their launch."""

    class AtOnce:
        def _make_gates(self, devices):
            gates = super()._make_gates(devices)
            return gates | {virtual.MEET: gates[virtual.OPEN]}

    plain, clocked = (type("AtOnce", (AtOnce, kind), {}) for kind in (VirtualRanks, chain.ClockedRanks))
    with mock.patch.multiple(
        chain,
        gpu=lambda rank: torch.device("cpu"),
        processors=lambda: 16,
        clocks_of=lambda devices: (1e3, 0.25, 0.7),
        replay_us=lambda calls: torch.full((5,), 2.5 * len(calls), dtype=torch.float64),
        ClockedRanks=clocked,
        EPOCHS=3,
        WARM=1,
    ):
        return chain.Chain(plain, 3, 1 / 64).row(), chain.hop_rows(1 / 64)


def test_rows_of_a_chain(run):
    """Both GPUs are mocked, so the times mean nothing."""
    [(row, hops)] = run(1, rows_case)
    assert (row["kind"], row["ranks"], row["bytes"], row["error_us"]) == ("chain", 3, 1 << 14, 0.0) and row[
        "p50_us"
    ] > 0
    found = {hop["kind"].removeprefix("hop: "): hop for hop in hops}
    assert all(set(chain.COLUMNS) <= {*hop, "gpu", "torch", "triton", "sources"} for hop in [row, *hops])
    assert found["launch, of an empty kernel"]["p50_us"] == 2.5
    assert found["flight, half a round trip"]["p50_us"] == pytest.approx(0.7)
    for name in ("loads, behind that", "combine", "forward", "output and end", "first store to last output"):
        assert found[name]["p20_us"] > 0, name
    assert found["a hop, there to there"]["error_us"] == 0.25


def test_clocks_keep_their_nanoseconds():
    begin = (1 << 60) + 1
    [found] = chain.since(begin, [torch.tensor([begin, begin + 7])])
    assert found.double().tolist() == [0.0, 7.0]
