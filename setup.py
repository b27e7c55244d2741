from setuptools import setup

# NVSHMEM: from 3.7 its bitcode is newer than what Triton 3.6 reads, so host library and bitcode stay below that.
NVSHMEM = ">=3.4,<3.7"

setup(
    name="allscan",
    version="0.1.0",
    description="All-Scan and ZeCO: sequence parallelism for linear attention, in Triton and NVSHMEM",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[
        "allscan",
        "allscan.gla",
        "allscan.delta",
        "allscan.integrations",
        "allscan.tools",
        "allscan.shmem_kernels",
        "allscan.bindings",
    ],
    package_dir={"allscan.shmem_kernels": "shmem_kernels", "allscan.bindings": "bindings"},
    package_data={"allscan": ["py.typed"]},
    install_requires=["torch>=2.6", "triton>=3.6,<3.8", "numpy"],
    extras_require={
        "cuda13": ["nvshmem4py-cu13>=0.3,<0.5", f"nvidia-nvshmem-cu13{NVSHMEM}", "cupy-cuda13x>=13.6"],
        "cuda12": ["nvshmem4py-cu12>=0.3,<0.5", f"nvidia-nvshmem-cu12{NVSHMEM}", "cupy-cuda12x>=13.6"],
        "fla": ["flash-linear-attention>=0.6,<0.7"],
        "transformers": ["transformers>=5.23,<5.24"],
        "megatron": ["megatron-core>=0.19,<0.20", "flash-linear-attention>=0.6,<0.7", "einops"],
        "bench": ["matplotlib"],
        # the bitcode, so that kernels which call NVSHMEM can be compiled and checked without a GPU; the version that
        # PyTorch 2.11 brings along, because the tests count registers and stack (3.6: 128 bytes of stack)
        "test": [
            "pytest",
            "pytest-xdist",
            "matplotlib",
            "ruff",
            "mypy",
            "mkdocs-material",
            "mkdocstrings[python]",
            "nvidia-nvshmem-cu13==3.4.5",
            "flash-linear-attention==0.6.0",
            "transformers==5.23.0",
            "accelerate>=1.15,<2",  # transformers' Trainer, in an example
            "megatron-core==0.19.2; python_version >= '3.12'",  # for earlier ones see the Makefile
        ],
    },
    entry_points={"console_scripts": ["allscan=allscan.tools.doctor:main"]},
    classifiers=["License :: OSI Approved :: Apache Software License", "Operating System :: POSIX :: Linux"],
)
