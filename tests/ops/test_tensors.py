"""Properties of tensors beyond shape, dtype and device, and torch's settings, for all operators and layouts: negative
views, tensors from saved_tensors_hooks, forward-mode derivatives, autocast, results that are views."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

import allscan
from support.tensors import as_tuple, calls, drawn, with_gradients, worst
from support.values import check_errors, raised

ONE = pytest.param(1, marks=pytest.mark.cpu)  # rank: on GPUs two ranks cover it, with the same kernels and more
OTHER_PATHS = "zigzag", "packed", "kept", "raw"  # of operators: two ranks have them
EXACT = 1e-6  # equal values, computed by kernels for other alignments


def calls_on(comm):
    """Return the calls that a test makes on this number of ranks: on one rank each operator's shortest."""
    if comm.size > 1:
        return calls()
    return {name: one for name, one in calls().items() if not name.endswith(OTHER_PATHS) or "zeco" not in name}


def negated(x):
    return x if x.dtype == torch.bool else torch._neg_view(-x)


def turned(x):
    """Return equal values with other strides."""
    return x.mT.contiguous().mT if x.ndim > 1 else torch.stack([x, x], -1)[..., 0]


def moved(x):
    """Return equal values at an offset in new memory."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x


def negatives_case(comm):
    """Pass arguments and gradients with properties that a kernel does not read: negative bit, strides."""
    found = {}
    for name, (function, shapes) in calls_on(comm).items():
        tensors = drawn(comm, shapes)
        expected = with_gradients(comm, function, tensors)
        for change in (negated, turned):
            answer = with_gradients(comm, function, tensors, change, change)
            # with other strides torch's functions add in another order
            bound = 2e-4 if change is turned and "zeco_ssd" in name else EXACT
            found[f"{name}, {change.__name__}"] = worst(answer, expected) / bound
    return found


@pytest.mark.slow(but="1")
@pytest.mark.parametrize("size", [ONE, 2])
def test_negative_views_and_strides(run, size):
    check_errors(run(size, negatives_case), 1)


def rounded(x):
    return x.bfloat16() if x.dtype == torch.float32 else x


def quantized(x):
    """Round to 256 values between the least and the largest, as compressors of activations do."""
    if not x.is_floating_point() or not x.numel():
        return x
    scale = x.abs().amax().clamp_min(1e-20)
    return torch.round(x / scale * 127) * (scale / 127)


def hooks_case(comm):
    """A saved-tensor hook returns tensors with other strides, another negative bit, in other memory, or rounded; memory
    not written by forward holds NaN."""
    found = {}
    for name, (function, shapes) in calls_on(comm).items():
        tensors = drawn(comm, shapes)
        expected = with_gradients(comm, function, tensors)
        for pack, unpacks, bound in (
            (lambda x: x, (negated, turned, moved), EXACT),
            (lambda x: (x.dtype, rounded(x)), (lambda x: x[1].to(x[0]),), 0.3),
            (quantized, (lambda x: x,), 1.0),
        ):
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty() with NaN
            leaves, change = [x.clone().requires_grad_() for x in tensors], [None]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x, change=change: change[0](x)):
                results = as_tuple(function(comm, *leaves))
                grads = [1.5 + y.detach().sin() for y in results]
            for unpack in unpacks:
                change[0] = unpack
                more = unpack is not unpacks[-1]
                answer = [*results, *torch.autograd.grad(results, leaves, grads, retain_graph=more)]
                found[f"{name}, {pack.__name__}, {unpack.__name__}"] = worst(answer, expected) / bound
            torch.use_deterministic_algorithms(before)
    return found


@pytest.mark.slow(but="1")
@pytest.mark.parametrize("size", [ONE, 2])
def test_saved_tensors_that_come_back_in_another_way(run, size):
    check_errors(run(size, hooks_case), 1)


OTHERS = dict(
    half=lambda x: x.half() if x.dtype == torch.float32 else x,
    double=lambda x: x.double(),
    integers=lambda x: x if x.is_floating_point() else x.double(),
    shorter=lambda x: x[..., :-1],
    flat=lambda x: x.flatten() if x.ndim > 1 else x[None],
    elsewhere=lambda x: x.to("meta"),
    lost=mock.Mock(side_effect=RuntimeError("the saved_tensors_hook has no memory")),
)


def rejected_saved_case(group, kinds, only, names):
    """A hook returns tensors of another dtype, shape or device on rank ``only``, or on all if it is None. Return the
    errors; later calls must be right."""
    found = {}
    with allscan.Communicator(group, timeout=60 if only is None else 2) as comm:
        for name, (function, shapes) in calls().items():
            if not name.startswith(names):
                continue
            tensors = drawn(comm, shapes)
            expected = with_gradients(comm, function, tensors)
            here = only in (None, comm.rank)
            for kind in kinds:
                if kind == "integers" and name.startswith("allscan"):  # it saves no integers
                    continue
                leaves = [x.clone().requires_grad_() for x in tensors]
                with torch.autograd.graph.saved_tensors_hooks(lambda x: x, OTHERS[kind] if here else lambda x: x):
                    results = as_tuple(function(comm, *leaves))
                found[name, kind] = raised(torch.autograd.grad, results, leaves, [torch.ones_like(y) for y in results])
                del results
                if only is not None:
                    comm.resync()
            assert worst(with_gradients(comm, function, tensors), expected) < EXACT, name
    return found


OPERATORS = "allscan", "zeco_gla", "zeco_kda", "zeco_gated"  # halo saves nothing, zeco_ssd through torch's functions


@pytest.mark.slow
@pytest.mark.cpu
def test_saved_tensors_that_are_others(run, size=2):
    for found in run(size, rejected_saved_case, [*OTHERS], None, OPERATORS):
        for kind in OTHERS:
            assert len([name for name, other in found if other == kind]) >= 10, kind
        for name, (error_name, why) in found.items():
            assert error_name == "RuntimeError" and "saved_tensors_hook" in why, (name, error_name, why)


@pytest.mark.cpu  # on CPUs the call itself ends with the time-out
def test_all_ranks_hear_of_saved_tensors_that_are_others(run):
    waits, rejects = run(
        2, rejected_saved_case, ["half"], 1, ("zeco_gla, contiguous", "zeco_kda, contig", "allscan, dec")
    )
    assert len(waits) == 4
    others = run(2, rejected_saved_case, ["lost"], 1, ("zeco_ssd, contig",))
    assert len(others[0]) == 1
    waits, rejects = waits | others[0], rejects | others[1]
    for name in waits:
        assert rejects[name][0] == "RuntimeError" and "saved_tensors_hook" in rejects[name][1], rejects[name]
        assert waits[name][0] == "AllScanTimeout" and "saved_tensors_hook" in waits[name][1], waits[name]


def compiled_hooks_case(comm):
    """The same with backward compiled by torch.compile. Return (largest error, errors for other tensors)."""
    worst_error, rejections = 0.0, {}
    for name, (function, shapes) in calls().items():
        if not name.startswith(("allscan", "halo", "zeco_gla", "zeco_kda")) or "zigzag" in name or "packed" in name:
            continue
        tensors = drawn(comm, shapes)
        expected = with_gradients(comm, function, tensors)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x, function=function: function(comm, *x), backend="aot_eager")
        for change in (turned, moved):  # inductor requires the strides, and effects take no negative views
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
                answer = with_gradients(comm, lambda _, *x, compiled=compiled: compiled(*x), tensors)
            worst_error = max(worst_error, worst(answer, expected))
        leaves = [x.clone().requires_grad_() for x in tensors]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.double()):
            results = as_tuple(compiled(*leaves))
        rejections[name] = raised(torch.autograd.grad, results, leaves, [torch.ones_like(y) for y in results])
    return worst_error, rejections


@pytest.mark.slow
def test_saved_tensors_of_compiled_functions(run, size=2):
    for worst_error, rejections in run(size, compiled_hooks_case):
        assert worst_error < 1e-5 and len(rejections) >= 6  # compiled, torch's own functions round differently
        for name, (error_name, why) in rejections.items():
            assert error_name == "RuntimeError" and "saved_tensors_hook" in why, (name, why)


def compiled_halves_case(group):
    """On rank 1 a compiled backward of halo() gets another tensor than was saved. Return this rank's error."""
    with allscan.Communicator(group, timeout=5) as comm:
        x = torch.ones(1, 8, 4, device=comm.device, requires_grad=True)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: allscan.halo(x, 2, comm=comm, layout="zigzag").sin(), backend="aot_eager")
        change = OTHERS["integers"] if comm.rank == 1 else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
            y = compiled(x)
            found = raised(y.sum().backward)
        comm.resync()
        return found


@pytest.mark.cpu  # on CPUs the call itself ends with the time-out
def test_all_ranks_hear_of_a_compiled_backward_in_halves(run):
    waits, rejects = run(2, compiled_halves_case)
    assert rejects[0] == "RuntimeError" and "saved_tensors_hook" in rejects[1], rejects
    assert waits[0] == "AllScanTimeout" and "saved_tensors_hook" in waits[1], waits


def tangents_case(comm, only):
    """Pass a tangent in each argument of each operator. With ``only`` one rank has a tangent, at a first call; the
    others must get an error."""
    found, right = {}, {}
    here = only in (None, comm.rank)
    all_calls = calls()
    all_calls["AllScan.scan"] = (
        lambda comm, *x: [allscan.AllScan(comm, (2, 3, 4)).scan(x[0], x[1], initial_state=x[2], out=x[3])],
        ((2, 3, 4), (2, 3), (2, 3, 4), (2, 3, 4)),
    )
    all_calls["allscan, out"] = (
        lambda comm, x, out: allscan.allscan(x, comm=comm, out=out),
        ((2, 5, 4), (2, 5, 4)),
    )
    for name, (function, shapes) in all_calls.items():
        if only is not None and not name.endswith(("decay", "halo", "gla, contiguous", "kda, raw", "ssd, zigzag")):
            continue
        tensors = drawn(comm, shapes)
        for i in range(len(tensors)):
            if only is not None and i:
                break
            with forward_ad.dual_level():
                given = list(tensors)
                if here:
                    given[i] = forward_ad.make_dual(given[i], torch.ones_like(given[i]))
                wanted = [x.requires_grad_() for x in given] if i == 0 and "out" not in name else given
                found[name, i, "wanting"] = raised(function, comm, *wanted)
                if only is None:
                    found[name, i] = raised(torch.no_grad()(function), comm, *given)
            tensors = [x.detach().requires_grad_(False) for x in tensors]
        if only is None and "AllScan" not in name:
            with forward_ad.dual_level():  # without a tangent calls work
                right[name] = raised(function, comm, *tensors)
    return found, right


@pytest.mark.cpu
def test_forward_mode_derivatives_are_rejected(run, size=2):
    for found, right in run(size, tangents_case, None):
        assert len(found) > 100 and set(right.values()) == {None}
        for name, answer in found.items():
            assert answer and answer[0] == "NotImplementedError" and "forward-mode" in answer[1], (name, answer)


@pytest.mark.cpu
def test_all_ranks_hear_of_forward_mode_derivatives(run, size=2):
    found = [answers for answers, _ in run(size, tangents_case, 0)]
    for name, answer in found[0].items():
        assert answer[0] == "NotImplementedError" and "forward-mode" in answer[1], (name, answer)
        assert found[1][name] and "forward-mode" in found[1][name][1], (name, found[1][name])


def tangents_of_gradients_case(comm):
    """Pass a tangent in a gradient to backward."""
    found = {}
    for name, (function, shapes) in calls().items():
        if name.startswith("a delta rule"):  # its first rank gets no gradient of its result
            continue
        leaves = [x.requires_grad_() for x in drawn(comm, shapes)]
        results = as_tuple(function(comm, *leaves))
        with forward_ad.dual_level():
            grads = [forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)) for y in results]
            found[name] = raised(torch.autograd.grad, results, leaves, grads)
    return found


@pytest.mark.cpu
def test_forward_mode_derivatives_of_gradients_are_rejected(run, size=2):
    for found in run(size, tangents_of_gradients_case):
        for name, answer in found.items():
            assert answer and answer[0] == "NotImplementedError" and "forward-mode" in answer[1], (name, answer)


@contextlib.contextmanager
def precision(name):
    torch.set_float32_matmul_precision(name)
    yield
    torch.set_float32_matmul_precision("highest")


def settings_case(comm):
    """torch's settings around forward, backward or both change none of our products."""
    found = {}
    device = comm.device.type
    autocast = torch.autocast(device, torch.bfloat16)
    plain = contextlib.nullcontext
    for name, (function, shapes) in calls_on(comm).items():
        tensors, expected = drawn(comm, shapes), None
        for forward, backwards in (
            (plain, (plain, lambda: autocast)),
            (lambda: autocast, (lambda: autocast, plain)),
            (lambda: precision("medium"), [lambda: precision("medium")]),  # no pass saves this setting
            (lambda: precision("high"), [lambda: precision("high")]),
        ):
            leaves = [x.clone().requires_grad_() for x in tensors]
            with forward():
                results = as_tuple(function(comm, *leaves))
            grads = [1.5 + y.detach().sin() for y in results]
            for backward in backwards:
                more = backward is not backwards[-1]
                with backward():
                    answer = [*results, *torch.autograd.grad(results, leaves, grads, retain_graph=more)]
                expected = expected or answer
                found[name] = max(found.get(name, 0.0), worst(answer, expected))
    return found


@pytest.mark.slow(but="1")
@pytest.mark.parametrize("size", [ONE, 2])
def test_settings_of_torch(run, size):
    check_errors(run(size, settings_case), EXACT)


def results_case(comm):
    """Results own their memory: writing to one changes no other result, input or gradient; also with gradients."""
    for name, (function, shapes) in calls_on(comm).items():
        tensors = drawn(comm, shapes)
        for wanted in (False, True):
            given = [x.clone().requires_grad_(wanted) for x in tensors]
            results = as_tuple(function(comm, *given))
            expected = [y.detach().clone() for y in results]
            addresses = [y.untyped_storage().data_ptr() for y in (*results, *given)]
            assert len({*addresses}) == len(addresses), name
            for i, y in enumerate(results):
                assert y.untyped_storage().nbytes() == y.nbytes, (name, i)
                y.mul_(2.0)
                assert all(torch.equal(a, (1 + (j <= i)) * b) for j, (a, b) in enumerate(zip(results, expected)))
            assert all(torch.equal(a, b) for a, b in zip(given, tensors, strict=True)), name
            if not wanted:
                continue
            grads = [1.5 + y.sin() for y in expected]
            try:
                found = torch.autograd.grad(results, given, grads)
            except RuntimeError as error:  # torch's own, for a saved result: of a decay, of silu
                assert "modified by an inplace operation" in str(error), (name, error)
                assert "decay" in name or "transition" in name or "zigzag" in name, name
                comm.resync()
                continue
            exact = with_gradients(comm, function, tensors)[len(results) :]
            assert worst(found, [2 * x for x in exact]) < EXACT, name


@pytest.mark.slow(but="1")
@pytest.mark.parametrize("size", [ONE, 2])
def test_results_own_their_memory(run, size):
    run(size, results_case)


def free_types_case(comm):
    """Pass all arguments whose dtype is free, by their docstring, in other dtypes at once."""
    errors = {}
    all_calls = calls()
    for rule in ("zeco_kda", "zeco_gated_delta_rule"):
        for kind, free in (("contiguous", [4]), ("zigzag", [4]), ("raw", [3, 4, 6, 7])):
            function, shapes = all_calls[f"{rule}, {kind}"]
            tensors = drawn(comm, shapes)
            for dtype in (torch.float64, torch.float16):  # the interpreter does not support bfloat16
                typed = [x.to(dtype) if i in free else x for i, x in enumerate(tensors)]
                expected = with_gradients(comm, function, [x.float() for x in typed])
                answer = with_gradients(comm, function, typed)
                assert [y.dtype for y in answer[2:]] == [x.dtype for x in typed]
                errors[rule, kind, dtype] = worst(answer, expected) / (2e-3 if dtype.itemsize == 2 else EXACT)
    return errors


@pytest.mark.cpu
def test_types_that_are_free(run, size=2):
    check_errors(run(size, free_types_case), 1)
