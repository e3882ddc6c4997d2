"""What config files share: the argument after the colon, and sections that several of them have."""

from ml_collections import config_dict


def parse_arg(arg: str, variants: tuple[str, ...] = ()) -> tuple[str, bool]:
    """Splits `NAME.py:variant,tiny` into the variant and whether `tiny` was asked for.

    Args:
      arg: The text after the colon: empty, a variant, `tiny`, or both with a comma between.
      variants: The admissible variants, the default first; empty where there is only one.

    Returns:
      The variant ("" where there are none) and the flag.

    Raises:
      ValueError: for an unknown word or two variants.
    """
    words = [word for word in (arg or "").split(",") if word]
    tiny = "tiny" in words
    named = [word for word in words if word != "tiny"]
    if len(named) > 1 or any(word not in variants for word in named):
        known = ", ".join((*variants, "tiny"))
        raise ValueError(f"config argument {arg!r} is not known: use one of {known}")
    return (named or list(variants[:1]) or [""])[0], tiny


def mesh() -> dict:
    """The section `mesh`: on how many devices a model is trained, as `dpx.training.fit` takes it.

    `--config.mesh.data=8` spreads the records, `--config.mesh.model=2` every large array. By default one
    device trains, or with `--distributed` all devices of all processes.
    """
    return {"data": config_dict.placeholder(int), "model": 1}


def table() -> dict:
    """How a table of one's own is written, in the section `data`.

    `header` says whether the first line names the columns: it has to be given where that line can be both.
    `separator` has to be given where cells are not separated as the file's name says.
    """
    return {"header": config_dict.placeholder(bool), "separator": config_dict.placeholder(str)}


def non_private(**changed) -> dict:
    """The section `non_private`: how the row without privacy is trained, by what it changes of `train`.

    Of the values in `tried`, where there are any, a part of the training records chooses; what is not tried
    stands beside it. With `steps` of 0 there is no such row.
    """
    tried = dict.fromkeys(("start", "steps", "learning_rate"), ())
    own = {"start": "scratch", "batch_size": config_dict.placeholder(int)}
    return {**own, **changed, "tried": tried | changed.get("tried", {})}


def reattention(*, enabled: bool = False, max_tokens: int = 8) -> dict:
    """The section `reattention`: whether a row with it is trained, and from what it knows the tokens.

    `budget_fraction` of ε pays for releasing token probabilities, to which a record adds up to
    `max_tokens` tokens.
    """
    return {
        "enabled": enabled,
        "probabilities": "release",  # or "uniform", or "public" with a file as path
        "path": config_dict.placeholder(str),
        "budget_fraction": 0.02,
        "max_tokens": max_tokens,
        "renormalize": True,
        "scale": 1.0,
        "floor": 1e-6,
    }
