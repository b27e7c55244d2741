"""Functions of others that launch Triton kernels become plans, and only those that a plan repeats to the bit.

On a GPU that is not one (support/fake_gpu.py); with fla's functions on real ones: tests/gpu/test_plans.py.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
import triton
import triton.language as tl

from allscan.launch.compiled_kernel import Launch
from allscan.ops.delta.fla_replay import ATTEMPTS, FlaReplay
from support.fake_gpu import fake_gpu, floats

pytestmark = [pytest.mark.cpu, pytest.mark.quick]
N = 32


@triton.heuristics({"HAS_Z": lambda args: args["z"] is not None})
@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((16, 1), (32, 2))], key=["n"])
@triton.jit(do_not_specialize=["n"])
def theirs_kernel(scale, x, z, n, out, HAS_Z: tl.constexpr, BLOCK: tl.constexpr, UNUSED: tl.constexpr = False):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = scale * tl.load(x + i, mask=i < n)
    if HAS_Z:
        y += tl.load(z + i, mask=i < n)
    tl.store(out + i, y, mask=i < n)


def as_theirs(grid, scale, x, z, n, out, HAS_Z, BLOCK, UNUSED):
    assert grid == (-(-n // BLOCK), 1, 1) and HAS_Z == (z is not None)
    floats(out, n)[:] = scale * floats(x, n) + (floats(z, n) if HAS_Z else 0)


KERNELS = {"theirs_kernel": as_theirs}


def launch(scale, x, z, out):
    theirs_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](scale=scale, x=x, z=z, n=x.numel(), out=out)


def library(x, y, scale, bias=None):
    """All that is traced: memory with zeros and without, views, a sum, an addition; an argument is returned, too."""
    x = x.contiguous()
    t, zeros = torch.empty_like(x), torch.zeros(2, 16)
    launch(scale, x, y, t)
    u = x.new_empty(2, 16)
    launch(scale, t, zeros, u.view(4, 8))
    total = u.sum(0).add_(u.new_zeros(16))
    out = torch.empty_like(x)
    launch(2.0, u, bias, out)
    return total, y, None, out


def expected(x, y, scale):
    u = scale * (scale * x + y)
    return u.view(2, 16).sum(0), y, None, 2 * u


def given():
    return torch.randn(N), torch.randn(N)


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert a is b if b is None else torch.allclose(a, b, atol=1e-5)


def test_a_function_becomes_a_plan():
    traced, calls = FlaReplay(True), []

    def counted(**arguments):
        calls.append(1)
        return library(**arguments)

    with fake_gpu(KERNELS) as gpu:
        for i in range(8):
            x, y = given()
            gpu.launches.clear()
            found = traced(counted, x=x, y=y, scale=0.5, bias=None)
            same(found, expected(x, y, 0.5))
            assert found[1] is y and found[3].shape == (N,)
            assert len(calls) == (1, 2, 4, 4, 4, 4, 4, 4)[i], (
                "the first call, two traces, and what the plan is held against"
            )
            assert gpu.launches.count("theirs_kernel") == 3 or i in (
                0,
                2,
            )  # where it is tuned, and where the plan is held against it
            assert traced.plans() == ({"counted": i > 2} if i else {})
        x, y = given()
        same(traced(counted, x=x, y=y, scale=3.0, bias=None), expected(x, y, 3.0))
        assert len(calls) == 5, "a constant more"
        for a, b in ((torch.randn(N + 1)[1:], y), (torch.randn(N, 2)[:, 0], y)):
            same(traced(counted, x=a, y=b, scale=0.5, bias=None), expected(a.clone(), b, 0.5))
        assert len(calls) == 6, "a gap; addresses that are no multiples of 16 go through Triton"
        same(traced(counted, x=y, y=y, scale=0.5, bias=None), expected(y, y, 0.5))
        assert len(calls) == 6


def run(function):
    """Whether it has a plan after some calls, whose results were right."""
    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for _ in range(ATTEMPTS + 4):
            x, y = given()
            out = traced(function, x=x, y=y)
            assert torch.allclose(out[:N], 2 * x + y, atol=1e-5)
        return traced.plans()[function.__name__]


def plain(x, y):
    out = torch.empty_like(x)
    launch(2.0, x, y, out)
    return out


def partly(x, y):
    """Half of what is returned nobody writes."""
    out = x.new_empty(2 * N)
    launch(2.0, x, y, out)
    return out


def not_of_triton(x, y):
    out, wanted = torch.empty_like(x), x.new_empty(N)
    launch(2.0, x, y, wanted)
    ctypes.memmove(out.data_ptr(), wanted.data_ptr(), 4 * N)  # which nobody sees
    return out


def another_operator(x, y):
    out = plain(x, y)
    return out.mul(1.0)


def a_part(x, y):
    both = x.new_empty(2, N)
    launch(2.0, x, y, both[1])
    return both[1]


def kept(x, y, memory=[]):  # noqa: B006
    memory[:] = memory or [torch.zeros(N)]
    launch(1.0, x, None, memory[0])
    out = torch.empty_like(x)
    launch(2.0, memory[0], y, out)
    return out


def another_each_time(x, y, count=[1]):  # noqa: B006
    count[0] *= 2  # no rounding
    t, out = torch.empty_like(x), torch.empty_like(x)
    launch(float(count[0]), x, None, t)
    launch(2.0 / count[0], t, y, out)
    return out


@pytest.mark.parametrize(
    "function, planned",
    [
        (plain, True),
        (partly, True),
        (not_of_triton, False),
        (another_operator, False),
        (a_part, False),
        (kept, False),
        (another_each_time, False),
    ],
)
def test_what_is_not_seen_makes_no_plan(function, planned):
    assert run(function) == planned


def test_arguments_in_the_same_memory_are_not_traced():
    """Which of them a kernel was given, nobody could tell. Afterwards all is as if they had not come."""
    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for _ in range(2 * ATTEMPTS):
            x = torch.randn(N)
            assert torch.allclose(traced(plain, x=x, y=x), 3 * x)
            assert not traced.plans()
        for _ in range(4):
            x, y = given()
            assert torch.allclose(traced(plain, x=x, y=y), 2 * x + y, atol=1e-5)
        assert traced.plans() == {"plain": True}


def test_a_plan_that_differs_once_is_given_up():
    bias = [1.0]

    def hidden(x, y):
        out = plain(x, y)
        floats(out.data_ptr(), N)[:] += bias[0]  # not of Triton
        return out

    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for i in range(4 + ATTEMPTS):
            bias[0] = 1.0 if i < 4 else 0.0
            x, y = given()
            assert torch.allclose(traced(hidden, x=x, y=y), 2 * x + y + bias[0], atol=1e-5)
        assert traced.plans() == {"hidden": False}


def scaled(x, y, scale):
    out = torch.empty_like(x)
    launch(10.0 if scale is True else 0.5, x, y, out)
    return out


def test_constants_that_python_takes_for_equal_are_not():
    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for i in range(15):
            x, y = given()
            scale = (True, 1, 1.0)[i % 3]
            found = traced(scaled, x=x, y=y, scale=scale)
            assert torch.allclose(found, (10.0 if scale is True else 0.5) * x + y, atol=1e-5)
        assert traced.plans() == {"scaled": True}


def in_a_list(x, y):
    return [plain(x, y)]


def of_a_list(x, y, rows):
    return plain(x, y)


@pytest.mark.parametrize("function, more", [(in_a_list, {}), (of_a_list, dict(rows=[0]))])
def test_what_is_neither_tensor_nor_constant(function, more):
    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for _ in range(5):
            x, y = given()
            found = traced(function, x=x, y=y, **more)
            assert isinstance(found, list) == (function is in_a_list)
        assert not any(traced.plans().values())


def test_gradients_go_through_the_function():
    def differentiable(x, y):
        return 2 * x + y if x.requires_grad else plain(x, y)

    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for _ in range(6):
            x, y = given()
            leaf = x.clone().requires_grad_()
            assert traced(differentiable, x=leaf, y=y).requires_grad
            with torch.no_grad():
                assert torch.allclose(traced(differentiable, x=x, y=y), 2 * x + y, atol=1e-5)
        assert traced.plans() == {"differentiable": True}


def test_an_error_is_the_functions():
    def fails(x, y):
        plain(x, y)
        raise ArithmeticError("theirs")

    traced = FlaReplay(True)
    with fake_gpu(KERNELS):
        for _ in range(3):
            with pytest.raises(ArithmeticError, match="theirs"):
                traced(fails, x=given()[0], y=given()[1])
        x, y = given()
        assert torch.allclose(plain(x, y), 2 * x + y)


def test_without_gpus_a_function_is_called():
    assert FlaReplay(False)(lambda x, y: (x, y), x=1, y=2) == (1, 2)


def test_a_launch_whose_tensors_are_not_first():
    launches = Launch(theirs_kernel.fn.fn, (2,), scale=2.0, z=None, n=N, HAS_Z=False, BLOCK=16, UNUSED=False)
    with fake_gpu(KERNELS):
        for ready in (False, True):
            x, out = torch.randn(N), torch.empty(N)
            assert launches.ready == ready
            launches(x, out)
            assert torch.equal(out, 2 * x)
