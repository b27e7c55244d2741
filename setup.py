import re

from setuptools import find_packages, setup

URL = ""  # of the repository, once published: the package index cannot resolve relative links


def for_the_index(text: str) -> str:
    """Return the README with absolute links. Without URL, replace relative links by their text and drop pictures."""
    picture, link = r"!\[([^]]*)\]\((?!https?:)([^)]+)\)\n*", r"\[([^]]*)\]\((?!https?:|#)([^)]+)\)"
    parts = text.split("```")
    for i in range(0, len(parts), 2):  # even parts are not code
        parts[i] = re.sub(picture, rf"![\1]({URL}/raw/main/\2)\n\n" if URL else "", parts[i])
        parts[i] = re.sub(link, rf"[\1]({URL}/blob/main/\2)" if URL else r"\1", parts[i])
    return "```".join(parts)


# No upper bounds for dependencies of torch (Triton, NVSHMEM): an upper bound would make pip install an older torch.
# docs/versions.md lists the tested versions; `allscan doctor` compares.
NVSHMEM = ">=3.4"
# Symbolic links in allscan/. find_packages would follow them, and in a checkout without symbolic links omit them
LINKED = "allscan.bindings", "allscan.bindings.interpreter", "allscan.shmem_kernels"
FLA = "flash-linear-attention>=0.6,<0.7"

setup(
    name="allscan",
    version=re.search(r'^__version__ = "(.+)"', open("allscan/__init__.py", encoding="utf-8").read(), re.M)[1],
    description="All-Scan and ZeCO: sequence parallelism for linear attention, in Triton and NVSHMEM",
    long_description=for_the_index(open("README.md", encoding="utf-8").read()),
    long_description_content_type="text/markdown",
    author="The allscan authors",
    keywords="linear attention, sequence parallelism, prefix scan, Triton, NVSHMEM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["allscan*"], exclude=[f"{name}*" for name in LINKED]), *LINKED],
    package_dir={name: name.partition(".")[2].replace(".", "/") for name in LINKED},
    package_data={"allscan": ["py.typed"]},
    install_requires=["torch>=2.11", "triton>=3.6", "numpy"],
    extras_require={
        "cuda13": ["nvshmem4py-cu13>=0.3,<0.5", f"nvidia-nvshmem-cu13{NVSHMEM}", "cupy-cuda13x>=13.6"],
        "cuda12": ["nvshmem4py-cu12>=0.3,<0.5", f"nvidia-nvshmem-cu12{NVSHMEM}", "cupy-cuda12x>=13.6"],
        "network": ["libucx-cu13>=1.22"],  # make test-network; or libucx-cu12
        "fla": [FLA],
        "transformers": ["transformers>=5.18"],
        "megatron": ["megatron-core>=0.19,<0.20", FLA, "einops"],
        "ringmaster": ["axolotl-ringmaster>=0.2,<0.3"],
        "bench": ["matplotlib"],
        # nvidia-nvshmem has the bitcode to compile and check kernels that call NVSHMEM without a GPU; in the version
        # of PyTorch 2.11, because the tests count registers and stack (3.6: 128 bytes of stack)
        "test": [
            "pytest",
            "pytest-xdist",
            "matplotlib",
            "ruff",
            "mypy",
            "mkdocs-material",
            "griffe",  # docs/generate.py
            "readme-renderer[md]",  # the README as the package index shows it
            "nox",  # make matrix
            "nvidia-nvshmem-cu13==3.4.5",
            "flash-linear-attention==0.6.0",
            "transformers==5.23.0",
            "accelerate>=1.15,<2",  # transformers' Trainer, in an example
            "megatron-core==0.19.2; python_version >= '3.12'",  # for earlier Pythons see the Makefile
        ],
    },
    entry_points={"console_scripts": ["allscan=allscan.__main__:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Environment :: GPU :: NVIDIA CUDA",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
