"""flash-linear-attention's GLA models, cut over the ranks, against the same model on one."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist

import allscan
from support.fla import import_fla, recurrence
from support.values import place, relative

os.environ["FLA_CACHE_RESULTS"] = "0"  # import_fla makes up what would be kept for other programs
pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
TOKENS = {2: [30, 31], 3: [17, 23, 21], 4: [14, 19, 12, 16]}  # of each rank
CUTS = [0, 1, 14, 14, 30, 34, 61]  # some at the ranks' cuts
CHOICES = {
    "plain": {},
    "convolution": dict(use_short_conv=True),
    "grouped": dict(use_short_conv=True, num_kv_heads=1, feature_map="relu", clamp_min=-0.05, use_output_gate=False),
}


def answers_of(model, tokens, **options):
    """(logits, loss, every parameter's gradient)."""
    model.zero_grad()
    output = model(input_ids=tokens, labels=tokens, use_cache=False, **options)
    logits, loss = output.logits.detach().clone(), output.loss.detach()  # backward may write over them
    output.loss.backward()
    return logits, loss, *(p.grad.clone() for p in model.parameters())


def model_case(group, tokens, choices, packed):
    """Errors of logits, loss and each gradient: against the recurrence, and on GPUs against fla's chunk_gla."""
    fla = import_fla()
    from allscan.integrations.fla import sequence_parallel

    on_gpu = torch.cuda.is_available()
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        config = fla.models.gla.GLAConfig(
            hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=97, fuse_cross_entropy=on_gpu, **choices
        )
        model = fla.models.gla.GLAForCausalLM(config).to(comm.device).train()
        whole = torch.randint(97, (1 if packed else 2, sum(tokens))).to(comm.device)
        lengths = torch.tensor(CUTS, dtype=torch.int32).to(comm.device) if packed else None
        chunk_gla, expected = fla.layers.gla.chunk_gla, []
        for call in (recurrence, chunk_gla)[: 1 + on_gpu]:
            fla.layers.gla.chunk_gla = call
            # 64 tokens or fewer would take the path for decoding
            fla.layers.gla.fused_recurrent_gla = lambda gk, call=call, **x: call(g=gk, **x)
            expected.append(answers_of(model, whole, cu_seqlens=lengths))
        fla.layers.gla.chunk_gla = chunk_gla

        mine = place(comm, tokens)
        assert sequence_parallel(model, comm=comm) is model
        model = copy.deepcopy(model)  # as for averaged weights
        logits, *sums = answers_of(model, whole[:, mine], cu_seqlens=lengths)
        for x in sums:
            dist.all_reduce(x, group=comm.group)
        with pytest.raises(ValueError, match="pack the sequences"):
            model(input_ids=whole[:, mine], attention_mask=torch.zeros_like(whole[:, mine]))
        return [
            [relative(logits, e[0][:, mine]), *(relative(*pair) for pair in zip(sums, e[1:], strict=True))]
            for e in expected
        ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_models(run, size, packed, choice):
    for of_recurrence, *of_fla in run(size, model_case, TOKENS[size], CHOICES[choice], packed):
        assert max(of_recurrence) < 1e-5
        assert all(max(errors) < 5e-3 for errors in of_fla)  # its products are in tf32


def prefill_case(group, tokens):
    """The ordinary model goes on from the last rank's cache. Relative error of the logits."""
    fla = import_fla()
    from allscan.integrations.fla import sequence_parallel

    fla.layers.gla.chunk_gla = recurrence
    fla.layers.gla.fused_recurrent_gla = lambda gk, **x: recurrence(g=gk, **x)
    with allscan.Communicator(group) as comm, torch.no_grad():
        torch.manual_seed(0)
        config = fla.models.gla.GLAConfig(
            hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=97, use_short_conv=True
        )
        model = fla.models.gla.GLAForCausalLM(config).to(comm.device).eval()
        whole = torch.randint(97, (2, sum(tokens))).to(comm.device)
        expected = model(input_ids=whole, use_cache=True)
        sequence_parallel(model, comm=comm)
        actual = model(input_ids=whole[:, place(comm, tokens)], use_cache=True)
        sequence_parallel(model, comm=None)
        assert actual.past_key_values.get_seq_length() == sum(tokens)
        if comm.rank == comm.size - 1:
            errors = []
            for a, b in zip(actual.past_key_values, expected.past_key_values, strict=True):
                errors.append(relative(a["recurrent_state"], b["recurrent_state"]))
                errors += [relative(*pair) for pair in zip(a["conv_state"], b["conv_state"], strict=True)]
            return max(errors)


@pytest.mark.parametrize("size", [3])
def test_the_last_ranks_cache(run, size):
    assert run(size, prefill_case, TOKENS[size])[-1] < 1e-5


class Other(torch.nn.Module):
    """A criterion that does not say how it reduces."""

    ignore_index = 0

    def forward(self, logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=0)


def options_case(group):
    """Prefills of other lengths, also on one rank alone, also of a cache that was used; criteria; what is refused."""
    fla = import_fla()
    from allscan.integrations.fla import sequence_parallel

    fla.layers.gla.chunk_gla = recurrence
    fla.layers.gla.fused_recurrent_gla = lambda gk, **x: recurrence(g=gk, **x)
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        config = fla.models.gla.GLAConfig(
            hidden_size=64, num_hidden_layers=1, num_heads=2, vocab_size=97, fuse_cross_entropy=False
        )
        model = fla.models.gla.GLAForCausalLM(config).to(comm.device)
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
            for x, e in zip(actual[1:], expected[1:], strict=True):
                dist.all_reduce(x, group=comm.group)
                errors.append(relative(x, e))
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


def test_other_layers_are_refused():
    from fla.layers import DeltaNet, GatedLinearAttention

    from allscan.integrations.fla import sequence_parallel

    class Wrapped(DeltaNet):  # as FSDP2 does, in a module of its own
        pass

    class Doubled(GatedLinearAttention):
        def forward(self, *x, **options):
            return 2 * super().forward(*x, **options)[0]

    layers = [kind(hidden_size=64, num_heads=2) for kind in (DeltaNet, Wrapped, Doubled, GatedLinearAttention)]
    sequence_parallel(layers[-1], comm=None)
    for module in (torch.nn.Linear(2, 2), *layers[:3], torch.nn.Sequential(layers[3], layers[1])):
        with pytest.raises(ValueError, match="GatedLinearAttention only"):
            sequence_parallel(module, comm=None)
