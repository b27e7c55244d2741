"""A long prompt is read by all ranks together, and its states are handed to one rank, which goes on alone.

    python examples/prefill_decode.py             # on all GPUs, or on 4 CPU processes in Triton's interpreter

The model is that of train_text.py. Each rank reads its part of the prompt; the final state of every layer is on the
rank that has the last token. From there that rank decodes, one token at a time, without the others and with no more
memory than the states. The same prompt on one rank must give the same tokens. Prints the text and the relative
difference of the logits; above 1e-4, or with another text, the exit status is 1.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from train_text import Model, text_bytes

import allscan
from allscan.tools.ranks import Ranks, on_first


def project(block, x):
    """q, k, v, g of a layer, as its forward makes them."""
    q, k, v, g = (t.unflatten(-1, (block.heads, -1)) for t in block.qkvg(block.norm(x)).chunk(4, -1))
    return q, F.normalize(k, dim=-1), v, F.logsigmoid(g + 3) / 4


def finish(block, x, o):
    x = x + block.out(o.flatten(-2))
    return x + block.mlp(x)


def prefill(model, tokens, comm):
    """(logits of this rank's tokens, the final state of each layer [1, H, K, V], true on the last rank)."""
    x, states = model.embedding(tokens), []
    for block in model.blocks:
        o, state = allscan.zeco_gla(*project(block, x), comm=comm, output_final_state=True)
        x = finish(block, x, o)
        states.append(state)
    return model.head(x), states


def decode(model, token, states):
    """(logits of one more token, states behind it): the recurrence itself."""
    x, after = model.embedding(token[:, None]), []
    for block, state in zip(model.blocks, states):
        q, k, v, g = (t[:, 0] for t in project(block, x))
        state = g.exp()[..., None] * state + k[..., None] * v[..., None, :]
        o = q.shape[-1] ** -0.5 * (q[..., None] * state).sum(-2)
        x = finish(block, x, o[:, None])
        after.append(state)
    return model.head(x)[:, 0], after


@torch.no_grad()
def generate(group, length, count):
    """On the rank with the last token: (the tokens that follow, their logits)."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Model(64, 2).to(comm.device)
        begin, end = (rank * length // comm.size for rank in (comm.rank, comm.rank + 1))
        mine = text_bytes()[begin:end].to(comm.device)
        logits, states = prefill(model, mine[None], comm)
        comm.barrier()
        if comm.rank != comm.size - 1:
            return None
        kept, tokens, logits = [], [], logits[:, -1]
        for _ in range(count):
            kept.append(logits)
            tokens.append(logits.argmax(-1))
            logits, states = decode(model, tokens[-1], states)
        return [t.item() for t in tokens], torch.stack(kept).cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--length", type=int, default=65536 if gpus > 1 else 256, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    options = parser.parse_args()
    count = gpus if gpus > 1 else 4
    with Ranks(count, "cuda" if gpus > 1 else "cpu") as ranks:
        alone, expected = ranks.run(on_first, 1, generate, options.length, options.tokens)[0]
        together, logits = ranks.run(on_first, count, generate, options.length, options.tokens)[count - 1]
    difference = ((logits - expected).norm() / expected.norm()).item()
    print(f"prompt of {options.length} tokens on {count} ranks, then {options.tokens} on one: {bytes(together)!r}")
    print(f"the same text as with the prompt on one rank: {together == alone}; logits differ by {difference:.1e}")
    return int(together != alone or not difference < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
