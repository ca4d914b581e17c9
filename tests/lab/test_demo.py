"""The demo, run as a person runs it, and the page as a browser sees it."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from in_process import smoothout
from smoothout.lab import measurements
from smoothout.lab.runs import find_runs, load_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of three seeds in an empty folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "smoothout", "demo", "--seeds", "3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_the_last_line_is_the_page_alone(demo):
    folder, lines = demo
    assert Path(lines[-1]) == folder / "runs" / "demo" / "index.html"
    assert Path(lines[-1]).is_file()


def test_every_kind_of_run_is_there_and_in_the_table(demo):
    folder, lines = demo
    runs = [load_run(path) for path in find_runs(folder)]
    assert len(runs) == 18
    assert {(r.config.batch_size, r.config.method) for r in runs} == {
        (b, m) for b in (16, 718) for m in ("plain", "smoothout", "adasmoothout")
    }
    text = "\n".join(lines)
    assert "test accuracy" in text
    assert "loss rise under noise" in text
    assert all(run.record.last.test_accuracy > 0.9 for run in runs)
    assert all(run.record.test_origin == "test" for run in runs)


def test_the_page_says_first_how_much_sharper_the_large_batch_is(demo):
    folder, lines = demo
    rises = {}
    for size in (16, 718):
        runs = find_runs(folder / "runs" / "demo" / f"batch-{size}" / "plain")
        curves = [measurements.load(run, "sensitivity-train").result for run in runs]
        rises[size] = sum(curve.losses[-1] - curve.losses[0] for curve in curves) / len(curves)
    assert rises[718] > 10 * rises[16]
    told = f"(loss rise {rises[718]:.3g} against {rises[16]:.2g})"
    page = Path(lines[-1]).read_text()
    assert f"{rises[718] / rises[16]:.2g} times as sharp as the small batch&#39;s {told}" in page
    assert "rise of the loss" in page  # on a scale that shows the small batch's curves


def test_fewer_runs_than_a_claim_needs_are_refused(tmp_path):
    refused = smoothout("demo", "--seeds", 2, cwd=tmp_path)
    assert refused.returncode == 1
    assert "--seeds 2: expected at least 3" in refused.stderr
    assert not list(tmp_path.iterdir())


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [
            (tag, k, v) for k, v in attributes if k in ("src", "href", "xlink:href", "data", "action", "srcset")
        ]


def test_the_page_is_self_contained_and_says_where_it_comes_from(demo):
    _, lines = demo
    page = Path(lines[-1]).read_text()
    links = Links()
    links.feed(page)
    assert all(value.startswith("#") for _, _, value in links.found), links.found
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 5  # four plots and the toy
    assert "smoothout demo" in page
    assert "torch 2." in page
    assert "± " in page


def test_the_same_command_again_trains_nothing(demo):
    folder, _ = demo
    results = {p: p.stat().st_mtime_ns for p in folder.rglob("result.json")}
    again = smoothout("demo", "--seeds", 3, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert results == {p: p.stat().st_mtime_ns for p in folder.rglob("result.json")}


def test_report_of_the_same_runs(demo):
    folder, _ = demo
    command = ["report", "runs", "--out", "page.html"]
    done = smoothout(*command, "--figures", "figures", cwd=folder)
    assert done.stdout.strip() == str(folder / "page.html")
    page = (folder / "page.html").read_text()
    assert "batch 718: AdaSmoothOut" in page
    figures = [file.read_text() for file in (folder / "figures").glob("*.svg")]
    assert len(figures) == page.count("<svg") > 0
    assert all(figure in page for figure in figures)
    assert {ElementTree.fromstring(figure).tag for figure in figures} == {"{http://www.w3.org/2000/svg}svg"}
    markdown = smoothout(*command, "--markdown", cwd=folder).stdout
    assert markdown.count("\n| batch ") == 10
    no_folder = smoothout("report", "runs", "--out", "other.html", "--figures", "page.html", cwd=folder)
    assert no_folder.returncode == 1
    assert "page.html: cannot be a folder of figures (File exists)" in no_folder.stderr
    assert not (folder / "other.html").exists()
    missing = smoothout("report", "nowhere", cwd=folder)
    assert missing.returncode == 1
    assert "no run in nowhere" in missing.stderr


@pytest.mark.soak
@pytest.mark.parametrize("width", [1280, 400])
def test_a_real_browser_shows_no_error_and_asks_nobody(demo, width, tmp_path):
    """The page's own security policy forbids every request: one that is tried shows on the console."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    _, lines = demo
    picture = tmp_path / "page.png"
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    more = "--disable-component-update --enable-logging=stderr --v=0 --hide-scrollbars"
    done = subprocess.run(
        [
            chromium,
            *flags.split(),
            *more.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},3000",
            f"--screenshot={picture}",
            f"file://{lines[-1]}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"DBUS_SESSION_BUS_ADDRESS": "/dev/null"},
    )
    assert picture.stat().st_size > 50_000
    assert "CONSOLE" not in done.stderr, done.stderr
