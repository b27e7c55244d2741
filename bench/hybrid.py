"""Measures training of transformers' own hybrids of recurrent and softmax layers over several GPUs.

    python -m bench.hybrid     # all GPUs; needs fla; writes hybrid.csv, where rows of other models and ranks stay
    python -m bench.hybrid --model kimi_linear qwen3_next nemotron_h --mla 128 192 --only heads --profile

3 recurrent layers to 1 of softmax, 12 in all, each with a dense MLP, a vocabulary of 32,000 (more logits would not
fit in memory), random weights, bfloat16, T tokens a rank, DistributedDataParallel and AdamW, called from Python; width
2,048, nemotron_h 4,096:

* kimi_linear: KDA, 16 heads of 128; MLA, 16 heads, latents of 512. --mla 128: keys of 96 + 32, values of 128; 192:
  Kimi's own, keys of 128 + 64.
* qwen3_next: Gated DeltaNet, 16 heads of 128 for keys and 32 for values; gated softmax, 16 heads of 256, 2 of them for
  keys and values;
* nemotron_h: Mamba2, 128 heads of 64, state of 128, 8 groups; softmax, 32 heads of 128, 8 of them for keys and values.

All methods use allscan's kernels inside the chunks of recurrent layers. They are faster than fla's, so the split's cost
is a larger share. A rank that computes a layer alone uses allscan's operator on one rank (column ``rule``). --chunk
fla: fla's kernels, with configurations chosen first; a rank alone uses fla's own operator, except for Gated DeltaNet,
whose backward fla rejects on Hopper before Triton 3.7.1.

Methods:

* allscan: allscan.integrations.transformers; a state is sent, softmax layers gather their keys and values or latents;
* allscan, zigzag: the same in the layout with equal work of all ranks in softmax layers; two states are sent;
* heads: all-to-all from tokens to heads around the rule and around attention (Ulysses; as in Megatron-core and
  ms-swift); gates are sent in the model's dtype, and convolutions use the integration's halo: less traffic than there;
* heads, copy engines: the same, with all-to-all by peer copies (as fast-ulysses) through PyTorch's symmetric memory;
* gathered: each recurrent layer gets the hidden states of the whole sequence on every rank and keeps its part (as in
  slime and NeMo-Automodel); softmax layers as for allscan;
* data parallel: a sequence of T tokens a rank, by the ordinary model: 100 %. Its softmax layers have fewer keys.

All methods use the kernels of allscan.integrations.attention_kernels in place of sdpa.

The methods alternate step by step in a new order each time; a time is the median step of the slowest rank. Before
each step all ranks and GPUs have ended the last one, as in training that reads its loss in each step. Columns
``in_a_row``: 4 steps after one another, as in training that reads its loss rarely. The methods are checked first on a
small model: loss and gradients against one rank with the whole sequence. Afterwards the kernels of one more step prove
which method ran, for allscan also its counted scans (column ``proof``, of rank 0). ``bound_ms``: data parallel's step
and, for each further rank, its softmax kernels once more, as a sequence over all ranks has as many times their work.
--profile prints the kernel times of that step, by kind and rank, and draws a softmax layer in zigzag. Without GPUs only
the check runs, on 2 CPU ranks, with transformers' functions in torch in place of fla's.

--compile: the model is compiled by ``model.compile()``, for allscan and data parallel (rows named "..., compiled").
DistributedDataParallel then sums all gradients after the backward pass (torch._dynamo.config.optimize_ddp is off), and
a method's steps follow one another, since a new split compiles anew.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import importlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import allscan
from allscan.ops.delta.delta_checks import CHUNKS
from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench import plots
from bench.attention import causal
from bench.baselines import Turn, by_copies, by_nccl
from bench.harness import WITHOUT_MULTICAST, Table, environment, results
from bench.model import text, training_rows
from bench.proof import DELTA_STATES, breakdown, kind_of, launched, overlapped, ran
from bench.tuning import Job, compile_ahead

STEPS, CHECKED = 7, 512  # measured steps; tokens per rank in the check
SERIES, IN_A_ROW = 3, 4  # measured series of steps in a row, and their length
REHEARSED = 90.0  # longest rehearsal in seconds
VOCABULARY = 32000
COLUMNS = (
    "model",
    "method",
    "rule",
    "chunk",
    "ranks",
    "T",
    "layers",
    "heads",
    "parameters",
    "step_ms",
    "tokens_per_s_per_gpu",
    "percent_of_data_parallel",
    "in_a_row_ms",
    "percent_in_a_row",
    "bound_ms",
    "percent_of_bound",
    "peak_gib",
    "max_error",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)
METHODS = ("allscan", "allscan, zigzag", "heads", "gathered")
COPY_ENGINES = "heads, copy engines"  # needs GPUs
EXCHANGES = {"heads": by_nccl, COPY_ENGINES: by_copies}  # method: see Turn
STATE = *DELTA_STATES, "transition_kernel"


class Family(NamedTuple):
    """Names of transformers: of its classes, of those of recurrent and softmax layers, of the function of a recurrent
    layer; allscan's operator in place of the function; kernels of which each method runs one in a recurrent layer."""

    prefix: str
    layers: tuple[str, str]
    rule: str
    operator: Callable
    kernels: tuple[str, ...] = DELTA_STATES


FAMILIES = dict(
    kimi_linear=Family(
        "KimiLinear",
        ("KimiLinearDeltaAttention", "KimiLinearAttention"),
        "chunk_kimi_delta_attention",
        allscan.zeco_kda,
    ),
    qwen3_next=Family(
        "Qwen3Next",
        ("Qwen3NextGatedDeltaNet", "Qwen3NextAttention"),
        "torch_chunk_gated_delta_rule",
        allscan.zeco_gated_delta_rule,
    ),
    nemotron_h=Family(
        "NemotronH",
        ("NemotronHMamba2Mixer", "NemotronHAttention"),
        "mamba2_chunk_scan",
        allscan.zeco_ssd,
        ("ssd_output_kernel",),
    ),
)


class Hybrid(NamedTuple):
    """A model of transformers and its sizes."""

    family: str
    mla: int = 0  # key width of Kimi-Linear's softmax layers, for heads of 128
    chunk: str = "allscan"  # whose kernels are used inside the chunks of recurrent layers
    compiled: bool = False
    convolution: str = "torch"  # whose convolutions run, but for All-Scan's, which are ours unless compiled

    @property
    def name(self) -> str:
        how = ", compiled" * self.compiled + ", fla's convolutions" * (self.convolution == "fla")
        return self.family + f", MLA {self.mla}" * bool(self.mla) + how

    @property
    def modeling(self):
        return importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]

    @property
    def is_ssd(self) -> bool:
        return self.of.operator is allscan.zeco_ssd

    def alone(self, device) -> bool:
        """Check whether a rank that is alone uses allscan's operator."""
        return (device.type == "cuda" or self.compiled) and (self.chunk == "allscan" or not self.mla)

    def alone_by(self, one) -> Callable:
        """Return allscan's operator on one rank in place of the model's function. one: this rank's communicator."""
        if self.is_ssd:
            return functools.partial(scan_alone, one)
        return functools.partial(alone, functools.partial(self.of.operator, chunk=self.chunk), one)

    def state(self, head: int) -> tuple[int, int]:
        """Return the rows and columns of a state."""
        return head, head // 2 if self.is_ssd else head

    def config(self, layers, width, heads, head, vocabulary):
        file = importlib.import_module(f"transformers.models.{self.family}.configuration_{self.family}")
        common = dict(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=width * 11 // 4,
            num_attention_heads=heads,
            pad_token_id=0,
            use_cache=False,
            attn_implementation="sdpa",
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        )
        if self.is_ssd:
            kinds = [kind for mixer in common.pop("layer_types") for kind in (mixer, "mlp")]
            width *= 2
            common |= dict(hidden_size=width, num_hidden_layers=len(kinds), intermediate_size=width * 11 // 4)
            return file.NemotronHConfig(
                layers_block_type=kinds,
                mamba_num_heads=8 * heads,
                mamba_head_dim=head // 2,
                ssm_state_size=head,
                n_groups=heads // 2,
                num_key_value_heads=heads // 2,
                head_dim=head,
                **common | dict(num_attention_heads=2 * heads),
            )
        if not self.mla:
            return file.Qwen3NextConfig(
                num_key_value_heads=2,
                head_dim=2 * head,
                linear_num_key_heads=heads,
                linear_num_value_heads=2 * heads,
                linear_key_head_dim=head,
                linear_value_head_dim=head,
                mlp_only_layers=[*range(layers)],
                **common,
            )
        key = self.mla * head // 128
        rope = key // (3 if self.mla == 192 else 4)
        return file.KimiLinearConfig(
            linear_num_heads=heads,
            linear_head_dim=head,
            num_key_value_heads=heads,
            kv_lora_rank=width // 4,
            qk_nope_head_dim=key - rope,
            qk_rope_head_dim=rope,
            v_head_dim=head,
            mlp_layer_types=["dense"] * layers,
            **common,
        )


def seen(layers, alone=False, of_state=DELTA_STATES) -> dict:
    """Return by method ({kernels that a step must run: how often, None for any}, kernels that it must not). alone:
    whether the operator on one rank is allscan's. of_state: kernels of which allscan's operator runs one."""
    # a layer's collectives are one group call, which NCCL maps to one or several kernels
    ours = {"|".join(of_state): None, "AllGather": None, "ReduceScatter": None}, ("SendRecv",)
    no_state = () if alone else STATE
    return {
        "allscan": ours,
        "allscan, zigzag": ours,
        "heads": ({"SendRecv": 4 * layers}, (*no_state, "AllGather")),
        COPY_ENGINES: ({"barrier_kernel": 8 * layers, "Memcpy": None}, (*no_state, "AllGather", "SendRecv")),
        "gathered": ({"AllGather": None, "ReduceScatter": None}, (*no_state, "SendRecv")),
        "data parallel": ({"AllReduce": None}, (*no_state, "SendRecv", "AllGather", "ReduceScatter")),
    }


def scans(comm, state) -> tuple:
    """Return the number of All-Scan's scans of states with these rows and columns on this rank, forward and reverse."""
    counted = [scan.epochs for scan in comm.collectives if tuple(scan.shape[-2:]) == state]
    return tuple(map(sum, zip((0, 0), *counted)))


def prove_scans(name, recurrent, before, after) -> None:
    """Raise AssertionError unless a step made the method's scans: for each layer one forward and, in its backward, one
    in reverse; in the zigzag layout an ascending and a descending one in either pass; none for other methods."""
    wanted = recurrent * {"allscan": 1, "allscan, zigzag": 2}.get(name, 0)
    made_now = tuple(now - then for now, then in zip(after, before))
    if made_now != (wanted, wanted):
        raise AssertionError(f"{name}: All-Scan made {made_now} scans of states in a step, {wanted} each are its own")


def made(hybrid, device, dtype, layers=12, width=2048, heads=16, head=128, vocabulary=VOCABULARY):
    config = hybrid.config(layers, width, heads, head, vocabulary)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(hybrid.modeling, f"{hybrid.of.prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-7, -4)  # slow decay: states persist over several ranks
    if hybrid.compiled:
        torch._dynamo.config.optimize_ddp, torch._dynamo.config.fail_on_recompile_limit_hit = False, True
        model.compile(backend="aot_eager" if torch.device(device).type == "cpu" else "inductor")
    return model.to(device, dtype).train()


def turned(exchange, comm, tensors, function):
    """Call ``function`` on tensors with all tokens and a share of the heads, [1, P * T, H / P, ...], made from tensors
    [1, T, H, ...] by all-to-all; convert its results back."""
    wide = Turn.apply(torch.cat(tensors, -1), comm, True, exchange)
    o = function(*wide.split([t.shape[-1] for t in tensors], -1)).contiguous()
    return Turn.apply(o, comm, False, exchange)


def rule_of_heads(exchange, original, sequence, q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
    each = v.shape[2] // q.shape[2]  # value heads per key head
    ends = v.shape[3:], g.shape[3:], beta.shape[3:]

    def rule(q, k, *of_values):
        v, g, beta = (t.unflatten(3, (each, *end)).flatten(2, 3) for t, end in zip(of_values, ends, strict=True))
        q, k, v, g, beta = (t.contiguous() for t in (q, k, v, g.float(), beta))
        o = original.call(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        return o.unflatten(2, (-1, each)).flatten(3)

    of_values = (t.to(q.dtype).unflatten(2, (-1, each)).flatten(3) for t in (v, g, beta))
    return turned(exchange, sequence.comm, (q, k, *of_values), rule).unflatten(3, (each, -1)).flatten(2, 3), None


def scan_of_heads(exchange, original, sequence, x, dt, A, B, C, chunk_size, *, D, dt_bias, **options):
    """As rule_of_heads, for Mamba2: a rank has some groups, with their heads."""
    comm, each = sequence.comm, x.shape[2] // B.shape[2]  # heads per group
    A, D, dt_bias = (t.chunk(comm.size)[comm.rank] for t in (A, D, dt_bias))

    def scan(x, dt, B, C):
        x, dt = x.unflatten(3, (each, -1)).flatten(2, 3), dt.flatten(2)
        y = original.call(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, **options)
        return y.unflatten(2, (-1, each)).flatten(3)

    x = x.unflatten(2, (-1, each)).flatten(3)
    return turned(exchange, comm, (x, dt.unflatten(2, (-1, each)), B, C), scan).unflatten(3, (each, -1)).flatten(2, 3)


def attention_of_heads(exchange, module, query, key, value, attention_mask, scaling=None, allscan_sequence=None, **_):
    comm, (_, heads, _, width) = allscan_sequence.comm, query.shape
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if key.shape[2] < comm.size:  # each rank needs one
        key, value = (t.repeat_interleave(comm.size // t.shape[2], 2) for t in (key, value))
    together = heads // key.shape[2]  # query heads per key head

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q.unflatten(3, (together, width)).flatten(2, 3), k, v))
        return causal(q, k, v, scaling).unflatten(2, (-1, together)).flatten(3)

    o = turned(exchange, comm, [query.unflatten(2, (-1, together)).flatten(3), key, value], attend)
    return o.unflatten(3, (together, -1)).flatten(2, 3), None


def attention_of_one(module, query, key, value, attention_mask, scaling=None, **_):
    """Replace sdpa, so that "data parallel" and "heads" use the same kernels as attention in blocks."""
    return causal(query, key, value, scaling), None


def gathering(layer, hidden_states, *, allscan_sequence, **options):
    """Run a recurrent layer's forward on the hidden states of all ranks."""
    from allscan.integrations.softmax import Gather

    sequence = allscan_sequence
    gather = Gather(sequence.comm, sequence.tokens, False, hidden_states)
    (whole,) = gather.read(gather.in_order())
    return type(layer).forward(layer, whole, **options)[:, sequence.first : sequence.first + sequence.own]


@contextlib.contextmanager
def method(name, hybrid, model, comm, one):
    """Patch the model for a method. one: the communicator of this rank alone."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from allscan.integrations import transformers as integration
    from allscan.integrations import transformers_layers as layers

    modeling, name_of_rule = hybrid.modeling, hybrid.of.rule
    recurrent, attentions = ([m for m in model.modules() if type(m).__name__ == kind] for kind in hybrid.of.layers)
    layout = "zigzag" if name == "allscan, zigzag" else "contiguous"
    integration.sequence_parallel(model, comm=None if name == "data parallel" else comm, layout=layout)
    rule = vars(modeling)[name_of_rule]
    own = getattr(rule, "original", rule)
    if hybrid.alone(one.device):
        own = hybrid.alone_by(one)
    try:
        if name in EXCHANGES:
            of_heads = functools.partial(scan_of_heads if hybrid.is_ssd else rule_of_heads, EXCHANGES[name])
            setattr(modeling, name_of_rule, layers.SplitOperator(own, of_heads))
            AttentionInterface.register(layers.NAME, functools.partial(attention_of_heads, EXCHANGES[name]))
            for layer in attentions:
                del layer.forward
        if name == "gathered":
            setattr(modeling, name_of_rule, layers.SplitOperator(own, None))
            for layer in recurrent:
                layer.forward = functools.partial(gathering, layer)
        if name == "data parallel":
            setattr(modeling, name_of_rule, own)
            AttentionInterface.register("sdpa", attention_of_one)
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        setattr(modeling, name_of_rule, rule)
        AttentionInterface.register(layers.NAME, layers._attention)
        for layer in recurrent:
            vars(layer).pop("forward", None)
        integration.sequence_parallel(model, comm=None)


def alone(operator, one, query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
    return operator(query, key, value, g, beta, comm=one, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


def scan_alone(one, x, dt, A, B, C, chunk_size, *, D, dt_bias, dt_softplus, dt_limit, **_):
    options = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    return allscan.zeco_ssd(x, dt, A, B, C, chunk_size, comm=one, **options)


def convolution_of_fla(x, weight, bias=None, activation=None, **_):
    """Convolution of x [B, C, T], as transformers' function, by fla's kernel, which takes [B, T, C]."""
    from fla.modules.causal_conv1d import causal_conv1d

    return causal_conv1d(x.mT, weight, bias, activation=activation)[0].mT


@contextlib.contextmanager
def functions(hybrid, device):
    """Set the model's operators: on GPUs, and compiled, allscan's with the model's ``chunk``; on CPUs, where fla's
    functions do not run, transformers' in torch."""
    from allscan.integrations import transformers_layers as layers

    own = vars(hybrid.modeling)[hybrid.of.rule]
    on_gpu = (lambda device: True) if hybrid.compiled else layers.on_gpu
    if device.type == "cpu" and not hybrid.compiled:
        own = getattr(own, "original", own)
        own = getattr(own, "__wrapped__", own)
    ours = {name: functools.partial(operator, chunk=hybrid.chunk) for name, operator in layers.OURS.items()}
    replaced = {hybrid.of.rule: own}
    if hybrid.convolution == "fla":
        replaced["causal_conv1d_fn"] = convolution_of_fla
    if hybrid.is_ssd:  # None: the layer then calls its convolution and its scan one after the other
        replaced["mamba2_split_conv1d_scan_combined"] = lambda *_, **__: None
    with (
        mock.patch.multiple(hybrid.modeling, **replaced),
        mock.patch.dict(layers.OURS, ours),
        mock.patch.object(layers, "on_gpu", on_gpu),
    ):
        yield


_alone: dict = {}


@contextlib.contextmanager
def communicators(group):
    """Create the communicator of the group, and one of this rank alone."""
    if group not in _alone:
        ranks = dist.get_process_group_ranks(group)
        # torch splits NCCL's communicator of the job, which is collective over all ranks of the job, not of the group
        _alone[group] = group if len(ranks) == 1 else dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # ranks may compile for different times
    with allscan.Communicator(group, timeout=300) as comm, allscan.Communicator(_alone[group]) as one:
        yield comm, one


def check(group, hybrid, names, T, heads, head) -> dict:
    """Return {method: relative error of loss and gradients} of a small model against one rank with the whole sequence;
    on GPUs in bfloat16 and with the measured heads, so that fla's kernels are tuned once."""
    with communicators(group) as (comm, one), functions(hybrid, comm.device):
        dtype, limit = (torch.float32, 1e-4) if comm.device.type == "cpu" else (torch.bfloat16, 5e-2)
        model = made(hybrid, comm.device, dtype, 4, 64, heads, head, 97)
        whole = text(T * comm.size, 97, comm.device, 0)[:, :-1]
        consecutive = torch.arange(comm.rank * T, (comm.rank + 1) * T, device=comm.device)
        errors, expected = {}, None
        for name in ("data parallel", *names):
            mine = zigzag_positions(T, comm=comm) if name == "allscan, zigzag" else consecutive
            before = scans(comm, hybrid.state(head))
            comm.step()
            with method(name, hybrid, model, comm, one):
                part = whole if expected is None else whole[:, mine]
                loss = model(input_ids=part, labels=part).loss
                loss.backward()
            prove_scans(name, 3, before, scans(comm, hybrid.state(head)))
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


def measure(group, hybrid, names, T, shape, steps) -> dict:
    """Return {method: (seconds of a step, peak GiB, parameters, proof, launches of one more step, seconds of a step of
    several in a row)}."""
    with communicators(group) as (comm, one), functions(hybrid, comm.device):
        model = made(hybrid, comm.device, torch.bfloat16, **shape)
        wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        data = text(T, VOCABULARY, comm.device, comm.rank)[:, :-1]
        recurrent = model.config.layer_types.count("linear_attention")
        wanted = seen(shape["layers"], hybrid.alone(comm.device), hybrid.of.kernels)
        names = (*names, "data parallel")
        peaks, proofs, profiles = {}, {}, {}
        times, in_a_row = ({name: [] for name in names} for _ in range(2))

        def step(count: int = 1):
            for _ in range(count):
                comm.step()
                loss = wrapped(input_ids=data, labels=data).loss
                (loss if name == "data parallel" else loss * comm.size).backward()  # gradients are averaged
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()

        last = steps + 2 + SERIES  # it is profiled
        turns = [(turn, name) for turn in range(last + 1) for name in random.Random(turn).sample(names, len(names))]
        if hybrid.compiled:  # in a row, since a new split compiles anew
            turns.sort(key=lambda pair: pair[1])
        for name, some in itertools.groupby(turns, key=lambda pair: pair[1]):
            with method(name, hybrid, model, comm, one):
                for turn, _ in some:
                    comm.barrier()
                    if turn == last:
                        profiles[name] = launched(step)
                        kernels = collections.Counter(one.name for one in profiles[name])
                        proofs[name] = ran(name, kernels, *wanted[name])
                        continue
                    single = turn < steps + 2
                    count, where = (1, times) if single else (IN_A_ROW, in_a_row)
                    before = scans(comm, hybrid.state(shape["head"]))
                    torch.cuda.reset_peak_memory_stats()
                    start = time.perf_counter()
                    step(count)
                    where[name].append((time.perf_counter() - start) / count)
                    if single:
                        peaks[name] = torch.cuda.max_memory_allocated() / (1 << 30)
                    prove_scans(name, recurrent * count, before, scans(comm, hybrid.state(shape["head"])))
                    if turn < 2 and comm.rank == 0:
                        print(f"  {name}: step {turn}, {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
        parameters = sum(p.numel() for p in model.parameters())
        medians = {name: (statistics.median(times[name][2:]), statistics.median(in_a_row[name])) for name in names}
        return {
            name: (single, peaks[name], parameters, proofs[name], profiles[name], row)
            for name, (single, row) in medians.items()
        }


def freed() -> None:
    """Free the last model's memory; runs on all ranks."""
    gc.collect()
    torch.cuda.empty_cache()


def print_breakdown(answers) -> None:
    for name in answers[0]:
        for rank, answer in enumerate(answers):
            found = answer[name][4]
            kinds = breakdown(found)
            values = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items())
            beside = overlapped(found, "NCCL", "softmax")
            total = f"{name}, rank {rank}: kernels {sum(kinds.values()):.1f} ms"
            print(f"  {total}: {values}; NCCL beside softmax {beside:.1f}", flush=True)


def softmax_layers(found) -> list[tuple[float, float]]:
    """Return (begin, end) in us of each softmax layer's kernels in a step, forward, then backward."""
    layers: list[list[float]] = []
    for one in sorted((x for x in found if kind_of(x.name) == "softmax"), key=lambda x: x.begin):
        if not layers or one.begin - layers[-1][1] > 5e3:  # recurrent layers or the loss lie in between
            layers.append([one.begin, one.begin])
        layers[-1][1] = max(layers[-1][1], one.begin + one.us)
    return [(begin, end) for begin, end in layers]


def aligned(profiles) -> list:
    """Shift the profiles of all ranks to the first rank's clock: the clocks of the GPUs' profilers differ by some
    milliseconds, but a collective ends on all ranks at the same time."""
    ends = [
        [x.begin + x.us for x in sorted(found, key=lambda x: x.begin) if kind_of(x.name) == "NCCL"]
        for found in profiles
    ]
    late = [statistics.median(b - a for a, b in zip(ends[0], some)) if some else 0.0 for some in ends]
    return [[x._replace(begin=x.begin - by) for x in found] for found, by in zip(profiles, late, strict=True)]


def timeline(answers, name: str, title: str) -> dict:
    """Return each rank's kernels in the forward and the backward of the first softmax layer, for plots.hybrid: (kind,
    name, begin and length in ms). Its backward is the last one."""
    profiles, panels = aligned([answer[name][4] for answer in answers]), {}
    layers = softmax_layers(profiles[0])
    for what, (begin, end) in (("forward", layers[0]), ("backward", layers[-1])):
        begin, end = begin - 2e3, end + 2e3
        panels[what] = [
            [
                (kind_of(x.name), x.name.split("(")[0][:60], round((x.begin - begin) / 1e3, 4), round(x.us / 1e3, 4))
                for x in found
                if begin < x.begin < end
            ]
            for found in profiles
        ]
    return dict(title=title, panels=panels)


def jobs(hybrid, ranks: int, heads: int, tokens) -> list[Job]:
    """Return fla's jobs: all heads, in the zigzag layout as two sequences, and a rank's share of the heads; for a
    rank's tokens, and for those of all ranks."""
    normalized = tuple(T * many for T in (CHECKED, *tokens) for many in (1, ranks))
    rule, heads = ("kda", heads) if hybrid.mla else ("gated_delta_rule", 2 * heads)
    return [
        Job(rule, heads, beta=torch.bfloat16, normalized=normalized),
        Job(rule, heads, "halves", beta=torch.bfloat16),
        Job(rule, heads // ranks, beta=torch.bfloat16),
    ]


def first_configuration(self, *args, **kwargs):
    """Replace Autotuner.run by the first configuration."""
    self.nargs = dict(zip(self.arg_names, args))
    config = self.prune_configs(kwargs)[0] if len(self.configs) > 1 else self.configs[0]
    self.nargs = None
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


def rehearsal(group, *arguments) -> None:
    from triton.runtime.autotuner import Autotuner

    with mock.patch.object(Autotuner, "run", first_configuration):
        check(group, *arguments)


def rehearse(count: int, hybrids, names, heads: int, head: int = 128) -> None:
    """Run the check of each model and method in separate ranks, all at once: Triton's cache then has all kernels but
    fla's before the measured ranks need them in sequence. Errors are left to the real check."""
    begin, cases = time.monotonic(), [(hybrid, name) for hybrid in hybrids for name in names]
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(variables(names)))
        many = [stack.enter_context(Ranks(count, "cuda")) for _ in cases]
        for ranks, (hybrid, name) in zip(many, cases, strict=True):
            ranks.start(on_first, count, rehearsal, hybrid, (name,), CHECKED, heads, head)
        for ranks, (hybrid, name) in zip(many, cases, strict=True):
            for _, error in ranks.results(timeout=max(1.0, begin + REHEARSED - time.monotonic()), after_failure=5.0):
                if error is not None:
                    print(f"rehearsal of {hybrid.name}, {name}: {str(error)[:200]}", file=sys.stderr)
                    kill(ranks)  # other ranks may wait for it
    print(f"rehearsed: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def kill(ranks: Ranks) -> None:
    for process in ranks.processes:
        process.kill()


def variables(names) -> dict[str, str]:
    """Return the environment variables of the ranks that measure these methods."""
    return WITHOUT_MULTICAST if COPY_ENGINES in names else {}


def started(count: int, hybrids, names) -> Ranks:
    """Start ranks that import the models' packages; the next call waits for the imports."""
    with environment(variables(names)):
        ranks = Ranks(count, "cuda")
    ranks.start(load, hybrids)
    return ranks


def load(hybrids) -> None:
    for hybrid in hybrids:
        _ = hybrid.modeling


def run(ranks, hybrid, names, count: int, arguments, table) -> None:
    """Check and measure; write and print the results."""
    begin, shape = time.monotonic(), dict(layers=arguments.layers, width=2048, heads=arguments.heads, head=128)
    one = "All-Scan's on one rank" if hybrid.alone(torch.device("cuda")) else "fla's"
    print(hybrid.name, flush=True)
    given = count, check, hybrid, names, CHECKED, arguments.heads, 128
    errors = ranks.run(on_first, *given, timeout=570.0)[0]
    print("errors", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
    print(f"checked: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    for T in arguments.tokens:
        answers = ranks.run(on_first, count, measure, hybrid, names, T, shape, arguments.steps, timeout=570.0)
        in_a_row = {name: 1e3 * max(answer[name][5] for answer in answers) for name in answers[0]}
        alone = [answer["data parallel"] for answer in answers]
        softmax = statistics.mean(breakdown(found)["softmax"] for *_, found, _ in alone)
        bound = 1e3 * max(step for step, *_ in alone) + (count - 1) * softmax
        for row in training_rows(answers, T):
            row["in_a_row_ms"] = ms = in_a_row[row["method"]]
            row["percent_in_a_row"] = 100 * in_a_row["data parallel"] / ms
            row |= dict(bound_ms=bound, percent_of_bound=100 * bound / row["step_ms"])
            told = f"{row['percent_in_a_row']:.1f} %; {row['percent_of_bound']:.1f} % of the bound"
            print(f"{'':13} in a row: {ms:.1f} ms, {told}", flush=True)
            rule = "All-Scan's" if row["method"].startswith("allscan") else one
            row |= dict(model=hybrid.name, rule=rule, chunk=hybrid.chunk, max_error=errors.get(row["method"], ""))
            table.write(row | dict(layers=arguments.layers, heads=arguments.heads))
        if arguments.profile:
            print_breakdown(answers)
            if "allscan, zigzag" in names:
                path = arguments.csv.removesuffix(".csv") + f"_{hybrid.name.replace(' ', '_').replace(',', '')}"
                title = f"{hybrid.name}, allscan, zigzag, {count} x {torch.cuda.get_device_name()}, T={T} a rank"
                found = timeline(answers, "allscan, zigzag", title)
                with open(f"{path}.json", "w") as file:
                    json.dump(found, file)
                with contextlib.suppress(ImportError):  # without matplotlib draw later with bench.plots
                    plots.hybrid(found, f"{path}.png")
        ranks.run(freed)
    print(f"{hybrid.name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="default all GPUs; must divide the heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="tokens per rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--model", nargs="+", choices=FAMILIES, default=["kimi_linear"])
    parser.add_argument("--mla", type=int, nargs="+", choices=(128, 192), default=[128], help="kimi_linear key width")
    parser.add_argument("--chunk", choices=CHUNKS, default="allscan", help="whose kernels to use inside chunks")
    parser.add_argument("--only", nargs="+", choices=(*METHODS, COPY_ENGINES), help="methods besides data parallel")
    parser.add_argument("--profile", action="store_true", help="print the kernel times of a step, by kind")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, for allscan and data parallel")
    parser.add_argument("--convolution", choices=("torch", "fla"), default="torch", help="of data parallel")
    parser.add_argument("--tuned", action="store_true", help="fla is already tuned, in Triton's cache")
    parser.add_argument("--csv", default=results("hybrid.csv"))
    arguments = parser.parse_args()
    hybrids = [
        Hybrid(
            family,
            mla,
            arguments.chunk if family != "nemotron_h" else "allscan",
            arguments.compile,
            arguments.convolution,
        )
        for family in arguments.model
        for mla in (arguments.mla if family == "kimi_linear" else [0])
    ]
    count = arguments.ranks or torch.cuda.device_count()
    names = tuple(arguments.only or (*METHODS, *[COPY_ENGINES] * (torch.cuda.device_count() > 1)))
    if arguments.compile:
        names = tuple(name for name in names if name.startswith("allscan"))
    if torch.cuda.device_count() < 2:
        if COPY_ENGINES in names:
            parser.error(f"{COPY_ENGINES!r} needs two GPUs")
        print("No two GPUs here: a check of every method on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for hybrid in hybrids:
                for name, error in ranks.run(check, None, hybrid, names, 24, 4, 16)[0].items():
                    print(f"{hybrid.name:22} {name:22} error {error:.1e}")
        return 0
    failed, ranks = False, started(count, hybrids, names)
    if not arguments.tuned:
        ahead = functools.partial(rehearse, count, hybrids, names, arguments.heads)
        if arguments.chunk == "allscan":
            ahead()
        else:
            of_fla = [hybrid for hybrid in hybrids if hybrid.chunk == "fla"]
            compile_ahead([job for h in of_fla for job in jobs(h, count, arguments.heads, arguments.tokens)], ahead)
    measured = {(hybrid.name, str(count)) for hybrid in hybrids}
    with Table(arguments.csv, COLUMNS, keep=lambda row: (row["model"], row["ranks"]) not in measured) as table:
        for hybrid in hybrids:
            try:
                run(ranks, hybrid, names, count, arguments, table)
            except RuntimeError as error:  # from the ranks; some may still wait for others
                failed = True
                print(f"{hybrid.name}: {error}", file=sys.stderr, flush=True)
                kill(ranks)
                ranks = started(count, hybrids, names)
    ranks.close()
    print(f"wrote {arguments.csv}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
