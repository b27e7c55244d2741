"""Computes log-probabilities of a model with the same bits on one rank and on all.

    python examples/same_bits.py             # on all GPUs, or on 2 CPU processes in Triton's interpreter

The model is that of train_text.py, with zeco_gla(invariant=SEGMENT): results of the recurrent layers do not depend on
the rank boundaries. All other layers are functions of one token, but libraries choose their GEMM kernel by the number
of tokens; so here these layers get SEGMENT tokens at a time, on any number of ranks. (On GPUs a batch-invariant mode of
GEMMs does the same.) Prints how many log-probabilities differ in bits between all ranks and one: 0; and, as a control,
without either of the two measures. A difference in the first case, or none in the controls, makes the exit status 1.
"""

import sys

import torch
import torch.nn.functional as F
from prefill_decode import finish, project
from train_text import Model, text_bytes

import allscan
from allscan.tools.ranks import launch, on_first

SEGMENT = 128


def by_segments(function, size, *inputs):
    """Apply ``function``, which acts on single tokens, to ``size`` tokens [1, T, ...] at a time."""
    parts = [function(*some) for some in zip(*(x.split(size, 1) for x in inputs))]
    if isinstance(parts[0], tuple):
        return [torch.cat(some, 1) for some in zip(*parts)]
    return torch.cat(parts, 1)


@torch.no_grad()
def log_probabilities(group, segment, tokens):
    """Return the log-probability of the next token, for each of this rank's tokens."""
    with allscan.Communicator(group, invariant=segment) as comm:
        torch.manual_seed(0)
        model = Model(64, 2).to(comm.device)
        # uneven: each boundary is one segment early
        cuts = [0, *(tokens * (r + 1) // comm.size - SEGMENT * (r + 1 < comm.size) for r in range(comm.size))]
        mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
        text, size = text_bytes()[: tokens + 1].to(comm.device), segment or tokens
        x = by_segments(model.embedding, size, text[None, mine])
        for block in model.blocks:
            q, k, v, g = by_segments(lambda x, block=block: project(block, x), size, x)
            o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)
            x = by_segments(lambda x, o, block=block: finish(block, x, o), size, x, o)
        logits = by_segments(model.head, size, x)
        comm.barrier()
        found = by_segments(lambda x: F.log_softmax(x, -1), size, logits)
        return found[0].gather(-1, text[1:, None][mine])[:, 0].cpu()


def main(ranks) -> int:
    size, others = ranks.size, {}
    tokens = 4 * SEGMENT * size
    for segment in (SEGMENT, 0):
        one, several = (
            torch.cat([x for x in ranks.run(on_first, n, log_probabilities, segment, tokens) if x is not None])
            for n in (1, size)
        )
        others[segment] = int((one.view(torch.int32) != several.view(torch.int32)).sum())
        assert torch.allclose(one, several, atol=1e-4)
        count = f"{others[segment]:4} of {tokens} log-probabilities differ"
        print(f"segments of {segment:3}: {count}, {size} ranks and 1")
    return int(others[SEGMENT] > 0 or others[0] == 0)


if __name__ == "__main__":
    sys.exit(launch(main, None if torch.cuda.device_count() > 1 else 2))
