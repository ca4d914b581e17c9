"""README and docs: every code block is executed as it stands, links lead somewhere, and the site builds."""

import multiprocessing
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from documentation import PAGES, ROOT, Reader, blocks, run_page

# One server imports what most pages need and forks a fresh process for each.
SERVER = multiprocessing.get_context("forkserver")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_does_what_the_page_says(page, tmp_path):
    if not blocks(page):
        return
    SERVER.set_forkserver_preload(["torch", "smoothout", "smoothout.measure", "smoothout.lab.cli", "sklearn.datasets"])
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=run_page, args=(page, tmp_path, theirs))
    process.start()
    theirs.close()
    failure = ours.recv() if ours.poll(240) else "no answer within four minutes"
    process.join(10)
    process.kill()
    assert failure is None, failure


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```python\nassert False\n```\n", "AssertionError"),
        ("```sh\nfalse\ntrue\n```\n", "AssertionError"),
        ("```sh\nsmoothout report nowhere\nsmoothout doctor\n```\n", "no run in nowhere"),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "the page shows"),
        ("```diff\n-raise ValueError('the old side')\n+pass\n```\n", "the old side"),
        ("```\nsrc/smoothout/\n├── nothing.py   is here\n```\n", "nothing.py is not in"),
        ("```python\n# alone.py\npass\n```\n", "no later block runs alone.py"),
        ("```python no-run\npass\n```\n", "run_python no-run"),
        ("```yaml\na: 1\n```\n", "run_yaml"),
    ],
)
def test_a_block_that_is_wrong_fails(tmp_path, monkeypatch, text, what):
    page = tmp_path / "page.md"
    page.write_text(text)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("documentation.ROOT", ROOT)
    reader = Reader(page, tmp_path / "folder")
    reader.page = ROOT / page.name  # for its name in messages
    monkeypatch.setattr("documentation.blocks", lambda _: blocks(page))
    with pytest.raises(AssertionError) as error:
        reader.run()
    assert what in f"{type(error.value.__cause__).__name__} {error.value.__cause__}"


@pytest.mark.parametrize("text", ["  ```python\n  ```\n", "~~~\n~~~\n", "```python\n"])
def test_fences_that_would_be_overlooked_are_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError):
        blocks(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    assert {page.relative_to(ROOT / "docs") for page in PAGES[1:]} <= built
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("smoothout.SmoothOut.perturbed", "smoothout.measure.sharpness", "SmoothOutCallback"):
        assert f'id="{name}"' in api or name in api, name
    from_elsewhere = r'<(?:script|link|img)[^>]*(?:src|href)="?(?:https?:)?//'
    assert not re.search(from_elsewhere, api)
    assert api.count("Examples:") >= 10
    assert "<blockquote>" not in api  # what becomes of >>> in a section that is not known
    assert '<script src="iframe-worker.js">' in api


@pytest.mark.soak
def test_search_answers_from_a_folder(tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site], cwd=ROOT, check=True)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = f"file://{site}/how-to/lora.html?q=sharpness"
    command = [chromium, *flags, "--virtual-time-budget=8000", "--dump-dom", page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "matching documents" in shown


def test_what_the_site_needs_is_in_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"mkdocs-material", "mkdocstrings[python]"} == {need.partition(">")[0] for need in extras["docs"]}
    assert any("docs" in need for need in extras["dev"] if need.startswith("smoothout["))
