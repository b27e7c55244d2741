"""The command ``allscan``. ``allscan doctor`` reports hardware, software, the chosen transport and missing parts, and
runs a self-test; ``allscan estimate`` prints the report of estimate.py."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..bindings import versions

# imports inside functions may fail if a package is missing or too old: the report says so

STATE = (32, 128, 128)  # 2 MiB: the state of 32 heads with K = V = 128


USAGE = """usage: allscan doctor       what this machine has, which transport would be used and why, and a self-test
       allscan estimate CONFIG --tokens T --ranks P    memory and traffic of a model's layers (docs/estimate.md)
       allscan --version
       allscan --help"""

USAGE_OF_ESTIMATE = """usage: allscan estimate CONFIG --tokens T --ranks P [--step]
                        [--batch B] [--layout zigzag] [--depth 3] [--puts] [--no-recompute]
       allscan estimate CONFIG --tokens T --ranks P,P,... --gpu 80G [--batch B] [--layout zigzag]
                        [--checkpointing] [--offload] [--loss-slice 4096] [--mlp-slice 4096] [--shard N]
                        [--state-dtype bfloat16|float32]

CONFIG: config.json of a model of transformers (Kimi-Linear, Qwen3-Next, Qwen3.5) or of flash-linear-attention (GLA,
KDA, Gated DeltaNet). T: tokens of the whole sequence, a multiple of P (with zigzag of 2 P). bfloat16, gates
float32. --step: also the memory of a training step of the whole model, one of transformers', which it needs.
--gpu: a table over numbers of ranks, of such a step, Mamba2's models too: does it fit, and how much of data
parallelism's speed can remain. --shard: GPUs over which FSDP2 shards; its parameters, gradients and moments are float32
by default, as accelerate's, else bfloat16. --no-recompute: GLA and delta rules with
recompute=False. 256k is 262,144, 1M is 1,048,576, 80G is 80 GiB."""


def main() -> int:
    """``python -m allscan``; returns the exit status."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    if sys.argv[1:] == ["--version"]:
        print(f"allscan {__version__}")
        return 0
    if sys.argv[1:2] == ["estimate"]:
        if rejection := versions.rejection(*versions.ALL):
            print(rejection, file=sys.stderr)
            return 2
        return estimate(sys.argv[2:])
    if sys.argv[1:] != ["doctor"]:
        print(USAGE, file=sys.stderr)
        return 2
    needs = report_versions()
    if versions.rejection(*versions.ALL):
        return 1
    try:
        needs += report()
        ok = self_test()
    except Exception as error:  # a broken installation may raise anything
        print(f"failed      {type(error).__name__}: {error}")
        again = [f"{name.lower()}=={(versions.version_of(name) or '').partition('+')[0]}" for name in versions.ALL[1:]]
        needs, ok = [*needs, f"pip install --force-reinstall {' '.join(again)}      # if one is there in part"], False
    for command in needs:
        print(f"missing     {command}")
    return 0 if ok and not needs else 1


def size(text: str) -> int:
    """A number with a suffix k, M, G, also MB, GB (of 1,024). Raises ValueError for other text."""
    text = text[:-1] if text[-2:].lower() in ("kb", "mb", "gb") else text
    power = "kmg".find(text[-1:].lower()) + 1 if text else 0
    found = float(text[:-1]) * 1024**power if power else int(text)
    if found == float("inf"):
        raise ValueError(text)
    return int(found)


def numbers(text: str) -> list[int]:
    """Integers with commas between them. Raises ValueError for other text."""
    return [int(x) for x in text.split(",")]


class _Parser(argparse.ArgumentParser):
    """Wrong arguments raise ValueError, in place of the usage and an end of the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def estimate(arguments: Sequence[str]) -> int:
    """``allscan estimate``: print the report; returns the exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that transformers and fla miss here
        return _estimate(arguments)


def _estimate(arguments: Sequence[str]) -> int:
    from ..base.tiling import H100_MULTIPROCESSORS
    from .estimate import Cut, check_cut, layers_of, report

    parser = _Parser(prog="allscan estimate", usage=USAGE_OF_ESTIMATE.removeprefix("usage: "))
    parser.add_argument("config")
    parser.add_argument("--gpu", type=size)
    parser.add_argument("--loss-slice", type=size)
    parser.add_argument("--mlp-slice", type=size)
    parser.add_argument("--shard", type=int)
    parser.add_argument("--state-dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    for name in ("--puts", "--step", "--checkpointing", "--offload", "--no-recompute"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--tokens", type=size, required=True)
    parser.add_argument("--ranks", type=numbers, required=True)
    for name, default in (("batch", 1), ("depth", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--multiprocessors", type=int, default=H100_MULTIPROCESSORS)
    try:
        options = parser.parse_args(arguments)
        zigzag = options.layout == "zigzag"
        how = options.depth, options.puts, options.multiprocessors, not options.no_recompute
        cut = Cut(options.tokens, 1, options.batch, zigzag, *how)
        cuts = [cut._replace(ranks=ranks) for ranks in options.ranks]
        for cut in cuts:
            check_cut(cut)
        with open(options.config, encoding="utf-8") as file:
            config = json.load(file)
        if options.gpu is not None:
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what is not installed here is of no importance
            from .estimate_fit import Options, report_of_fit  # needs transformers

            if options.step:
                raise ValueError("--step and --gpu are two reports: pass one of them")
            shard = 1 if options.shard is None else options.shard
            dtype = options.state_dtype or ("float32" if shard > 1 else "bfloat16")
            state_bytes = 4 if dtype == "float32" else 2
            slices = options.loss_slice, state_bytes, options.mlp_slice
            of_fit = Options(options.checkpointing, shard, *slices, options.offload)
            print(report_of_fit(config, cuts, of_fit, options.gpu))
            return 0
        of_gpu = options.shard, options.loss_slice, options.mlp_slice, options.state_dtype
        if options.checkpointing or options.offload or any(x is not None for x in of_gpu):
            names = "--checkpointing, --offload, --shard, --loss-slice, --mlp-slice and --state-dtype"
            raise ValueError(f"{names} are for --gpu")
        if len(cuts) > 1:
            raise ValueError("several numbers of ranks are for --gpu")
        lines = [report(layers_of(config), cuts[0])]
        if options.step:
            from .estimate_step import report_of_step  # needs transformers

            lines.append(report_of_step(config, cuts[0]))
    except (ImportError, OSError, RecursionError, ValueError) as error:
        print("allscan estimate:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


def report_versions() -> list[str]:
    """Print installed and tested versions; returns advice for required packages."""
    needs = []
    for known in versions.PACKAGES:
        kind, version, advice = versions.state_of(known.name)
        use = f" (optional: for {known.use})" if known.use else ""
        about = f"missing{use}" if version is None else f"{version}, {kind}" + (f": {advice}" if advice else "")
        print(f"{known.name:<11} {about}")
        if kind in ("missing", "rejected") and known.name in versions.ALL:
            needs.append(advice)
    return needs


def report() -> list[str]:
    """Print the parts of this machine; returns those that are required and missing."""
    import torch

    from ..bindings.arena import arena_bytes

    gpus = torch.cuda.device_count()
    needs = []
    print(f"bitcode     {_bitcode()}")
    print(f"GPUs        {gpus}" + "".join(f"\n  {i}: {torch.cuda.get_device_name(i)}" for i in range(gpus)))
    if gpus:
        pairs = list(itertools.permutations(range(gpus), 2))
        unmapped = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        print(
            f"mapped      {len(pairs) - len(unmapped)} of {len(pairs)} pairs"
            + (f"; not {unmapped}" if unmapped else "")
        )
        cuda = (torch.version.cuda or "13").partition(".")[0]
        wanted = [versions.package(name) for name in ("nvshmem4py", "NVSHMEM")]
        absent = [p for p in wanted if versions.state_of(p.name).kind in ("missing", "rejected")]
        if gpus > 1 and absent:
            names = " ".join(f"'{p.requirement.replace('cu13', f'cu{cuda}')}'" for p in absent)
            needs.append(f"pip install {names}      # for more than one GPU")
    transport = "shm: no CUDA device; ranks are processes on this host in Triton's interpreter (TRITON_INTERPRET=1)"
    if gpus:
        stores = "neighbours that are mapped use sentinel stores, others NVSHMEM put with signal"
        transport = f"nvshmem: torch finds CUDA; {stores}"
    print(f"transport   {transport}")
    print("network     " + _network())
    try:
        heap = f"{arena_bytes(None):,} bytes a rank (ALLSCAN_HEAP, or allscan.init(heap_bytes=...))"
    except ValueError as error:
        heap = str(error)
        needs.append("export ALLSCAN_HEAP=512M      # or another size")
    print(f"heap        {heap}")
    if not gpus:
        room = os.statvfs("/dev/shm")
        print(f"/dev/shm    {room.f_bavail * room.f_frsize:,} of {room.f_blocks * room.f_frsize:,} bytes free")
    print("GPU tests   " + _last_run())
    return needs


def _network() -> str:
    """This node's network as NVSHMEM would find it, and NVSHMEM's environment variables."""
    folder = "/sys/class/infiniband"
    devices = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = "InfiniBand devices " + ", ".join(devices) if devices else "no InfiniBand devices"
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NVSHMEM_")]
    return "; ".join([found, *told])


def _bitcode() -> str:
    from ..bindings.nvshmem_module import device_library

    try:
        return os.path.basename(device_library())
    except RuntimeError as error:
        return str(error)


def _last_run() -> str:
    from ..comm.heap import source_hash

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.join(os.path.dirname(package), "tests", "gpu", "last_run.json")
    if not os.path.exists(path):
        return "no record here (it is kept in the repository, tests/gpu/last_run.json)"
    with open(path) as file:
        record = json.load(file)
    same = "these sources" if record["sha256"] == source_hash() else "other sources than these"
    gpus = f"{len(record['gpus'])} x {record['gpus'][0]}"
    part = "" if len(record["parts"]) > 1 else f" (of those with -m {record['parts'][0]!r})"
    failed = record["failed"] + record["error"]
    names = "".join(f"\n  failed: {name}" for name in record.get("tests_that_failed", ()))
    return f"{record['passed']} passed, {failed} failed{part} on {gpus}, {record['date']}, {same}{names}"


def self_test() -> bool:
    """Scan over all GPUs, or over 3 CPU ranks; True if the results are right."""
    import torch

    from .ranks import Ranks

    gpus = torch.cuda.device_count()
    if gpus == 1:
        print("self-test   one GPU: nothing to communicate with; the CPU ranks are tested instead")
    size, device = (gpus, "cuda") if gpus > 1 else (3, "cpu")
    start = time.perf_counter()
    try:
        with Ranks(size, device) as ranks:
            results = ranks.run(_self_test_rank, timeout=120)
    except RuntimeError as error:
        print(f"self-test   FAILED\n{error}")
        return False
    worst = max(result["error"] for result in results)
    print(
        f"self-test   {size} ranks on {device}: largest error {worst:.1e}, {time.perf_counter() - start:.0f} s in all"
    )
    if device == "cuda":
        scan_us = max(result["scan_us"] for result in results)
        copy_us = max(result["copy_us"] for result in results)
        print(
            f"            a scan of 2 MiB takes {scan_us:.1f} us where scans follow each other; a bare peer copy of "
            f"the same bytes {copy_us:.1f} us: {copy_us / scan_us:.0%} of the wire"
        )
    return worst < 1e-5


def _self_test_rank() -> dict:
    import torch

    import allscan
    from allscan.reference import allscan_reference
    from allscan.tools.timing import copy_kernel, replay_us

    with allscan.Communicator() as comm:
        shape = STATE if comm.device.type == "cuda" else (2, 16, 16)
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(shape, generator=generator) for _ in range(comm.size)]
        decays = [torch.rand(shape[:-1], generator=generator) for _ in range(comm.size)]
        state, decay = states[comm.rank].to(comm.device), decays[comm.rank].to(comm.device)
        # with it the result has every rank's decay, also on 2 ranks
        initial = torch.randn(shape, generator=generator)
        scan = allscan.AllScan(comm, shape)
        out = scan.scan(state, decay, initial_state=initial.to(comm.device))
        expected = allscan_reference(states, decays, initial)[comm.rank]
        result = {"error": (out.cpu() - expected).abs().max().item()}
        if comm.device.type == "cuda":
            spare, numel = allscan.AllScan(comm, shape, protocol="signal", depth=1).channel(), state.numel()

            def copy() -> None:
                copy_kernel[(numel // 2048,)](spare.next_inbox, state, numel, BLOCK=2048)

            result["scan_us"] = replay_us([lambda: scan.scan(state, decay, out=out)] * 50).median().item() / 50
            comm.barrier()
            result["copy_us"] = 0.0
            if comm.rank < comm.size - 1:
                result["copy_us"] = replay_us([copy] * 50).median().item() / 50
        comm.barrier()
    return result
