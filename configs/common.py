"""What every config file shares: the argument after the colon."""


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
