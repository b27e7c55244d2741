"""Creates stand-ins for the CUDA libraries of a torch wheel that was installed without them (``--no-deps``):

    python tests/matrix/stand_ins.py          # for this interpreter's torch

A torch for CUDA can then be imported on a machine without a GPU, and takes 2 GB less. Each missing library is compiled
from a C file with the versioned symbols that torch's own libraries need from it. Each symbol is a function that returns
cudaErrorNoDevice, so torch finds no GPU. CUDA does not work: for tests on CPUs only, never shipped.

Needs Linux, a C compiler, nm and objdump.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(library: str, *options: str) -> list[tuple[str, str]]:
    """Return (name, version or "") of the dynamic symbols that nm lists."""
    lines = (line.split() for line in output("nm", "-D", "--with-symbol-versions", *options, library).splitlines())
    names = (words[-1].partition("@") for words in lines if words and words[-2] not in "wv")
    return [(name, version.lstrip("@")) for name, _, version in names]


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing(folder: str) -> dict[str, dict[str, set[str]]]:
    """Return {library: {version: symbols}} that the libraries in ``folder`` need and the machine lacks."""
    own = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if ".so" in name]
    present = {os.path.basename(path) for path in own}
    libraries: dict[str, dict[str, set[str]]] = {}
    wanted: dict[str, set[str]] = defaultdict(set)  # by version
    of_version: dict[str, str] = {}
    for path in own:
        header = output("objdump", "-p", path)
        for name in re.findall(r"NEEDED\s+(\S+)", header):
            if name not in present and name not in libraries and not loads(name):
                libraries[name] = {}
        for name, versions in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", header):
            of_version |= {line.split()[-1]: name for line in versions.splitlines()}
        for name, version in symbols(path, "--undefined-only"):
            wanted[version].add(name)
    there = {name for path in own for name, _ in symbols(path, "--defined-only")}
    loose = {name for name in wanted.pop("", ()) - there if not name.startswith(("Py", "_Py"))}
    for version, names in wanted.items():
        if of_version.get(version) in libraries:
            libraries[of_version[version]][version] = names
    if libraries:  # symbols without a version are looked up in all libraries
        libraries[min(libraries)].setdefault("", set()).update(loose)
    return libraries


def make(name: str, versions: dict[str, set[str]], folder: str) -> None:
    """Compile the library ``name`` in ``folder``."""
    source = [f"int allscan_stand_in(void) {{ return {NO_DEVICE}; }}"]
    source += [
        f'__attribute__((alias("allscan_stand_in"))) int {x}();' for x in sorted(set().union(*versions.values()))
    ]
    script = [
        f"{version} {{ global: {' '.join(f'{x};' for x in sorted(names))} }};"
        for version, names in versions.items()
        if version
    ]
    with tempfile.TemporaryDirectory() as work:
        paths = [os.path.join(work, file) for file in ("stand_in.c", "stand_in.map")]
        for path, lines in zip(paths, (source, script)):
            with open(path, "w") as file:
                file.write("\n".join([*lines, ""]))
        options = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{name}"]
        options += [f"-Wl,--version-script={paths[1]}"] if script else []
        subprocess.run(["cc", *options, paths[0], "-o", os.path.join(folder, name)], check=True)


def main() -> int:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        print("torch is not installed", file=sys.stderr)
        return 1
    folder = os.path.join(found.submodule_search_locations[0], "lib")
    made = missing(folder)
    for name, versions in made.items():
        make(name, versions, folder)
    if made:
        forget_requirements()
    print(f"stand-ins for {len(made)} libraries: {' '.join(sorted(made))}")
    return 0


def forget_requirements() -> None:
    """Remove the requirements on CUDA's libraries from the installed torch: pip would install them with any package
    that needs torch."""
    files = importlib.metadata.distribution("torch").files or ()
    (path,) = (str(file.locate()) for file in files if file.name == "METADATA")
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(x for x in lines if not re.match(r"Requires-Dist: (nvidia|cuda)-", x))


if __name__ == "__main__":
    sys.exit(main())
