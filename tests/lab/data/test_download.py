"""Downloading from a real server that breaks off, ignores Range, lies, or is not there."""

import hashlib
import os

import pytest
from misbehaving_server import serving

from smoothout.lab.data import DataError
from smoothout.lab.data.download import TRIES_WITHOUT_PROGRESS, download, md5_of
from smoothout.lab.data.published import RemoteFile

CONTENT = os.urandom(5000)
FILE = "data.bin"


def remote(*servers, content=CONTENT):
    return RemoteFile(FILE, tuple(server.url(FILE) for server in servers), hashlib.md5(content).hexdigest())


def fetched(server, folder, **kwargs):
    path = download(remote(server), folder, pause=0, **kwargs)
    assert path == folder / FILE
    assert path.read_bytes() == CONTENT
    assert os.listdir(folder) == [FILE]


def test_a_good_server(tmp_path):
    told = []
    with serving({FILE: CONTENT}) as server:
        fetched(server, tmp_path, progress=lambda *what: told.append(what))
        assert told[-1] == (FILE, 5000, 5000)
        assert server.ranges == [None]
        fetched(server, tmp_path)
        assert server.ranges == [None]  # what is there is not fetched again


def test_a_server_that_breaks_off_is_asked_for_the_rest(tmp_path):
    told = []
    with serving({FILE: CONTENT}, "breaks off") as server:
        fetched(server, tmp_path, progress=lambda *what: told.append(what))
        assert server.ranges == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-", "bytes=4000-"]
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert {total for _, _, total in told} == {5000}


def test_a_later_call_resumes(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1234])
    with serving({FILE: CONTENT}) as server:
        fetched(server, tmp_path)
        assert server.ranges == ["bytes=1234-"]


def test_a_whole_part_needs_no_bytes(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT)
    with serving({FILE: CONTENT}) as server:
        fetched(server, tmp_path)
        assert server.ranges == ["bytes=5000-"]


@pytest.mark.parametrize("old", [b"stale" * 100, b"stale" * 2000], ids=["shorter", "longer"])
def test_a_part_of_something_else_is_thrown_away(tmp_path, old):
    (tmp_path / f"{FILE}.part").write_bytes(old)
    with serving({FILE: CONTENT}) as server:
        fetched(server, tmp_path)
        assert server.ranges == [f"bytes={len(old)}-", None]


def test_a_server_that_ignores_range_starts_over(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1234])
    with serving({FILE: CONTENT}, "ignores range") as server:
        fetched(server, tmp_path)
        assert server.ranges == ["bytes=1234-"]


def test_a_server_that_resumes_elsewhere_starts_over(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1234])
    with serving({FILE: CONTENT}, "wrong range") as server:
        fetched(server, tmp_path)
        assert server.ranges == ["bytes=1234-", None]


def test_wrong_bytes_never_get_the_files_name(tmp_path):
    with serving({FILE: CONTENT}, "wrong bytes") as server:
        with pytest.raises(DataError) as error:
            download(remote(server), tmp_path, pause=0)
    assert hashlib.md5(bytes(5000)).hexdigest() in str(error.value)
    assert f"expected MD5 {hashlib.md5(CONTENT).hexdigest()}" in str(error.value)
    assert os.listdir(tmp_path) == []


def test_a_silent_server_leaves_the_part_and_says_how_to_go_on(tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:1234])
    with serving({FILE: CONTENT}, "silent") as server:
        with pytest.raises(DataError) as error:
            download(remote(server), tmp_path, pause=0)
        assert len(server.ranges) == TRIES_WITHOUT_PROGRESS
    assert "broke off at 1234 bytes" in str(error.value)
    assert f"1234 bytes are kept in {tmp_path / FILE}.part: the same command resumes there" in str(error.value)
    assert (tmp_path / f"{FILE}.part").read_bytes() == CONTENT[:1234]
    with serving({FILE: CONTENT}) as server:
        fetched(server, tmp_path)


@pytest.mark.parametrize("bad", ["wrong bytes", "error 500", "silent"])
def test_the_next_mirror_is_tried(tmp_path, bad):
    with serving({FILE: CONTENT}, bad) as first, serving({FILE: CONTENT}) as second:
        assert download(remote(first, second), tmp_path, pause=0).read_bytes() == CONTENT


def test_a_file_that_is_not_there(tmp_path):
    with serving({}) as server:
        with pytest.raises(DataError, match="HTTP 404"):
            download(remote(server), tmp_path, pause=0)
        assert len(server.ranges) == 1  # asking again would not help


def test_no_server(tmp_path):
    with serving({}) as server:
        gone = remote(server)
    with pytest.raises(DataError, match=r"data.bin could not be fetched.*refused"):
        download(gone, tmp_path, pause=0)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / f"{FILE}.part").mkdir()
    with serving({FILE: CONTENT}) as server:
        with pytest.raises(DataError, match=r"data.bin.part: cannot be written \(Is a directory\)"):
            download(remote(server), tmp_path, pause=0)


def test_md5(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    assert md5_of(tmp_path / "x") == hashlib.md5(CONTENT).hexdigest()
