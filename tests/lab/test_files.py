"""Files are written whole or not at all."""

import pytest

from smoothout.lab.files import RunError, write_atomically


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"old")
    (tmp_path / "file.partial").mkdir()  # nothing can be opened under the temporary name
    with pytest.raises(RunError, match=r"file: cannot be written.*untouched\. .* the same command again\.$"):
        write_atomically(file, b"new")
    with pytest.raises(RunError, match=r"the same command again; it goes on\.$"):
        write_atomically(file, b"new", afterwards="it goes on")
    assert file.read_bytes() == b"old"
