"""flash-linear-attention's models, split over the ranks, against the same model on one rank."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

import allscan
from support.fla import (
    by_document,
    delta_recurrence,
    dplr_recurrence,
    import_fla,
    recurrence,
    scalar_recurrence,
)
from support.values import Copies, added_up, check_answers, check_errors, in_ranks, place, raised, relative

os.environ["FLA_CACHE_RESULTS"] = "0"  # import_fla fakes results, which other programs must not find in the cache
if not importlib.util.find_spec("fla"):  # only ranks import it: the import is slow
    pytest.skip("needs flash-linear-attention", allow_module_level=True)
sequence_parallel = in_ranks("fla", "sequence_parallel")
TOKENS = {2: [30, 31], 3: [18, 22, 21], 4: [14, 19, 12, 16]}  # of each rank
EVEN = {2: [30, 32], 3: [18, 22, 20], 4: [14, 20, 12, 16]}  # for the zigzag layout
CUTS = [0, 1, 14, 14, 30, 34, 61]  # some at the ranks' boundaries
DOCUMENTS = [0, 1, 1, 5, 8]  # over 2P, each sharded
SOFTMAX = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=True)
GROUPED = dict(use_short_conv=True, num_kv_heads=1, feature_map="relu", clamp_min=-0.05, use_output_gate=False)
CHOICES = {
    "gla, convolution": dict(use_short_conv=True),
    "gla, grouped": GROUPED,
    "gla, hybrid": dict(attn=SOFTMAX | dict(window_size=21)),
    "kda, hybrid": dict(head_dim=16, attn=SOFTMAX),
    "kda, bounded": dict(
        num_hidden_layers=1,
        head_dim=16,
        num_v_heads=4,
        use_short_conv=False,
        allow_neg_eigval=True,
        lower_bound=-5.0,
        safe_gate=True,
    ),
    "gated_deltanet, hybrid": dict(head_dim=16, num_v_heads=4, expand_v=1, attn=SOFTMAX),
    "gated_deltanet, plain": dict(num_hidden_layers=1, head_dim=16, use_gate=False),
    "simple_gla, convolution": dict(num_hidden_layers=1, use_short_conv=True),
    "simple_gla, grouped": dict(num_hidden_layers=1, use_short_conv=True, num_kv_heads=1, feature_map="relu"),
    "retnet, hybrid": dict(attn=SOFTMAX),
    "retnet, grouped": dict(num_hidden_layers=1, num_kv_heads=1, feature_map="relu", use_output_gate=False),
    "mamba2, norm": dict(
        num_heads=4, head_dim=32, n_groups=2, state_size=16, chunk_size=16, D_has_hdim=True, dt_limit=(0.001, 0.05)
    ),
    "mamba2, gate": dict(num_hidden_layers=1, state_size=16, chunk_size=16, rmsnorm=False, hidden_act="relu"),
    "rwkv7, fused norms": dict(head_dim=16),
    "rwkv7, torch's norms": dict(head_dim=32, fuse_norm=False, num_hidden_layers=3),
}
MODELS = dict(gla="GLA", kda="KDA", gated_deltanet="GatedDeltaNet", simple_gla="GLA", retnet="RetNet", mamba2="Mamba2")
MODELS |= dict(rwkv7="RWKV7")
RECURRENCES = dict(gla=recurrence, kda=delta_recurrence, gated_deltanet=delta_recurrence, mamba2=by_document)
RECURRENCES |= dict(simple_gla=scalar_recurrence, retnet=scalar_recurrence, rwkv7=dplr_recurrence)
OPERATORS = dict(gla="gla", kda="kda", gated_deltanet="gated_delta_rule", simple_gla="simple_gla", retnet="retention")
ON_HOPPER = "gated_deltanet", "simple_gla", "retnet"  # whose backward fla rejects there


def limit(kind):
    """The largest error: on GPUs fla's products are in TF32; for RWKV-7 it inverts each chunk's matrix in float16."""
    if torch.cuda.is_available():
        return 1e-5 if kind == "gla" else 5e-3
    return 5e-4 if kind == "rwkv7" else 1e-5


def model_of(fla, kind, **choices):
    choices = dict(hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=97, use_l2warp=False) | choices
    models = getattr(fla.models, MODELS[kind].lower() if kind == "simple_gla" else kind)
    config = getattr(models, f"{MODELS[kind]}Config")(**choices)
    model = getattr(models, f"{MODELS[kind]}ForCausalLM")(config)
    for i, block in enumerate(model.model.layers if kind == "simple_gla" else ()):  # no model of fla has such layers
        names = "hidden_size", "num_heads", "num_kv_heads", "feature_map", "use_short_conv"
        options = {name: getattr(config, name) for name in names}
        layers = importlib.import_module("fla.layers.simple_gla")  # fla.layers does not import it
        block.attn = layers.SimpleGatedLinearAttention(layer_idx=i, **options)
    if kind == "rwkv7":
        with torch.no_grad():  # its layers begin with weights of zero
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    for module in model.modules():
        if hasattr(module, "safe_gate"):  # the interpreter does not run fla's kernel for it
            module.safe_gate &= torch.cuda.is_available()
    return model


@contextlib.contextmanager
def computed_by(fla, kind, call):
    """Replace the layers' operator by ``call``; with None, leave it."""
    layers = fla.layers.multiscale_retention if kind == "retnet" else getattr(fla.layers, kind)
    # 64 tokens or fewer take the path for decoding, whose gates may have another name
    names = [f"{how}_{OPERATORS[kind]}" for how in ("chunk", "fused_recurrent") if kind not in ("mamba2", "rwkv7")]
    with pytest.MonkeyPatch.context() as patch:
        if call is by_document:
            patch.setattr(layers.Mamba2, "forward", call(layers.Mamba2.forward))
        if call is dplr_recurrence:
            patch.setattr(layers, "chunk_rwkv7", call)
        for name in names if call else ():
            patch.setattr(layers, name, lambda gk=None, g=None, **x: call(g=gk if g is None else g, **x))
        yield


def answers_of(model, tokens, labels=None, **options):
    """Return (logits, loss, each parameter's gradient)."""
    model.zero_grad()
    output = model(input_ids=tokens, labels=tokens if labels is None else labels, use_cache=False, **options)
    logits, loss = output.logits, output.loss.detach()
    if logits is None:  # a loss that computes logits in pieces
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False, **options).logits
    logits = logits.detach().clone()  # backward may overwrite them
    output.loss.backward()
    return logits, loss, *(p.grad.clone() for p in model.parameters())


def errors_of_part(comm, found, expected, mine):
    """Return relative errors of answers_of this rank's tokens ``mine``, gradients summed, to those of all tokens."""
    logits, *sums = found
    sums = [added_up(x, comm.group) for x in sums]
    return [relative(logits, expected[0][:, mine]), *(relative(*pair) for pair in zip(sums, expected[1:], strict=True))]


def of_first(comm, call, fla, kind, model, whole, **options):
    """Return answers_of the global sequence, computed by rank 0 for all."""
    shapes = [(*whole.shape, 97), (), *(p.shape for p in model.parameters())]
    answers = [torch.empty(shape, device=comm.device) for shape in shapes]
    if comm.rank == 0:
        with computed_by(fla, kind, call):
            answers = answers_of(model, whole, **options)
    for x in answers:
        dist.broadcast(x, 0, group=comm.group)
    return answers


def model_case(comm, tokens, kind, choices, packed, layout, merged=True):
    """Return errors of logits, loss and each gradient against the recurrence; on GPUs also against fla's kernels, and
    of these against the recurrence, except where fla rejects their backward, see ON_HOPPER."""
    fla = import_fla()
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    model = model_of(fla, kind, fuse_cross_entropy=on_gpu, **choices).to(comm.device).train()
    whole = torch.randint(97, (1 if packed else 2, sum(tokens))).to(comm.device)
    lengths = torch.tensor([*CUTS[:-1], sum(tokens)], dtype=torch.int32).to(comm.device) if packed else None
    documents = None
    if layout == "documents":
        documents = [2 * comm.size * n for n in DOCUMENTS]
        lengths = torch.tensor(documents, dtype=torch.int32).to(comm.device)
    rejected = on_gpu and kind in ON_HOPPER and torch.cuda.get_device_capability()[0] == 9
    alone = rejected or (not on_gpu and kind != "rwkv7") or kind == "mamba2"  # whose own forward runs in any case
    calls = [RECURRENCES[kind]] if alone else [RECURRENCES[kind], None]
    labels = whole.clone()
    if documents:  # the layout shifts labels within each document
        labels[:, [a for a in documents if a < sum(tokens)]] = -100
    expected = [of_first(comm, call, fla, kind, model, whole, labels=labels, cu_seqlens=lengths) for call in calls]
    mine = place(comm, tokens, layout == "zigzag", documents)
    where = dict(layout="contiguous" if layout == "contiguous" else "zigzag", per_document=documents is not None)
    assert sequence_parallel(model, comm=comm, merged_attention=merged, **where) is model
    model = copy.deepcopy(model)  # as for averaged weights
    found = answers_of(model, whole[:, mine], cu_seqlens=lengths)
    with pytest.raises(ValueError, match="pack the sequences"):
        model(input_ids=whole[:, mine], attention_mask=torch.zeros_like(whole[:, mine]))
    errors = [errors_of_part(comm, found, e, mine) for e in expected]
    if len(expected) > 1:
        errors.append([relative(*pair) for pair in zip(*expected[::-1], strict=True)])
    return errors


@pytest.mark.slow(
    but=(
        "gla, hybrid-2-contiguous",
        "kda, bounded",
        "gated_deltanet, hybrid-1",
        "kda, hybrid-2",
        "gla, hybrid-2-documents",
        "simple_gla, convolution-2-contiguous",
        "retnet, hybrid-2",
        "mamba2, gate-2",
        "rwkv7, fused norms-2",
    )
)
@pytest.mark.parametrize(
    "choice, size, layout",
    [
        ("gla, convolution", 2, "contiguous"),
        ("gla, convolution", 4, "contiguous"),
        ("gla, grouped", 4, "contiguous"),
        ("gla, hybrid", 2, "contiguous"),
        ("kda, hybrid", 4, "contiguous"),
        ("kda, bounded", 2, "contiguous"),
        ("gated_deltanet, hybrid", 2, "contiguous"),
        ("gated_deltanet, plain", 4, "contiguous"),
        ("gla, convolution", 2, "zigzag"),
        ("gla, hybrid", 4, "zigzag"),
        ("kda, hybrid", 2, "zigzag"),
        ("gated_deltanet, hybrid", 4, "zigzag"),
        ("gla, hybrid", 2, "documents"),
        ("kda, hybrid", 4, "documents"),
        ("gated_deltanet, hybrid", 1, "documents"),
        ("simple_gla, convolution", 2, "contiguous"),
        ("simple_gla, convolution", 2, "documents"),
        ("simple_gla, grouped", 4, "zigzag"),
        ("retnet, hybrid", 2, "contiguous"),
        ("retnet, hybrid", 4, "zigzag"),
        ("retnet, grouped", 4, "contiguous"),
        ("retnet, grouped", 2, "documents"),
        ("mamba2, norm", 2, "contiguous"),
        ("mamba2, norm", 4, "zigzag"),
        ("mamba2, gate", 4, "contiguous"),
        ("mamba2, gate", 2, "zigzag"),
        ("mamba2, norm", 2, "documents"),
        ("rwkv7, fused norms", 2, "contiguous"),
        ("rwkv7, fused norms", 4, "contiguous"),
        ("rwkv7, torch's norms", 3, "contiguous"),
        ("rwkv7, torch's norms", 2, "zigzag"),
        ("rwkv7, fused norms", 3, "zigzag"),
        ("rwkv7, fused norms", 4, "zigzag"),
    ],
)
def test_models(run, choice, size, layout):
    """Two ranks have unpacked sequences, four have packed ones; "documents": each document is sharded."""
    kind = choice.split(",")[0]
    tokens = [2 * DOCUMENTS[-1]] * size if layout == "documents" else (EVEN if layout == "zigzag" else TOKENS)[size]
    packed = size == 4 or layout == "documents"
    for of_recurrence, *of_fla in run(size, model_case, tokens, kind, CHOICES[choice], packed, layout=layout):
        unsplit = of_fla.pop() if of_fla else [0.0] * len(of_recurrence)
        pairs = zip(of_recurrence, unsplit, strict=True)
        wrong = [pair for pair in pairs if not pair[0] < max(limit(kind), 1.5 * pair[1])]
        assert not wrong and max(unsplit) < 5e-2, (wrong, unsplit)
        assert all(max(errors) < max(limit(kind), limit("rwkv7")) for errors in of_fla)


@pytest.mark.slow(but="contiguous")
@pytest.mark.cpu
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_attention_without_a_merge(run, layout, size=2):
    """One kernel runs over keys in sequence order."""
    tokens = (EVEN if layout == "zigzag" else TOKENS)[size]
    for errors, *_ in run(
        size,
        model_case,
        tokens,
        kind="gla",
        choices=dict(attn=SOFTMAX),
        packed=False,
        layout=layout,
        merged=False,
    ):
        assert max(errors) < 1e-5, errors


# A good batch, then ranks with fewer tokens than a convolution's halo, or none
FEW = [
    ((9, 8, 10), False),
    ((8, 2, 8), False),
    ((1, 8, 7), True),
    ((8, 5, 1), True),
    ((1, 1, 8), False),
    ((8, 0, 8), False),
    ((0, 8, 7), True),
    ((8, 5, 0), False),
    ((9, 0, 0), True),
]


def few_case(comm, kind, choices, batches, layout):
    """Return errors of logits, loss and each gradient for several batches."""
    fla = import_fla()
    torch.manual_seed(0)
    model = model_of(fla, kind, fuse_cross_entropy=torch.cuda.is_available(), **choices).to(comm.device).train()
    errors = []
    for tokens, packed in batches:
        total = sum(tokens)
        whole = torch.randint(1, 97, (1 if packed else 2, total)).to(comm.device)
        lengths = torch.tensor([0, 3, 8, total], dtype=torch.int32).to(comm.device) if packed else None
        sequence_parallel(model, comm=None)
        expected = of_first(comm, RECURRENCES[kind], fla, kind, model, whole, cu_seqlens=lengths)
        sequence_parallel(model, comm=comm, layout=layout)
        mine = place(comm, tokens, layout == "zigzag")
        found = answers_of(model, whole[:, mine], cu_seqlens=lengths)
        errors.append(max(errors_of_part(comm, found, expected, mine)))
    return errors


@pytest.mark.slow(but="gla, hybrid")
@pytest.mark.parametrize(
    "choice, layout",
    [
        ("gla, convolution", "contiguous"),
        ("gla, hybrid", "contiguous"),
        ("kda, hybrid", "contiguous"),
        ("gated_deltanet, hybrid", "contiguous"),
        ("kda, hybrid", "zigzag"),
        ("retnet, hybrid", "contiguous"),
        ("mamba2, norm", "contiguous"),
        ("rwkv7, fused norms", "contiguous"),
        ("rwkv7, torch's norms", "zigzag"),
    ],
)
def test_few_tokens(run, choice, layout, size=3):
    kind = choice.split(",")[0]
    batches = FEW if layout == "contiguous" else [((8, 8, 8), False), ((2, 2, 2), False), ((8, 8, 8), False)]
    check_errors(run(size, few_case, kind, CHOICES[choice], batches, layout), limit(kind))


def steep_case(comm, kind, layout, T=24):
    """Return, for each convolution, the largest relative difference of a token's gradient to the unsplit model's."""
    fla = import_fla()
    torch.manual_seed(0)
    model, found = model_of(fla, kind, num_hidden_layers=1, use_short_conv=True).to(comm.device).train(), {}
    layer = model.model.layers[0].attn
    for name in "qkv":
        # with inputs of about 6.5 the history turns sums of -0.1 into -12
        weight = getattr(layer, f"{name}_conv1d").weight
        weight.data.copy_(torch.tensor([-0.6, -0.6, -0.6, -0.02]))

        def with_offset(_, __, y, name=name):
            y = y + 6.5
            y.register_hook(lambda dy: found.__setitem__(name, dy[0]))
            return y

        getattr(layer, f"{name}_proj").register_forward_hook(with_offset)
    whole, weights = torch.randint(97, (1, T)), torch.randn(1, T, 97)

    def gradients(part):
        logits = model(input_ids=whole[:, part].to(comm.device), use_cache=False).logits
        (logits * weights[:, part].to(comm.device)).sum().backward()
        return dict(found)

    with computed_by(fla, kind, RECURRENCES[kind]):
        alone = gradients(slice(None))
    part = place(comm, [T // comm.size] * comm.size, layout == "zigzag")
    sequence_parallel(model, comm=comm, layout=layout)
    split = gradients(part)
    expected = {name: x[part] for name, x in alone.items()}
    return [((split[x] - expected[x]).norm(dim=1) / expected[x].norm(dim=1)).max().item() for x in "qkv"]


@pytest.mark.slow(but="gla")
@pytest.mark.cpu
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ["gla", "kda", "gated_deltanet"])
def test_gradients_beside_a_boundary(run, kind, layout, size=2):
    """As test_transformers' test of this name."""
    check_errors(run(size, steep_case, kind, layout), 5e-5)


def prefill_case(group, tokens, kind, choices, layout):
    """Return the cache's relative error when the ordinary model continues from each rank's cache."""
    fla = import_fla()
    with allscan.Communicator(group) as comm, torch.no_grad(), computed_by(fla, kind, RECURRENCES[kind]):
        torch.manual_seed(0)
        model = model_of(fla, kind, **choices).to(comm.device).eval()
        whole = torch.randint(97, (2, sum(tokens))).to(comm.device)
        expected = model(input_ids=whole, use_cache=True)
        sequence_parallel(model, comm=comm, layout=layout)
        actual = model(input_ids=whole[:, place(comm, tokens, layout == "zigzag")], use_cache=True)
        sequence_parallel(model, comm=None)
        assert actual.past_key_values.get_seq_length() == sum(tokens)
        errors = []
        for a, b in zip(actual.past_key_values, expected.past_key_values, strict=True):
            for name in ("conv_state", "attn_state"):
                if b[name] is not None:
                    errors += [relative(*pair) for pair in zip(a[name], b[name], strict=True)]
            if b["recurrent_state"] is not None:
                errors.append(relative(a["recurrent_state"], b["recurrent_state"]))
        following = torch.zeros_like(whole[:, :1])
        found, wanted = (model(following, past_key_values=x.past_key_values).logits for x in (actual, expected))
        return max(*errors, relative(found, wanted))


PREFILLED = {"gla": dict(use_short_conv=True), "kda": CHOICES["kda, hybrid"], "gated_deltanet": dict(head_dim=16)}
PREFILLED |= dict(simple_gla=dict(use_short_conv=True), retnet={}, mamba2=CHOICES["mamba2, norm"])


@pytest.mark.slow(but="kda-zigzag")
@pytest.mark.parametrize(
    "kind, layout", [*((kind, "contiguous") for kind in PREFILLED), ("kda", "zigzag"), ("mamba2", "zigzag")]
)
def test_every_ranks_cache(run, kind, layout, size=3):
    for tokens in [EVEN[size]] + ([] if layout == "zigzag" else [[8, 9, 2], [8, 1, 1], [8, 9, 0]]):
        assert max(run(size, prefill_case, tokens, kind, PREFILLED[kind], layout)) < limit(kind)


class Other(torch.nn.Module):
    """A criterion without a reduction attribute."""

    ignore_index = 0

    def forward(self, logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=0)


def options_case(group):
    """Check prefills of several lengths, uneven and with a reused cache; criteria; rejected options."""
    fla = import_fla()
    with allscan.Communicator(group) as comm, computed_by(fla, "gla", recurrence):
        torch.manual_seed(0)
        model = model_of(fla, "gla", num_hidden_layers=1, fuse_cross_entropy=False).to(comm.device)
        whole, errors = torch.randint(97, (2, 15)).to(comm.device), []
        mine, weight = place(comm, [8, 7]), torch.rand(97).to(comm.device)
        criteria = [
            torch.nn.CrossEntropyLoss(ignore_index=0),
            torch.nn.CrossEntropyLoss(reduction="sum"),
            torch.nn.CrossEntropyLoss(weight=weight, ignore_index=int(whole[0, 4])),
            torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1),
        ]
        for criterion in criteria:
            model.criterion = criterion
            expected = answers_of(sequence_parallel(model, comm=None), whole)
            actual = answers_of(sequence_parallel(model, comm=comm), whole[:, mine])
            errors += errors_of_part(comm, actual, expected, mine)
        model.criterion = Other()
        with pytest.raises(ValueError, match='reduction of "mean" or "sum"'):
            model(input_ids=whole, labels=whole)
        model.config.use_l2warp = True
        with pytest.raises(ValueError, match="use_l2warp"):
            model(input_ids=whole, labels=whole)
        lengths, cache = [], None
        with torch.no_grad():
            for tokens in ([8, 8], [7, 7], [8, 7], [5, 6]):
                if tokens == [5, 6]:
                    cache.reset()
                part = torch.zeros(1, tokens[comm.rank], dtype=torch.long, device=comm.device)
                again = dict(past_key_values=cache) if tokens == [5, 6] else {}
                cache = model.eval()(input_ids=part, use_cache=True, **again).past_key_values
                lengths.append(cache.get_seq_length())
        sequence_parallel(model, comm=None)
        model.model.layers[0].attn.forward = lambda *x: x
        with pytest.raises(ValueError, match="was replaced"):
            sequence_parallel(model, comm=comm)
        return lengths, max(errors)


def test_options(run):
    for lengths, error in run(2, options_case):
        assert lengths == [16, 14, 15, 11] and error < 1e-5


def one_rank_case(group):
    """Return (error of the loss of a call after them, {expected text: error}) where one rank's arguments differ."""
    fla = import_fla()
    answers = {}
    with allscan.Communicator(group, timeout=60) as comm, torch.no_grad():
        torch.manual_seed(0)
        model = model_of(fla, "gla", fuse_cross_entropy=False, attn=SOFTMAX | dict(layers=[0])).to(comm.device)
        whole, mine = torch.randint(97, (2, 15)).to(comm.device), place(comm, [8, 7])
        sequence_parallel(model, comm=comm)
        batch = dict(input_ids=whole[:, mine], labels=whole[:, mine], use_cache=False)
        for rank in range(comm.size):
            different = dict(num_items_in_batch=7) if rank == comm.rank else {}
            answers[f"num_items_in_batch is None: {rank > 0} on rank 0; {rank < 1} on rank 1"] = raised(
                model, **batch, **different
            )
        for rank in range(comm.size):
            different = dict(labels=None) if rank == comm.rank else {}
            text = f"labels is None: {rank < 1} on rank 0; {rank > 0} on rank 1"
            answers[text] = raised(model, **batch | different)
        text = "num_items_in_batch: 7.0 on rank 0; 8.0 on rank 1"
        answers[text] = raised(model, **batch, num_items_in_batch=7 + comm.rank)
        with torch.set_grad_enabled(comm.rank == 0):
            answers["torch.is_grad_enabled(): True on rank 0; False on rank 1"] = raised(model, **batch)
        text = "call: with use_cache=False on rank 0; with use_cache=True on rank 1"
        answers[text] = raised(model, **batch | dict(use_cache=comm.rank == 1))
        sequence_parallel(model, comm=comm, merged_attention=comm.rank == 0)
        answers["merged_attention: True on rank 0; False on rank 1"] = raised(model, **batch)
        sequence_parallel(model, comm=comm)
        with torch.autocast(comm.device.type, torch.bfloat16, enabled=comm.rank == 1):
            text = "float32, torch.float32 on rank 0; torch.bfloat16, torch.bfloat16 on rank 1"
            answers[text] = raised(model, **batch)
        embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_(comm.rank == 1)
        with torch.enable_grad():  # one rank has learned tokens before a frozen model
            text = "gradients of keys and values: False on rank 0; True on rank 1"
            answers[text] = raised(model.requires_grad_(False), inputs_embeds=embedded)
        losses = [model(**batch, **some).loss for some in ({}, dict(num_items_in_batch=28))]
        return relative(*(added_up(loss, comm.group) for loss in losses)), answers


def test_arguments_of_one_rank(run, size=2):
    """An argument that decides which collectives follow is an error on every rank if one rank alone passes it."""
    for error, answers in run(size, one_rank_case):
        assert error < 1e-6
        check_answers(answers)


def rwkv7_case(group):
    """Return the errors of what split RWKV-7 rejects, each on rank 1 alone where a rank can differ, and the error of
    the loss of a call afterwards."""
    fla = import_fla()
    with allscan.Communicator(group, timeout=4) as comm, allscan.Communicator(group, invariant=256) as invariant:
        torch.manual_seed(0)
        model = model_of(fla, "rwkv7", head_dim=32, fuse_cross_entropy=False).to(comm.device).train()
        whole, answers = torch.randint(97, (1, 16)).to(comm.device), {}
        expected = of_first(comm, dplr_recurrence, fla, "rwkv7", model, whole)[1]
        answers["per_document"] = raised(sequence_parallel, model, comm=comm, layout="zigzag", per_document=True)
        answers["invariant"] = raised(sequence_parallel, model, comm=invariant)
        sequence_parallel(model, comm=comm)
        mine = place(comm, [8, 8])

        def call(**options):
            return model(input_ids=whole[:, mine], labels=whole[:, mine], **dict(use_cache=False) | options).loss

        call()
        wrong = dict(use_cache=True) if comm.rank == 0 else {}
        answers["pass use_cache=False"] = raised(call, **wrong)
        comm.resync()
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                patch.setattr("allscan.integrations.fla_rwkv7.chunk_rwkv7", None)
            answers["not callable"] = raised(call)
        comm.resync()
        return relative(added_up(call(), comm.group), expected), answers


@pytest.mark.cpu
def test_what_rwkv7_rejects(run, size=2):
    """A rank that rejects a call, or fails in it, leaves nobody waiting, and the ranks can go on."""
    for rank, (error, answers) in enumerate(run(size, rwkv7_case)):
        assert error < limit("rwkv7")
        for text, (kind, message) in answers.items():
            if rank == 0 or text in ("per_document", "invariant"):
                assert kind in ("ValueError", "TypeError") and text in message, (text, kind, message)
            else:
                assert kind in ("AllScanRejected", "AllScanTimeout", "AllScanOutOfStep"), (text, kind, message)


def test_other_layers_are_rejected():
    from fla.layers import DeltaNet, GatedLinearAttention

    class Wrapped(DeltaNet):  # FSDP2 also derives a class, in its own module
        pass

    class Doubled(GatedLinearAttention):
        def forward(self, *x, **options):
            return 2 * super().forward(*x, **options)[0]

    layers = [kind(hidden_size=64, num_heads=2) for kind in (DeltaNet, Wrapped, Doubled, GatedLinearAttention)]
    sequence_parallel(layers[-1], comm=None)
    for module in (torch.nn.Linear(2, 2), *layers[:3], torch.nn.Sequential(layers[3], layers[1])):
        with pytest.raises(ValueError, match="expected layers of"):
            sequence_parallel(module, comm=None)


def cut_case(group, choice):
    """Return (error of the logits, {expected text: error}) for batches from cut_batch."""
    fla = import_fla()
    from allscan.integrations.fla import cut_batch

    kind = choice.split(",")[0]
    with allscan.Communicator(group, timeout=60) as comm, torch.no_grad():
        torch.manual_seed(0)
        model = model_of(fla, kind, fuse_cross_entropy=False, **CHOICES[choice]).to(comm.device).train()
        sequence_parallel(model, comm=comm)
        whole, rank = torch.randint(96, (2, 43)), comm.rank  # on the CPU, where cut_batch computes checksums
        batch, first = dict(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False), 22 * rank

        def cut(ids):
            part = cut_batch(batch | dict(input_ids=ids), comm=comm)
            return {name: x.to(comm.device) if isinstance(x, torch.Tensor) else x for name, x in part.items()}

        part = cut(whole)
        assert torch.equal(part["input_ids"].cpu(), whole[:, first : first + 22 - rank])
        dealt = whole + rank
        answers = {"have cut different batches": raised(model, **cut(dealt))}
        found = model(**part).logits
        answers["has 2 rows, tokens [43, 43]"] = raised(model, **part | dict(input_ids=whole.to(comm.device)))
        if kind == "gla" and "attn" in CHOICES[choice]:  # exchanges in every call
            answers["they must read the same rows"] = raised(model, **cut(dealt))
        expected = model(input_ids=part["input_ids"], use_cache=False).logits
        return relative(found, expected), answers


@pytest.mark.slow(but="gla, hybrid")
@pytest.mark.parametrize("choice", ["gla, convolution", "gla, hybrid", "rwkv7, fused norms"])
def test_cut_batches(run, choice, size=2):
    """Without all parts of one batch from cut_batch, a split model raises; cut_batch's stamp detects that."""
    for error, answers in run(size, cut_case, choice):
        assert error < 1e-6
        check_answers(answers)


def copies_case(group, layout, packed):
    """Return [ordinary, split]: elements copied by a layer's forward and backward pass, for each number of tokens. The
    recurrence is replaced by a sum."""
    fla = import_fla()
    from allscan.integrations import fla as integration

    def rule(*tensors, q=None, k=None, v=None, g=None, **_):
        q, k, v, g = tensors[:4] if tensors else (q, k, v, g)
        return q + k + v + g, None

    table = []
    with allscan.Communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla.layers.kda, "chunk_kda", rule)
        patch.setattr(integration, "zeco_kda", rule)
        for T in (64, 128):
            layer, table = fla.layers.KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=16), [*table, []]
            lengths = torch.tensor([0, 1, 20, T * comm.size], dtype=torch.int32) if packed else None
            x = torch.randn(1, T, 64, requires_grad=True)
            for split in (False, True):
                if split:
                    integration.sequence_parallel(layer, comm=comm, layout=layout)
                for _ in range(2):  # the first call creates tables
                    with Copies() as copies:
                        layer(x, cu_seqlens=lengths if split else None)[0].sum().backward()
                table[-1].append(copies.numbers)
    return table


@pytest.mark.slow(but="zigzag-False")
@pytest.mark.cpu
@pytest.mark.parametrize("layout, packed", [("contiguous", False), ("zigzag", False), ("zigzag", True)])
def test_what_a_split_copies(run, layout, packed, size=2):
    """The split copies a few tokens at the ranks' boundaries, whatever the sequence's length, and no whole row."""
    for (one, split), (one_of_more, split_of_more) in run(size, copies_case, layout, packed):
        added, added_of_more = split - one, split_of_more - one_of_more
        assert added_of_more - added <= 64, (added, added_of_more)  # a row has 32 numbers a token
