"""Trains a byte-level GLA language model on real English text twice from the same start: with the whole sequence on one
rank, and with the sequence split over all ranks. Both loss curves must be equal.

    python examples/train_text.py                 # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/train_text.py  # with its ranks; on CPUs with TRITON_INTERPRET=1
    python examples/train_text.py --steps 300 --length 8192

The text is Python's own language reference (pydoc_data.topics). The last line is the largest relative difference of
loss and of gradients between the two runs; above 1e-4 the exit status is 1.
"""

import argparse
import csv
import functools
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import allscan
from allscan.tools.ranks import launch, on_first

TOLERANCE = 1e-4


def text_bytes() -> torch.Tensor:
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.long)


class GlaBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkvg = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, comm, layout="contiguous"):
        q, k, v, g = (t.unflatten(-1, (self.heads, -1)) for t in self.qkvg(self.norm(x)).chunk(4, -1))
        k = F.normalize(k, dim=-1).to(v.dtype)  # autocast makes it float32
        o, _ = allscan.zeco_gla(q, k, v, F.logsigmoid(g + 3) / 4, comm=comm, layout=layout)
        x = x + self.out(o.flatten(-2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width, heads, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(GlaBlock(width, heads) for _ in range(blocks))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256))

    def forward(self, tokens, comm):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, comm)
        return self.head(x)


def train(group, options, start):
    """Train with the sequence split over the group's ranks. Return on rank 0 [(loss, gradient)] by step."""
    comm = allscan.Communicator(group)
    torch.manual_seed(0)
    model = Model(options.width, options.heads).to(comm.device)
    # Where a gradient is near 0, Adam's first steps amplify rounding errors: a short warm-up, and an eps of the size of
    # small gradients, keep two runs with different rounding together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if comm.device.type == "cpu" else 1e-3, eps=1e-6)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    text = text_bytes()
    first, end = (rank * options.length // comm.size for rank in (comm.rank, comm.rank + 1))  # the tokens of this rank
    sequence = torch.Generator().manual_seed(0)
    history = []
    for step in range(options.steps):
        comm.step()
        begin = torch.randint(len(text) - options.length - 1, (), generator=sequence).item()
        tokens = text[begin + first : begin + end + 1].to(comm.device)[None]  # the last label is the next rank's token
        logits = model(tokens[:, :-1], comm)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / options.length
        optimizer.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach()[None]])
        dist.all_reduce(gradient, group=group)  # each rank has the part of its own tokens
        offset = 0
        for p in model.parameters():
            p.grad.copy_(gradient[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
        warm_up.step()
        history.append((gradient[-1].item(), gradient[:-1].cpu()))
        if comm.rank == 0 and (step % max(1, options.steps // 8) == 0 or step == options.steps - 1):
            print(
                f"  {'unsplit' if comm.size == 1 else f'{comm.size} ranks'}  step {step + 1:3d}/{options.steps}"
                f"  loss {history[-1][0]:.4f}  {time.time() - start:.0f} s",
                flush=True,
            )
    comm.check()
    comm.close()
    return history if comm.rank == 0 else None


def show(whole, split, ranks, path):
    """Print both curves, and write them as CSV and as a plot."""
    print(f"\n  step   unsplit  {ranks} ranks")
    every = max(1, len(whole) // 10)
    for step in [*range(0, len(whole) - 1, every), len(whole) - 1]:
        print(f"  {step + 1:4d}  {whole[step][0]:8.5f} {split[step][0]:8.5f}")
    with open(path + ".csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss_unsplit", f"loss_{ranks}_ranks", "relative_difference_of_gradients"))
        for step, ((a, x), (b, y)) in enumerate(zip(whole, split), 1):
            writer.writerow((step, f"{a:.7f}", f"{b:.7f}", f"{((x - y).norm() / x.norm()).item():.2e}"))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([loss for loss, _ in whole], linewidth=4, alpha=0.4, label="whole sequence on one rank")
    axes.plot([loss for loss, _ in split], "k--", linewidth=1, label=f"sequence cut over {ranks} ranks")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level GLA language model on pydoc_data.topics")
    axes.legend()
    figure.savefig(path + ".png", dpi=120)
    print(f"  wrote {path}.png and {path}.csv")


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    on_gpu = torch.cuda.device_count() > 1
    parser.add_argument("--ranks", type=int, help="default: torchrun's, or one a GPU, or 4 on CPUs")
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 30)
    parser.add_argument("--length", type=int, default=4096 if on_gpu else 256, help="tokens of the whole sequence")
    parser.add_argument("--width", type=int, default=256 if on_gpu else 32)
    parser.add_argument("--heads", type=int, default=4 if on_gpu else 1)
    parser.add_argument("--out", default="demo", help="path of the picture and the CSV, without ending")
    return parser.parse_args()


def main(options, ranks) -> int:
    where = "GPUs" if ranks.device == "cuda" else "CPU processes, kernels in Triton's interpreter"
    print(f"{options.length} tokens over {ranks.size} {where}; {options.steps} steps")
    start = time.time()
    whole = ranks.run(on_first, 1, train, options, start, timeout=1800)[0]
    split = ranks.run(on_first, ranks.size, train, options, start, timeout=1800)[0]
    show(whole, split, ranks.size, options.out)
    loss = max(abs(a - b) / abs(a) for (a, _), (b, _) in zip(whole, split))
    gradient = max(((x - y).norm() / x.norm()).item() for (_, x), (_, y) in zip(whole, split))
    print(f"largest relative difference: loss {loss:.1e}, gradients {gradient:.1e}")
    return 0 if max(loss, gradient) <= TOLERANCE else 1


if __name__ == "__main__":
    options = options_of()
    sys.exit(launch(functools.partial(main, options), options.ranks))
