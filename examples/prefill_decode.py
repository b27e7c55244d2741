"""All ranks prefill a long prompt together; then each rank decodes its own text from the final states.

    python examples/prefill_decode.py             # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/prefill_decode.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

The model is that of train_text.py. Each rank processes its part of the prompt; the final state of every layer is sent
to all ranks, and so are the logits of the last token. Then each rank decodes, one token at a time, without the others
and with no memory but the states: rank r starts with the r-th most likely token. The same prompt on one rank must give
the same tokens. Prints the texts and the relative difference of the logits; above 1e-4, or with another text, the exit
status is 1.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from train_text import Model, text_bytes

import allscan
from allscan.tools.ranks import launch, on_first


def project(block, x):
    """Compute q, k, v, g of a layer as in its forward."""
    q, k, v, g = (t.unflatten(-1, (block.heads, -1)) for t in block.qkvg(block.norm(x)).chunk(4, -1))
    return q, F.normalize(k, dim=-1), v, F.logsigmoid(g + 3) / 4


def finish(block, x, o):
    x = x + block.out(o.flatten(-2))
    return x + block.mlp(x)


def prefill(model, tokens, comm):
    """Return (logits of this rank's tokens, the final state of each layer [1, H, K, V])."""
    x, states = model.embedding(tokens), []
    for block in model.blocks:
        o, state = allscan.zeco_gla(*project(block, x), comm=comm, output_final_state="all")
        x = finish(block, x, o)
        states.append(state)
    return model.head(x), states


def decode(model, token, states):
    """Run the recurrence for one token; return (its logits, the states after it)."""
    x, after = model.embedding(token[:, None]), []
    for block, state in zip(model.blocks, states):
        q, k, v, g = (t[:, 0] for t in project(block, x))
        state = g.exp()[..., None] * state + k[..., None] * v[..., None, :]
        o = q.shape[-1] ** -0.5 * (q[..., None] * state).sum(-2)
        x = finish(block, x, o[:, None])
        after.append(state)
    return model.head(x)[:, 0], after


@torch.no_grad()
def generate(group, length, count, texts):
    """Return (the next tokens, their logits): on one rank for all texts, on several for each rank's own text."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Model(64, 2).to(comm.device)
        begin, end = (rank * length // comm.size for rank in (comm.rank, comm.rank + 1))
        mine = text_bytes()[begin:end].to(comm.device)
        logits, prompt = prefill(model, mine[None], comm)
        first = logits[:, -1].clone() if end > begin else logits.new_empty(1, 256)  # the last rank has tokens
        dist.broadcast(first, dist.get_global_rank(comm.group, comm.size - 1), group=comm.group)
        comm.barrier()
        found = []
        for text in range(texts) if comm.size == 1 else [comm.rank]:
            states, logits, kept = prompt, first, []
            tokens = [logits.topk(texts).indices[:, text]]
            for _ in range(count):
                logits, states = decode(model, tokens[-1], states)
                kept.append(logits)
                tokens.append(logits.argmax(-1))
            found.append(([t.item() for t in tokens], torch.stack(kept).cpu()))
        return found


def main(ranks) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--length", type=int, default=65536 if ranks.device == "cuda" else 256, help="tokens of the prompt"
    )
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    options = parser.parse_args()
    count, arguments = ranks.size, (options.length, options.tokens, ranks.size)
    expected = ranks.run(on_first, 1, generate, *arguments)[0]
    found = [x[0] for x in ranks.run(on_first, count, generate, *arguments)]
    print(f"prompt of {options.length} tokens on {count} ranks, then {options.tokens} on each of them:")
    failed = False
    for rank, ((tokens, logits), (alone, wanted)) in enumerate(zip(found, expected, strict=True)):
        difference = ((logits - wanted).norm() / wanted.norm()).item()
        failed |= tokens != alone or not difference < 1e-4
        same = f"as on one rank: {tokens == alone}, logits differ by {difference:.1e}"
        print(f"rank {rank}: {bytes(tokens)!r}; {same}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(launch(main))
