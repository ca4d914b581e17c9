"""The one error of this package, and reading a file so that every failure becomes it."""

from pathlib import Path


class DataError(Exception):
    """A dataset is missing, broken or not what its name says. The message has the file, what was found and expected."""

    @classmethod
    def at(cls, path: str | Path, *, found: str, expected: str) -> "DataError":
        """The usual message: where, what is there, what should be."""
        return cls(f"{path}: found {found}; expected {expected}")


def read_file(path: Path, expected: str) -> bytes:
    """All bytes of `path`; `expected` says in words what should be there when they cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError.at(path, found=why_unreadable(path, error), expected=expected) from error


def why_unreadable(path: Path, error: OSError) -> str:
    """In words, why opening `path` failed."""
    if path.is_symlink() and not path.exists():
        return f"a symbolic link to nothing (to {path.readlink()})"
    if path.is_dir():
        return "a directory"
    if isinstance(error, FileNotFoundError):
        return "no file"
    if isinstance(error, PermissionError):
        return "a file that this user may not read"
    return f"a file that cannot be read ({error.strerror or error})"
