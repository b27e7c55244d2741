"""bench.variants without GPUs: a wrong kernel is not timed."""

from __future__ import annotations

import os
import shutil

import pytest

from bench import variants
from bench.variants import Variant

pytestmark = pytest.mark.cpu
KERNELS = os.path.join(os.path.dirname(variants.__file__), os.pardir, "shmem_kernels")


def copied(folder):
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return str(folder)


def changed(folder, old, new):
    """Copy the kernels and replace one line of scan.py; return the folder."""
    copied(folder)
    text = (folder / "scan.py").read_text()
    assert text.count(old) == 1
    (folder / "scan.py").write_text(text.replace(old, new))
    return str(folder)


def test_a_variant_is_checked_before_it_is_timed(pool, tmp_path):
    same = changed(tmp_path / "same", "epoch, word, ok = begin(channel, 0)", "epoch, word, ok = begin(channel, 0 * 1)")
    wrong = changed(tmp_path / "wrong", "b_state = load_tile(p_state, ch", "b_state = 2 * load_tile(p_state, ch")
    both = [Variant.of(f"now={KERNELS}"), Variant.of(f"same={same}:256:2")]
    rows = pool.run(variants.point, 1 << 14, both)[1]
    assert [(row["variant"], row["words"]) for row in rows] == [("now", 4096), ("same", 256)]
    with pytest.raises(RuntimeError, match="wrong:256: [0-9]+ words are wrong"):
        pool.run(variants.point, 1 << 14, [Variant.of(f"wrong={wrong}:256")])


def test_the_slowest_rank_counts():
    first = dict(latencies=[3.0, 1.0, 2.0], in_a_row=[9.0, 9.0, 1.0])
    found = variants.slowest([first, dict(latencies=[1.0] * 3, in_a_row=[2.0] * 3)])
    assert [found[x] for x in ("us", "least_us", "most_us", "back_to_back_us")] == [2.0, 1.0, 3.0, 9.0]


@pytest.mark.parametrize("text", ["now", "now=nowhere", f"now={KERNELS}:1:2:3", f"now={KERNELS}:x"])
def test_what_is_no_variant_is_rejected(text):
    with pytest.raises(ValueError, match="is not NAME=FOLDER|must be numbers"):
        Variant.of(text)
