"""linear_cross_entropy and mlp_in_slices, by themselves and in split models, against torch on whole tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from allscan.integrations import slices
from allscan.integrations.slices import linear_cross_entropy, mlp_in_slices
from support.models import VOCABULARY, gradients, made, sequence_parallel
from support.values import added_up, check_errors, pairs, place, raised, relative

pytestmark = pytest.mark.cpu
T, D, V = 21, 16, 53


def drawn(dtype=torch.float32, tokens=T, ignored=3):
    """Return (x, weight, bias, labels), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((tokens, D), (V, D), (V,)))
    labels = torch.randint(V, (tokens,), generator=generator)
    labels[:ignored] = -100
    return *(y.to(dtype).requires_grad_() for y in (x, weight, bias)), labels


def reference(x, weight, bias, labels, z_loss=0.0, scale=1.0, num_items=None, **options):
    """Return (loss, gradients) in float64."""
    leaves = [y.detach().double().requires_grad_() for y in (x, weight, bias)]
    logits = scale * F.linear(*leaves)
    counted = labels != options.get("ignore_index", -100)
    loss = F.cross_entropy(logits, labels, reduction="sum", **options)
    loss = loss + z_loss * (logits.logsumexp(-1)[counted] ** 2).sum()
    loss = loss / (counted.sum() if num_items is None else num_items)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def errors_of(loss, leaves, expected):
    """Return relative errors of the loss, and of the gradients of 0.3 * loss that the leaves require."""
    wanted = [(y, 0.3 * gradient) for y, gradient in zip(leaves, expected[1]) if y is not None and y.requires_grad]
    found = torch.autograd.grad(loss, [y for y, _ in wanted], torch.tensor(0.3))
    assert all(a.dtype == y.dtype and a.shape == y.shape for a, (y, _) in zip(found, wanted))
    return [relative(loss, expected[0]), *(relative(a, b) for a, (_, b) in zip(found, wanted))]


OPTIONS = pairs(
    [1, 4, T, None],  # tokens of a slice
    [{}, dict(label_smoothing=0.1), dict(z_loss=1e-2), dict(label_smoothing=0.2, z_loss=1e-3)],
    [{}, dict(scale=0.3), dict(num_items=7), dict(num_items=torch.tensor([9]))],
    [[], [0], [1], [0, 2], [1, 2]],  # frozen of x, weight and bias
    [-100, 5],
)


def options_case(group, words):
    """words: elements of a row in a step of the kernel."""
    slices.WORDS, found = words, []
    for size, some, more, frozen, ignored in OPTIONS:
        x, weight, bias, labels = drawn()
        labels = torch.where(labels == -100, ignored, labels)
        leaves, how = (x, weight, bias), some | more | dict(ignore_index=ignored)
        for i in frozen:
            leaves[i].requires_grad_(False)
        shaped = x.view(3, 7, D) if size == 4 else x.view(1, T, D)
        loss = linear_cross_entropy(shaped, weight, labels.view(shaped.shape[:2]), bias=bias, slice_tokens=size, **how)
        assert loss.dtype == torch.float32 and loss.shape == ()
        found.append(max(errors_of(loss, leaves, reference(*leaves, labels, **how))))
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(x, weight, labels, bias=bias, slice_tokens=size, **how), loss)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("words", [16, slices.WORDS])
def test_values_and_gradients_with_all_options(run, words, size=1):
    (found,) = run(size, options_case, words)
    assert max(found) < 2e-6, found


def dtypes_case(group):
    """Return the errors over those of torch's whole loss in the same dtype, and what autocast returns."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        *leaves, labels = drawn(dtype)
        expected = reference(*leaves, labels)
        own = errors_of(linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2]), leaves, expected)
        theirs = errors_of(F.cross_entropy(F.linear(*leaves).float(), labels), leaves, expected)
        found.append([a / b for a, b in zip(own, theirs)])
        few = errors_of(
            linear_cross_entropy(leaves[0], leaves[1], labels, slice_tokens=2, bias=leaves[2]), leaves, expected
        )
        found.append([a / b for a, b in zip(few, theirs)])
    *leaves, labels = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        own = linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2], slice_tokens=4)
        theirs = F.cross_entropy(F.linear(*leaves).float(), labels)
    expected = reference(*leaves, labels)
    found.append([a / b for a, b in zip(errors_of(own, leaves, expected), errors_of(theirs, leaves, expected))])
    return found


def test_half_precision_is_as_exact_as_the_whole_loss(run, size=1):
    (found,) = run(size, dtypes_case)
    assert max(max(ratios) for ratios in found) < 1.1, found


def around_case(group):
    """Return errors inside of a checkpoint, with a tied embedding, with saved tensors elsewhere, and what is raised."""
    x, weight, bias, labels = drawn()
    leaves, expected, found = [x, weight, bias], None, {}
    expected = reference(*leaves, labels)

    def loss_of(x, weight, bias):
        return linear_cross_entropy(x, weight, labels, bias=bias, slice_tokens=4)

    found["checkpoint"] = max(errors_of(checkpoint(loss_of, *leaves, use_reentrant=False), leaves, expected))
    with torch.autograd.graph.save_on_cpu():
        found["save_on_cpu"] = max(errors_of(loss_of(*leaves), leaves, expected))
    tokens = torch.randint(V, (T,))
    own, theirs = (F.embedding(tokens, weight) for _ in range(2))
    (own,) = torch.autograd.grad(linear_cross_entropy(own, weight, labels), weight)
    (theirs,) = torch.autograd.grad(F.cross_entropy(F.linear(theirs, weight), labels), weight)
    found["tied"] = relative(own, theirs)
    loss = loss_of(*leaves)
    derivative = raised(torch.autograd.grad, loss, x, create_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    second = derivative, raised(torch.autograd.grad, loss, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y):  # torch then compares no versions
        loss = loss_of(*leaves)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    second = *second, all(y.isnan().all() for y in torch.autograd.grad(loss, leaves))
    x.requires_grad_(False)
    nothing = linear_cross_entropy(x, weight.detach(), labels)
    empty = linear_cross_entropy(x[:0], weight, labels[:0], num_items=3)
    empty.backward()
    unlabelled = linear_cross_entropy(x, weight, torch.full_like(labels, -100))
    slices.WORDS = 16  # all words of the first blocks are masked
    words = torch.full((V, D), -torch.inf)
    words[-1] = 1
    masked = linear_cross_entropy(torch.ones(1, D), words, torch.tensor([V - 1]))
    return found, second, nothing.requires_grad, (empty.item(), weight.grad.any()), unlabelled.item(), masked.item()


def test_checkpoints_tied_weights_and_second_passes(run, size=1):
    ((found, (derivative, again, hooked), grad, empty, unlabelled, masked),) = run(size, around_case)
    assert max(found.values()) < 2e-6 and hooked, found
    assert "no second derivative" in derivative[1] and "inplace operation" in again[1], (derivative, again)
    assert not grad and empty == (0, False) and unlabelled != unlabelled and masked == 0


def unknown_case(group):
    """Return loss and gradients of tokens whose labels are not in [0, V), which are not looked for on a GPU."""
    logits, labels = torch.randn(4, V), torch.tensor([V, -1, -100, 0])
    losses, options = torch.empty(4), slices._Options(torch.float32, -100, 0.1, 1e-3, 1.0)
    slices._losses(logits, labels, losses, torch.ones(()), options, True)
    return losses.isnan().tolist(), logits.isnan().all(1).tolist(), logits[2:].isnan().any().item()


def test_labels_that_are_no_words_make_loss_and_gradient_nan(run, size=1):
    assert run(size, unknown_case) == [([True, True, False, False], [True, True, False, False], False)]


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that torch creates."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(x))])
        return found


def largest_case(group, tokens, slice_tokens):
    x, weight, _, labels = drawn(tokens=tokens)
    with Largest() as seen:
        linear_cross_entropy(x, weight, labels, slice_tokens=slice_tokens).backward()
    return seen.most


def test_no_tensor_has_the_logits_of_all_tokens(run, size=1):
    assert run(size, largest_case, 400, 8) == [400 * D]  # x's gradient: V D and 8 V are less
    assert run(size, largest_case, 40, 8) == [V * D]


def ranks_case(comm, wrong=None):
    """Return errors on ranks with different tokens, one without labels and one without tokens; or what is raised."""
    x, weight, bias, labels = drawn(tokens=12, ignored=5)
    mine = {1: [12], 2: [5, 7], 3: [0, 5, 7]}[comm.size]
    mine = place(comm, mine)
    leaf = x.detach()[mine].requires_grad_()
    if wrong is not None:
        given = dict(bias=bias, comm=comm)
        given |= wrong if comm.rank == 1 else {}
        here = labels[mine] + (V if "labels" in given else 0)
        given.pop("labels", None)
        return raised(linear_cross_entropy, leaf, weight, here, **given)
    loss = linear_cross_entropy(leaf, weight, labels[mine], bias=bias, comm=comm, slice_tokens=2)
    loss.backward()
    sums = [added_up(y, comm.group) for y in (loss, weight.grad, bias.grad)]
    expected, (dx, dw, db) = reference(x, weight, bias, labels)
    found = [relative(a, b) for a, b in zip(sums, (expected, dw, db))]
    return [*found, (leaf.grad - dx[mine]).norm().item()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_labels_of_all_ranks_are_counted(run, size):
    check_errors(run(size, ranks_case), 2e-6)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(label_smoothing=2.0), "label_smoothing must be in"),
        (dict(slice_tokens=0), "slice_tokens must be"),
        (dict(bias=torch.zeros(V, dtype=torch.float64)), "must be float32"),
        (dict(labels=1), "a label must be in"),
        (dict(z_loss=0.1), "different arguments: z_loss"),
        (dict(num_items=3), "different arguments: num_items"),
    ],
)
def test_what_one_rank_gets_wrong_every_rank_raises(run, wrong, message, size=2):
    for kind, text in run(size, ranks_case, wrong):
        assert kind in ("ValueError", "TypeError") and message in text, text


def wrong_case(group):
    x, weight, bias, labels = drawn()
    calls = [(None, weight, labels), (x, weight[:, 1:], labels), (x, weight, labels[1:]), (x, weight, labels.int())]
    calls += [(x.double(), weight.double(), labels), (x.bfloat16(), weight, labels), (x, None, labels)]
    several = raised(linear_cross_entropy, x, weight, labels, num_items=torch.ones(3))
    assert several is not None and "shape '[]' is invalid" in several[1], several
    return [raised(linear_cross_entropy, *call) for call in calls]


def test_wrong_arguments(run, size=1):
    words = ["a tensor", "weight [V, D]", "one for each token", "int64", "must be float32", "alike", "a tensor"]
    for (kind, text), word in zip(run(size, wrong_case)[0], words, strict=True):
        assert kind in ("ValueError", "TypeError") and word in text, text


class Tail(nn.Module):
    """An MLP and a head, whose loss is computed inside of forward, or by the caller from the hidden states."""

    def __init__(self, comm, inside):
        super().__init__()
        self.comm, self.inside = comm, inside
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))
        self.head = nn.Linear(D, V)

    def forward(self, x, labels):
        x = x + self.mlp(x)
        return self.loss(x, labels) if self.inside else x

    def loss(self, x, labels):
        head = self.head
        return linear_cross_entropy(x, head.weight, labels, bias=head.bias, comm=self.comm, slice_tokens=3)


def fsdp_case(comm, inside):
    """Return relative errors of the loss and of all gradients under FSDP2."""
    torch.manual_seed(0)
    model = Tail(comm, inside)
    x, _, _, labels = drawn(tokens=12)
    whole = copy.deepcopy(model)
    expected = F.cross_entropy(whole.head(x + whole.mlp(x)), labels)
    expected.backward()
    mesh = DeviceMesh.from_group(comm.group, "cpu")
    mlp_in_slices(model.mlp, 4)
    fully_shard(model.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = place(comm, [12 // comm.size] * comm.size)
    found = model(x[mine], labels[mine])
    loss = found if inside else model.loss(found, labels[mine])
    (loss * comm.size).backward()  # FSDP2 averages
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return [
        relative(added_up(loss, comm.group), expected),
        *(relative(a.grad.full_tensor(), b.grad) for a, b in pairs),
    ]


@pytest.mark.parametrize("inside", [True, False])
def test_a_head_that_fsdp2_shards(run, inside, size=2):
    check_errors(run(size, fsdp_case, inside), 2e-6)


# MLPs


class Statistics(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.mean()


def mlp_case(group):
    """Return errors of the result and all gradients, the largest tensors, and what is raised."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 4 * D), nn.SiLU(), nn.Linear(4 * D, D - 1))
    whole, errors, most = copy.deepcopy(module), [], []
    assert mlp_in_slices(module, 5) is module
    for shape in ((2, 20), (13,), (1, 0), (1, 3)):
        results = []
        for m in (module, whole):
            torch.manual_seed(1)
            m.zero_grad()
            x = torch.randn(*shape, D, requires_grad=True)
            with Largest() as seen:
                y = m(x)
                y.square().sum().backward()
            most.append(seen.most)
            results.append([y, x.grad, *(p.grad for p in m.parameters())])
        errors += [relative(a, b) for a, b in zip(*results)]
        with torch.no_grad():
            errors.append(relative(module(x), whole(x)))
    same = mlp_in_slices(module, None)(x)
    assert torch.equal(same, whole(x))
    statistics = raised(mlp_in_slices(Statistics(D, D), 4), x)
    module.forward = module.forward
    return errors, most[:2], [statistics, raised(mlp_in_slices, module, 4), raised(mlp_in_slices, whole, 0)]


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.out, self.tokens = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), 0

    def forward(self, x):
        self.tokens += x.shape[:-1].numel()
        return self.out(F.dropout(F.silu(self.wide(x)), 0.5))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.mlp = nn.Linear(D, D), Counted()

    def forward(self, x):
        x = x + self.mixer(x)
        return x + self.mlp(x)


@pytest.mark.parametrize("of_layers", [False, True])
def test_mlps_of_checkpointed_layers_run_twice(of_layers):
    """With dropout, and two backward passes through the same graph; a layer whose input needs no gradient."""
    torch.manual_seed(0)
    model, sums = nn.ModuleList(Block() for _ in range(2)), []
    x, weights = torch.randn(2, 10, D), torch.randn(2, 10, D)
    for sliced in (False, True):
        for block in model:
            mlp_in_slices(block.mlp, 20 if not sliced else 7)
            block.mlp.tokens = 0
        torch.manual_seed(1)
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False) if of_layers else block(y)
        for _ in range(2):
            model.zero_grad()
            (y * weights).sum().backward(retain_graph=True)
        sums.append([p.grad for p in model.parameters()])
        assert [block.mlp.tokens for block in model] == [60, 60]  # forward, and once in each backward pass
    assert max(relative(a, b) for a, b in zip(*sums)) < 2e-6


class Gated(nn.Linear):
    def forward(self, x, other):
        return super().forward(x) * x.shape[-2] + x @ other.to(x.dtype)


@pytest.mark.parametrize("kind", ["transposed", "other dtype"])
def test_slices_of_calls_with_another_tensor(kind):
    """The other tensor has the shape and the address of a slice; what is changed in place before backward raises."""
    torch.manual_seed(0)
    whole, x = Gated(D, D), torch.randn(1, D, D)
    module, other = mlp_in_slices(copy.deepcopy(whole), D), x.mT if kind == "transposed" else x.view(torch.int32)
    for m in (module, whole):
        m(x, other).square().sum().backward()
    assert relative(module.weight.grad, whole.weight.grad) < 2e-6
    changed = torch.ones(D, D)
    y = module(x.clone().requires_grad_(), changed)
    changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.quick
def test_mlp_in_slices(run, size=1):
    ((errors, most, problems),) = run(size, mlp_case)
    assert max(errors) < 2e-6, errors
    assert most == [4 * D * D, 40 * 4 * D], most  # the weights; the hidden layer of all tokens
    for (kind, text), word in zip(problems, ("a router's statistics", "was replaced", "positive int"), strict=True):
        assert kind == "ValueError" and word in text


# Split models of transformers


def model_case(comm, family, layout, packed, tokens):
    """Return relative errors of loss and gradients of a split model against the unsplit one's whole loss."""
    from allscan.integrations.transformers import require_logits

    zigzag, total = layout != "contiguous", sum(tokens)
    model = made(family)
    whole = torch.randint(1, VOCABULARY, (1 if packed else 2, total))
    labels = whole.clone()
    labels[:, : total // 2] = -100
    cuts, how = [0, 4 * comm.size, total], {}
    if packed:
        labels[:, cuts[:-1]], how = -100, dict(cu_seq_lens_q=torch.tensor(cuts))
    where = dict(layout="zigzag" if zigzag else layout, per_document=layout == "documents")
    mine = place(comm, tokens, zigzag, cuts if layout == "documents" else None)
    results, shapes = [], []
    for more in ({}, dict(loss_in_slices=dict(slice_tokens=4), mlp_in_slices=3)):
        sequence_parallel(model, comm=comm, **where, **more)
        model.zero_grad()
        output = model(input_ids=whole[:, mine], labels=labels[:, mine], **how)
        output.loss.backward()
        shapes.append((output.logits is None, raised(require_logits, output) is not None))
        results.append([added_up(x, comm.group) for x in (output.loss, *gradients(model).values())])
    with torch.no_grad():
        short = model(input_ids=whole[:, mine], labels=labels[:, mine], return_dict=False, use_cache=False, **how)
        logits = model(input_ids=whole[:, mine], use_cache=False, **how).logits
    assert logits.shape[:2] == whole[:, mine].shape and torch.is_tensor(short[0]) and not short[0].ndim
    kept = raised(model, input_ids=whole[:, mine], labels=labels[:, mine], logits_to_keep=1, **how)
    comm.resync()
    sequence_parallel(model, comm=None)
    assert not any("forward" in vars(module) for module in model.modules())
    model.zero_grad()
    if not packed:
        logits = model(input_ids=whole, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        results[0] = [loss.detach(), *gradients(model).values()]
    found = [relative(b, a) if a.any() else b.norm().item() for a, b in zip(*results, strict=True)]
    return found, shapes, kept


@pytest.mark.parametrize(
    "family, layout, packed, tokens",
    [
        ("qwen3_next", "contiguous", False, [9, 8]),
        ("kimi_linear", "zigzag", False, [10, 10]),
        ("nemotron_h", "contiguous", False, [0, 12]),
        ("mamba2", "documents", True, [12, 12]),
        ("granitemoehybrid", "contiguous", False, [14]),
        ("falcon_h1", "contiguous", True, [10, 14]),
        ("zamba2", "contiguous", False, [8]),
    ],
)
def test_split_models(run, family, layout, packed, tokens):
    pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
    for errors, shapes, kept in run(len(tokens), model_case, family, layout, packed, tokens):
        assert max(errors) < 2e-5, errors
        assert shapes == [(False, False), (True, True)]
        assert "logits_to_keep" in kept[1], kept


def sharded_case(comm, alone, compiled):
    """Return relative errors of loss and gradients with FSDP2 over model and, if ``alone``, head; or compiled."""
    model = sequence_parallel(made("nemotron_h"), comm=comm)
    tokens = torch.randint(1, VOCABULARY, (1, 12))[:, place(comm, [7, 5])]
    expected = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    grads = [*added_up(gradients(model), comm.group).values()]
    model.zero_grad()
    sequence_parallel(model, comm=comm, loss_in_slices=dict(slice_tokens=2), mlp_in_slices=2)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if compiled:
        loss = torch.compile(model, backend="aot_eager")(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found = [*added_up(gradients(model), comm.group).values()]
    else:
        mesh = DeviceMesh.from_group(comm.group, "cpu")
        for module in [*model.model.layers, *[model.lm_head] * alone, model]:
            fully_shard(module, mesh=mesh)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        (loss * comm.size).backward()
        found = [x.full_tensor() for x in gradients(model).values()]
    pairs = zip(found, grads, strict=True)
    return [relative(loss, expected), *(relative(a, b) if b.any() else a.norm().item() for a, b in pairs)]


@pytest.mark.parametrize("alone, compiled", [(False, False), (True, False), (False, True)])
def test_split_models_with_fsdp2_and_compiled(run, alone, compiled, size=2):
    pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
    check_errors(run(size, sharded_case, alone, compiled), 2e-5)


def rejected_case(comm):
    jittered, replaced = made("minimax", router_jitter_noise=0.1), made("mamba2")
    replaced.lm_head.forward = replaced.lm_head.forward.__call__
    calls = [(jittered, dict(mlp_in_slices=4)), (replaced, dict(loss_in_slices=True))]
    calls += [(made("mamba2"), dict(loss_in_slices=more)) for more in (dict(scale=2.0), 4096)]
    calls += [(made("mamba2"), dict(mlp_in_slices=more)) for more in (0, True)]
    return [raised(sequence_parallel, model, comm=comm, **options) for model, options in calls]


def test_what_split_models_reject(run, size=1):
    pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
    words = ["router_jitter_noise must be 0", "an nn.Linear", *["loss_in_slices takes"] * 2, *["positive int"] * 2]
    for (kind, text), word in zip(run(size, rejected_case)[0], words, strict=True):
        assert kind == "ValueError" and word in text, text


class Wrapped(nn.Module):
    """A head with an addition that the loss in slices does not see, as of LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more, self.weight = base, nn.Linear(base.in_features, base.out_features), base.weight

    def forward(self, x):
        return self.base(x) + self.more(x)


def changed_case(comm):
    """Return what calls raise whose head was replaced or wrapped, and whether a call that raises leaves anything."""
    tokens, found = torch.ones(1, 8, dtype=torch.int64), []
    for change in (lambda head: nn.Linear(head.in_features, head.out_features), Wrapped):
        model = sequence_parallel(made("mamba2"), comm=comm, loss_in_slices=True)
        head, before = model.lm_head, {*vars(model)}
        model.lm_head = change(head)
        found.append(raised(model, input_ids=tokens, labels=tokens, use_cache=False))
        model.lm_head = head
        assert {*vars(model)} == before and head(torch.zeros(1, 3, head.in_features)).ndim == 3
    return found


def test_a_head_that_was_changed_raises(run, size=1):
    pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
    for kind, text in run(size, changed_case)[0]:
        assert kind == "ValueError" and "the head was replaced or wrapped" in text, text
