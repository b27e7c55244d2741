"""transformers' models, split over the ranks, against the same model on one: in float32, with its own torch
functions."""

from __future__ import annotations

import copy
import functools
import importlib
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import allscan
from allscan.integrations import recurrent, softmax
from allscan.reference import delta_reference
from allscan.zigzag import zigzag_positions
from support.fla import import_fla
from support.models import CHOICES, COMMON, VOCABULARY, expected, gradients, made, sequence_parallel
from support.values import Copies, added_up, check_answers, check_errors, place, raised, relative

pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
pytestmark = pytest.mark.cpu  # the functions for GPUs are not torch's own

TOKENS = {1: [20], 2: [17, 12], 3: [9, 14, 7], 4: [6, 3, 11, 9]}  # of each rank
EVEN = {1: [20], 2: [14, 14], 4: [10] * 4}  # in the zigzag layout: also halves of an odd number
CUTS = {2: [0, 1, 8, 17, 21, 29], 3: [0, 5, 7, 12, 26, 30], 4: [0, 4, 5, 14, 18, 29]}  # some at the ranks' boundaries
IN_ZIGZAG = {2: [0, 1, 7, 16, 21, 28], 4: [0, 3, 5, 14, 18, 29, 40]}  # of halves of 7 and 5
DOCUMENTS = [0, 1, 1, 4, 9]  # over 2P, each sharded
PRELOAD = ["allscan.integrations.transformers", *(f"transformers.models.{f}.modeling_{f}" for f in CHOICES)]


def boundaries_given(packed, lengths, mine):
    """Return the arguments of a model by which it gets the boundaries of a row's sequences."""
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(lengths)])[None, mine]
    dtype = torch.int32 if packed == "cu_seq_lens" else torch.int64
    given = dict(cu_seq_lens_q=torch.tensor(lengths, dtype=dtype)) if packed in ("cu_seq_lens", "both") else {}
    return given if packed in (None, "cu_seq_lens") else given | dict(position_ids=positions)


def model_case(group, family, packed, inner, keep=False, layout="contiguous", merged=True, **more):
    """Return relative errors of logits, loss, all gradients together and each; and names of parameters without a
    gradient."""

    zigzag, documents = layout != "contiguous", None
    with allscan.Communicator(group) as comm:
        model = made(family, inner, keep, **more)
        if layout == "documents":
            documents = [2 * comm.size * n for n in DOCUMENTS]
            tokens = [2 * DOCUMENTS[-1]] * comm.size
        else:
            tokens = (EVEN if zigzag else TOKENS)[comm.size]
        names = [name for name, _ in model.named_parameters()]
        whole = torch.randint(1, VOCABULARY, (1 if packed else 2, sum(tokens)))
        labels = whole.clone()
        labels[:, 3] = -100
        one = packed in (None, "one") or documents
        lengths = [0, sum(tokens)] if one else (IN_ZIGZAG if zigzag else CUTS)[comm.size]
        lengths, given = documents or lengths, labels.clone()
        labels[:, [a for a in lengths if a < sum(tokens)]] = -100  # no sequence predicts the next one's first token
        given = labels if documents is None else given  # in sharded documents the layout says so
        lengths = sorted({*lengths})
        logits, loss, grads = expected(model, whole, labels, lengths)
        model.zero_grad()
        mine = place(comm, tokens, zigzag, documents)
        how = boundaries_given(packed, documents or lengths, mine)
        where = dict(layout="zigzag" if zigzag else "contiguous", per_document=documents is not None)
        assert sequence_parallel(model, comm=comm, merged_attention=merged, **where) is model
        assert [name for name, _ in model.named_parameters()] == names
        model = copy.deepcopy(model)  # as for averaged weights
        output = model(input_ids=whole[:, mine], labels=given[:, mine], **how)
        output.loss.backward()
        share = added_up(output.loss, comm.group)
        errors = {"logits": relative(output.logits, logits[:, mine]), "loss": relative(share, loss)}
        unused = []
        for name, gradient in added_up(gradients(model), comm.group).items():
            if not grads[name].any():
                unused.append(name)
                assert not gradient.any()
            else:
                errors[name] = relative(gradient, grads[name])
        return errors, unused


MODELS = {  # by layout: family, number of ranks, how sequences are given, softmax function
    "contiguous": [
        ("qwen3_next", 2, None, "sdpa"),
        ("qwen3_next", 4, "cu_seq_lens", "sdpa"),
        ("qwen3_5", 3, None, "eager"),
        ("qwen3_5", 2, "position_ids", "eager"),
        ("qwen3_5_moe", 2, None, "sdpa"),
        ("kimi_linear", 2, None, "sdpa"),
        ("kimi_linear", 4, "position_ids", "eager"),
        ("nemotron_h", 1, None, "sdpa"),
        ("nemotron_h", 4, None, "sdpa"),
        ("nemotron_h", 2, "cu_seq_lens", "sdpa"),
        ("bamba", 2, None, "sdpa"),
        ("bamba", 3, "position_ids", "sdpa"),
        ("granitemoehybrid", 2, None, "sdpa"),
        ("falcon_h1", 2, None, "sdpa"),
        ("falcon_h1", 3, "cu_seq_lens", "eager"),
        ("zamba2", 2, "position_ids", "sdpa"),
        ("mamba2", 2, None, "eager"),
        ("mamba2", 3, "cu_seq_lens", "eager"),
        ("mamba2", 2, "position_ids", "eager"),
        ("minimax", 2, None, "sdpa"),
        ("minimax", 3, "cu_seq_lens", "eager"),
        ("olmo_hybrid", 2, None, "sdpa"),
        ("olmo_hybrid", 3, "cu_seq_lens", "eager"),
        ("bailing_hybrid", 2, None, "sdpa"),
        ("bailing_hybrid", 3, "position_ids", "eager"),
        ("lfm2", 3, None, "sdpa"),
        ("lfm2", 2, "cu_seq_lens", "eager"),
        ("lfm2_moe", 2, None, "sdpa"),
    ],
    "zigzag": [
        ("kimi_linear", 2, None, "sdpa"),
        ("kimi_linear", 4, "one", "eager"),
        ("kimi_linear", 1, None, "sdpa"),
        ("kimi_linear", 4, "cu_seq_lens", "sdpa"),
        ("nemotron_h", 2, "position_ids", "sdpa"),
        ("qwen3_next", 4, "position_ids", "eager"),
        ("qwen3_next", 2, "one", "sdpa"),
        ("qwen3_next", 4, None, "sdpa"),
        ("qwen3_next", 2, None, "eager"),
        ("qwen3_5", 2, "one", "sdpa"),
        ("nemotron_h", 2, None, "eager"),
        ("nemotron_h", 4, None, "sdpa"),
        ("bamba", 2, None, "sdpa"),
        ("granitemoehybrid", 2, None, "eager"),
        ("falcon_h1", 4, None, "sdpa"),
        ("zamba2", 2, None, "eager"),
        ("mamba2", 2, "position_ids", "eager"),
        ("minimax", 2, "position_ids", "sdpa"),
        ("minimax", 4, None, "sdpa"),
        ("olmo_hybrid", 2, None, "sdpa"),
        ("bailing_hybrid", 2, "one", "sdpa"),
        ("lfm2", 4, "position_ids", "sdpa"),
        ("lfm2_moe", 2, None, "eager"),
    ],
    "documents": [  # of no tokens, and of one a piece; the layout shifts labels within documents
        ("kimi_linear", 1, "cu_seq_lens", "sdpa"),
        ("kimi_linear", 4, "cu_seq_lens", "sdpa"),
        ("qwen3_next", 3, "both", "eager"),
        ("qwen3_next", 2, "cu_seq_lens", "sdpa"),
        ("nemotron_h", 5, "cu_seq_lens", "sdpa"),
        ("falcon_h1", 2, "both", "eager"),
        ("mamba2", 2, "both", "eager"),
        ("minimax", 2, "cu_seq_lens", "sdpa"),
        ("lfm2", 3, "cu_seq_lens", "sdpa"),
        ("olmo_hybrid", 2, "cu_seq_lens", "sdpa"),
    ],
}


@pytest.mark.slow(
    but=(
        *("contiguous-qwen3_next", "contiguous-qwen3_5-3", "contiguous-kimi_linear", "contiguous-nemotron_h-2"),
        *("contiguous-bamba-2", "contiguous-mamba2-2-None", "contiguous-minimax-2", "zigzag-kimi_linear-2"),
        *("contiguous-olmo_hybrid-2", "contiguous-bailing_hybrid-2", "contiguous-lfm2", "zigzag-lfm2-4"),
        *("zigzag-kimi_linear-4-cu_seq_lens", "zigzag-qwen3_next-2-one", "zigzag-nemotron_h-2-p"),
        *("documents-kimi_linear", "documents-qwen3_next"),
    )
)
@pytest.mark.quick("contiguous-qwen3_next-2-None", "contiguous-nemotron_h-2")
@pytest.mark.parametrize(
    "layout, family, size, packed, inner", [(layout, *case) for layout, cases in MODELS.items() for case in cases]
)
def test_models(run, layout, family, size, packed, inner):
    for errors, unused in run(size, model_case, family, packed, inner, keep=False, layout=layout):
        assert max(errors.values()) < 2e-5, {k: v for k, v in errors.items() if not v < 2e-5}
        assert all("experts" in name or "gate" in name for name in unused), unused


# A good batch, then ranks with fewer tokens than a convolution's halo, or none; packed or not
FEW = [
    ((9, 8, 10), None),
    ((8, 2, 8), None),
    ((8, 0, 9), None),
    ((1, 8, 7), "position_ids"),
    ((8, 5, 0), None),
    ((8, 5, 1), "cu_seq_lens"),
    ((0, 1, 8), None),
    ((8, 0, 6), "position_ids"),
    ((0, 9, 0), "cu_seq_lens"),
    ((8, 0, 1), "position_ids"),
    ((5, 0, 0), None),
]


def few_case(comm, family, inner, batches, layout, more=()):
    """Return errors of logits, loss and all gradients together for several batches. more: options of the config."""
    model, found = made(family, inner, **dict(more)), []
    for tokens, packed in batches:
        total = sum(tokens)
        whole = torch.randint(1, VOCABULARY, (1 if packed else 2, total))
        if not total:
            model(input_ids=whole).logits.sum().backward()
            continue
        labels, lengths = whole.clone(), [0, 3, 8, total] if packed else [0, total]
        labels[:, lengths[:-1]] = -100
        logits, loss, grads = expected(sequence_parallel(model, comm=None), whole, labels, lengths)
        model.zero_grad()
        mine = place(comm, tokens, layout == "zigzag")
        how = boundaries_given(packed, lengths, mine)
        sequence_parallel(model, comm=comm, layout=layout)
        output = model(input_ids=whole[:, mine], labels=labels[:, mine], **how)
        output.loss.backward()
        unused = {name for name, p in model.named_parameters() if p.grad is None and "experts" not in name}
        answers: list = [None] * comm.size  # DistributedDataParallel would wait for a parameter unused on one rank
        dist.all_gather_object(answers, unused, group=comm.group)
        assert all(answer == unused for answer in answers), answers
        whole_gradient = torch.cat([g.flatten() for g in gradients(model).values()])
        sums = added_up(output.loss, comm.group), added_up(whole_gradient, comm.group)
        model.zero_grad()
        if tokens[-1] == 1 and family != "minimax":
            with torch.no_grad(), pytest.raises(ValueError, match="as many tokens as a convolution's kernel"):
                model(input_ids=whole[:, mine], use_cache=True)
        wanted = [loss, torch.cat([g.flatten() for g in grads.values()])]
        assert output.logits.shape == logits[:, mine].shape
        errors = [relative(output.logits, logits[:, mine]), *(relative(*pair) for pair in zip(sums, wanted))]
        found.append(max(errors))
    return found


@pytest.mark.slow(but=("qwen3_next", "kimi_linear-sdpa"))
@pytest.mark.parametrize(
    "family, inner, layout",
    [
        ("qwen3_next", "sdpa", "contiguous"),
        ("kimi_linear", "eager", "contiguous"),
        ("nemotron_h", "sdpa", "contiguous"),
        ("kimi_linear", "sdpa", "zigzag"),
        ("mamba2", "eager", "contiguous"),
        ("minimax", "sdpa", "contiguous"),
        ("lfm2", "sdpa", "contiguous"),
        ("lfm2", "sdpa", "zigzag"),
    ],
)
def test_few_tokens(run, family, inner, layout, size=3):
    batches = FEW if layout == "contiguous" else [((n,) * 3, None) for n in (8, 2, 0, 4)]
    check_errors(run(size, few_case, family, inner, batches, layout), 2e-5)


@pytest.mark.parametrize("family, kernel", [("qwen3_next", "linear_conv_kernel_dim"), ("nemotron_h", "conv_kernel")])
def test_few_tokens_with_a_kernel_of_one_token(run, family, kernel, size=2):
    batches, more = [((0, 7), None), ((7, 0), None)], {kernel: 1}
    check_errors(run(size, few_case, family, "sdpa", batches, layout="contiguous", more=more), 2e-5)


def documents_case(comm):
    """Return (relative errors of the loss for batches from cut_batch, packed and not, {expected text: error})."""
    from allscan.integrations.transformers import cut_batch

    cut, last, T = dict(layout="zigzag", per_document=True), comm.rank == comm.size - 1, 16 * comm.size
    lengths = torch.tensor([0, 4, 12, 16]) * comm.size
    whole = torch.randint(1, VOCABULARY, (2, T), generator=torch.Generator().manual_seed(0))
    labels = whole[:1].clone()
    labels[:, lengths[:-1]] = -100
    model = made("qwen3_5")
    want = [expected(model, whole[:1], labels, lengths.tolist())[1], expected(model, whole, whole, [0, T])[1]]
    batch = dict(input_ids=whole[:1], labels=whole[:1], cu_seq_lens_q=lengths)
    sequence_parallel(model, comm=comm, **cut)
    part, errors = cut_batch(batch, comm=comm, **cut), []

    def differ():
        rows = cut_batch(dict(input_ids=whole, labels=whole), comm=comm, **cut)
        for given, loss in zip((part, rows), want, strict=True):
            errors.append(relative(added_up(model(**given).loss, comm.group), loss))

    differ()
    places = zigzag_positions(16, comm=comm, cu_seqlens=lengths, per_document=True)
    assert torch.equal(part["input_ids"], whole[:1, places])
    nothing = model(input_ids=whole[:1, :0], labels=whole[:1, :0], cu_seq_lens_q=torch.tensor([0, 0]))
    nothing.loss.backward()
    assert nothing.logits.shape[:2] == (1, 0)
    odd, ids = lengths + torch.tensor([0, 2, 0, 0]), dict(input_ids=part["input_ids"])
    starts = torch.cat([torch.arange(b - a) for a, b in pairwise(lengths.tolist())])[places][None]
    rows = cut_batch(batch, comm=comm, layout="zigzag")
    rejected = {
        f"multiples of {2 * comm.size}": ids | dict(cu_seq_lens_q=odd),
        "differs between ranks": ids | dict(cu_seq_lens_q=odd if last else lengths),
        "requires cu_seq_lens_q": ids | dict(position_ids=starts),
        f"from 0 to the {T} tokens": ids | dict(cu_seq_lens_q=lengths[:-1]),
        "batch size 1": dict(input_ids=whole[:, places], cu_seq_lens_q=lengths),
        "but the model has 1 rows, tokens [16, 16], zigzag, per_document=True": rows,
    }
    answers = {text: raised(model, **wrong) for text, wrong in rejected.items()}
    wrong = dict(comm=comm, layout="zigzag", per_document=True)
    answers["must be multiples"] = raised(cut_batch, batch | dict(cu_seq_lens_q=odd), **wrong)
    answers["is for layout"] = raised(cut_batch, batch, **wrong | dict(layout="contiguous"))
    answers['for layout="zigzag"'] = raised(sequence_parallel, model, **wrong | dict(layout="contiguous"))
    sequence_parallel(model, comm=comm, layout="zigzag", per_document=not last)
    text = "layout differs between ranks: rank 0: zigzag, per_document=True; rank 1: zigzag"
    answers[text] = raised(model, **ids)
    sequence_parallel(model, comm=comm, **cut)
    differ()
    return errors, answers


def test_cut_documents_and_what_is_rejected(run, size=2):
    for errors, answers in run(size, documents_case):
        assert max(errors) < 1e-5
        check_answers(answers)


@pytest.mark.slow(but="kimi_linear-3")
@pytest.mark.parametrize(
    "family, size, layout",
    [("kimi_linear", 3, "contiguous"), ("kimi_linear", 4, "zigzag"), ("qwen3_next", 2, "zigzag")],
)
def test_attention_without_a_merge(run, family, size, layout):
    """One kernel runs over keys in sequence order."""
    for errors, _ in run(size, model_case, family, packed=None, inner="sdpa", layout=layout, merged=False):
        assert max(errors.values()) < 2e-5, {k: v for k, v in errors.items() if not v < 2e-5}


def half_precision_case(comm, family, how):
    """Return relative errors of bfloat16 logits to float32 on the ranks and on one rank; whether all gradients are
    finite."""
    tokens, model = TOKENS[comm.size], made(family)
    whole, mine = torch.randint(1, VOCABULARY, (2, sum(tokens))), place(comm, tokens)
    exact = model(input_ids=whole, use_cache=False).logits.detach()[:, mine]
    model = model if how == "autocast" else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        alone = model(input_ids=whole, use_cache=False).logits[:, mine]
        found = sequence_parallel(model, comm=comm)(input_ids=whole[:, mine], labels=whole[:, mine])
    found.loss.backward()
    finite = all(g.isfinite().all() for g in gradients(model).values())
    return relative(alone, exact), relative(found.logits, exact), finite


@pytest.mark.slow(but="qwen3_5")
@pytest.mark.parametrize(
    "family, how",
    [("qwen3_5", "bfloat16"), ("nemotron_h", "bfloat16"), ("qwen3_5", "autocast"), ("minimax", "bfloat16")],
)
def test_bfloat16(run, family, how, size=3):
    for alone, found, finite in run(size, half_precision_case, family, how):
        assert finite and found < 1.3 * alone, (found, alone)


def functions_case(group, family, name, wrapped, packed, **more):
    """Compare ranks, with ``wrapped(torch's function)`` for ``name`` of a model's file, with torch's function on one
    rank."""
    from allscan.integrations import transformers_layers as layers

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made(family)
    with pytest.MonkeyPatch.context() as patch:
        own = vars(modeling)[name]
        own = getattr(own, "original", own)
        patch.setattr(modeling, name, own)  # undo restores this value
        split = functools.partial(layers.OPERATORS[name], layers.original_of(wrapped(own)))
        patch.setattr(modeling, name, layers.SplitOperator(own, lambda _, *given, **options: split(*given, **options)))
        return model_case(group, family, packed, "sdpa", keep=True, **more)


RULES = {
    "kimi_linear": ("chunk_kimi_delta_attention", "chunk_kda", dict(linear_head_dim=16)),
    "qwen3_next": (
        "torch_chunk_gated_delta_rule",
        "chunk_gated_delta_rule",
        dict(linear_key_head_dim=16, linear_value_head_dim=16),
    ),
}


def ours_case(group, family, packed, layout):
    """The model's function is fla's, and All-Scan's replaces it, as on a GPU. Return (errors, options of its calls,
    choices)."""
    from transformers.integrations import use_kernel_func_from_hub_with_fallback

    from allscan.integrations import transformers_layers as layers

    import_fla()
    (name, theirs, more), calls = RULES[family], []
    decorated = use_kernel_func_from_hub_with_fallback(theirs, "fla")
    own = layers.OURS[theirs]

    @functools.wraps(own)
    def counted(*tensors, **options):
        calls.append(sorted(options))
        assert options["layout"] == ("contiguous" if layout == "contiguous" else "zigzag")
        assert options["per_document"] == (layout == "documents")
        return own(*tensors, **options)

    def chosen(device, **options):
        found = layers.ours(layers.original_of(decorated(own)), torch.device(device), options)
        return found and found.__name__

    with pytest.MonkeyPatch.context() as patch:
        choices = [
            chosen("cuda"),
            chosen("cuda", scale=0.5),
            chosen("cuda", use_cache=True),
            chosen("cuda", cp_context=1),
            chosen("cpu"),
            layers.ours(layers.original_of(own), torch.device("cuda"), {}),
        ]
        patch.setattr(layers, "on_gpu", lambda device: True)
        patch.setitem(layers.OURS, theirs, counted)
        errors, _ = functions_case(group, family, name, decorated, packed, layout=layout, **more)
    return errors, calls, choices


@pytest.mark.slow(but=("kimi_linear-None-2", "qwen3_next-cu_seq_lens-2"))
@pytest.mark.parametrize(
    "family, packed, size, layout",
    [
        ("kimi_linear", None, 2, "contiguous"),
        ("qwen3_next", "cu_seq_lens", 2, "contiguous"),
        ("qwen3_next", None, 3, "contiguous"),
        ("kimi_linear", None, 4, "zigzag"),
        ("qwen3_next", None, 2, "zigzag"),
        ("kimi_linear", "position_ids", 2, "zigzag"),
        ("qwen3_next", "cu_seq_lens", 4, "zigzag"),
        ("kimi_linear", "cu_seq_lens", 3, "documents"),
    ],
)
def test_our_operator_in_place_of_flas(run, family, packed, size, layout):
    pytest.importorskip("fla.ops", reason="needs flash-linear-attention")
    name = {"kimi_linear": "zeco_kda", "qwen3_next": "zeco_gated_delta_rule"}[family]
    where = ["comm", "cu_seqlens", "first_token", "layout", "output_final_state", "per_document"]
    where.append("use_qk_l2norm_in_kernel")
    for errors, calls, choices in run(size, ours_case, family, packed, layout):
        assert max(errors.values()) < 2e-5, errors
        assert calls == [where]  # one layer
        assert choices == [name] * 3 + [None] * 3


def without_fla_case(group, family):
    """The model's function is transformers' own in torch, and All-Scan's replaces it. Return (errors, options of its
    calls)."""
    from allscan.integrations import transformers_layers as layers

    (name, _, more), calls = RULES[family], []
    operator = layers.OURS[name]

    @functools.wraps(operator)
    def counted(*tensors, **options):
        calls.append(sorted(options))
        return operator(*tensors, **options)

    def given(own):
        inspected = layers.original_of(own)
        on_cpus, on_gpus = (layers.ours(inspected, torch.device(kind), {}) for kind in ("cpu", "cuda"))
        assert on_cpus is None and on_gpus is operator
        assert not layers.ours(inspected, torch.device("cuda"), {"chunk_size": 32})
        patch.setitem(layers.OURS, name, counted)
        patch.setattr(layers, "on_gpu", lambda device: True)
        return own

    with pytest.MonkeyPatch.context() as patch:
        errors, _ = functions_case(group, family, name, given, None, **more)
    return errors, calls


@pytest.mark.parametrize("family", [*RULES])
def test_our_operator_in_place_of_torchs(run, family):
    for errors, calls in run(2, without_fla_case, family):
        assert max(errors.values()) < 2e-5, errors
        assert len(calls) == 1 and "comm" in calls[0]  # one layer


def flas_on_cpus_case(group, family):
    """Return relative errors of logits and gradients where the model's file calls fla's function."""
    from transformers.integrations import use_kernel_func_from_hub_with_fallback

    name, theirs, more = RULES[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    alone, tokens = made(family, **more), TOKENS[dist.get_world_size(group)]
    whole = torch.randint(1, VOCABULARY, (1, sum(tokens)))
    logits, _, grads = expected(alone, whole, whole, [0, sum(tokens)])
    with pytest.MonkeyPatch.context() as patch, allscan.Communicator(group) as comm:
        own = vars(modeling)[name]
        own = getattr(own, "original", own)
        patch.setattr(modeling, name, use_kernel_func_from_hub_with_fallback(theirs, "fla")(own))
        mine, model = place(comm, tokens), sequence_parallel(made(family, keep=True, **more), comm=comm)
        found = model(input_ids=whole[:, mine], labels=whole[:, mine])
        found.loss.backward()
        summed = added_up(gradients(model), group)
    return relative(found.logits, logits[:, mine]), max(relative(summed[n], g) for n, g in grads.items() if g.any())


@pytest.mark.parametrize("family", [*RULES])
def test_cpu_ranks_call_no_kernels_of_fla(run, family):
    pytest.importorskip("fla.ops", reason="needs flash-linear-attention")
    check_errors(run(2, flas_on_cpus_case, family), 1e-4)


def copies_case(group, family, layout):
    """Return [ordinary model, split model]: elements copied by a forward and backward pass, for each number of tokens.
    One product replaces the recurrences, and there are no softmax layers."""
    from allscan.integrations.transformers_layers import OPERATORS

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = "chunk_kimi_delta_attention" if family == "kimi_linear" else "mamba2_chunk_scan"

    def rule(x, *others, g=None, **_):
        return x if g is None else (x + g, None)

    table = []
    with allscan.Communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.delitem(OPERATORS, name)
        for T in (64, 128):
            model = made(family, **COPIED[family])
            patch.setattr(modeling, name, rule)
            how, table = dict(cu_seq_lens_q=torch.tensor([0, 1, 20, T * comm.size], dtype=torch.int32)), [*table, []]
            ids = torch.randint(1, VOCABULARY, (1, T))
            for split in (False, True):
                if split:
                    sequence_parallel(model, comm=comm, layout=layout)
                for _ in range(2):  # the first call creates tables
                    with Copies() as copies:
                        model(input_ids=ids, labels=ids, use_cache=False, **(how if split else {})).loss.backward()
                table[-1].append(copies.numbers)
    return table


COPIED = {
    "kimi_linear": dict(layer_types=["linear_attention"] * 2, mlp_layer_types=["dense"] * 2),
    "nemotron_h": dict(layers_block_type=["linear_attention", "mlp"]),
}


@pytest.mark.slow(but=("kimi_linear-contiguous", "nemotron_h"))
@pytest.mark.parametrize(
    "family, layout", [("kimi_linear", "contiguous"), ("kimi_linear", "zigzag"), ("nemotron_h", "zigzag")]
)
def test_what_a_split_copies(run, family, layout, size=2):
    """With packed sequences the split copies a few tokens at the ranks' boundaries, whatever the sequence's length,
    labels and positions, and no whole row."""
    for (one, split), (one_of_more, split_of_more) in run(size, copies_case, family, layout):
        added, added_of_more = split - one, split_of_more - one_of_more
        assert added_of_more - added <= 64 * 8, (added, added_of_more)  # a row has at least 48 numbers a token


def convolutions_case(group, activation, layout, packed):
    """Return errors of a convolution's outputs and gradients, for activations that save their result for backward or
    not, and for a slice x of a wider tensor."""
    from allscan.tokens.packing import TokenRange, flags_of

    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        zigzag, n, T, C, B = layout == "zigzag", 3, 10, 4, 2 - packed
        where = dict(cu_seqlens=torch.tensor([0, T * comm.size])) if packed else {}
        tokens = [T] * comm.size
        mine, own = place(comm, tokens, zigzag), [x.requires_grad_() for x in (torch.randn(C, n + 1), torch.randn(C))]
        wide = torch.randn(B, T * comm.size, 2 * C, requires_grad=True)
        dy = torch.randn(B, T * comm.size, C)

        def conv(x):
            y = torch.nn.functional.conv1d(x.mT, own[0][:, None], own[1], padding=n, groups=C)
            return activation(y[:, :, : x.shape[1]]).mT

        def answers(y, dy, x):
            return [y.detach(), *torch.autograd.grad(y, (x, *own), dy)]

        y, *grads = answers(conv(wide[:, :, C:]), dy, wide)
        pieces = [TokenRange(0, T, flags=flags_of(comm.rank == 0))]
        if zigzag:
            pieces = [TokenRange(0, T // 2, flags=flags_of(comm.rank == 0)), TokenRange(T // 2, T, 1)]
        part = wide[:, mine].detach().requires_grad_()
        here = recurrent.conv_with_halo(conv, n, part[:, :, C:], pieces, {}, comm=comm, layout=layout, **where)
        got, dx, *sums = answers(here, dy[:, mine], part)
        sums = [added_up(x, comm.group) for x in sums]
        wanted = y[:, mine], grads[0][:, mine], *grads[1:]
        return [relative(*pair) for pair in zip((got, dx, *sums), wanted, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("activation", [torch.nn.functional.silu, torch.relu, torch.tanh, torch.nn.Identity()])
def test_convolutions(run, activation, layout, packed, size=3):
    """Of packed sequences the first outputs are replaced in place, also where the activation saves its result for
    backward."""
    check_errors(run(size, convolutions_case, activation, layout, packed), 2e-6)


DRAWS = 4  # of the loss
STEEP = -0.6, -0.6, -0.6, -0.02  # weights of a convolution that turns inputs of about 6.5 into -12, the first into -0.1


def steep_gradients(family, dtype, part=slice(None), **where):
    """Return the gradients of the first convolution's input for each token, [DRAWS, T, channels] in float64.

    where: arguments of sequence_parallel, or none for the unsplit model."""
    experts = (
        dict(num_experts_per_tok=4) if "num_experts_per_tok" in CHOICES[family][1] else {}
    )  # no choice by rounding
    model, found = made(family, experts_implementation="eager", **experts), []
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "conv1d"):
                module.conv1d.weight[:] = torch.tensor(STEEP)
                if module.conv1d.bias is not None:
                    module.conv1d.bias.zero_()
    model = (
        sequence_parallel(model.to(torch.bfloat16).to(dtype), **where) if where else model.to(torch.bfloat16).to(dtype)
    )
    operator = importlib.import_module(f"transformers.models.{family}.modeling_{family}").causal_conv1d_fn
    name, at = ("split", 2) if where else ("original", 0)
    inner = getattr(operator, name)

    def convolution(*arguments, **options):
        x = arguments[at] + 6.5
        x.register_hook(lambda dx: found.append(dx[0].T.double()))
        return inner(*arguments[:at], x, *arguments[at + 1 :], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, name, convolution)
        for seed in range(DRAWS):
            weights = torch.randn(1, 24, VOCABULARY, generator=torch.Generator().manual_seed(seed))[:, part]
            logits = model(input_ids=1 + torch.arange(24)[None, part], use_cache=False).logits
            (logits.float() * weights).sum().backward()
    return torch.stack(found[len(found) // DRAWS - 1 :: len(found) // DRAWS])  # the first layer's is the last


def steep_case(group, family):
    """Return by layout and dtype: the largest error of a token's gradient over that of the unsplit model, RMS over
    DRAWS."""

    def errors(x, exact):
        return ((x - exact).norm(dim=2) / exact.norm(dim=2)).square().mean(0).sqrt()

    with allscan.Communicator(group) as comm:
        parts = {x: place(comm, [24 // comm.size] * comm.size, x == "zigzag") for x in ("contiguous", "zigzag")}
        split = {
            (layout, dtype): steep_gradients(family, dtype, part, comm=comm, layout=layout)
            for layout, part in parts.items()
            for dtype in (torch.float32, torch.bfloat16)
        }
    exact = steep_gradients(family, torch.float64)  # after a split, which wraps the model's functions
    alone = {dtype: errors(steep_gradients(family, dtype), exact) for dtype in (torch.float32, torch.bfloat16)}
    ratios = {}
    for (layout, dtype), x in split.items():
        part, least = parts[layout], alone[dtype].median()
        ratios[layout, dtype] = (errors(x, exact[:, part]) / alone[dtype].clamp_min(least)[part]).max().item()
    return ratios


@pytest.mark.slow(but="kimi_linear")
@pytest.mark.parametrize("family", [family for family in CHOICES if family != "minimax"])  # without convolutions
def test_gradients_beside_a_boundary(run, family, size=2):
    """A convolution's gradients there are as exact as the unsplit model's, also where outputs without the tokens of the
    rank before would have far larger ones."""
    for ratios in run(size, steep_case, family):
        for (_, dtype), ratio in ratios.items():
            assert ratio < (5 if dtype == torch.float32 else 2), ratios


def pieces_case(group, family, layout, compiled=False):
    """Return relative errors of the ordinary model's logits, of a prompt that is read in three pieces by all ranks, and
    of three tokens after it, which each rank decodes alone."""
    with allscan.Communicator(group) as comm, torch.no_grad():
        zigzag, size = layout == "zigzag", comm.size
        pieces = (
            [[n] * size for n in (8, 10, 12)] if zigzag else [[4 + (r + i) % 5 for r in range(size)] for i in range(3)]
        )
        kinds = ["linear_attention", "full_attention", "linear_attention"]  # the first layer has no keys
        model = made(family, **dict(layer_types=kinds) if family == "minimax" else {}).eval()
        whole = torch.randint(1, VOCABULARY, (2, sum(map(sum, pieces))))
        want = model(input_ids=whole, use_cache=True)
        sequence_parallel(model, comm=comm, layout=layout)
        torch._dynamo.reset()
        split = torch.compile(model, backend="aot_eager") if compiled else model
        name, cache, errors, first = "cache_params" if family == "mamba2" else "past_key_values", None, [], 0
        for tokens in pieces:
            mine = torch.arange(first, first + sum(tokens))[place(comm, tokens, zigzag)]
            found = split(input_ids=whole[:, mine], use_cache=True, **{} if cache is None else {name: cache})
            cache, first = getattr(found, name), first + sum(tokens)
            errors.append(relative(found.logits, want.logits[:, mine]))
        sequence_parallel(model, comm=None)
        for step in range(3):
            token = torch.full((2, 1), step + 1)
            found, want = (model(input_ids=token, **{name: getattr(x, name)}, use_cache=True) for x in (found, want))
            errors.append(relative(found.logits, want.logits))
        return max(errors)


@pytest.mark.slow(but=("qwen3_next-zigzag", "nemotron_h-contiguous", "kimi_linear-contiguous"))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("family", [family for family in CHOICES if family != "lfm2_moe"])
def test_a_prompt_in_pieces(run, family, layout, size=3):
    assert max(run(size, pieces_case, family, layout)) < 2e-5


@pytest.mark.slow
def test_a_prompt_in_pieces_with_compile(run, size=2):
    assert max(run(size, pieces_case, "minimax", "contiguous", compiled=True)) < 2e-5


def compiled_case(group, family, layout, checkpointed):
    """Return (errors of the compiled model's loss and gradients, in its second step, against the eager split model's;
    reasons of graph breaks; number of graphs; calls of the compiled and of the eager model)."""
    from torch._dynamo.utils import counters

    from allscan.integrations import transformers_layers as layers

    with allscan.Communicator(group, timeout=600) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "on_gpu", lambda device: True)  # All-Scan's operators for delta rules
        zigzag = layout == "zigzag"
        tokens = [16] * comm.size
        model = sequence_parallel(made(family, keep=True), comm=comm, layout=layout)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        whole = torch.randint(1, VOCABULARY, (2, sum(tokens)), generator=torch.Generator().manual_seed(0))
        mine = place(comm, tokens, zigzag)
        found, compiled = [], torch.compile(model, backend="aot_eager")
        torch._dynamo.reset()
        counters.clear()
        for function in compiled, compiled, model:
            model.zero_grad()
            before = list(comm.order.call_counts)
            loss = function(input_ids=whole[:, mine], labels=whole[:, mine]).loss
            loss.backward()
            calls = [now - then for now, then in zip(comm.order.call_counts, before)]
            found.append((dict(loss=loss.detach()) | copy.deepcopy(gradients(model)), calls))
        _, (answers, calls), (eager, eager_calls) = found
        errors = {name: relative(answers[name], x) for name, x in eager.items() if x.any()}
        return errors, dict(counters["graph_break"]), counters["stats"]["unique_graphs"], calls, eager_calls


@pytest.mark.slow(but=("kimi_linear", "nemotron_h"))
@pytest.mark.parametrize(
    "family, layout, checkpointed",
    [
        ("nemotron_h", "contiguous", False),
        ("qwen3_next", "zigzag", False),
        ("kimi_linear", "zigzag", True),
    ],
)
def test_compiled_models(run, family, layout, checkpointed, size=2):
    """The exchange at the model's entry is the only graph break: two graphs, the text model's, and that of the logits
    and the loss. A second step compiles nothing. Compiled checkpoints save the results of calls."""
    for errors, breaks, graphs, compiled, eager in run(size, compiled_case, family, layout, checkpointed):
        assert all("_entered" in reason for reason in breaks) and graphs == 2, breaks
        assert max(errors.values()) < 1e-5, errors
        assert compiled == eager if not checkpointed else sum(compiled) < sum(eager)


class Failing(dict):
    def pop(self, *_):
        raise MemoryError


def failed_step_case(group):
    """Return (errors of a compiled step against the eager split model's; the numbers of gathers held after a step that
    raised in a softmax layer, and after the next one)."""

    with allscan.Communicator(group, timeout=600) as comm:
        model = sequence_parallel(made("qwen3_next", keep=True), comm=comm, layout="zigzag")
        whole = torch.randint(1, VOCABULARY, (2, 16 * comm.size), generator=torch.Generator().manual_seed(0))
        ids = whole[:, place(comm, [16] * comm.size, True)]
        torch._dynamo.reset()
        compiled, found = torch.compile(model, backend="aot_eager"), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(softmax, "_running", Failing())
            with pytest.raises(MemoryError):
                compiled(input_ids=ids, labels=ids)
            kept = softmax._running
        softmax._running.update(kept)
        comm.resync()
        held = [len(softmax._running)]
        for function in compiled, model:
            model.zero_grad()
            loss = function(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(dict(loss=loss.detach()) | copy.deepcopy(gradients(model)))
        held.append(len(softmax._running))
        answers, eager = found
        return {name: relative(answers[name], x) for name, x in eager.items() if x.any()}, held


@pytest.mark.slow
def test_compiled_softmax_layers(run, size=2):
    """A compiled step after one that raised while keys were on their way."""
    for errors, held in run(size, failed_step_case):
        assert max(errors.values()) < 1e-5, errors
        assert held == [1, 0], held


def fla_case(group, name):
    """Return forward errors, against the recurrence, of fla's own functions that Triton's interpreter runs."""
    import_fla()
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    from allscan.integrations import transformers_layers as layers
    from allscan.integrations.transformers_sequence import SplitSequence

    with allscan.Communicator(group) as comm, torch.no_grad():
        function = dict(kda=fused_recurrent_kda, gated_delta_rule=fused_recurrent_gated_delta_rule)[name]
        tokens, lengths, generator = [13, 11], [0, 4, 17, 24], torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 24, 2, 16, generator=generator) for _ in range(3))
        g, beta = -torch.rand(1, 24, 2, 16, generator=generator) / 8, torch.rand(1, 24, 2, generator=generator)
        k, g = torch.nn.functional.normalize(k, dim=-1), g if name == "kda" else g[..., 0]
        o, _ = delta_reference(q, k, v, g, beta, cu_seqlens=lengths)
        mine, where = place(comm, tokens), SplitSequence(comm, tokens, torch.tensor(lengths), "sdpa")
        own = [x[:, mine].contiguous() for x in (q, k, v, g, beta)]
        found, _ = layers._delta_rule(layers.original_of(function), where, *own[:3], g=own[3], beta=own[4])
        return relative(found, o[:, mine])


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
def test_flas_functions(run, name, size=2):
    pytest.importorskip("fla.ops", reason="needs flash-linear-attention")
    assert max(run(size, fla_case, name)) < 1e-5


def prefill_case(group, family, layout):
    """Return relative errors of the ordinary model's next logits on every rank, from the rank's cache."""
    from transformers import DynamicCache

    with allscan.Communicator(group) as comm, torch.no_grad():
        zigzag = layout == "zigzag"
        tokens, model = (EVEN if zigzag else TOKENS)[comm.size], made(family).eval()
        whole = torch.randint(1, VOCABULARY, (2, sum(tokens)))
        want = model(input_ids=whole, use_cache=True)
        sequence_parallel(model, comm=comm, layout=layout)
        mine = whole[:, place(comm, tokens, zigzag)]
        name = "cache_params" if family == "mamba2" else "past_key_values"
        assert getattr(model(input_ids=mine), name) is None
        cache = dict(use_cache=True)
        if family == "qwen3_next" and not zigzag:  # layers fill a cache that is given in any case
            cache = dict(past_key_values=DynamicCache(config=model.config))
        found = model(input_ids=mine, logits_to_keep=1, **cache)
        sequence_parallel(model, comm=None)
        has_last = comm.rank == (0 if zigzag else comm.size - 1)
        errors = [relative(found.logits, want.logits[:, -1:])] if has_last else []
        assert family == "mamba2" or found.past_key_values.get_seq_length() == sum(tokens)
        for step in range(3):
            token = torch.full((2, 1), step + 1)
            found, want = (model(input_ids=token, **{name: getattr(x, name)}, use_cache=True) for x in (found, want))
            errors.append(relative(found.logits, want.logits))
        return max(errors)


@pytest.mark.slow(but=("qwen3_next", "nemotron_h-contiguous"))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "family", ["qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1", "mamba2", "minimax", "lfm2", "bailing_hybrid"]
)
def test_every_ranks_cache(run, family, layout, size=4):
    """One rank has the smallest allowed number of tokens."""
    assert max(run(size, prefill_case, family, layout)) < 1e-5


def learned_case(comm, family, trained, layout):
    """One rank has a learned prompt before a frozen model, except for parameters with ``trained`` in their name; the
    loss is that of other ranks' tokens. Return relative errors of the summed gradients."""
    zigzag = layout == "zigzag"
    factor = 3.0 if family == "falcon_h1" else 1.0  # by which the model multiplies embeddings of input_ids alone
    tokens, model = EVEN[comm.size], made(family, **{"embedding_multiplier": factor} if factor > 1 else {})
    whole = torch.randint(1, VOCABULARY, (1, sum(tokens)), generator=torch.Generator().manual_seed(1))
    for name, p in model.named_parameters():
        p.requires_grad_(trained is not None and trained in name)
    prompt = torch.nn.Parameter(torch.ones(4, model.config.hidden_size))
    learned = [prompt, *(p for p in model.parameters() if p.requires_grad)]

    def gradients_of(where):
        ids, labels, positions = whole[:, where], whole[:, where].clone(), torch.arange(sum(tokens))[where]
        labels[:, positions < 7] = -100
        given = dict(input_ids=ids)
        if positions[0] == 0:
            x = factor * model.get_input_embeddings()(ids)
            given = dict(inputs_embeds=torch.cat([prompt[None], x[:, len(prompt) :]], 1))
        model(**given, labels=labels, use_cache=False).loss.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
        for p in learned:
            p.grad = None
        return found

    expected = gradients_of(slice(None))
    sequence_parallel(model, comm=comm, layout=layout)
    found = [added_up(x, comm.group) for x in gradients_of(place(comm, tokens, zigzag))]
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    "family, trained, layout",
    [
        ("nemotron_h", None, "contiguous"),
        ("falcon_h1", None, "contiguous"),
        ("qwen3_next", "lm_head", "contiguous"),
        ("qwen3_next", "norm", "zigzag"),
    ],
)
def test_learned_tokens_of_one_rank(run, family, trained, layout, size=2):
    check_errors(run(size, learned_case, family, trained, layout), 2e-5)


def training_case(comm, family, how, layout):
    """Return (losses of one rank, losses of all ranks) over ten steps each."""
    curves, whole = [], torch.randint(1, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    for split in (False, True):
        model = made(family)
        if split:
            sequence_parallel(model, comm=comm, layout=layout)
            if how != "plain":
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
            if how == "FSDP":
                mesh = DeviceMesh.from_group(comm.group, "cpu")
                for module in (*model.model.layers, model):
                    fully_shard(module, mesh=mesh)
        zigzag = layout == "zigzag"
        part = whole[:, place(comm, [16, 16] if zigzag else [20, 12], zigzag)] if split else whole
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(10):
            comm.step()
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            share = loss.detach().clone()
            (loss * comm.size if split and how == "FSDP" else loss).backward()
            if split:
                dist.all_reduce(share, group=comm.group)
                for p in gradients(model).values() if how != "FSDP" else ():
                    dist.all_reduce(p, group=comm.group)
            losses.append(share.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        curves.append(losses)
    return curves


@pytest.mark.slow(but="qwen3_5")
@pytest.mark.parametrize(
    "family, how, layout",
    [
        ("qwen3_5", "plain", "contiguous"),
        ("nemotron_h", "checkpointing", "contiguous"),
        ("falcon_h1", "FSDP", "contiguous"),
        ("kimi_linear", "checkpointing", "zigzag"),
    ],
)
def test_ten_steps_of_training(run, family, how, layout, size=2):
    for alone, split in run(size, training_case, family, how, layout):
        assert alone[-1] < alone[0] - 1  # the loss falls
        assert max(abs(a - b) for a, b in zip(alone, split, strict=True)) < 1e-4, (alone, split)


def skipped_case(group, how):
    """The last rank skips iteration 2: its forward pass runs out of memory before the ranks' exchange, or it skips all
    that follows step()."""
    from allscan.integrations import transformers

    with allscan.Communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        model = transformers.sequence_parallel(made("qwen3_next"), comm=comm)
        part, last = torch.ones(1, 8, dtype=torch.int64), comm.rank == comm.size - 1

        def no_memory(*_):
            raise torch.OutOfMemoryError

        def iteration(i):
            if how == "after step()":
                comm.step()
                if last and i == 2:
                    raise torch.OutOfMemoryError
            with patch.context() as now:
                if how == "in the model" and last and i == 2:
                    now.setattr(transformers, "masks_nothing", no_memory)
                model(input_ids=part, labels=part, attention_mask=torch.ones_like(part)).loss.backward()

        found = [raised(iteration, i) for i in (1, 2)]
        if last:
            found[1:] = [found[1][0], raised(iteration, 3)]
        ended = raised(comm.resync)
        return found, ended, None if ended else raised(iteration, 3)


@pytest.mark.parametrize("how", ["in the model", "after step()"])
def test_an_iteration_that_one_rank_skips(run, how, size=2):
    """The next exchange, in which the two meet at forward passes of different batches, raises on both."""
    (of_0, *after_0), (of_1, *after_1) = run(size, skipped_case, how)
    assert of_1[:2] == [None, "OutOfMemoryError"] and of_0[0] is None, (of_0, of_1)
    counts = dict([("in the model", (2, 3, 0, 0)), ("after step()", (2, 2, 2, 3))])[how]
    said = "rank {}: {} forward passes, {} calls of step()"
    for kind, text in (of_0[1], of_1[2]):
        assert kind == "AllScanOutOfStep", (kind, text)
        assert all(said.format(r, counts[r], counts[2 + r]) in text for r in range(2)), text
    for ended, again in (after_0, after_1):
        assert (ended is None and again is None) if how == "in the model" else "in different steps" in ended[1]


def places_case(how):
    """The error of a rank in a loop in which rank 1 leaves out the backward of step 2, or does not come to step 3."""
    from allscan.integrations.transformers import sequence_parallel

    comm = allscan.Communicator(timeout=3.0)
    model = sequence_parallel(made("mamba2"), comm=comm)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if how == "left out, DDP" else model
    part = torch.ones(1, 8, dtype=torch.int64)

    def iteration(step):
        comm.step()
        loss = wrapped(input_ids=part, labels=part).loss
        if how == "absent" or (comm.rank, step) != (1, 2):
            loss.backward()

    for step in (1, 2, 3):
        if (how, comm.rank, step) == ("absent", 1, 3):
            time.sleep(9)
            return None
        if found := raised(iteration, step):
            return found
    return None


@pytest.mark.slow(but=("absent", "left out"))
@pytest.mark.parametrize("how", ["absent", "left out", "left out, DDP"])
def test_an_error_tells_in_which_pass_of_the_model_each_rank_is(fresh, how):
    (kind, text), second = fresh(2).run(places_case, how)
    entry = "the last is the forward pass of Mamba2Model (tokens [1, 8]), in step 3"
    if how == "absent":
        assert kind == "AllScanHostTimeout" and second is None, (kind, second)
        assert "rank 1 (global) did not come within 8 s, and has reported nothing. " in text, text
        assert "Rank 0 has made " in text and entry in text and "rank 1 has made" not in text.lower(), text
        return
    assert (kind, second[0]) == ("AllScanTimeout", "AllScanOutOfStep"), (kind, second[0])
    for one in (text, second[1]):
        assert "the last is the backward of zeco_ssd (tokens [1, 8], H 4, K 10, V 16), in step 2" in one, one
        assert entry in one and one.count("Rank 1 is in a later step and has made fewer reverse calls") == 1, one


def sharded_projection_case(comm, layout, tokens, gathered):
    """Return relative errors of gradients. FSDP2 shards the projection of latents, in which all ranks then call
    collectives."""
    from allscan.integrations import transformers_sequence

    whole = torch.randint(1, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    part, model = whole[:, place(comm, tokens, layout == "zigzag")], made("kimi_linear")
    model(input_ids=whole, labels=whole, use_cache=False).loss.backward()
    expected = gradients(model)
    model = sequence_parallel(made("kimi_linear"), comm=comm, layout=layout)
    mesh = DeviceMesh.from_group(comm.group, "cpu")
    for module in (model.model.layers[1].self_attn.kv_b_proj, *model.model.layers, model):
        fully_shard(module, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_sequence, "FEW_TOKENS", 0 if gathered == "latents" else 32)
        (model(input_ids=part, labels=part).loss * comm.size).backward()
    found = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in gradients(model).items()}
    return {name: relative(found[name], x) for name, x in expected.items() if x.any()}


@pytest.mark.parametrize("gathered", ["keys", "latents"])
@pytest.mark.parametrize("layout, tokens", [("contiguous", [20, 12]), ("contiguous", [32, 0]), ("zigzag", [16, 16])])
def test_a_sharded_projection(run, layout, tokens, gathered, size=2):
    """Also a rank that attends to no other rank's keys projects their latents."""
    for errors in run(size, sharded_projection_case, layout, tokens, gathered):
        assert max(errors.values()) < 2e-5, errors


def mixed_precision_case(comm, layout):
    """Return relative errors of loss and gradients in FSDP2's mixed precision, which casts each layer's inputs, and the
    unsplit model's in bfloat16."""
    tokens, zigzag = [16] * comm.size, layout == "zigzag"
    whole = torch.randint(1, VOCABULARY, (2, sum(tokens)), generator=torch.Generator().manual_seed(1))
    exact, alone = (made("qwen3_5").to(dtype) for dtype in (torch.float32, torch.bfloat16))
    answers = [torch.empty(0)] * 2
    for i, model in enumerate((exact, alone)):
        loss = model(input_ids=whole, labels=whole, use_cache=False).loss
        loss.backward()
        answers[i] = torch.cat([loss.detach()[None], *(x.flatten() for x in gradients(model).values())]).float()
    model, part = sequence_parallel(made("qwen3_5"), comm=comm, layout=layout), place(comm, tokens, zigzag)
    mesh, policy = DeviceMesh.from_group(comm.group, "cpu"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    loss = model(input_ids=whole[:, part], labels=whole[:, part], use_cache=False).loss
    (loss * comm.size).backward()
    share = added_up(loss, comm.group)
    found = torch.cat([share[None], *(x.full_tensor().flatten() for x in gradients(model).values())])
    expected, beside = answers
    return [(relative(x[:1], expected[:1]), relative(x[1:], expected[1:])) for x in (found, beside)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_mixed_precision_of_fsdp2(run, layout, size=2):
    for (of_loss, of_gradients), (_, alone) in run(size, mixed_precision_case, layout):
        assert of_loss < 1e-2 and of_gradients < 1.3 * alone < 0.1, (of_loss, of_gradients, alone)


def flash(query, key, value, attention_mask, query_length, is_causal, softmax_scale, attn_implementation, **options):
    """FlashAttention as transformers calls it: [B, T, H, D], the last query at the last key, groups of heads."""
    assert attention_mask is None and is_causal and attn_implementation == "flash_attention_2"
    assert query_length == query.shape[1] and "position_ids" not in options
    key, value = (t.repeat_interleave(query.shape[2] // t.shape[2], 2) for t in (key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale)
    return o.transpose(1, 2)


def options_case(group):
    """Check FlashAttention (a stand-in), a given number of labels, rejected calls and valid calls after them."""
    from transformers.integrations import flash_attention

    with allscan.Communicator(group, timeout=60) as comm, pytest.MonkeyPatch.context() as patch:
        tokens, errors, answers = [11, 9], [], {}
        whole, mine = torch.randint(1, VOCABULARY, (1, 20)), place(comm, tokens)
        dist.broadcast(whole, 0, group=comm.group)
        model, part = made("qwen3_next"), whole[:, mine]
        want = model(input_ids=whole, labels=whole, use_cache=False, num_items_in_batch=7)
        patch.setattr(flash_attention, "_flash_attention_forward", flash)
        sequence_parallel(model, comm=comm)
        model.model.forward = functools.partial(
            model.model.forward.func, *model.model.forward.args[:-1], "flash_attention_2"
        )
        found = model(input_ids=part, labels=part, num_items_in_batch=7)
        share = added_up(found.loss, comm.group)
        errors += [relative(found.logits, want.logits[:, mine]), relative(share, want.loss)]
        found.loss.backward()
        past = made("qwen3_next")(input_ids=whole, use_cache=True).past_key_values
        answers["gradients do not pass through a cache"] = raised(model, input_ids=part, past_key_values=past)
        few = dict(input_ids=part[:, : 8 * comm.rank + 2], past_key_values=past)
        rejected = {
            "pack the sequences": dict(attention_mask=torch.zeros_like(part)),
            "after tokens in a cache each rank must have at least 4 tokens": few,
            "tokens in the cache: ": dict(past_key_values=past) if comm.rank else dict(use_cache=True),
            "leave no cache": dict(cu_seq_lens_q=torch.tensor([0, 8, 20]), use_cache=True),
            "output_attentions": dict(output_attentions=True),
            "output_router_logits": dict(output_router_logits=True),
            "position_ids must be [B, T]": dict(position_ids=part[None]),
            "T = ": dict(position_ids=part[:, 1:]),
            "from 0 to the 20 tokens": dict(cu_seq_lens_q=torch.tensor([0, 8, 19])),
            "must rise from 0": dict(cu_seq_lens_q=torch.tensor([0, 12, 8, 20])),
            "cu_seq_lens_q differs": dict(cu_seq_lens_q=torch.tensor([0, 8 + comm.rank, 20])),
            "on every rank or on none": dict(position_ids=torch.arange(11)[None]) if comm.rank == 0 else {},
            "by cu_seq_lens_q or position_ids": dict(seq_idx=part),
            "batch size 1": dict(input_ids=part.expand(2, -1), cu_seq_lens_q=torch.tensor([0, 8, 20])),
        }
        with torch.no_grad():
            for text, wrong in rejected.items():
                answers[text] = raised(model, **dict(input_ids=part) | wrong)
            answers["generate() is for the ordinary model"] = raised(model.generate, part, use_cache=False)
            restart = dict(position_ids=torch.arange(part.shape[1])[None] // 2)
            for text, wrong in {
                "leave no cache: pass use_cache=False; ": dict(input_ids=part, use_cache=True),
                "got 2; ": dict(input_ids=part.expand(2, -1)),
            }.items():
                answers[text + "position_ids begin a sequence wherever"] = raised(model, **wrong | restart)
            again = model(input_ids=part, attention_mask=torch.ones_like(part))
            compiled = torch.compile(model, backend="eager")(input_ids=part)
        errors += [relative(output.logits, found.logits) for output in (again, compiled)]

        unequal = sequence_parallel(made("qwen3_next"), comm=comm, merged_attention=comm.rank == 0)
        answers["merged_attention differs between ranks: rank 0: True"] = raised(unequal, input_ids=part)
        other = sequence_parallel(made("minimax"), comm=comm)  # without convolutions
        answers["use_cache differs between ranks: rank 0: True"] = raised(
            other, input_ids=part, use_cache=comm.rank == 0
        )
        frozen = made("qwen3_next")
        if comm.rank:
            frozen.model.layers[1].requires_grad_(False)
        sequence_parallel(frozen, comm=comm)
        answers["trainable parameters: "] = raised(frozen, input_ids=part)
        modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        patch.setattr(modeling, "causal_conv1d_fn", modeling.causal_conv1d_fn.original)
        answers["was replaced since"] = raised(model, input_ids=part)
        answers["cannot be called directly"] = raised(model.model.layers[1].self_attn, part)
        return max(errors), answers


def zigzag_case(group):
    """Check FlashAttention (a stand-in), offset positions, and rejected calls in the zigzag layout."""
    from transformers.integrations import flash_attention

    with allscan.Communicator(group, timeout=60) as comm, pytest.MonkeyPatch.context() as patch:
        tokens, answers = [12] * comm.size, {}
        whole, mine = torch.randint(1, VOCABULARY, (1, sum(tokens))), place(comm, tokens, True)
        dist.broadcast(whole, 0, group=comm.group)
        model, part = made("qwen3_next"), whole[:, mine]
        want = model(input_ids=whole, use_cache=False).logits.detach()[:, mine]
        patch.setattr(flash_attention, "_flash_attention_forward", flash)
        sequence_parallel(model, comm=comm, layout="zigzag")
        ordinary = model.model.forward
        model.model.forward = functools.partial(ordinary.func, *ordinary.args[:-1], "flash_attention_2")
        shifted = mine[None] + 5  # RoPE is invariant to it
        errors = [relative(model(input_ids=part, **how).logits, want) for how in ({}, dict(position_ids=shifted))]
        model.model.forward, last = ordinary, comm.rank == comm.size - 1
        contiguous = torch.arange(12)[None] + 12 * comm.rank
        rejected = {
            "begin with 0, got (0, 9) of the row at positions [0, 1]": dict(
                position_ids=torch.where(mine < 9, mine, mine - 8)[None]
            ),
            "of the row at positions [0, 12, 18]": dict(position_ids=contiguous if last else mine[None]),
            "on every rank or on none": dict(position_ids=mine[None]) if last else {},
            "got rank 0: 12; rank 1: 10": dict(input_ids=part[:, :10] if last else part),
            "needs an even number of tokens": dict(input_ids=part[:, :11]),
            "pack the sequences": dict(attention_mask=torch.zeros_like(part)),
        }
        with torch.no_grad():
            for text, wrong in rejected.items():
                answers[text] = raised(model, **dict(input_ids=part) | wrong)
            errors.append(relative(model(input_ids=part).logits, want))
            sequence_parallel(model, comm=comm, layout="contiguous" if last else "zigzag")
            answers["layout differs between ranks: rank 0: zigzag; rank 1: contiguous"] = raised(model, input_ids=part)
            answers["layout must be"] = raised(sequence_parallel, model, comm=comm, layout="ring")
            sequence_parallel(model, comm=comm, layout="zigzag")
            errors.append(relative(model(input_ids=part, labels=part).logits, want))
        return max(errors), answers


def configs_case(group):
    """Return (relative errors of models created with one config object, before and after one is split, {expected text:
    error})."""
    from transformers import AutoModelForCausalLM

    with allscan.Communicator(group, timeout=60) as comm, torch.no_grad():
        model = made("qwen3_next")
        config, state, mine = model.config, model.state_dict(), place(comm, TOKENS[comm.size])
        whole = torch.randint(1, VOCABULARY, (1, sum(TOKENS[comm.size])), generator=torch.Generator().manual_seed(1))
        want, errors = model(input_ids=whole, use_cache=False).logits, []

        def alone(other):
            other.load_state_dict(state)
            errors.append(relative(other(input_ids=whole, use_cache=False).logits, want))

        def split(other):
            sequence_parallel(other, comm=comm)
            errors.append(relative(other(input_ids=whole[:, mine]).logits, want[:, mine]))

        before = type(model)(config)
        split(model)
        assert model.config is model.model.config is model.model.layers[1].self_attn.config
        after, copied = type(model)(config), type(model)(copy.deepcopy(config))
        of_split = type(model)(copy.deepcopy(model.config))
        for other in (before, after, copied):
            alone(other)
            split(other)
        text = "made with the config of a model that is split: make it with"
        answers = {text: raised(of_split, input_ids=whole, use_cache=False)}
        alone(AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="sdpa"))
        model.set_attn_implementation("eager")
        answers["was set since sequence_parallel"] = raised(model, input_ids=whole[:, mine])
        alone(sequence_parallel(model, comm=None))
        model.set_attn_implementation("eager")
        split(model)
        return max(errors), answers


def one_rank_case(comm):
    """Return ({expected text: error}, relative error of a call after them) where one rank's arguments differ."""
    tokens, answers = [11, 9], {}
    whole, mine = torch.randint(1, VOCABULARY, (1, 20)), place(comm, tokens)
    dist.broadcast(whole, 0, group=comm.group)
    model, part = made("nemotron_h"), whole[:, mine]
    want = model(input_ids=whole, use_cache=False).logits[:, mine]
    sequence_parallel(model, comm=comm)
    embedded = model.get_input_embeddings()(part).detach()
    different = {
        "num_items_in_batch is None: False on rank 0; True on rank 1": dict(num_items_in_batch=7),
        "num_items_in_batch is None: True on rank 0; False on rank 1": dict(num_items_in_batch=torch.tensor(7)),
        "shift_labels is None: False on rank 0; True on rank 1": dict(shift_labels=part),
        "labels is None: True on rank 0; False on rank 1": dict(labels=None),
        "got input_ids (1, 11), inputs_embeds (1, 11, 32)": dict(inputs_embeds=embedded),
        "got input_ids (11,)": dict(input_ids=part[0]),
        "got neither": dict(input_ids=None),
    }
    for text, wrong in different.items():
        chosen = comm.rank == ("batch is None: True on rank 0" in text)
        answers[text] = raised(model, **dict(input_ids=part, labels=part) | (wrong if chosen else {}))
    text = "num_items_in_batch: 7.0 on rank 0; 8.0 on rank 1"
    answers[text] = raised(model, input_ids=part, labels=part, num_items_in_batch=7 + comm.rank)
    model(input_ids=part), model(input_ids=part, labels=part)
    text = "labels is None: False on rank 0; True on rank 1"  # both known: each forward pass compares them
    positional = part, None, None, None, None, None if comm.rank else part
    answers[text] = raised(model, *positional)
    with torch.set_grad_enabled(comm.rank == 0):
        text = "torch.is_grad_enabled(): True on rank 0; False on rank 1"
        answers[text] = raised(model, input_ids=part, labels=part)
    with torch.autocast("cpu", torch.bfloat16, enabled=comm.rank == 1):
        answers["torch.autocast: None on rank 0; torch.bfloat16 on rank 1"] = raised(model, input_ids=part)
    other = copy.deepcopy(model).bfloat16() if comm.rank else model
    answers["model.dtype: torch.float32 on rank 0; torch.bfloat16 on rank 1"] = raised(other, input_ids=part)
    if comm.rank:
        other = copy.deepcopy(model)
        other.gradient_checkpointing_enable()
    answers["gradient checkpointing: False on rank 0; True on rank 1"] = raised(other, input_ids=part)
    count = torch.tensor(7, device=("cpu", "meta")[comm.rank])  # "meta" as on a GPU: not read
    return relative(model(input_ids=part, num_items_in_batch=count).logits, want), answers


def wrapped_case(comm, how):
    """Return relative errors of (logits, the loss of all ranks), and whether hooks and a copy's hooks are removed."""
    packed = how == "any options, packed"  # which Mamba2's forward does not pass to its text model
    model = made("mamba2" if packed else "nemotron_h")
    kind = type(model)

    class AnyOptions(kind):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options)

    class NoOptions(kind):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels=labels)

    whole, mine = torch.randint(1, VOCABULARY, (1, 20)), place(comm, [11, 9])
    dist.broadcast(whole, 0, group=comm.group)
    labels, lengths, options = whole.clone(), [0, 6, 20] if packed else [0, 20], {}
    labels[:, lengths[:-1]] = -100
    if packed:
        options = dict(cu_seq_lens_q=torch.tensor(lengths))
    logits, want, _ = expected(model, whole, labels, lengths)
    part = whole[:, mine]
    model.__class__ = {"no options": NoOptions, "plain": kind, "FSDP1": kind}.get(how, AnyOptions)
    called = sequence_parallel(model, comm=comm)
    other = copy.deepcopy(model)
    if how == "FSDP1":
        called = FullyShardedDataParallel(model, process_group=comm.group, device_id=torch.device("cpu"))
    found = called(part, labels=labels[:, mine], **options)
    loss = added_up(found.loss, comm.group)
    removed = [not sequence_parallel(x, comm=None)._forward_pre_hooks for x in (other, model)]
    return relative(found.logits, logits[:, mine]), relative(loss, want), removed


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of FSDP1
@pytest.mark.parametrize("how", ["plain", "any options", "any options, packed", "no options", "FSDP1"])
def test_subclasses_and_flat_parameters(run, how, size=2):
    """A subclass may name other arguments in its forward; with FSDP1 a text model has no parameters of its own."""
    for logits, loss, removed in run(size, wrapped_case, how):
        assert max(logits, loss) < 1e-5 and removed == [True, True]


def test_arguments_of_one_rank(run, size=2):
    """An argument that decides which collectives follow, or that is wrong, on one rank is an error on every rank."""
    for error, answers in run(size, one_rank_case):
        assert error < 1e-5
        check_answers(answers, "ValueError", "AllScanRejected")


@pytest.mark.parametrize("case", [options_case, zigzag_case, configs_case])
def test_options_and_what_is_rejected_when_called(run, case, size=2):
    for error, answers in run(size, case):
        assert error < 1e-5
        check_answers(answers)


def rejected_case(comm):
    from transformers import LlamaConfig, LlamaForCausalLM

    def changed(family="qwen3_next", loss=None, forward=None, implementation=None, **more):
        model = made(family, **more)
        if loss is not None:
            model.loss_function = loss
        if forward is not None:
            model.model.forward = forward
        if implementation is not None:
            model.config._attn_implementation_internal = implementation
        return model

    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    small = LlamaConfig(**COMMON, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    other = LlamaForCausalLM(small)
    config = made("qwen3_next").config
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    kernels = changed()
    kernels._use_kernels = True
    shared = made("qwen3_next")
    sequence_parallel(shared, comm=comm)
    of_split = modeling.Qwen3NextForCausalLM(copy.deepcopy(shared.config))
    rejected = {
        "got ['LlamaForCausalLM', 'LlamaModel']": other,
        "got none": torch.nn.Linear(2, 2),
        "got ['Qwen3NextForSequenceClassification']": modeling.Qwen3NextForSequenceClassification(config),
        "must be one of eager, sdpa": changed(implementation="flex_attention"),
        "hub kernels": kernels,
        "sliding window": changed("nemotron_h", sliding_window=8),
        "type 'dynamic'": changed("bamba", rope_parameters=rope),
        "z_loss_coefficient": changed("bamba", z_loss_coefficient=0.1),
        "ForCausalLMLoss": changed(loss=lambda *_, **__: 0),
        "was replaced": changed(forward=lambda *_: None),
        "from_config(copy.deepcopy(config)": of_split,
    }
    answers = {text: raised(sequence_parallel, model, comm=comm) for text, model in rejected.items()}
    with pytest.raises(TypeError, match="merged_attention must be True or False"):
        sequence_parallel(made("qwen3_next"), comm=comm, merged_attention=None)
    with pytest.MonkeyPatch.context() as patch:
        other = made("mamba2")
        patch.delattr(importlib.import_module(type(other).__module__), "mamba2_chunk_scan")
        answers["this version of transformers"] = raised(sequence_parallel, other, comm=comm)
    assert shared.config._attn_implementation == "allscan"
    sequence_parallel(shared, comm=None)
    assert shared.config._attn_implementation == "sdpa" and "forward" not in vars(shared.model)
    assert shared.loss_function is other.loss_function
    return answers


def test_what_is_rejected_before(run):
    for answers in run(1, rejected_case):
        check_answers(answers)
