"""Names, comments, docstrings and messages use the field's terms (MPI, NCCL, Triton, PyTorch), one for each concept."""

from __future__ import annotations

import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Forbidden patterns, and their replacements
WORDS = {
    r"\bin the whole (this|that|of)\b": "in the global sequence",
    r"\b(runs?|launched|recorded) beside\b(?! (the kernel|kernels|NCCL))": "overlapped with, on a side stream",
    r"\b(class|->|:) (Kept|Room)\b|\b(Kept|Room)\(|\b(kept_for|_kept_here)\b": "SavedStates; Scratch",
    r"\bkeeps(=|: bool)": "saves",
    r"\bBeside\b(?=[:(\]]| *[|,]|$)|\.beside\(|_beside\b": "Side, side_stream",
    r"\.narrow\b(?!\()": "is_bf16",
    r"\b[bp]_(enters|leaves|entering|leaving)\b|\b(load_entering|Entering)\b": "incoming, local, outgoing state",
    r"\bScanKind\b": "ScanVariant",
    r"tickets?\b": "fwd_epoch, forward epoch: the epoch of a forward launch, which its adjoint launch finds",
    r"\bProblem\b": "DeferredError",
    r"one_hop|ONE_HOP": "neighbour shift",
    r"nothing_passes|[Nn]othing passes through": "zero decay, the zero-decay fast path",
    r"(?<![Rr]ecursive )(?<!recursive_)(?<!123-)doubling\b": "recursive doubling",
    r"free[ _]running": "back to back",
    r"fine_product|store_fine": "dot_split, store_split",
    r"\bwidest\b": "BV_max",
    r"\bRendezvous\b|\brendezvous\b": "StoreExchange",
    r"(?i)(?<!connection )\brefus(e|es|ed|al|als|ing)\b|_refus(e|es|ed|al)": "reject",
    r"\bout of step\b|out_of_step": "desynchronized",
    r"\blate ranks?\b|late_rank": "straggler",
    r"\b[Ww]hat (enters|leaves)\b|\bwhat precedes\b": "incoming state; local state, outgoing state",
    r"there[ _]and[ _]back|\bthere, back\b(?! = launcher)|way back begins": "ascending and descending scan",
    r"\btravel": "is sent",
}
# Not allowed as a name or as its part between underscores; prose may use them
PARTS_OF_NAMES = {
    "given": "inputs, arguments, initial, requested ...",
    "made": "outputs, results, counts, created ...",
    "kept": "saved, cached, retained ...",
}
PACKAGES_OF_NAMES = "allscan", "shmem_kernels", "bindings"
PUBLIC_NAMES = {("allscan/launch/graph_cache.py", "kept")}  # GraphCounts.kept
NAMES_OF_OTHERS = r"_symmetric_memory\.rendezvous|rdzv|_symm.*rendezvous|symm_mem.*rendezvous"


def lines():
    for folder in ("allscan", "shmem_kernels", "bindings", "tests", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT)
            linked = str(inside).startswith(("allscan/shmem_kernels", "allscan/bindings"))
            if path.name == "test_words.py" or linked:
                continue
            yield from lines_of(path)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")):
        yield from lines_of(path)


def lines_of(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}", line


@pytest.mark.quick
@pytest.mark.cpu
def test_words():
    found = [
        f"{where}\n    say {instead}"
        for where, line in lines()
        if not re.search(NAMES_OF_OTHERS, line)
        for word, instead in WORDS.items()
        if re.search(word, line)
    ]
    assert not found, "\n".join(["", *found])


def names_of(path):
    """Yield (location, path inside the repository, name) of each name in the code of a file."""
    inside = str(path.relative_to(ROOT))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield f"{inside}:{token.start[0]}: {token.string}", inside, token.string


@pytest.mark.quick
@pytest.mark.cpu
def test_names():
    paths = [path for package in PACKAGES_OF_NAMES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > len(PACKAGES_OF_NAMES)
    found = [
        f"{where}\n    say {instead}"
        for path in paths
        for where, inside, name in names_of(path)
        if (inside, name) not in PUBLIC_NAMES
        for part, instead in PARTS_OF_NAMES.items()
        if part in name.lower().split("_")
    ]
    assert not found, "\n".join(["", *found])
