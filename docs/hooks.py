"""Pages of the site that are made from the repository: included, or generated, and never copied.

MkDocs calls the functions `on_*`. Links lead from file to file of the repository, so that its host can follow
them too, and are turned to lead from page to page of the site.
"""

import ast
import os
import re
import sys
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Pages of the site, and the files that they are.
INCLUDED = {
    "index.md": "README.md",
    "sweeps.md": "experiments/README.md",
    "how_far_it_goes.md": "experiments/how_far_it_goes.md",
    "papers/private_training.md": "experiments/dp_transformer/README.md",
    "papers/noisy_head.md": "experiments/noisy_head/README.md",
    "papers/attention_matrix.md": "experiments/gram/README.md",
    "papers/cross_attention.md": "experiments/cross_attention/README.md",
    "audits.md": "experiments/audit/README.md",
    "benchmarks.md": "experiments/bench/README.md",
    "security.md": "SECURITY.md",
    "planted_faults.md": "tests/faults/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
# Modules that are used by their own name, and stand on the page of their room.
MODULES = {
    "data": ["columns", "embedding", "minilm", "newsgroups"],
    "nn": [
        *("transformer", "recurrent", "cross_attention", "gram_attention", "linear_attention"),
        *("lora", "peft", "pretrained"),
    ],
    "noise": ["lattice", "secure", "stream"],
    "recommend": ["popularity", "transitions", "item_gram", "metrics"],
    "training": ["correlated", "planning", "sources"],
}
NOTEBOOKS = "experiments/notebooks"
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_config(config):
    """Fills the sections of the navigation that have a page for each room, and for each notebook."""
    for section in config.nav:
        if "API reference" in section:
            section["API reference"] += [f"api/{room}.md" for room in rooms()]
        if "Notebooks" in section:
            section["Notebooks"] += [f"notebooks/{path.name}" for path in notebooks()]
    return config


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files, config):
    """Adds the pages that no file in docs/ holds."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in INCLUDED.items()}
    pages |= {f"api/{room}.md": _reference(room) for room in rooms()}
    pages["configs.md"] = _configs()
    pages |= {_source_page(path): _listing(path) for path in _linked_sources()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    place = {"dest_dir": config.site_dir, "use_directory_urls": config.use_directory_urls}
    for path in notebooks():  # as if experiments/ were a folder of pages
        files.append(File(f"notebooks/{path.name}", str(ROOT / NOTEBOOKS / ".."), **place))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns the links of a page, but for what stands in code."""
    uri = page.file.src_uri
    source = INCLUDED.get(uri, f"docs/{uri}")
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_relinked(markdown[at : fence.start()], uri, source), fence[0]]
        at = fence.end()
    return "".join([*parts, _relinked(markdown[at:], uri, source)])


def on_page_content(html, page, config, files):
    """Turns the links of a notebook, which is a page without Markdown."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html

    def turned(match):
        target = _target(match[1], "index.md", f"{NOTEBOOKS}/{page.file.name}.ipynb")
        path, hash_, anchor = target.partition("#")
        return f'href="{files.get_file_from_path(path).url_relative_to(page.file)}{hash_}{anchor}"'

    return re.sub(r'href="(\.\./[^"]+)"', turned, html)


def rooms() -> list[str]:
    """The rooms of `dpx`, as its stub imports them, and the functions that lie in none of them."""
    stub = ast.parse((ROOT / "dpx" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = [alias.name for node in imports if node.module is None for alias in node.names]
    return sorted({*named, "clipping", "runs.experiment"})


def notebooks() -> list[Path]:
    return sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))


def _reference(room: str) -> str:
    parts = [f"# dpx.{room}\n\n::: dpx.{room}\n"]
    options = "    options:\n      heading_level: 3\n"
    for name in _hidden(room):
        parts.append(f"## {name}\n\n::: dpx.{room}.{name}.{name}\n{options}")
    for name in MODULES.get(room, ()):
        parts.append(f"## dpx.{room}.{name}\n\n::: dpx.{room}.{name}\n{options}")
    return "\n".join(parts)


def _hidden(room: str) -> list[str]:
    """The functions of a room whose module has their name, and stands in their place for mkdocstrings."""
    package = ROOT / "dpx" / room.replace(".", "/")
    if not package.is_dir():
        return []
    init = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in init.body if isinstance(node, ast.ImportFrom)]
    own = [(node.module or "").rpartition(".")[2] for node in imports]
    named = zip(own, imports, strict=True)
    return [name for name, node in named if name in {alias.name for alias in node.names}]


def _configs() -> str:
    """Every key of every config: its default and its meaning, from the configs themselves."""
    sys.path.insert(0, str(ROOT))
    from dpx.runs import listing, sources

    lines = [
        "# Configs\n",
        "`dpx run --config=NAME --workdir=DIR --config.KEY=VALUE` changes a key, and "
        "`dpx run --config=NAME --help` prints what stands here. Of a variant the table shows what is not as "
        "in the first one. Every config takes `tiny` too, as in `quickstart:tiny`, to run in seconds.\n",
    ]
    for name in sources.names():
        lines += [f"## {name}\n", f"{listing.summary(name)}\n"]
        seen: dict[str, listing.Key] = {}
        for variant in listing.variants(name) or ("",):
            found = listing.keys(f"{name}:{variant}" if variant else name)
            changed = [key for key in found if seen.get(key.name) != key]
            if variant:
                lines.append(f"### {name}:{variant}\n")
            lines += ["| key | default | meaning |", "|---|---|---|"]
            lines += [
                f"| `{k.name}` | `{_cell(k.default)}` | {_cell(k.meaning)} |" for k in changed
            ]
            lines.append("")
            seen = seen or {key.name: key for key in found}
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A cell of a table, which may be broken where a tuple has commas."""
    return re.sub(r",(?=\w)", ", ", text).replace("|", "\\|")


def _relinked(text: str, page: str, source: str) -> str:
    return _LINK.sub(lambda match: match[1] + _target(match[2], page, source) + match[3], text)


def _target(link: str, page: str, source: str) -> str:
    if re.match(r"[a-z]+:|#", link):
        return link
    path, hash_, anchor = link.partition("#")
    place = os.path.normpath(os.path.join(os.path.dirname(source), path))
    pages = {file: known for known, file in INCLUDED.items()}
    if place.startswith("docs/"):
        target = place.removeprefix("docs/")
    elif place.startswith(NOTEBOOKS):
        target = place.replace(NOTEBOOKS, "notebooks")
        target = target if target.endswith(".ipynb") else "notebooks/index.md"
    else:
        target = pages.get(place) or _source_page(place)
    return os.path.relpath(target, os.path.dirname(page) or ".") + hash_ + anchor


def _linked_sources() -> set[str]:
    """The files of code that pages link to."""
    found = set()
    own = (str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    for source in [*INCLUDED.values(), *own]:
        for match in _LINK.finditer(_FENCE.sub("", (ROOT / source).read_text(encoding="utf-8"))):
            path = match[2].partition("#")[0]
            place = os.path.normpath(os.path.join(os.path.dirname(source), path))
            if place.endswith((".py", ".cff")) and not re.match(r"[a-z]+:", path):
                found.add(place)
    return found


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _listing(path: str) -> str:
    language = {".py": "python", ".cff": "yaml"}[Path(path).suffix]
    return f"# {path}\n\n```{language}\n{(ROOT / path).read_text(encoding='utf-8')}\n```\n"
