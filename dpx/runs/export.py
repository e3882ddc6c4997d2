"""Exports the private model of a finished run, with a card that states its guarantee.

dpx export --workdir=RUN --to=FOLDER [--merged | --gguf] [--base=NAME] [--nometrics]
"""

from pathlib import Path

from absl import flags

from dpx import _storage as storage
from dpx.runs import card, cli, query, records


def write(
    workdir: Path, folder: Path, *, form: str, base: str | None, metrics: bool = True
) -> None:
    """Writes a folder with the model of a run, "adapters", "merged" or as "gguf", and its card as README.md.

    Only the private model, `privacy.json` and the table of `result.json` are taken from the run's folder.

    Raises:
      FileNotFoundError: if `workdir` holds no finished run.
      ValueError: for a run whose model cannot be exported, or a `folder` that is not empty.
    """
    model = query.model_of(workdir, "export")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--to={folder} must be a new or an empty folder: use another one")
    record = records.read(workdir)
    assert record is not None  # else `model_of` would have raised
    exported = model.export(folder, form=form, base=base)
    storage.write_text(folder / "README.md", card.text(record, exported, metrics=metrics))


@cli.OneLine(ValueError)
def _export() -> None:
    flag = flags.FLAGS
    folder = Path(cli.given("to", "FOLDER, which is made")).expanduser()
    workdir = cli.run_folder()
    if flag.merged and flag.gguf:
        raise ValueError("--gguf must be without --merged: a GGUF file holds a merged model")
    form = "gguf" if flag.gguf else "merged" if flag.merged else "adapters"
    write(workdir, folder, form=form, base=flag.base, metrics=flag.metrics)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def start() -> None:
    """The command line."""
    flags.DEFINE_string("workdir", None, "folder of a finished run")
    flags.DEFINE_string("to", None, "folder to write, which is made")
    flags.DEFINE_bool(
        "merged", False, "write the whole model, adapters merged, in place of adapters"
    )
    flags.DEFINE_bool("gguf", False, "write it as model.gguf, which llama.cpp opens")
    flags.DEFINE_string("base", None, "name of the pretrained model, by default that of its folder")
    flags.DEFINE_bool("metrics", True, "put the table into the card, which no guarantee covers")
    cli.start(_export)
