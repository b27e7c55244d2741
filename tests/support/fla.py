"""flash-linear-attention in the tests."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
import triton.runtime.interpreter as interpreter
from triton.runtime.autotuner import Autotuner

from allscan.reference import gla_reference

os.environ["FLA_CACHE_RESULTS"] = "0"  # import_fla makes up what would be kept for other programs


def import_fla():
    """fla's models, each kernel in the first of its configurations: their speed does not matter here."""
    Autotuner._bench = lambda *_, **__: [1.0, 1.0, 1.0]
    if (
        not torch.cuda.is_available()
    ):  # numpy 2.4 does not take the interpreter's [1]-shaped bounds of loops for numbers
        patch = interpreter._patch_lang_tensor

        def patched(tensor, *scope):
            patch(tensor, *scope)
            tensor.__index__ = lambda self: self.handle.data.item()

        interpreter._patch_lang_tensor = patched
    import fla.layers.gla
    import fla.models.gla

    return fla


def recurrence(q, k, v, g, cu_seqlens=None, output_final_state=False, **_):
    """chunk_gla, token by token."""
    o, state = gla_reference(q, k, v, g, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), state.mT.to(v.dtype)


H, D = 4, 64  # heads, widths
T = 192 if torch.cuda.is_available() else 48  # tokens of a rank


WIDTHS = dict(q=D, k=D, v=D, g=1, gk=D, x=D, beta=1, u=D)


def drawn(names, tokens):
    generator = torch.Generator().manual_seed(0)
    for name in names:
        x = torch.randn((H, D) if name == "u" else (1, tokens, H, WIDTHS[name]), generator=generator)
        if name in ("g", "gk"):
            x = F.logsigmoid(x) * (3 / T)  # a tenth of a state is left after a rank
        x = F.normalize(x, dim=-1) if name == "k" else x.sigmoid() if name == "beta" else x
        yield x.squeeze(-1) if name in ("g", "beta") else x
