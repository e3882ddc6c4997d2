"""The site is built strictly, no link in it leads nowhere, and its search finds what people look for."""

import functools
import html.parser
import http.server
import shutil
import subprocess
import sys
import threading
from importlib import util
from pathlib import Path
from urllib import parse

import pytest

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        util.find_spec("mkdocs") is None, reason='mkdocs is not installed: pip install -e ".[docs]"'
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, which is built from this clone."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(target)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


class _Page(html.parser.HTMLParser):
    """What a page can be linked by, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = {""}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def broken(site):
    """The links inside the site that lead nowhere, with their pages."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            url = parse.urlparse(link)
            if url.scheme or url.netloc or path.name == "404.html":
                continue
            place = parse.unquote(url.path)
            target = (path.parent / place).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            fragment = parse.unquote(url.fragment)
            known = pages[target].anchors if target in pages else {fragment}
            if not target.exists() or fragment not in known:
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def test_no_link_is_broken(site):
    assert len(list(site.rglob("*.html"))) > 40
    assert broken(site) == []


def test_a_broken_link_is_noticed(site, tmp_path):
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    page = copy / "concepts" / "index.html"
    page.write_text(page.read_text() + '<a href="../nowhere/">a</a><a href="#nothing">b</a>')
    assert broken(copy) == ["concepts/index.html: ../nowhere/", "concepts/index.html: #nothing"]


def test_included_pages_are_those_of_the_repository(site):
    security = (site / "security" / "index.html").read_text(encoding="utf-8")
    assert "Threat model" in security
    configs = (site / "configs" / "index.html").read_text(encoding="utf-8")
    assert "l2 norm of a record at most" in configs
    assert "recommender:table" in configs
    training = (site / "api" / "training" / "index.html").read_text(encoding="utf-8")
    assert 'id="dpx.training.fit"' in training
    for room, name in [("training", "privatize"), ("audit", "replay"), ("noise", "release")]:
        text = (site / "api" / room / "index.html").read_text(encoding="utf-8")
        assert f'id="{name}"' in text  # whose module has their name


@pytest.fixture(scope="module")
def address(site):
    """Where a server on this machine shows the site."""
    handler = functools.partial(_Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium here: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=driver)
    with webdriver.Chrome(options=options, service=service) as opened:
        yield opened


def wait_for(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(condition)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("AdaptiveClipNorm", "api/training/"),
        ("neighbouring", "concepts/"),
        ("resume", "guides/resume/"),
    ],
)
def test_search_finds(address, browser, words, page):
    browser.set_window_size(1280, 900)
    browser.get(address)
    browser.execute_script("document.querySelector('.md-search__input').focus()")
    browser.switch_to.active_element.send_keys(words)

    def results(browser):
        return [
            link.get_attribute("href")
            for link in browser.find_elements("css selector", "a.md-search-result__link")
        ]

    found = wait_for(browser, results)
    assert any(page in link for link in found), found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("page", ["", "configs/", "papers/private_training/", "api/training/"])
def test_pages_fit_narrow_and_wide_screens_light_and_dark(address, browser, page, width, scheme):
    """No page scrolls sideways, no script fails, and text can be told from what is behind it."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(address + page)
    browser.execute_script("localStorage.clear()")  # of the scheme that was shown before
    browser.refresh()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    chosen = browser.execute_script("return document.body.dataset.mdColorScheme")
    assert chosen == {"light": "default", "dark": "slate"}[scheme]
    article = browser.find_element("css selector", "article")
    text, behind = (
        luminance(article.value_of_css_property("color")),
        luminance(
            browser.find_element("css selector", "body").value_of_css_property("background-color")
        ),
    )
    lighter, darker = max(text, behind), min(text, behind)
    assert (lighter + 0.05) / (darker + 0.05) > 4.5
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


def luminance(colour):
    """Of a colour as CSS has it, rgb(a)(r, g, b…), by the definition of WCAG."""
    parts = [float(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
