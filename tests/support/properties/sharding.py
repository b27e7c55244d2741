"""Random sequences over the ranks, and what is where."""

from __future__ import annotations

import torch

from ..gla import owners
from ..values import chunks, place
from .draw import Place


class Sharding:
    """A sequence over the ranks: their tokens, of some none; the layout; packed sequences."""

    def __init__(self, draw, size, packed, most=7, contiguous=False):
        self.size = size
        self.tokens = [draw.choice([0, 1, 1, 2, draw.randint(3, 20), most]) for _ in range(size)]
        self.tokens[draw.randrange(size)] += 1
        self.zigzag, self.per_document = not contiguous and draw.happens(0.4), False
        if self.zigzag:
            self.tokens = [n + n % 2 for n in self.tokens]
            self.per_document = packed and draw.happens(0.5)
        self.lengths = None
        if self.per_document:  # each rank has two pieces of each sequence
            pieces = [draw.choice([0, 1, 1, 2, draw.randint(1, most)]) for _ in range(draw.randint(1, 3))]
            pieces[draw.randrange(len(pieces))] += 1
            self.lengths = [0]
            for piece in pieces:
                self.lengths.append(self.lengths[-1] + 2 * size * piece)
            self.tokens = [2 * sum(pieces)] * size
        elif packed:
            edges, total = [0, *(end for _, _, end in chunks(self.tokens, self.zigzag))], sum(self.tokens)
            cuts = [draw.choice([draw.randint(0, total), draw.choice(edges)]) for _ in range(draw.randint(0, 6))]
            self.lengths = sorted([0, total, *cuts, *draw.sample(cuts, len(cuts) // 3)])
        self.total, self.form = sum(self.tokens), draw.choice(["list", "int32", "int64"])
        documents = self.lengths if self.per_document else None
        self.places = [place(Place(rank, size), self.tokens, self.zigzag, documents) for rank in range(size)]
        self.owner = torch.empty(self.total, dtype=torch.int64)
        for rank, mine in enumerate(self.places):
            self.owner[mine] = rank
        self.text = f"tokens {self.tokens}, {self.options(False)}"

    def draw_loss(self, draw, batch):
        """Draw which ranks return final states, and what is in the loss. Every rank uses a result."""
        self.finals = draw.choice([[False], [True], [True], ["all"], [draw.happens(0.5) for _ in self.tokens]])
        self.finals = (self.finals * self.size)[: self.size]
        loss = draw.choice(["o", "both", "final"])
        self.uses_o = [loss != "final" or not final for final in self.finals]
        self.uses_final = [loss != "o" and bool(final) for final in self.finals]
        sequences = batch if self.lengths is None else len(self.lengths) - 1
        last = owners(self.tokens, None if self.per_document else self.lengths, sequences, self.zigzag)[1]
        self.shown, self.weighed = ([bool(used[r]) for r in last] for used in (self.finals, self.uses_final))
        self.text += f", final states {self.finals}, loss of {loss}"

    def of_loss(self, do, dfinal):
        """Gradients of the whole's (o, final states), float64, if each rank uses what uses_o and uses_final say."""
        do, dfinal = do.double().clone(), dfinal.double().clone()
        for mine, used in zip(self.places, self.uses_o, strict=True):
            do[:, mine] *= used
        if self.finals[0] == "all":  # every rank's loss has the same gradient
            return do, dfinal * self.size * self.uses_final[0]
        dfinal[[not used for used in self.weighed]] = 0.0
        return do, dfinal

    def backward(self, rank, o, final, do, dfinal):
        results = [(o, do)] * self.uses_o[rank] + [(final, dfinal)] * self.uses_final[rank]
        torch.autograd.backward(*zip(*results, strict=True))

    def options(self, tensors=True):
        """The call's arguments."""
        packed = self.lengths
        if tensors and packed is not None and self.form != "list":
            packed = torch.tensor(packed, dtype=getattr(torch, self.form))
        layout = "zigzag" if self.zigzag else "contiguous"
        return dict(cu_seqlens=packed, layout=layout, per_document=self.per_document)

    def joined(self, parts, whole):
        """The tokens of all ranks, [B, T, ...], in order; like ``whole``."""
        found = torch.full_like(whole, float("nan"))
        for mine, part in zip(self.places, parts, strict=True):
            found[:, mine] = part.to(whole.dtype)
        return found

    def check_owners(self, name, parts, last):
        """A final state (``last``) lies on the rank of the sequence's last token, an initial state's gradient on the
        first's."""
        for i in range(parts[0].shape[0]):
            begin, end = (0, self.total) if self.lengths is None else self.lengths[i : i + 2]
            having = [p for p in range(self.size) if parts[p][i].any()]
            if self.lengths is None and not self.tokens[-1 if last and not self.zigzag else 0]:
                owner = 0 if self.zigzag or not last else self.size - 1  # of states, also without tokens
            elif begin < end:
                owner = self.owner[end - 1 if last else begin].item()
            else:
                assert len(having) <= 1, (name, i, having)
                continue
            assert having in ([], [owner]), (name, i, having)

    def assembled(self, name, parts, whole):
        """What the ranks have found of a tensor of tokens, of "final" or of "dinitial", like ``whole``."""
        if name not in ("final", "dinitial"):
            return self.joined(parts, whole)
        if name == "final" and self.finals[0] == "all":
            assert all(torch.equal(part, parts[0]) for part in parts), name
            return parts[0].double()
        parts = [torch.zeros_like(whole) if part is None else part for part in parts]
        self.check_owners(name, parts, name == "final")
        return sum(part.double() for part in parts)
