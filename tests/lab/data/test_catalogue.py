"""Datasets by name: where they are looked for, what a missing one says, fetching and verifying whole datasets."""

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from misbehaving_server import serving
from small_files import append, write_image_folder

from smoothout.lab.data import NAMES, DataError, data_roots, fetch, load, status, verify
from smoothout.lab.data.published import SOURCES, RemoteFile, Source


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """The three places that are looked in, all of them empty."""
    monkeypatch.setenv("SMOOTHOUT_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "argument", tmp_path / "variable", tmp_path / "cache" / "smoothout" / "data"


def test_the_places_in_their_order(roots, monkeypatch):
    assert data_roots(roots[0]) == roots
    monkeypatch.delenv("SMOOTHOUT_DATA")
    assert data_roots() == roots[2:]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_roots() == (Path.home() / ".cache" / "smoothout" / "data",)


def test_the_first_place_that_has_it_wins(roots):
    for per_class, root in enumerate(roots[::-1], start=2):
        write_image_folder(root / "imagenette128", per_class=per_class)
        assert len(load("imagenette", roots[0]).train) == 2 * per_class


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_missing_dataset_says_where_and_how(roots, name):
    with pytest.raises(DataError) as error:
        load(name, roots[0])
    for root in roots:
        assert str(root / SOURCES[name].folder) in str(error.value)
    assert f"smoothout data fetch {name}" in str(error.value)


def test_unknown_names_and_folders(roots):
    with pytest.raises(DataError, match="svhn: no such dataset; expected one of digits, mnist"):
        load("svhn")
    with pytest.raises(DataError, match="train/ and val/"):
        load("imagefolder:nowhere")


def test_a_link_to_nothing_is_not_passed_over(roots):
    roots[0].mkdir()
    (roots[0] / "mnist").symlink_to("nowhere")
    with pytest.raises(DataError, match="train-images"):
        load("mnist", roots[0])


def test_an_image_folder_by_path_and_under_a_root(roots, tmp_path):
    write_image_folder(tmp_path / "mine", per_class=2)
    write_image_folder(roots[1] / "yours", per_class=3)
    assert len(load(f"imagefolder:{tmp_path / 'mine'}").train) == 4
    assert len(load("imagefolder:yours").train) == 6


def test_status(roots):
    write_image_folder(roots[1] / "imagenette128", per_class=2)
    there = {each.name: each for each in status(roots[0])}
    assert tuple(there) == NAMES
    assert there["digits"].is_here
    assert there["imagenette"].path == roots[1] / "imagenette128"
    assert not there["mnist"].is_here


def test_verify_decodes_every_image(roots):
    write_image_folder(roots[0] / "imagenette128", sizes=((40, 30), (30, 40)), per_class=2)
    verified = verify("imagenette", roots[0])
    assert (verified.train_images, verified.test_images) == (4, 4)
    (roots[0] / "imagenette128" / "val" / "n02" / "val_0.JPEG").write_text("no image")
    with pytest.raises(DataError, match=r"val_0\.JPEG"):
        verify("imagenette", roots[0])


def test_verify_digits():
    assert verify("digits").train_images == 1437


def tarred(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def source_of(server, files: dict[str, bytes], folder: str, archive: bool) -> Source:
    remote = tuple(RemoteFile(name, (server.url(name),), hashlib.md5(raw).hexdigest()) for name, raw in files.items())
    return Source(folder, remote, archive)


ARCHIVE = {"set.tar.gz": tarred({"set/a.bin": os.urandom(3000), "set/b.bin": b"b"})}


def test_fetches_and_unpacks_an_archive_from_a_server_that_breaks_off(roots):
    told = []
    with serving(ARCHIVE, "breaks off") as server:
        source = source_of(server, ARCHIVE, "set", archive=True)
        folder = fetch("set", roots[0], lambda *what: told.append(what), source=source, pause=0)
    assert folder == roots[0] / "set"
    assert (folder / "b.bin").read_bytes() == b"b"
    assert (folder / "a.bin").stat().st_size == 3000
    assert os.listdir(roots[0]) == ["set"]  # no archive, no part, no temporary folder stays
    assert told[-1] == ("set.tar.gz", len(ARCHIVE["set.tar.gz"]), len(ARCHIVE["set.tar.gz"]))


def test_a_fetch_that_failed_is_resumed_by_the_same_call(roots):
    files = {"one": os.urandom(2000), "two": os.urandom(2000)}
    with serving({"one": files["one"]}) as server:
        with pytest.raises(DataError, match="two could not be fetched"):
            fetch("set", roots[0], source=source_of(server, files, "set", archive=False), pause=0)
    assert not (roots[0] / "set").exists()
    with serving({"two": files["two"]}) as server:
        folder = fetch("set", roots[0], source=source_of(server, files, "set", archive=False), pause=0)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert os.listdir(roots[0]) == ["set"]


def test_what_is_there_is_not_fetched(roots):
    (roots[1] / "set").mkdir(parents=True)
    with serving(ARCHIVE) as server:
        assert fetch("set", source=source_of(server, ARCHIVE, "set", archive=True), pause=0) == roots[1] / "set"
        assert server.ranges == []


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (tarred({"../escaped": b"x", "set/a": b"a"}), "no sound tar archive"),
        (tarred({"other/a": b"a"}), "no folder set"),
        (b"no archive at all", "no sound tar archive"),
        (ARCHIVE["set.tar.gz"][:2000], "no sound tar archive"),
        (gzip.compress(b"x" * 600), "no sound tar archive"),
    ],
    ids=["leads out of the folder", "other folder", "no tar", "truncated", "gzip of no tar"],
)
def test_bad_archives_leave_no_folder(roots, archive, words):
    files = {"set.tar.gz": archive}
    with serving(files) as server:
        with pytest.raises(DataError, match=words):
            fetch("set", roots[0], source=source_of(server, files, "set", archive=True), pause=0)
    assert os.listdir(roots[0]) == ["set.tar.gz"]
    assert not (roots[0].parent / "escaped").exists()


def test_fetch_refuses(roots, tmp_path):
    with pytest.raises(DataError, match="embedded"):
        fetch("digits")
    with pytest.raises(DataError, match=r"svhn: no address is known for it; expected one of mnist"):
        fetch("svhn")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be stored there"):
        fetch("mnist", tmp_path / "file")


def test_every_published_source_is_whole():
    for source in SOURCES.values():
        for file in source.files:
            assert len(file.md5) == 32
            assert all(url.startswith("https://") and url.endswith(file.name) for url in file.urls)
        assert len(source.files) == 1 or not source.archive


@pytest.mark.real_data
def test_verify_tells_published_files_from_others(tmp_path):
    place = next((each.path for each in status() if each.name == "mnist"), None)
    if place is None:
        pytest.skip("no MNIST in $SMOOTHOUT_DATA")
    verified = verify("mnist")
    assert len(verified.published) == 4
    assert verified.other == ()
    copied = tmp_path / "mnist"
    copied.mkdir()
    for file in place.iterdir():
        raw = gzip.decompress(file.read_bytes())
        (copied / file.name).write_bytes(gzip.compress(raw, 1))
    assert len(verify("mnist", tmp_path).other) == 4
    append(copied / "train-labels-idx1-ubyte.gz")
    with pytest.raises(DataError):
        verify("mnist", tmp_path)
