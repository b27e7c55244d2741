"""A long training (support/soak.py), which GPUs run for thousands of steps: here a minute in the interpreter."""

from __future__ import annotations

from collections import Counter

import pytest

from support import soak

pytestmark = pytest.mark.cpu
STEPS = 40  # 100 take more than two minutes in the interpreter on two cores


@pytest.mark.slow
def test_soak():
    """soak() checks its results; this test checks that the planned events have happened."""
    every = [word for name in ("fault", "checkpoint", "validate") for word in (f"--{name}-every", str(STEPS // 4))]
    options = soak.parsed(["--device", "cpu", "--steps", str(STEPS), "--timeout", "20", *every])
    planned = [soak.plan(options, step) for step in range(STEPS)]
    assert {p.kind for p in planned} == set(soak.KINDS) and {p.fault for p in planned} == {None, *soak.FAULTS}
    assert any(p.again for p in planned) and any(p.late[1] for p in planned)
    text, answers = soak.soak(options)
    assert sum(found["skipped"] for found in answers) == 4, text
    for found in answers:
        counts = found["resyncs"], found["checkpoints"], len(found["losses"]), len(found["validations"])
        assert counts == (4, 4, STEPS, 4), text
        assert sum(found["errors"].values()) == 4
    raised = sum((found["errors"] for found in answers), Counter())
    assert raised["SkippedBatch"] == 2 and raised["TypeError"] == 1, raised  # on the ranks at fault
    assert raised["AllScanTimeout"] + raised["AllScanOutOfStep"] + raised["AllScanRejected"] == 5, raised


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(losses=[3.0, 2.0, float("nan"), 1.0]), "1 of 4 losses differ from those of one rank, first in step 2"),
        (dict(losses=[3.0, 2.0, 2.0, 1.01]), "1 of 4 losses differ from those of one rank, first in step 3"),
        (dict(validations=[1.002]), "a loss of validation differs"),
        (dict(spread=1e-9), "the ranks' parameters differ"),
        (dict(end=dict(gpu=0, arena=90)), "90 at the end"),
        (dict(closed=90), "90 after close"),
        (dict(keys=1), "1 keys are left"),
    ],
)
def test_what_the_verdict_sees(wrong, message):
    options = soak.parsed(["--device", "cpu"])
    options.steps = 4
    memory = dict(gpu=0, arena=100)
    good = dict(
        losses=[3.0, 2.0, 2.0, 1.0],
        validations=[1.0],
        spread=0.0,
        warm=memory,
        end=memory,
        free=100,
        closed=100,
        keys=0,
    )
    expected = good["losses"], good["validations"], [1e-6]
    soak.check(options, expected, [good, good])
    with pytest.raises(AssertionError, match=message):
        soak.check(options, expected, [good | wrong, good])
    with pytest.raises(AssertionError, match="the parameters after 40 steps differ by 2.0e-03"):
        soak.check(options, (*expected[:2], [1e-6, 2e-3]), [good, good])


@pytest.mark.quick
def test_memory_that_grows_is_seen():
    options = soak.parsed(["--device", "cpu", "--steps", str(2 * soak.FILLED)])
    losses = [2.0 - i / options.steps for i in range(options.steps)]
    warm = dict(gpu=5 << 20, arena=100)
    found = dict(losses=losses, validations=[], spread=0.0, warm=warm, end=warm, free=100, closed=100, keys=0)
    soak.check(options, (losses, [], []), [found, found])
    more = found | dict(end=warm | dict(gpu=(6 << 20) + 512))
    with pytest.raises(AssertionError, match="memory has grown by 1049088 bytes"):
        soak.check(options, (losses, [], []), [found, more])
