"""Measures a language model's head and loss on one GPU: linear_cross_entropy, in slices of tokens, beside torch's whole
loss on as many tokens as it has memory for, and Liger's, if installed.

    python -m bench.loss                # one GPU; writes bench/results/loss.csv

Forward and backward, called from Python, with x in bfloat16 and the weight in bfloat16, or in float32 under autocast.
Losses and gradients of each method are checked first, on 512 tokens, in several slices, and 4,096 words, against
float64. ``ms`` is the median of samples; the methods take turns. ``extra_gib`` is the peak memory beside x, the weight
and their gradients; ``percent_of_whole`` the time for a token as a part of torch's whole loss, with a weight of the
same dtype. Without GPUs only the check runs, on a CPU rank.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys

import torch
import torch.nn.functional as F

from allscan.integrations.slices import linear_cross_entropy
from allscan.tools.ranks import Ranks
from bench.harness import Table, checked, extra_mib, results, sample

TOKENS, WHOLE, WORDS, WIDTH = 131072, 16384, 151936, 2048  # WHOLE: the tokens of torch's whole loss
SAMPLES = 5
LIMIT = 2e-2  # relative error of bfloat16 gradients
COLUMNS = "method weight tokens words width ms us_per_token percent_of_whole extra_gib gpu torch triton sources".split()


def whole(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight).float(), labels)


def liger(x, weight, labels):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, weight, labels, accum_dtype=torch.float32)


def cut(x, weight, labels):
    """Without its filter, which leaves out gradients below 2^-12: with random words nearly all."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, weight.to(x.dtype), labels, filter_eps=None)


METHODS = {"torch, whole": whole, "linear_cross_entropy": linear_cross_entropy, "Liger": liger}
METHODS |= {"cut-cross-entropy, no filter": cut}
PACKAGES = {liger: "liger_kernel", cut: "cut_cross_entropy"}


def available(device) -> dict:
    """Return the methods that can run here; cut-cross-entropy needs a GPU."""
    return {
        name: method
        for name, method in METHODS.items()
        if method not in PACKAGES
        or (importlib.util.find_spec(PACKAGES[method]) and (method is not cut or device == "cuda"))
    }


def drawn(tokens, words, width, weight, device):
    """Draw (x, weight, labels); weight is a dtype."""
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, width, generator=generator, device=device) for n in (tokens, words))
    labels = torch.randint(words, (tokens,), generator=generator, device=device)
    return x.bfloat16().requires_grad_(), (w * width**-0.5).to(weight).requires_grad_(), labels


def both_passes(method, x, weight, labels, gradient=None):
    """Return [loss, gradients]; gradient: the incoming one, a tensor."""
    x.grad = weight.grad = None
    with torch.autocast(x.device.type, torch.bfloat16, enabled=weight.dtype == torch.float32):
        loss = method(x, weight, labels)
    loss.backward(gradient)
    return [loss.detach(), x.grad, weight.grad]


def check(tokens, words, width, device, gradient=0.3) -> dict:
    """Return {(method, dtype of the weight): largest relative error of loss and gradients}; raise if one is wrong.
    gradient: the loss's."""
    found, gradient = {}, torch.tensor(gradient, device=device)
    methods = available(device) | {
        "linear_cross_entropy": functools.partial(linear_cross_entropy, slice_tokens=tokens // 3)
    }
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, labels = drawn(tokens, words, width, dtype, device)
        leaves = [y.detach().double().requires_grad_() for y in (x, weight)]
        expected = F.cross_entropy(F.linear(*leaves), labels)
        expected = [expected.detach(), *torch.autograd.grad(expected, leaves, gradient.double())]
        for name, method in methods.items():
            found[name, dtype] = checked(name, both_passes(method, x, weight, labels, gradient), expected, LIMIT)
    return found


def measure(tokens, whole_tokens, words, width, dtype):
    """Yield table rows for a weight of ``dtype``."""
    calls, extra = {}, {}
    for name, method in available("cuda").items():
        for count in (whole_tokens,) if method is whole else (whole_tokens, tokens):
            x, weight, labels = drawn(count, words, width, dtype, "cuda")
            call = calls[name, count] = functools.partial(both_passes, method, x, weight, labels)
            call()
            x.grad = weight.grad = None
            extra[name, count] = extra_mib(call) / 1024 - (x.nbytes + weight.nbytes) / (1 << 30)
            x.grad = weight.grad = None
    times = {key: [] for key in calls}
    for _ in range(SAMPLES):
        for key, call in calls.items():
            times[key].append(sample(call, 2) / 1e3)
    ms = {key: statistics.median(values) for key, values in times.items()}
    base = ms["torch, whole", whole_tokens] / whole_tokens
    for (name, count), time in ms.items():
        row = dict(method=name, weight=str(dtype).removeprefix("torch."), tokens=count, words=words, width=width)
        row |= dict(ms=time, us_per_token=1e3 * time / count, percent_of_whole=100 * time / count / base)
        yield row | dict(extra_gib=extra[name, count])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--whole", type=int, default=WHOLE, help="tokens of torch's whole loss")
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--csv", default=results("loss.csv"))
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        errors = check(512, 4096, arguments.width, "cuda")
    else:
        print("No GPU here: a check of every method on a CPU rank.")
        with Ranks(1, "cpu") as ranks:
            (errors,) = ranks.run(check, 40, 97, 64, "cpu")
    for (name, dtype), error in errors.items():
        print(f"{name:22} {dtype!s:15} error {error:.1e}")
    if not on_gpu:
        return 0
    with Table(arguments.csv, COLUMNS) as table:
        for dtype in (torch.bfloat16, torch.float32):
            for row in measure(arguments.tokens, arguments.whole, arguments.words, arguments.width, dtype):
                table.write(row)
                print(
                    f"{row['method']:22} weight {row['weight']:8} {row['tokens']:7} tokens  {row['ms']:8.1f} ms  "
                    f"{row['percent_of_whole']:5.1f} % of the whole loss's time a token  {row['extra_gib']:.2f} GiB",
                    flush=True,
                )
            torch.cuda.empty_cache()
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
