"""zeco_gla's error beside that of flash-linear-attention's chunk_gla, both against the float64 recurrence."""

from __future__ import annotations

import pytest
from test_gla import BF16, F32, NAMES, Whole, relative_all

import allscan

pytestmark = pytest.mark.gpu
fla = pytest.importorskip("fla.ops.gla", reason="needs fla-core and einops")


def chunk_gla(q, k, v, g, *, comm, **options):
    options.pop("cu_seqlens")
    return fla.chunk_gla(q, k, v, g, **options)


def errors_case(group, kind):
    with allscan.Communicator(group) as comm:
        whole = Whole(0, 1024, 1, 4, 128, 128, kind, BF16, F32, comm.device)
        expected = whole.reference()
        calls = (allscan.zeco_gla, chunk_gla)
        return [relative_all(NAMES, whole.ours(comm, slice(None), call), expected) for call in calls]


@pytest.mark.parametrize("kind", ["weak", "mild", "zero", "strong"])
def test_error_is_no_larger_than_flas(run, kind):
    """2 %: where both only round the result, the last digits are chance."""
    ours, theirs = run(1, errors_case, kind)[0]
    assert all(ours[name] <= 1.02 * theirs[name] for name in NAMES), (ours, theirs)
