"""The documentation runs: its snippets as pasted, its commands with flags and keys that exist, its links."""

import ast
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import folders
import pytest
from absl import flags
from ml_collections import config_flags

from dpx.runs import records, sweep

# ml_collections loads each config that way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("experiments/*/README.md"))]
SITE = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [
    *PAGES,
    *SITE,
    *sorted(ROOT.glob("experiments/*.md")),
    *sorted(set(ROOT.glob("*.md")) - set(PAGES)),
]
MODULES = [*sorted(ROOT.glob("configs/*.py")), *sorted(ROOT.glob("experiments/bench/*.py"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(
    r"^(?:.*&& )?(?:\w+=\S+ )?(?:[\w./]*python -m (experiments\.[\w.]+|pytest)|dpx (\w+))(?: +(.*))?$"
)
_ADOPTED = re.compile(r"adopt_module_key_flags\((\w+)\)")
_DEFINED_FLAG = re.compile(r"DEFINE_\w+\(\s*\"(\w+)\"")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets() -> list:
    found = []
    for page in [*PAGES, *SITE]:
        blocks = [
            code
            for language, code in _FENCE.findall(page.read_text(encoding="utf-8"))
            if language == "python"
        ]
        for number, code in enumerate(blocks):
            marks = () if page.parent == ROOT else pytest.mark.slow
            found.append(pytest.param(page, code, id=f"{name_of(page)}-{number}", marks=marks))
    return found


def text_of(path: Path) -> str:
    """A page, or the docstring of a module."""
    text = path.read_text(encoding="utf-8")
    text = (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text
    # Where a command goes on in the next line, that line's indentation is no gap before an explanation.
    return re.sub(r" *\\\n *", " ", text)


def spans_of(path: Path) -> list[str]:
    return [" ".join(span.split()) for span in _SPAN.findall(_FENCE.sub("", text_of(path)))]


def commands_of(path: Path) -> list[str]:
    lines = [line.strip() for line in text_of(path).splitlines()]
    # A line with NAME or COMMAND in it shows the form of a command.
    return [
        code
        for code in (*lines, *spans_of(path))
        if _COMMAND.search(code) and not re.search("NAME|COMMAND", code)
    ]


def options_of(path: Path) -> list[str]:
    return [
        span
        for span in spans_of(path)
        if span.startswith(("--config", "--set=")) and "NAME" not in span
    ]


def config_file(source: str) -> str:
    """The path of a config that is given by its path or by its name, with its argument."""
    path, colon, argument = source.partition(":")
    path = path if path.endswith(".py") else f"configs/{path}.py"
    return str(ROOT / path) + colon + argument


def check_command(line: str) -> str | None:
    """Raises for a module, flag, config or key that does not exist; returns the config."""
    match = _COMMAND.search(line)
    assert match, f"{line!r} is no command"
    module, verb, rest = match.groups()
    # What follows a wide gap, or stands in brackets, explains a command and shows its options.
    rest = re.sub(r"[\[\]]| {3,}.*", "", rest or "")
    arguments = shlex.split(rest, comments=True)
    if module == "pytest":
        for argument in arguments:
            if argument.startswith("tests"):
                assert (ROOT / argument.partition("::")[0]).exists(), f"{argument} does not exist"
        return None
    launched = verb or module.removeprefix("experiments.")
    source = ROOT / ("dpx/runs" if "." not in launched else "experiments")
    files = {"configs": "listing"} | dict.fromkeys(
        ("sample", "recommend", "predict", "ask"), "query"
    )
    file = files.get(launched, launched.replace(".", "/"))
    source = source / file
    source = source / "__main__.py" if source.is_dir() else source.with_suffix(".py")
    assert source.exists(), f"{launched} is no command"
    texts = [source.read_text(encoding="utf-8")]
    for adopted in _ADOPTED.findall(texts[0]):
        texts.append(source.with_name(f"{adopted}.py").read_text(encoding="utf-8"))
    if launched in ("run", "sweep"):
        texts.append((ROOT / "dpx/runs/cli.py").read_text(encoding="utf-8"))
    flags = {"help", *(name for text in texts for name in _DEFINED_FLAG.findall(text))}
    values = {}
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        assert argument.startswith("--"), f"{argument!r} is no flag"
        assert name.partition(".")[0] in flags, f"{launched} has no flag --{name}"
        values.setdefault(name, []).append(value)
    if "config" not in values:
        return None
    config = config_file(values["config"][0])
    check_options(config, [argument for argument in arguments if "." in argument.partition("=")[0]])
    check_options(config, [argument for argument in arguments if argument.startswith("--set=")])
    return config


def check_options(config: str, options: list[str]) -> None:
    """Raises for a key that a config does not have, or a value that it cannot take."""
    known = records.flatten(records.load_config(config).to_dict())
    for option in options:
        if option.startswith("--config."):
            key = option.removeprefix("--config.").partition("=")[0]
            assert key in known, f"{config} has no key {key}"
    given = [option for option in options if option.startswith("--config.") and "=" in option]
    parsed = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=parsed)
    arguments = ["run", f"--config={config}", *given]
    with mock.patch.object(sys, "argv", arguments):  # where a config looks for what overrides it
        parsed(arguments)
    axes = [option.removeprefix("--set=") for option in options if option.startswith("--set=")]
    for point in sweep.grid(config, axes) if axes else ():
        sweep.point_config(config, point)


def problem(check, *arguments) -> str | None:
    try:
        check(*arguments)
    except (AssertionError, ValueError, FileNotFoundError, flags.Error) as error:
        return f"{arguments[-1]}: {str(error).splitlines()[0]}"
    return None


@pytest.mark.parametrize(("page", "code"), snippets())
def test_a_snippet_runs_as_pasted(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if '"folder"' in code:  # of a pretrained model, which a page cannot bring along
        folders.with_letters(tmp_path / "folder", config={"max_position_embeddings": 48})
    exec(compile(code, name_of(page), "exec"), {"__name__": "__main__"})


def test_the_snippets_are_found():
    pages = {parameters.values[0] for parameters in snippets()}
    assert pages >= set(PAGES)
    guides = {page for page in SITE if page.parent.name == "guides"}
    assert len(pages & guides) >= len(guides) - 1  # of many devices has commands alone


@pytest.mark.parametrize("page", [*DOCUMENTS, *MODULES], ids=name_of)
def test_commands_name_what_exists(page):
    wrong = [problem(check_command, line) for line in commands_of(page)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_has_commands(page):
    assert len(commands_of(page)) >= 4


@pytest.mark.parametrize("page", [*DOCUMENTS, *MODULES], ids=name_of)
def test_options_are_of_a_config_of_the_page(page):
    """An option that stands alone belongs to a config of the commands of its page."""
    configs = {config for line in commands_of(page) if (config := check_command(line))}
    configs |= {f"{ROOT}/configs/{page.name}"} if page.parent.name == "configs" else set()

    def check(option):
        parts = shlex.split(option)
        sources = [
            config_file(part.removeprefix("--config=")) for part in parts if "config=" in part
        ]
        wrong = [problem(check_options, config, parts) for config in sources or configs]
        assert not all(wrong), wrong[0] if wrong else "no config is named on this page"

    found = [problem(check, option) for option in options_of(page)]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("python -m experiments.run --config=configs/gram.py --config.epsilonn=3", "epsilonn"),
        ("python -m experiments.run --config=configs/grams.py --workdir=runs/x", "no such config"),
        ("python -m experiments.run --config=configs/gram.py:columns --workdir=runs/x", "columns"),
        ("python -m experiments.run --config=configs/gram.py --wokdir=runs/x", "wokdir"),
        ("python -m experiments.run --config=configs/gram.py --config.rows=two", "rows"),
        ("python -m experiments.sweep --config=configs/gram.py --set=rows=two", "rows"),
        ("python -m experiments.sweep --config=configs/gram.py --set=row=2", "row"),
        ("python -m experiments.bench.speed", "no command"),
        ("dpx ran --config=gram --workdir=runs/x", "no command"),
        ("dpx run --config=gram extra --workdir=runs/x", "extra"),
        ("python -m pytest tests/test_nothing.py", "does not exist"),
    ],
)
def test_a_wrong_command_is_noticed(line, complaint):
    found = problem(check_command, line)
    assert found
    assert complaint in found.removeprefix(line)


@pytest.mark.parametrize("page", [*DOCUMENTS, ROOT / "tests/faults/README.md"], ids=name_of)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if target.is_relative_to(ROOT / "docs/api") or target == ROOT / "docs/configs.md":
            continue  # pages that are made when the site is built, which checks the links to them
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: the page has no such heading"


def anchors(page: Path) -> list[str]:
    """Headings as the hosts of repositories write them in links."""
    headings = re.findall(
        r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_measured_numbers_of_the_readme_stand_on_the_page_that_they_link_to():
    """A number stands once, on a page of results; the README repeats it and must not be left behind."""
    rows = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if " ε = " in line
    ]
    found = 0
    for row in rows:
        cell = row.rstrip("| ").rpartition("|")[2]
        for link in _LINK.findall(cell):
            page = (ROOT / link.partition("#")[0]).read_text(encoding="utf-8")
            words = re.sub(_LINK, "", re.sub(r"\]\([^)]*\)", "]", cell))
            numbers = re.findall(r"(?<![\w.])\d*\.\d+(?:e-\d+)?", words)
            assert numbers, cell
            assert [number for number in numbers if number not in page] == [], cell
            found += len(numbers)
    assert found > 12
