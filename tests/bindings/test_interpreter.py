"""bindings/interpreter: Triton's interpreter gives the same results with less repeated work."""

from __future__ import annotations

import collections
import sys
import types
from typing import NamedTuple

import numpy
import pytest
import torch
import triton
import triton.language as tl

from allscan.bindings.interpreter import fast_launches, prepare_interpreter
from allscan.shmem_kernels.wait import poll_word
from support.values import raised

pytestmark = [pytest.mark.cpu, pytest.mark.quick]
FOUND = []
# exceeds int32; from 3.9 on Triton rejects it together with an int32
BEYOND = tl.constexpr(3000000000 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else 2147483647)


def keep(*values):
    """Record types, shapes and bytes of values: in the interpreter a kernel may call any Python function."""
    FOUND.extend((str(x.type), str(x.handle.data.dtype), x.handle.data.shape, x.handle.data.tobytes()) for x in values)


@triton.jit
def of_numbers(x, y, s):
    a, b = x[:, None], y[None, :]
    keep(
        a + b,
        b - s,
        a * b,
        s * b,
        3 - x,
        x + 3,
        x - 0,
        2 * y,
        tl.maximum(x, y),
        tl.minimum(s, y),
        tl.maximum(x, 2),
        tl.where(a > b, a, b),
        tl.where(x < 0, 0, x),
        tl.where(x >= y, y, -1),
        tl.where(x == 1, x, -y),
        -x,
        (a <= b) & (b != s),
        (x == y) | (y > 1),
        a * (b < s),
        (a + s) * 1,
        tl.where(s > 0, x, s),
        x[None],
        x + True,
    )


@triton.jit
def of_floats(x, y, s):
    keep(
        x / y,
        1 / x,
        x / 2,
        x / 0.3,
        s / y,
        x * -0.0,
        x + 0.0,
        x * 0.0,
        x - 1e-40,
        1e30 * y,
        x > 0.0,
        y < -0.0,
        y == -0.0,
        tl.where(x > 0, x, -0.0),
        tl.where(x > 0, 0.0, y),
        tl.where(x > 0, float("nan"), y),
        x * float("inf"),
        tl.where(y > 0, float("-inf"), x),
        tl.exp2(x),
        tl.sum(x),
        tl.max(x, 0),
        tl.cumsum(x, 0),
        x + tl.sum(y),
        x + 16777217,
        x * float("nan"),
        x.to(tl.bfloat16).to(tl.float32),
        x - y,
        x.to(tl.bfloat16) * x,
        x.to(tl.float16) + 1,
        (x * 1e-38).to(tl.bfloat16).to(tl.float32),
        y.to(tl.int32),
    )


@triton.jit
def of_integers(x, y, s):
    keep(
        x // 3,
        x % 3,
        x // 2,
        x % -2,
        s // 2,
        s % 2,
        x & 5,
        x | s,
        x ^ y,
        x + 0.5,
        x * 2.0,
        x / 2,
        x.to(tl.int64) * 3000000000,
        x == 0.5,
        x >> 1,
        x << 2,
        7 // (x * x + 1),
        7 % (x * x + 1),
        x < BEYOND,
        x // (y * y + 1),
        x % (y * y + 1),
        x.to(tl.uint32) + 1,
        x.to(tl.uint32) > 5,
        x.to(tl.float32) / 3,
    )


@triton.jit
def of_mixed_numbers(x, n, wide):
    keep(
        x + n,
        n * x,
        wide + n,
        n - wide,
        n < wide,
        x > n,
        n[:, None] * wide[None, :],
        (wide * 2) // 3,
        n & wide,
        tl.where(n > 0, n, wide),
        tl.where(n > 0, x, n),
        x.to(tl.float16) * n,
        x.to(tl.int32) + wide,
        x * wide,
    )


@triton.jit
def of_memory(p_x, p_n, p_wide, p_half, p_to, x, n):
    i, two = tl.arange(0, 8), tl.arange(0, 2)
    inside, square = i < 5, two[:, None] * 4 + two[None, :]
    tl.store(p_to + i, x + 1, mask=inside)
    tl.store(p_to + 8 + i, n)
    tl.store(p_to + 16 + square, 7.5)
    tl.store(p_to + 24, tl.load(p_n))
    tl.store(p_to + 25 + two, tl.load(p_x))
    tl.store(p_half + 8 + i, x, mask=inside)
    keep(
        tl.load(p_x + i, mask=inside),
        tl.load(p_x + i, mask=inside, other=-1.5),
        tl.load(p_n + i, inside, 3),
        tl.load(p_x + i, mask=inside, other=n),
        tl.load(p_x + i, mask=inside, other=x),
        tl.load(p_x + 2),
        tl.load(p_x + i, mask=inside, other=float("-inf")),
        tl.load(p_x + 8 - 1 - i),
        tl.load(p_wide + (n & 3)),
        tl.load(p_half + i, mask=inside, other=0.3),
        tl.load(p_x + square, mask=(two < 1)[None, :], other=2),
        tl.load(p_half + i).to(tl.float32) * 2,
        tl.load(p_to + i),
        tl.load(p_to + 16 + i),
        tl.load(p_half + 8 + i),
        tl.load(1 + p_x),
        tl.load(p_x + (tl.load(p_wide) & 3)),
        tl.load(p_x, mask=tl.load(p_n) > 0, other=0.0),
        tl.load(p_x + i, mask=inside, other=-0.0),
        tl.load(p_to + 24 + i),
        tl.load(p_x + i, cache_modifier=".cg"),
    )


@triton.jit
def of_blocks(x, y, half):
    i, k = tl.arange(0, 8), tl.arange(4, 8)
    a, b = x[:, None] * y[None, :], y[:, None] + x[None, :]
    narrow = half.to(tl.float16)[None, :] * half.to(tl.float16)[:, None]
    keep(
        i + 1,
        k,
        tl.arange(0, 8) * i,
        tl.zeros([8, 8], tl.float32) + a,
        tl.full([4], 3, tl.int32) + k,
        tl.full([4], -0.0, tl.float32),
        tl.full([4], 0.0, tl.float32),
        tl.full([4], float("nan"), tl.float32),
        tl.full([4], 3, tl.int64),
        tl.full([], 3, tl.int64),
        tl.full([8], tl.sum(x), tl.float32),
        tl.dot(a, b),
        tl.dot(a, b, a),
        tl.dot(a, tl.trans(b), input_precision="ieee"),
        tl.dot(b, a, input_precision="tf32x3"),
        tl.dot(narrow, narrow),
        tl.dot(narrow, narrow, a),
        tl.dot(narrow, narrow, out_dtype=tl.float16),
        tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16)),
    )


@triton.jit
def kernel(p_x, p_y, p_n, p_m, p_wide, p_half, p_to):
    i = tl.arange(0, 8)
    x, y, n, m, wide = tl.load(p_x + i), tl.load(p_y + i), tl.load(p_n + i), tl.load(p_m + i), tl.load(p_wide + i)
    of_numbers(x, y, tl.load(p_y))
    of_numbers(n, m, tl.load(p_m))
    of_numbers(wide, wide - 3, tl.load(p_wide))
    of_floats(x, y, tl.load(p_y))
    of_integers(n, m, tl.load(p_m))
    of_integers(wide, wide - 3, tl.load(p_wide))
    of_mixed_numbers(x, n, wide)
    of_memory(p_x, p_n, p_wide, p_half, p_to, x, n)
    of_blocks(x, y, tl.load(p_half + i))


class Pair(NamedTuple):
    left: object
    right: object


@triton.jit
def of_arguments(p_x, n, wide, pair, factor, nothing, D: tl.constexpr, last=3, SIZE: tl.constexpr = 4):
    if nothing is None:
        i = tl.arange(0, SIZE)
        keep(n + 1, wide + 0, tl.load(pair.left + i) * factor, tl.load(p_x + i) + D, i * pair.right, last + i)
        tl.store(pair.left + n, 5.0 * n)


HOOKED = triton.jit(of_arguments.fn)
HOOKED.add_pre_run_hook(lambda *args, **kwargs: FOUND.append(len(args) + len(kwargs)))


def launches():
    """Call kernels with many argument lists; return recorded values and types of errors."""
    x, y = torch.arange(16.0), torch.arange(16.0)[4:]
    pair, most, found = Pair(y, 7), 1 << 31, []
    language = {name: value for module in (tl, tl.core, tl.core.tensor) for name, value in vars(module).items()}
    for launched in (of_arguments, HOOKED):
        for args, options in (
            ((x, 2, most, pair, 0.5, None, 3), {}),
            ((x, -2, -most, pair, 0.5, None), dict(D=3, last=1, SIZE=2, num_warps=4)),
            ((x,), dict(n=1, wide=most - 1, pair=pair, factor=2.0, nothing=None, D=0)),
            ((x, 2, 2 * most, Pair(x[2:], 1), 1.5, None, 3, 2, 8), {}),
            ((x, 2), {}),
            ((x, 2, most, pair, 0.5, None, 3), dict(n=2)),
            ((x, 2, most, pair, 0.5, None, 3, 3, 4, 5), {}),
            ((x, 1 << 64, most, pair, 0.5, None, 3), {}),
            ((x, 2, most, None, 0.5, None, 3), {}),
        ):
            FOUND.clear()
            error = raised(launched[lambda arguments: (1, 2)], *args, **options)
            found.append([error and error[0], *FOUND, x.tolist(), y.tolist()])
    now = {name: value for module in (tl, tl.core, tl.core.tensor) for name, value in vars(module).items()}
    return [*found, sorted(name for name in {*language, *now} if language.get(name) is not now.get(name))]


@triton.jit
def of_a_constant(p_to, X: tl.constexpr):
    tl.store(p_to + tl.arange(0, 8), tl.full([8], X, tl.float32) + X)


@triton.jit
def of_two_modules(p_word, p_to):  # wait.py has triton.language.core among its globals, too
    for i in tl.static_range(2):
        tl.store(p_to + i, (poll_word(p_word) + i).to(tl.float32))


def functions_and_blocks():
    """Return (whether a function that another package sets in triton.language stays, while and after it is set; whether
    launches with many constants have the right results)."""
    original, to = tl.load, torch.zeros(8)

    def own(*_):
        return None

    tl.load = own
    of_a_constant[(1,)](to, 0)
    stays = [tl.load is own]
    tl.load = original
    of_a_constant[(1,)](to, 0)
    stays.append(tl.load is original)
    word = torch.tensor([3])
    for _ in range(3):
        of_two_modules[(1,)](word, to)
        stays.append(to[:2].tolist() == [3.0, 4.0])
    sums = []
    for x in range(512):
        of_a_constant[(1,)](to, x + 0.5)
        sums.append(to.sum().item() == 16 * x + 8)
    return stays, all(sums)


def found(seed):
    """Return the values that the kernel records and stores, with random numbers of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, generator=generator) for _ in "xy")
    x[seed], y[seed] = torch.tensor([0.0, float("nan"), -0.0, float("inf")])[[seed, seed - 1]]
    n, m, wide = torch.randint(-9, 9, (3, 8), generator=generator)
    n, m = n.int(), m.int()
    half, to = torch.randn(16, generator=generator).bfloat16(), torch.zeros(32)
    FOUND.clear()
    kernel[(1,)](x, y, n, m, wide, half, to)
    return [*FOUND, half.view(torch.int16).tolist(), to.view(torch.int32).tolist()]


def both():
    as_it_is = [found(seed) for seed in range(4)]
    launched = launches()
    prepare_interpreter()
    # the first call of each kind of operands runs Triton's code, later ones the shorter path
    shorter = [found(seed) for seed in (*range(4), *range(4))]
    return as_it_is, shorter, [launched, launches(), launches()], functions_and_blocks()


def test_the_same_with_less_work(fresh):
    ((as_it_is, shorter, (launched, *others), functions),) = fresh(1).run(both)
    assert functions == ([True] * 5, True)
    assert len(as_it_is[0]) > 200
    for i, values in enumerate(shorter):
        for k, pair in enumerate(zip(values, as_it_is[i % 4], strict=True)):
            assert pair[0] == pair[1], (i, k)
    assert {values[0] for values in launched[:-1]} >= {None, "TypeError", "InterpreterError"} and launched[-1] == []
    assert sum(values[0] is None for values in launched[:-1]) == 8
    for other in others:
        assert other == launched


def launch_inside(p_to):
    """Called by a kernel."""
    try:
        of_a_constant[(1,)](torch.zeros(8), 1)
    except RuntimeError as error:
        FOUND.append(str(error))


@triton.jit
def of_a_launch_inside(p_to):
    launch_inside(p_to)
    tl.store(p_to, 5.0)


def nested():
    prepare_interpreter()
    to = torch.zeros(1)
    FOUND.clear()
    of_a_launch_inside[(1,)](to)
    return to.item(), FOUND


def test_a_launch_inside_of_a_kernel_is_rejected(fresh):
    ((value, found),) = fresh(1).run(nested)
    assert value == 5.0 and len(found) == 1 and found[0].startswith("this thread of this process is inside of a kernel")


class Interrupt:
    """A trace function that raises KeyboardInterrupt before the ``time``-th execution of an instruction of
    fast_launches.py or of Triton's functions that set and reset. ``counts``: executions by instruction."""

    def __init__(self, place=None, time=0):
        self.place, self.time, self.counts = place, time, collections.Counter()

    def __call__(self, frame, event, _):
        code = frame.f_code
        if code.co_filename != fast_launches.__file__ and code.co_name not in ("set_attr", "_patch_lang"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            place = id(code), frame.f_lasti
            self.counts[place] += 1
            if place == self.place and self.counts[place] == self.time:
                raise KeyboardInterrupt
        return self


def interrupted(launch, interrupt):
    """Whether KeyboardInterrupt was raised."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        launch()
    except BaseException as error:
        return isinstance(error, KeyboardInterrupt)
    finally:
        sys.settrace(before)
    return False


def new_kernel():
    """Return a kernel without cached signature; Triton and this package patch the language anew for it."""
    tl.static_print = lambda *_: None
    known = of_two_modules.fn
    return triton.jit(types.FunctionType(known.__code__, known.__globals__, known.__name__))


HOOKED_MODULES = triton.jit(types.FunctionType(of_two_modules.fn.__code__, globals(), "of_two_modules"))
HOOKED_MODULES.add_pre_run_hook(lambda *args, **kwargs: None)


def interrupts(name):
    """Interrupt a launch at each instruction. Return (number of interrupts, those after which a launch is wrong)."""
    prepare_interpreter()
    kernel_of = {"first": new_kernel, "hooked": lambda: HOOKED_MODULES}.get(name, lambda: of_two_modules)
    changed, errors = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype), numpy.geterr()
    to, word = torch.zeros(8), torch.tensor([3])

    def launch(launched, interrupt):
        return interrupted(lambda: launched[(1,)](None if name == "failing" else word, to), interrupt)

    def right(before):
        to.zero_()
        of_two_modules[(1,)](word, to)
        return to[:2].tolist() == [3.0, 4.0] and [dict(vars(x)) for x in changed] == before and numpy.geterr() == errors

    wrong, count, record = [], 0, None
    for _ in range(2):  # the first one fills caches, except those of a new kernel
        record = Interrupt()
        launch(kernel_of(), record)
    for place, most in record.counts.items():
        for time in {(most + 1) // 2} if name == "first" else {1, most}:  # a first launch takes longer
            launched = kernel_of()
            before = [dict(vars(x)) for x in changed]
            count += launch(launched, Interrupt(place, time))
            try:
                problem = "" if right(before) else "another value"
            except Exception as error:
                problem = repr(error)
            if problem:
                wrong.append((place[1], time, problem))
    return count, wrong


@pytest.mark.slow(but="next")
@pytest.mark.parametrize("name", ["first", "next", "hooked", "failing"])
def test_launches_after_an_interrupted_one(fresh, name):
    ((count, wrong),) = fresh(1).run(interrupts, name)
    assert count > 300 and not wrong, (count, len(wrong), wrong[:5])


@triton.jit
def of_casted_counters(p_to, n):
    for i in range(n):
        wide = i.to(tl.int64) * (1 << 31)
        for j in range(i, n):
            tl.store(p_to + i * n + j, wide + j)


def casted_counters():
    prepare_interpreter()
    to = torch.zeros(9, dtype=torch.int64)
    of_casted_counters[(1,)](to, 3)
    return to.tolist()


def test_loop_counters_that_a_kernel_casts(fresh):
    """A counter is an int32 of Triton's, as in compiled kernels, also as a bound of another loop."""
    (found,) = fresh(1).run(casted_counters)
    assert found == [(i << 31) + j if j >= i else 0 for i in range(3) for j in range(3)]
