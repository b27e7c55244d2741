"""Training transformers' own Kimi-Linear, a hybrid of KDA and softmax layers, over several GPUs.

    python -m bench.hybrid              # all GPUs of this machine; writes bench/results/hybrid.csv; needs fla

3 KDA layers to 1 of softmax, 12 in all, 16 heads of 128, width 2,048, dense MLPs, a vocabulary of 32,000 (logits of
more would take the memory), bfloat16, T tokens a rank, DistributedDataParallel and AdamW, called from Python. Beside
each other:

* allscan: allscan.integrations.transformers; a state travels, softmax layers gather their latents;
* allscan, zigzag: the same in the layout in which all ranks have equal work in softmax layers; two states travel;
* heads: all-to-all turns tokens into heads around fla's chunk_kda and around sdpa (Ulysses; as Megatron-core and
  ms-swift do); gates travel in the model's dtype, and convolutions take allscan.halo, which is less than those send;
* gathered: each KDA layer has the hidden states of the whole sequence on every rank and keeps its part (as slime and
  NeMo-Automodel do); softmax layers as for allscan;
* data parallel: a sequence of T tokens a rank, by the ordinary model: 100 %. Its softmax layers look back at less.

The methods take turns, step by step, in another order each time; a time is the median step of the slowest rank. They
are checked first on a small model: loss and gradients against one rank with the whole sequence; and proven afterwards
by the kernels of one more step, allscan also by its counted scans (column ``proof``, of rank 0). Without GPUs only the
check runs, on 2 CPU ranks, with transformers' functions in torch in the place of fla's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import allscan
from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench.baselines import Turn
from bench.harness import Table, results
from bench.model import text, training_rows
from bench.proof import kernels, ran
from bench.tuning import Job, compile_ahead

STEPS, CHECKED = 7, 512  # measured; tokens of a rank in the check
VOCABULARY, RULE = 32000, "chunk_kimi_delta_attention"
COLUMNS = (
    "method", "ranks", "T", "layers", "heads", "parameters", "step_ms", "tokens_per_s_per_gpu",
    "percent_of_data_parallel", "peak_gib", "max_error", "proof", "gpu", "torch", "triton", "sources",
)  # fmt: skip
STATE = ("delta_states_kernel", "transition_kernel")


def seen(layers) -> dict:
    """Of each method what a step must run, and how often (None: at all), and what it must not."""
    # a layer's collectives are one group call, of which NCCL makes one kernel or some
    ours = {STATE[0]: None, "AllGather": None, "ReduceScatter": None}, ("SendRecv",)
    return {
        "allscan": ours,
        "allscan, zigzag": ours,
        "heads": ({"SendRecv": 4 * layers}, (*STATE, "AllGather")),
        "gathered": ({"AllGather": None, "ReduceScatter": None}, (*STATE, "SendRecv")),
        "data parallel": ({"AllReduce": None}, (*STATE, "SendRecv", "AllGather", "ReduceScatter")),
    }


def scans(comm, head) -> tuple:
    """How many of states [head, head] All-Scan has made on this rank, forward and reverse."""
    counted = [scan.epochs for scan in comm.collectives if tuple(scan.shape[-2:]) == (head, head)]
    return tuple(map(sum, zip((0, 0), *counted)))


def prove_scans(name, recurrent, before, after) -> None:
    """AssertionError unless a step made those of the method: for each layer one forward and, in its backward, one in
    reverse; in the zigzag layout one there and one back in either pass; none for other methods."""
    wanted = recurrent * {"allscan": 1, "allscan, zigzag": 2}.get(name, 0)
    made_now = tuple(now - then for now, then in zip(after, before))
    if made_now != (wanted, wanted):
        raise AssertionError(f"{name}: All-Scan made {made_now} scans of states in a step, {wanted} each are its own")


def made(device, dtype, layers=12, width=2048, heads=16, head=128, vocabulary=VOCABULARY):
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, intermediate_size=width * 11 // 4,
        linear_num_heads=heads, linear_head_dim=head, num_attention_heads=heads, num_key_value_heads=heads,
        kv_lora_rank=width // 4, qk_nope_head_dim=head * 3 // 4, qk_rope_head_dim=head // 4, v_head_dim=head,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        mlp_layer_types=["dense"] * layers, pad_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = KimiLinearForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-7, -4)  # a decay over many tokens: states last over some ranks
    return model.to(device, dtype).train()


def turned(comm, tensors, function):
    """function(tensors with all tokens and some heads) [1, P * T, H / P, ...] of tensors [1, T, H, ...]; back."""
    wide = Turn.apply(torch.cat(tensors, -1), comm, True)
    return Turn.apply(function(*wide.split([t.shape[-1] for t in tensors], -1)).contiguous(), comm, False)


def rule_of_heads(original, sequence, q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
    def rule(q, k, v, g, beta):
        q, k, v = (t.contiguous() for t in (q, k, v))
        options = dict(g=g.float().contiguous(), beta=beta[..., 0].contiguous())
        return original(q, k, v, **options, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]

    return turned(sequence.comm, (q, k, v, g.to(q.dtype), beta.to(q.dtype)[..., None]), rule), None


def attention_of_heads(module, query, key, value, attention_mask, scaling=None, allscan_sequence=None, **_):
    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2)

    return turned(allscan_sequence.comm, [t.transpose(1, 2) for t in (query, key, value)], attend), None


def gathering(layer, hidden_states, *, allscan_sequence, **options):
    """The forward of a KDA layer with the hidden states of all ranks."""
    from allscan.integrations.softmax import chunks, gathered

    sequence = allscan_sequence
    whole = gathered(hidden_states, chunks(sequence.tokens), sequence.comm)
    return type(layer).forward(layer, whole, **options)[:, sequence.first : sequence.first + sequence.own]


@contextlib.contextmanager
def method(name, model, comm):
    """The model as that method has it."""
    from transformers import AttentionInterface
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    from allscan.integrations import transformers as integration

    attentions = [m for m in model.modules() if type(m) is modeling.KimiLinearAttention]
    recurrent = [m for m in model.modules() if type(m) is modeling.KimiLinearDeltaAttention]
    layout = "zigzag" if name == "allscan, zigzag" else "contiguous"
    integration.sequence_parallel(model, comm=None if name == "data parallel" else comm, layout=layout)
    rule = vars(modeling)[RULE]
    try:
        if name == "heads":
            setattr(modeling, RULE, integration._Operator(rule.original, rule_of_heads))
            AttentionInterface.register(integration.NAME, attention_of_heads)
            for layer in attentions:
                del layer.forward
        if name == "gathered":
            for layer in recurrent:
                layer.forward = functools.partial(gathering, layer)
        yield
    finally:
        setattr(modeling, RULE, rule)
        AttentionInterface.register(integration.NAME, integration._attention)
        for layer in recurrent:
            vars(layer).pop("forward", None)
        integration.sequence_parallel(model, comm=None)


@contextlib.contextmanager
def functions(device):
    """transformers' function in torch on CPUs, where fla's does not run."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    own = vars(modeling)[RULE]
    if device.type == "cpu":
        own = getattr(own, "original", own)
        own = getattr(own, "__wrapped__", own)
    with mock.patch.object(modeling, RULE, own):
        yield


def check(group, T, heads, head) -> dict:
    """{method: relative error of loss and gradients} of a small model against one rank with the whole; on GPUs in
    bfloat16 and with the heads that are measured, so that fla's kernels are tuned once."""
    with allscan.Communicator(group, timeout=120) as comm, functions(comm.device):
        dtype, limit = (torch.float32, 1e-4) if comm.device.type == "cpu" else (torch.bfloat16, 5e-2)
        model = made(comm.device, dtype, 4, 64, heads, head, 97)
        whole = text(T * comm.size, 97, comm.device, 0)[:, :-1]
        consecutive = torch.arange(comm.rank * T, (comm.rank + 1) * T, device=comm.device)
        errors, expected = {}, None
        for name in seen(4):
            if name == "data parallel":
                continue
            mine = zigzag_positions(T, comm=comm) if name == "allscan, zigzag" else consecutive
            for kind in ("data parallel", name) if expected is None else (name,):
                before = scans(comm, head)
                with method(kind, model, comm):
                    part = whole if expected is None else whole[:, mine]
                    loss = model(input_ids=part, labels=part).loss
                    loss.backward()
                prove_scans(kind, 3, before, scans(comm, head))
                found = torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]).float()
                model.zero_grad()
                if expected is None:
                    expected = found
                    continue
                dist.all_reduce(found, group=comm.group)
                errors[name] = ((found - expected).norm() / expected.norm()).item()
                if not errors[name] < limit:
                    raise AssertionError(f"{name} is wrong by {errors[name]}")
        comm.barrier()
        return errors


def measure(group, T, shape, steps) -> dict:
    """{method: (seconds of a step, peak GiB, parameters, proof)}."""
    with allscan.Communicator(group, timeout=120) as comm:  # where one rank compiles longer than another
        model = made(comm.device, torch.bfloat16, **shape)
        wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        data = text(T, VOCABULARY, comm.device, comm.rank)[:, :-1]
        recurrent = model.config.layer_types.count("linear_attention")
        wanted = seen(shape["layers"])
        times, peaks, proofs = {name: [] for name in wanted}, {}, {}

        def step():
            loss = wrapped(input_ids=data, labels=data).loss
            (loss if name == "data parallel" else loss * comm.size).backward()  # gradients are averaged
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        for turn in range(steps + 2):
            for name in random.Random(turn).sample(list(wanted), len(wanted)):
                with method(name, model, comm):
                    before = scans(comm, shape["head"])
                    torch.cuda.reset_peak_memory_stats()
                    comm.barrier()
                    start = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - start)
                    peaks[name] = torch.cuda.max_memory_allocated() / (1 << 30)
                prove_scans(name, recurrent, before, scans(comm, shape["head"]))
                if turn < 2 and comm.rank == 0:
                    print(f"  {name}: step {turn}, {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
        for name in wanted:
            with method(name, model, comm):
                comm.barrier()
                proofs[name] = ran(name, kernels(step), *wanted[name])
        parameters = sum(p.numel() for p in model.parameters())
        return {name: (statistics.median(times[name][2:]), peaks[name], parameters, proofs[name]) for name in wanted}


def jobs(ranks: int, heads: int, tokens) -> list[Job]:
    """What fla is called for: all heads, in the zigzag layout as two sequences, and a rank's share of the heads; a
    rank's tokens, and those of all ranks."""
    normalized = tuple(T * many for T in (CHECKED, *tokens) for many in (1, ranks))
    return [
        Job("kda", heads, beta=torch.bfloat16, normalized=normalized),
        Job("kda", heads, "halves", beta=torch.bfloat16),
        Job("kda", heads // ranks, beta=torch.bfloat16),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="default all GPUs; must divide the heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of each rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tuned", action="store_true", help="fla's configurations are in Triton's cache already")
    parser.add_argument("--csv", default=results("hybrid.csv"))
    arguments = parser.parse_args()
    count = arguments.ranks or torch.cuda.device_count()
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: a check of every method on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for name, error in ranks.run(check, None, 24, 2, 16)[0].items():
                print(f"{name:22} error {error:.1e}")
        return 0
    if not arguments.tuned:
        compile_ahead(jobs(count, arguments.heads, arguments.tokens))
    shape = dict(layers=arguments.layers, width=2048, heads=arguments.heads, head=128)
    with Table(arguments.csv, COLUMNS) as table, Ranks(count, "cuda") as ranks:
        errors = ranks.run(on_first, count, check, CHECKED, arguments.heads, 128, timeout=570.0)[0]
        print("errors", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
        for T in arguments.tokens:
            answers = ranks.run(on_first, count, measure, T, shape, arguments.steps, timeout=570.0)
            for row in training_rows(answers, T):
                error = errors.get(row["method"], "")
                table.write(row | dict(layers=arguments.layers, heads=arguments.heads, max_error=error))
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
