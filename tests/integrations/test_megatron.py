"""Megatron-core's mixers in a Megatron model, split over the ranks, against the same model on one rank."""

from __future__ import annotations

import copy
import importlib.util
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.comm.heap import init
from support.megatron import (
    VOCABULARY,
    WIDTH,
    called,
    configuration,
    gradients,
    mixers,
    model,
    packing,
    placed,
    rule,
    specification,
    stand_ins,
)
from support.values import check_answers, check_errors, in_ranks, raised, relative

if not all(importlib.util.find_spec(name) for name in ("megatron", "fla")):  # imports would take seconds
    pytest.skip("needs megatron-core, which make test installs, and fla", allow_module_level=True)
pytestmark = pytest.mark.cpu  # the stand-ins replace the GPU in Megatron's constructors

sequence_parallel = in_ranks("megatron", "sequence_parallel")
PRELOAD = ["fla.models.gla", "allscan.integrations.megatron", "megatron.core.models.hybrid.hybrid_model"]


def model_case(group, layout, tokens, lengths, options, params):
    """Return relative errors of logits, loss, the input's gradient and each parameter's."""
    with stand_ins(), allscan.Communicator(group) as comm:
        spec, total = specification(**params), sum(tokens)
        whole = model(spec, **options)
        of_ranks = spec if "pattern" not in options else specification(attention=dict(comm=comm, layout=layout))
        for module in whole.modules():
            if not options.get("deterministic_mode", True) and hasattr(module, "gated_delta_rule"):
                module.gated_delta_rule = rule  # Triton's interpreter does not run fla's
        batch = 1 if lengths else 2
        torch.manual_seed(1)
        embedded = torch.randn(total, batch, WIDTH, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, (batch, total))
        ends = sorted(set(lengths or [0, total]))  # without the empty ones
        answers = [called(whole, embedded[a:b], labels[:, a:b]) for a, b in pairwise(ends)]  # each sequence by itself
        logits, losses = torch.cat([a[0] for a in answers]), torch.cat([a[1] for a in answers], 1)
        losses.sum().backward()

        how = dict(layout="zigzag", per_document=False) if layout == "row" else dict(layout=layout)
        own = model(sequence_parallel(of_ranks, comm=comm, **how), group, **options)
        own.load_state_dict(whole.state_dict())
        mine = placed(comm, tokens, ends, layout)
        given = embedded.detach()[mine].requires_grad_()
        own_logits, own_losses = called(own, given, labels[:, mine], lengths and packing(lengths))
        share = own_losses.sum()
        share.backward()
        dist.all_reduce(share, group=group)
        errors = {
            "logits": relative(own_logits, logits[mine]),
            "loss": relative(share, losses.sum()),
            "input": relative(given.grad, embedded.grad[mine]),
        }
        expected = gradients(whole)
        for name, gradient in gradients(own).items():
            if name.startswith("embedding"):
                continue  # the input bypasses it
            dist.all_reduce(gradient, group=group)
            assert expected[name].any()
            errors[name] = relative(gradient, expected[name])
        return errors


RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
NORM_RECOMPUTED = dict(
    recompute_granularity="selective",
    recompute_modules=["gdn_norm_out"],
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=2,
)
FEW = dict(linear_num_key_heads=1, linear_num_value_heads=2, mamba_num_heads=2, mamba_num_groups=1)


MODELS = [  # layout, tokens of each rank, boundaries, options, params
    ("zigzag", [16, 16], None, {}, {}),
    ("contiguous", [6, 3, 11, 9], None, FEW, {}),  # more ranks than heads
    ("zigzag", [16, 16], [0, 12, 12, 32], {}, {}),
    ("row", [16, 16], [0, 1, 8, 17, 21, 32], {}, {}),
    ("contiguous", [0, 16], [0, 5, 16], {}, {}),  # ranks without tokens
    ("contiguous", [16, 0], None, NORM_RECOMPUTED, {}),
    ("zigzag", [16], None, NORM_RECOMPUTED, {}),  # Megatron's own forward
]
MORE_MODELS = [
    ("zigzag", [12] * 4, None, FEW, {}),
    ("contiguous", [17, 12], None, {}, {}),
    ("zigzag", [14] * 4, [0, 8, 48, 56], FEW, {}),  # some ranks with fewer tokens than a convolution's halo
    ("row", [10] * 4, [0, 4, 5, 14, 28, 29, 40], FEW, {}),
    ("contiguous", [17, 12], [0, 1, 8, 17, 21, 29], {}, {}),
    ("contiguous", [6, 3, 11, 9], [0, 4, 5, 14, 18, 29], FEW, {}),
    ("contiguous", [7, 0, 9], None, dict(deterministic_mode=False), {}),
    ("zigzag", [16, 16], None, dict(pattern="MG*-MG*-"), {}),  # with softmax attention and MLPs
    ("contiguous", [12] * 4, None, dict(pattern="GM*-"), {}),
    ("zigzag", [16, 16], None, {}, dict(gdn=dict(conv_bias=True), mamba=dict(D_has_hdim=True, rmsnorm=False))),
    ("zigzag", [16, 16], None, RECOMPUTED, {}),
    ("zigzag", [16, 16], None, NORM_RECOMPUTED, {}),
    ("zigzag", [16, 16], None, dict(deterministic_mode=False), {}),  # fla's operators
    ("zigzag", [16, 16], [0, 12, 12, 32], dict(deterministic_mode=False), {}),
    ("row", [16, 16], [0, 1, 8, 17, 21, 32], dict(deterministic_mode=False), {}),
    ("contiguous", [17, 12], [0, 1, 8, 17, 21, 29], dict(deterministic_mode=False), {}),
]


@pytest.mark.parametrize(
    "layout, tokens, lengths, options, params",
    [*MODELS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MODELS)],
)
def test_a_model(run, layout, tokens, lengths, options, params):
    for errors in run(len(tokens), model_case, layout, tokens, lengths, options, params=params):
        # a relative change of 6e-8 of the convolution's output changes this gradient by 1e-4 of its norm
        of_decays = errors.pop("decoder.layers.0.mixer.A_log", 0.0)
        assert len(errors) > 19 and max(errors.values()) < 2e-5 and of_decays < 3e-4, (of_decays, errors)


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """Replaces causal_conv1d's."""
    assert activation == "silu" and seq_idx is None
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[2]])


def torchs_rule_case(group, tokens):
    """Return (o of Megatron's rule in torch with a communicator with invariant=, its error) for this rank's tokens."""
    from megatron.core.ssm.gated_delta_net import gdn

    from allscan.integrations import megatron
    from allscan.tokens.packing import TokenRange, flags_of

    generator = torch.Generator().manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, sum(tokens), 2, 16, generator=generator), dim=-1) for _ in range(3))
    g = -torch.rand(1, sum(tokens), 2, generator=generator) / 8
    given = q, k, v, g, g.exp()
    with allscan.Communicator(group, invariant=64) as comm:
        begin = sum(tokens[: comm.rank])
        mine = slice(begin, begin + tokens[comm.rank])
        of_rank = megatron._Tokens([TokenRange(0, tokens[comm.rank], flags=flags_of(comm.rank == 0))], dict(comm=comm))
        operator = gdn.torch_chunk_gated_delta_rule
        o = megatron._rule(operator, of_rank, *(x[:, mine] for x in given))
        comm.barrier()
    wanted = operator(*given, use_qk_l2norm_in_kernel=False)[0]
    return o, relative(o, wanted[:, mine])


def test_the_same_bits_of_torchs_rule(run, size=2):
    answers = [run(len(tokens), torchs_rule_case, tokens) for tokens in ([200], [64, 136])]
    one, two = (torch.cat([o for o, _ in parts], 1) for parts in answers)
    assert torch.equal(one, two) and max(error for parts in answers for _, error in parts) < 1e-5


def packages_case(group):
    from megatron.core.ssm import mamba_mixer

    with mock.patch.object(mamba_mixer, "causal_conv1d_fn", causal_conv1d_fn):
        with mock.patch.object(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", True):
            return model_case(group, "zigzag", [16, 16], [0, 12, 32], {}, {})


def test_with_causal_conv1d_and_a_dtype_of_states(run, size=2):
    check_errors(run(size, packages_case), 2e-5)


def tensor_case(layout, sequence):
    """Combine tensor parallelism over ranks 0, 1 and 2, 3 with context parallelism over 0, 2 and 1, 3; compare with
    tensor parallelism alone."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, cp = (group for group in groups if isinstance(group, dist.ProcessGroup))
    init()
    with stand_ins():
        with allscan.Communicator(cp) as comm:
            spec, options = specification(), dict(sequence_parallel=sequence)
            whole = model(spec, tp=tp, **options)
            own = model(sequence_parallel(spec, layout=layout, comm=comm), cp, tp, **options)
            assert "context parallelism, got one of" in raised(model, sequence_parallel(spec, comm=comm), tp, cp)[1]
            own.load_state_dict(whole.state_dict())
            torch.manual_seed(1)
            embedded, labels = torch.randn(32, 2, WIDTH), torch.randint(0, VOCABULARY, (2, 32))
            mine = placed(comm, [16, 16], [0, 32], layout)

            def run(made, where):
                given = embedded[where]
                given = given.chunk(2)[tp.rank()] if sequence else given
                losses = called(made, given, labels[:, where])[1]
                losses.sum().backward()
                return losses.detach()

            errors = {"loss": relative(run(own, mine), run(whole, torch.arange(32))[:, mine])}
            for (name, p), other in zip(own.named_parameters(), whole.parameters(), strict=True):
                if name.startswith("embedding"):
                    continue
                dist.all_reduce(p.grad, group=cp)
                if not getattr(p, "tensor_model_parallel", False):  # parameters equal on all ranks
                    dist.all_reduce(p.grad, group=tp)
                    dist.all_reduce(other.grad, group=tp)
                errors[name] = relative(p.grad, other.grad)
            return errors


@pytest.mark.slow(but="contiguous")
@pytest.mark.parametrize("layout, sequence", [("zigzag", False), ("contiguous", True)])
def test_with_tensor_parallelism(fresh, layout, sequence):
    for errors in fresh(4).run(tensor_case, layout, sequence):
        assert len(errors) > 18 and max(errors.values()) < 2e-5, errors


def own_case(group):
    """Return relative differences of logits and parameters' gradients to Megatron's own all-to-all, and the bytes sent
    by a rank with each. Megatron's own function splits the tokens."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    with stand_ins(), allscan.Communicator(group) as comm:
        spec = specification()
        torch.manual_seed(1)
        batch = dict(tokens=torch.randint(0, VOCABULARY, (2, 16 * comm.size)))
        batch["labels"] = batch["tokens"].roll(-1, 1)
        mine = get_batch_on_this_cp_rank(batch | dict(cu_seqlens=None), is_hybrid_cp=False, cp_group=group)
        assert torch.equal(mine["tokens"], batch["tokens"][:, placed(comm, [], [0, 16 * comm.size], "zigzag")])
        answers, sent = [], []
        exchange = dist.all_to_all_single

        def counted(output, given, *arguments, **options):
            sent.append(given.nbytes * (comm.size - 1) // comm.size)
            return exchange(output, given, *arguments, **options)

        for some in (spec, sequence_parallel(spec, comm=comm)):
            made = model(some, group)
            with mock.patch.object(dist, "all_to_all_single", counted):
                losses = made(mine["tokens"], None, None, labels=mine["labels"])
                losses.sum().backward()
            for gradient in gradients(made).values():
                dist.all_reduce(gradient, group=group)
            answers.append(dict(losses=losses, **gradients(made)))
            sent.append(0)
        errors = {name: relative(answers[1][name], x) for name, x in answers[0].items()}
        return errors, sum(sent[: sent.index(0)]), sum(sent[sent.index(0) :]), own_bytes(comm)


def own_bytes(comm):
    """Return the bytes sent by this rank's scans, forward and backward: a state for each neighbour."""
    sent = 0
    for scan in comm.collectives:
        ascending, descending = scan.epochs
        state = 4 * torch.Size(scan.shape).numel()
        sent += state * (ascending * (comm.rank < comm.size - 1) + descending * (comm.rank > 0))
    return sent


def of_all_to_all(config, T, batch, size):
    """Return the bytes that a rank sends for a Mamba2 and a Gated DeltaNet layer in the forward pass, float32."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    groups = 2 * config.mamba_num_groups * config.mamba_state_dim
    mamba = 2 * inner + groups + config.mamba_num_heads + 2 * inner  # z, x, B, C, dt; and y, z of the norm
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    gdn = 2 * keys + 2 * values + 2 * config.linear_num_value_heads + values  # q, k, v, gate, beta, alpha; and outputs
    return 4 * (mamba + gdn) * T * batch * (size - 1) // size


def of_all_scan(config, batch, zigzag):
    """Return the bytes that a middle rank sends for these layers in the forward pass: states and halos of
    convolutions."""
    H, P, N, G = (getattr(config, f"mamba_{name}") for name in ("num_heads", "head_dim", "state_dim", "num_groups"))
    K, V = config.linear_key_head_dim, config.linear_value_head_dim
    HK, HV = config.linear_num_key_heads, config.linear_num_value_heads
    states = H * P * N + HV * K * V
    tokens = 3 * (H * P + 2 * G * N + 2 * HK * K + HV * V)
    return 4 * batch * (1 + zigzag) * (states + tokens)


def test_like_megatrons_own(run, size=2):
    with stand_ins():
        config = configuration()
    for errors, theirs, left, ours in run(size, own_case):
        assert len(errors) > 18 and max(errors.values()) < 2e-5, errors
        assert left == 0
        assert theirs == 2 * of_all_to_all(config, 16, 2, size)  # forward and backward
        assert ours == of_all_scan(config, 2, True)  # each of two ranks sends half of a middle rank's bytes


def bytes_case(group, layout):
    with stand_ins(), allscan.Communicator(group) as comm:
        made = model(sequence_parallel(specification(), layout=layout, comm=comm), group, **FEW)
        with torch.no_grad():
            made(None, None, None, decoder_input=torch.randn(8, 1, WIDTH))
        forward = own_bytes(comm)
        made(None, None, None, decoder_input=torch.randn(8, 1, WIDTH)).sum().backward()
        return forward, own_bytes(comm) - 2 * forward


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_rank_sends_states(run, layout, size=4):
    """A rank sends one state in the contiguous layout, two in zigzag, forward and again in backward; and three tokens a
    convolution."""
    with stand_ins():
        config = configuration(**FEW)
    a_state = of_all_scan(config, 1, False)
    for rank, (forward, backward) in enumerate(run(size, bytes_case, layout)):
        ascending, descending = a_state * (rank < size - 1), a_state * (rank > 0)
        expected = (ascending, descending) if layout == "contiguous" else (ascending + descending,) * 2
        assert (forward, backward) == expected


def bfloat16_case(group, layout):
    """Return error ratios of the ranks' bfloat16 logits to one rank's, both against float32; each layer gets its own
    input."""
    with stand_ins(), allscan.Communicator(group) as comm:
        spec, half = specification(), dict(bf16=True, params_dtype=torch.bfloat16)
        own = model(sequence_parallel(spec, layout=layout, comm=comm), group, **half)
        exact, whole = model(spec), model(spec, **half)
        exact.load_state_dict(whole.state_dict())
        torch.manual_seed(1)
        x = torch.randn(16 * comm.size, 2, WIDTH).bfloat16()
        mine = placed(comm, [16] * comm.size, [0, 16 * comm.size], layout)
        answers = []
        for made, given in ((exact, x.float()), (whole, x), (own, x[mine])):
            with torch.no_grad():
                answers.append([mixer(given, *[None] * i)[0] for i, mixer in enumerate(mixers(made))])
        return [relative(c, a[mine]) / relative(b[mine], a[mine]) for a, b, c in zip(*answers, strict=True)]


@pytest.mark.slow(but="contiguous")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bfloat16(run, layout, size=2):
    check_errors(run(size, bfloat16_case, layout), 1.3)


def not_packed_case(group):
    """packed_seq_params with a format that is not packed and without boundaries have no effect; with their own group
    they are rejected."""
    from megatron.core.packed_seq_params import PackedSeqParams

    with stand_ins(), allscan.Communicator(group) as comm:
        made, equal, rejected = model(sequence_parallel(specification(), comm=comm), group), [], []
        for mixer, mask in zip(mixers(made), ({}, dict(attention_mask=None)), strict=True):
            x = torch.randn(8, 2, WIDTH)
            expected, _ = mixer(x, **mask)
            for kind in ("bshd", "sbhd", None):
                found, _ = mixer(x, **mask, packed_seq_params=PackedSeqParams(qkv_format=kind))
                equal.append(torch.equal(found, expected))
            own = PackedSeqParams(qkv_format="bshd", local_cp_size=1)
            rejected.append(raised(mixer, x, **mask, packed_seq_params=own))
        return equal, rejected


def test_packed_seq_params_that_are_none(run, size=2):
    for equal, rejected in run(size, not_packed_case):
        assert all(equal) and all("parallel group of their own" in text for _, text in rejected), (equal, rejected)


def rejections_case(group):
    """Return ({(expected text, mixer or option): error}, whether a valid call is right afterwards)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    with stand_ins(), allscan.Communicator(group) as comm:
        spec = sequence_parallel(specification(), comm=comm)
        made = model(spec, group)
        x, cu_seqlens = torch.randn(8, 1, WIDTH), torch.tensor([0, 16], dtype=torch.int32)
        good = dict(qkv_format="thd", cu_seqlens_q=cu_seqlens)
        bad = {
            "inference": (x, dict(inference_context=object())),
            "'thd'": (x, dict(packed_seq_params=PackedSeqParams(**good | dict(qkv_format="sbhd")))),
            "a context parallel group of their own": (
                x,
                dict(packed_seq_params=PackedSeqParams(**good, local_cp_size=1)),
            ),
            "batch size 1": (x.expand(8, 2, WIDTH), dict(packed_seq_params=PackedSeqParams(**good))),
            "multiples of 4": (x, dict(packed_seq_params=packing([0, 6, 16]))),
            "16 tokens of all ranks": (x, dict(packed_seq_params=packing([0, 20]))),
            "differs between ranks": (x, dict(packed_seq_params=packing([0, 12 if comm.rank else 4, 16]))),
            "even": (x[:7], {}),
        }
        answers = {}
        for mixer, mask in zip(mixers(made), ({}, dict(attention_mask=None)), strict=True):
            for text, (given, options) in bad.items():
                answers[text, type(mixer).__name__] = raised(mixer, given, **mask, **options)
        kind = type(mixers(made)[1])
        for text, name, value in (
            ("hybrid", "hybrid_context_parallel", True),
            ("CUDA graphs", "cuda_graph_impl", "local"),
        ):
            config = configuration(context_parallel_size=comm.size)
            setattr(config, name, value)
            answers[text, name] = raised(kind, config, None, pg_collection=mock.Mock(cp=group), comm=comm)
        return answers, made(None, None, None, decoder_input=x).isfinite().all()


def test_what_is_rejected(run, size=2):
    for answers, good in run(size, rejections_case):
        assert good
        check_answers(answers)


def test_specs():
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec, get_module

    from allscan.integrations.megatron import AllScanGatedDeltaNet, AllScanMambaMixer

    spec = specification(gdn=dict(conv_bias=True))
    before = copy.deepcopy(spec)
    changed = sequence_parallel(spec, layout="contiguous").submodules
    for name in ("mamba_layer", "gdn_layer"):  # a copied spec compares unequal in the other layers: partial functions
        assert getattr(spec.submodules, name) == getattr(before.submodules, name)
    assert changed.mamba_layer.submodules.mixer.module is AllScanMambaMixer
    gdn = changed.gdn_layer.submodules.self_attention
    assert gdn.module is AllScanGatedDeltaNet
    assert gdn.params == dict(conv_bias=True, layout="contiguous", per_document=True, comm=None)
    assert gdn.submodules == spec.submodules.gdn_layer.submodules.self_attention.submodules
    theirs = sequence_parallel(hybrid_stack_spec).submodules
    assert theirs.gdn_layer.submodules.self_attention.module is AllScanGatedDeltaNet
    assert theirs.mlp_layer == hybrid_stack_spec.submodules.mlp_layer
    by_name = ModuleSpec(("megatron.core.ssm.gated_delta_net", "GatedDeltaNet"))
    assert [get_module(s) for s in sequence_parallel([by_name, GatedDeltaNet])] == [AllScanGatedDeltaNet] * 2
    with pytest.raises(ValueError, match="no GatedDeltaNet or MambaMixer"):
        sequence_parallel(ModuleSpec(IdentityOp))
    with pytest.raises(ValueError, match="layout"):
        sequence_parallel(spec, layout="ring")


def one_case(group):
    """With one rank of context parallelism bits are equal; without a communicator the group's own is created."""
    from allscan.integrations import megatron

    with stand_ins():
        spec, x = specification(), torch.randn(16, 2, WIDTH)
        alone, whole = model(megatron.sequence_parallel(spec)), model(spec)
        assert [mixer.comm for mixer in mixers(alone)] == [None, None]
        equal = torch.equal(*(made(None, None, None, decoder_input=x) for made in (alone, whole)))
        made = model(megatron.sequence_parallel(spec), group)
        for own, other in zip(mixers(made), mixers(whole), strict=True):
            kept, others = (m.sharded_state_dict("m.", (), dict(dp_cp_group=group)) for m in (own, other))
            assert len(kept) > 5 and [x.key for x in kept.values()] == [x.key for x in others.values()]
        (comm,) = {mixer.comm for mixer in mixers(made)}
        size = comm.size
        comm.close()
        return equal, size


def test_one_rank_and_communicators(run, size=2):
    assert run(size, one_case) == [(True, size)] * size
