"""transformers' models and Megatron-core's mixers on all GPUs of this machine, against one rank.

One rank runs transformers' own functions in torch, or the recurrence in float64 (Megatron-core), instead of fla's
kernels: these functions are independent and need no compilation, and fla rejects Gated DeltaNet's backward on Hopper
with Triton before 3.7.1. mamba_ssm, causal_conv1d and Transformer Engine are not needed: transformers' functions in
torch, or fla's convolution and the stand-ins of support/megatron.py, replace them. fla's kernels round float32 to TF32
(triangular systems always), so that one rank with the ranks' operators differs from torch's functions by 1e-3. So
errors are compared with those of one rank in that dtype; with parts of whole chunks, as in training here, both round
alike.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import statistics
import threading
import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.tools.ranks import Ranks, on_first
from support.fla import import_fla
from support.megatron import group_of_one
from support.models import with_weights
from support.values import place, relative

pytestmark = pytest.mark.gpu

VOCABULARY = 53
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    pad_token_id=0,
    num_attention_heads=4,
    attn_implementation="sdpa",
)
MIXED = dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
MODELS = {  # without mixtures of experts: a last bit may change their routing
    "kimi_linear": (
        "KimiLinear",
        COMMON
        | MIXED
        | dict(
            linear_num_heads=2,
            linear_head_dim=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=32,
            num_key_value_heads=4,
            mlp_layer_types=["dense", "dense"],
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        COMMON
        | MIXED
        | dict(
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            num_key_value_heads=2,
            head_dim=32,
            mlp_only_layers=[0, 1],
        ),
    ),
    "nemotron_h": (
        "NemotronH",
        COMMON
        | dict(
            layers_block_type=["linear_attention", "full_attention", "mlp"],
            num_key_value_heads=2,
            head_dim=32,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            chunk_size=32,
        ),
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Bounds of relative errors to one rank in torch and float32: TIMES the error of one rank in that dtype, with the same
# operators (float32) or with torch's functions, which compute in float32 (bfloat16), plus BEYOND
TIMES, BEYOND = 3.0, {"float32": 1e-4, "bfloat16": 3e-2}
ALONE = {"float32": 1e-2, "bfloat16": 1.0}  # bound for one rank's error; 8e-4 were measured in float32
CURVE = {"float32": 1e-4, "bfloat16": 1e-2}  # for each loss of ten steps
TRAINED = ["kimi_linear", "qwen3_next"]
CASES = [(family, dtype, packed) for family in MODELS for dtype in DTYPES for packed in (False, True)]
CASES += [(family, "bfloat16", "zigzag") for family in TRAINED]  # not packed
CASES += [(family, "bfloat16", "documents") for family in MODELS]  # packed, each document sharded
DOCUMENTS = [0, 1, 13, 60, 60, 91]  # over 2P
# The gradient of Nemotron-H's A_log is a sum that nearly cancels: errors differ by a factor of six between batches
SEEDS = {"nemotron_h": range(1, 9)}
COMPILED_AT_ONCE = 6  # processes; each takes 2 to 3 GB of the GPU
starting = threading.Lock()  # guards the environment, from which started processes take their variables
GATED = dict(linear_key_head_dim=32, linear_value_head_dim=32, deterministic_mode=False)


def needs(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.fixture(scope="module")
def ranks():
    """All GPUs."""
    with mock.patch.dict(os.environ, ALLSCAN_HEAP="512M"):
        made = Ranks(torch.cuda.device_count(), "cuda")
    yield made
    made.close()


def compile_ahead(case, deadline):
    """Run a case on one new rank. Errors are left for the test to report."""
    if time.monotonic() > deadline:
        return
    with starting, mock.patch.dict(os.environ, ALLSCAN_HEAP="128M"):
        one = Ranks(1, "cuda")
    one.start(on_first, 1, *case)
    [(_, error)] = one.results(timeout=max(1.0, deadline - time.monotonic()))
    if error is not None:
        one.processes[0].kill()
    one.close()


@pytest.fixture(scope="module")
def compiled():
    """Compile the kernels of transformers' models, each variant in its own process: in sequence this takes minutes."""
    needs("transformers", "fla")
    kinds = [(model_case, *case) for case in CASES if case[0] != "nemotron_h"]
    kinds += [(training_case, family, "bfloat16") for family in TRAINED]
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(COMPILED_AT_ONCE) as threads:
        for done in [threads.submit(compile_ahead, case, begin + 300) for case in kinds]:
            done.result()
    print(f"compiled in {time.monotonic() - begin:.0f} s")


def run(ranks, *arguments):
    return ranks.run(on_first, len(ranks.processes), *arguments, timeout=200.0)


def parts(size):
    """Return (tokens of each rank, boundaries of packed sequences: some at the end of a rank, some inside of ranks). No
    number of tokens is a multiple of 16, for which Triton would compile other kernels than those compiled ahead."""
    tokens = [(199, 122, 137, 183)[rank % 4] for rank in range(size)]
    total = sum(tokens)
    return tokens, [0, 50, *([199] if size > 1 else ()), total - 70, total - 69, total]


def made(family, device):
    return with_weights(family, *MODELS[family], rates=(-6, -3)).to(device)


@contextlib.contextmanager
def torchs_own(family):
    """Replace package kernels in a model's file by its own functions in torch."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    from allscan.integrations.transformers_layers import OPERATORS

    with contextlib.ExitStack() as stack:
        for name in OPERATORS:
            if (function := vars(modeling).get(name)) is not None:
                function = getattr(function, "original", function)
                function = getattr(function, "__wrapped__", function)
                if "delta" in name:  # autocast would round its float32 products; it does not round fla's or ours
                    function = torch.autocast("cuda", enabled=False)(function)
                stack.enter_context(mock.patch.object(modeling, name, function))
        yield


def answers(model, logits, loss):
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return dict(logits=logits.detach().float(), loss=loss.detach()) | found


def one_rank(family, model, whole, labels, lengths):
    with torchs_own(family):
        logits = torch.cat([model(input_ids=whole[:, a:b], use_cache=False).logits for a, b in pairwise(lengths)], 1)
    return answers(model, logits, F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))


def split(comm, family, model, tokens, labels, how, layout="contiguous"):
    """Return answers of the model for this rank's tokens; assert that its operators are All-Scan's."""
    from allscan.integrations import transformers as integration
    from allscan.integrations import transformers_layers as layers

    per_document = layout == "documents"
    layout = "zigzag" if per_document else layout
    integration.sequence_parallel(model, comm=comm, layout=layout, per_document=per_document)
    with recorded(layers) as seen:
        output = model(input_ids=tokens, labels=labels, use_cache=False, **how)
    integration.sequence_parallel(model, comm=None)
    assert seen == {"kimi_linear": ["zeco_kda"], "qwen3_next": ["zeco_gated_delta_rule"]}.get(family, []), seen
    return answers(model, output.logits, output.loss)


def model_case(group, family, dtype, packed):
    """Return {name: (error to one rank in float32, error of one rank in ``dtype``)} of logits, loss, parameters'
    gradients; over several batches, the root of the mean square. packed: False, True, "zigzag" (that layout, not
    packed), or "documents" (packed, each document sharded)."""
    import_fla(models=False)
    with allscan.Communicator(group, timeout=120) as comm:  # one rank may compile longer than another
        model = made(family, comm.device)
        batches = [batch_errors(comm, group, family, model, dtype, packed, seed) for seed in SEEDS.get(family, (1,))]
    assert all(errors.keys() == batches[0].keys() for errors in batches)
    pairs = {name: [errors[name] for errors in batches] for name in batches[0]}
    return {
        name: tuple(root_mean_square(x) for x in zip(*of_batches, strict=True)) for name, of_batches in pairs.items()
    }


def root_mean_square(errors):
    return statistics.fmean(x * x for x in errors) ** 0.5


def batch_errors(comm, group, family, model, dtype, packed, seed):
    """Return ``model_case``'s errors for one batch of random tokens."""
    zigzag, documents = packed in ("zigzag", "documents"), None
    layout = packed if zigzag else "contiguous"
    packed = packed and packed != "zigzag"
    tokens, lengths = parts(comm.size)
    tokens = [182] * comm.size if zigzag else tokens  # no multiple of 16 either
    lengths = lengths if packed else [0, sum(tokens)]
    if layout == "documents":
        documents = lengths = [2 * comm.size * n for n in DOCUMENTS]
    whole = torch.randint(1, VOCABULARY, (1 if packed else 2, sum(tokens)), generator=torch.manual_seed(seed))
    whole = whole.to(comm.device)
    labels = whole.clone()
    labels[:, lengths[:-1]] = -100  # no sequence predicts the next one's first token
    mine = place(comm, tokens, zigzag, documents)
    exact = one_rank(family, model, whole, labels, sorted({*lengths}))
    model = copy.deepcopy(model).to(DTYPES[dtype])
    how = dict(cu_seq_lens_q=torch.tensor(lengths, dtype=torch.int32, device=comm.device)) if packed else {}
    if dtype == "float32":
        with allscan.Communicator(group_of_one()) as one:
            alone = split(one, family, model, whole, labels, how)
    else:
        alone = one_rank(family, model, whole, labels, sorted({*lengths}))
    found = split(comm, family, model, whole[:, mine], labels[:, mine], how, layout)
    summed_over(group, found)
    exact["logits"], alone["logits"] = (x["logits"][:, mine] for x in (exact, alone))
    return {name: (relative(found[name], x), relative(alone[name], x)) for name, x in exact.items() if x.any()}


def summed_over(group, found):
    """Sum in place over ranks, without the logits, in the order of the names: a set's order differs between
    processes."""
    for name in sorted(found.keys() - {"logits"}):
        dist.all_reduce(found[name], group=group)


@contextlib.contextmanager
def recorded(layers):
    """Record names of All-Scan's operators that replace fla's, in the order of their calls; on CPUs too."""
    seen, choose = [], layers.ours

    def ours(*arguments):
        operator = choose(*arguments)
        seen.extend([] if operator is None else [operator.__name__])
        return operator

    with mock.patch.multiple(layers, ours=ours, on_gpu=lambda device: True):
        yield seen


def check(errors, dtype):
    worst = max(errors, key=lambda name: errors[name][0])
    print(f"largest error {errors[worst][0]:.1e} ({worst}; one rank in this dtype {errors[worst][1]:.1e})")
    limits = {name: TIMES * b + BEYOND[dtype] for name, (_, b) in errors.items()}
    wrong = {name: pair for name, pair in errors.items() if not (pair[0] < limits[name] and pair[1] < ALONE[dtype])}
    assert len(errors) > 10 and not wrong, wrong


@pytest.mark.parametrize("family, dtype, packed", CASES)
def test_transformers(compiled, ranks, family, dtype, packed, size=2):
    for errors in run(ranks, model_case, family, dtype, packed):
        check(errors, dtype)


def inductor_case(group, family):
    """Return {name: (error of the split model compiled by inductor, of the eager split model)} to one rank in float32,
    in bfloat16 and zigzag; and the reasons of graph breaks."""
    from torch._dynamo.utils import counters

    from allscan.integrations.transformers import sequence_parallel

    import_fla(models=False)
    with allscan.Communicator(group, timeout=300) as comm:  # one rank may compile longer than another
        model, tokens, found = made(family, comm.device), [182] * comm.size, []
        whole = torch.randint(1, VOCABULARY, (2, sum(tokens)), generator=torch.manual_seed(1)).to(comm.device)
        mine = place(comm, tokens, True)
        exact = one_rank(family, model, whole, whole, [0, sum(tokens)])
        exact["logits"] = exact["logits"][:, mine]
        model = sequence_parallel(copy.deepcopy(model).to(torch.bfloat16), comm=comm, layout="zigzag")
        counters.clear()
        for function in torch.compile(model), model:
            output = function(input_ids=whole[:, mine], labels=whole[:, mine], use_cache=False)
            found.append(answers(model, output.logits, output.loss))
            summed_over(group, found[-1])
        sequence_parallel(model, comm=None)
        errors = {name: tuple(relative(x[name], y) for x in found) for name, y in exact.items() if y.any()}
        return errors, [*counters["graph_break"]]


@pytest.mark.parametrize("family", ["qwen3_next"])
def test_compiled_by_inductor(compiled, ranks, family, size=2):
    for errors, breaks in run(ranks, inductor_case, family):
        check(errors, "bfloat16")
        others = [reason for reason in breaks if "_entered" not in reason]
        assert not others, "\n".join(others)


def training_case(group, family, dtype):
    """Return (losses of ten steps on one rank with these operators, losses of all ranks). bfloat16 uses autocast."""
    from allscan.integrations.transformers import sequence_parallel

    import_fla(models=False)
    with (
        allscan.Communicator(group, timeout=120) as all_ranks,  # one rank may compile longer than another
        allscan.Communicator(group_of_one()) as one,
    ):
        curves, tokens = [], [(192, 128)[rank % 2] for rank in range(all_ranks.size)]
        whole = torch.randint(1, VOCABULARY, (2, sum(tokens)), generator=torch.manual_seed(1)).to(one.device)
        for comm, part in ((one, whole), (all_ranks, whole[:, place(all_ranks, tokens)])):
            model = sequence_parallel(made(family, comm.device), comm=comm)
            optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
            for _ in range(10):
                comm.step()
                with torch.autocast(comm.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                    loss = model(input_ids=part, labels=part, use_cache=False).loss
                share = loss.detach().clone()
                loss.backward()
                for x in (share, *(p.grad for p in model.parameters() if p.grad is not None)):
                    dist.all_reduce(x, group=comm.group)
                losses.append(share.item())
                optimizer.step()
                optimizer.zero_grad()
            curves.append(losses)
        return curves


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_steps_of_training(compiled, ranks, family, dtype, size=2):
    for alone, split in run(ranks, training_case, family, dtype):
        print("one rank", alone, "ranks", split)
        assert alone[-1] < alone[0] - 0.3  # the loss falls
        assert max(abs(a - b) for a, b in zip(alone, split, strict=True)) < CURVE[dtype], (alone, split)


def graph_case(group, family):
    """Return relative differences of all gradients of a split model's step in bfloat16: a replayed graph's and an eager
    step's, two eager steps'; and whether the losses are equal."""
    from allscan.integrations.transformers import sequence_parallel

    import_fla(models=False)
    with allscan.Communicator(group, timeout=120) as comm:  # one rank may compile longer than another
        model = sequence_parallel(made(family, comm.device).bfloat16(), comm=comm, layout="zigzag")
        tokens = torch.randint(1, VOCABULARY, (1, 512), generator=torch.manual_seed(comm.rank)).to(comm.device)

        def step():
            comm.step()
            model.zero_grad(set_to_none=False)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            return loss

        def gradients():
            torch.cuda.synchronize()
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).float()

        stream, eager = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for _ in range(4):
                loss = step()
                eager.append(gradients())
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            of_graph = step()
        with torch.cuda.stream(stream):
            for _ in range(3):
                graph.replay()
        found = gradients()
        comm.check()
        same = loss.item() == of_graph.item()
        del graph
        return relative(found, eager[-1]), relative(eager[-2], eager[-1]), same


@pytest.mark.parametrize("family", TRAINED)
def test_a_step_in_the_callers_graph(ranks, family, size=2):
    """Its gradients are those of an eager step, but for sums without a fixed order in torch's attention kernels."""
    for of_graph, of_eager, same in run(ranks, graph_case, family):
        print("a graph and an eager step", of_graph, "two eager steps", of_eager)
        assert same and of_graph <= 2 * of_eager + 1e-6, (of_graph, of_eager, same)


def zeco_rule(comm, q, k, v, g, beta, **_):
    """Replaces megatron.rule by the ranks' operator."""
    return allscan.zeco_gated_delta_rule(q, k, v, g, beta, comm=comm)


def megatron_case(group, layout, dtype, packed):
    """As model_case, for a HybridModel of a Mamba2 and a Gated DeltaNet layer, starting with its decoder input."""
    from allscan.integrations.megatron import sequence_parallel
    from support import megatron

    with megatron.stand_ins(), allscan.Communicator(group, timeout=120) as comm:
        total = 64 * comm.size
        lengths = [0, total // 2, total] if packed else [0, total]
        torch.manual_seed(1)
        embedded, labels = torch.randn(total, 1, megatron.WIDTH), torch.randint(0, megatron.VOCABULARY, (1, total))
        embedded, labels = embedded.to(comm.device), labels.to(comm.device)
        options = GATED if dtype == "float32" else GATED | dict(bf16=True, params_dtype=torch.bfloat16)
        mine = megatron.placed(comm, [64] * comm.size, lengths, layout).to(comm.device)

        def called(made, cuts, given, targets, packing):
            pairs = [megatron.called(made, given[a:b], targets[:, a:b], packing) for a, b in pairwise(cuts)]
            logits, losses = torch.cat([x for x, _ in pairs]), torch.cat([x for _, x in pairs], 1)
            logits, losses = logits.detach().float(), losses.sum()
            losses.backward()
            grads = {n: p.grad.float() for n, p in made.named_parameters() if p.grad is not None}
            return dict(logits=logits, loss=losses.detach()) | grads

        spec, kept = megatron.specification(), []
        with allscan.Communicator(group_of_one()) as one:
            for some, rule in (
                (GATED, megatron.rule),
                (options, megatron.rule if dtype == "bfloat16" else functools.partial(zeco_rule, one)),
            ):
                whole = megatron.model(spec, **some)
                for module in whole.modules():
                    if hasattr(module, "gated_delta_rule"):
                        module.gated_delta_rule = rule
                kept.append(called(whole, lengths, embedded.to(next(whole.parameters()).dtype), labels, None))
        own = megatron.model(sequence_parallel(spec, layout=layout, comm=comm), group, **options)
        packing = megatron.packing(lengths) if packed else None
        given = embedded[mine].to(next(own.parameters()).dtype)
        found = called(own, [0, 64], given, labels[:, mine], packing)
        summed_over(group, found)
        exact, alone = kept
        exact["logits"], alone["logits"] = (x["logits"][mine] for x in (exact, alone))
        return {name: (relative(found[name], x), relative(alone[name], x)) for name, x in exact.items() if x.any()}


@pytest.mark.parametrize("layout, packed", [("zigzag", False), ("zigzag", True), ("contiguous", True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_megatron(ranks, layout, dtype, packed, size=2):
    needs("megatron", "fla")
    for errors in run(ranks, megatron_case, layout, dtype, packed):
        check(errors, dtype)
