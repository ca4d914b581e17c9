"""Fetch one file over HTTP: resumed where it broke off, checked against its checksum, never half there."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from smoothout.lab.data.errors import DataError
from smoothout.lab.data.published import RemoteFile

Progress = Callable[[str, int, int | None], None]
"""Told (file name, bytes there so far, bytes in all or None where the server does not say)."""

CHUNK = 1 << 18
TIMEOUT_SECONDS = 30
TRIES_WITHOUT_PROGRESS = 4


def download(remote: RemoteFile, folder: Path, progress: Progress | None = None, pause: float = 1.0) -> Path:
    """`folder`/name with the right checksum, from the first address that gives it.

    The bytes go to name.part, which a broken transfer leaves behind and the next one continues; only a file whose
    checksum is right gets its name. Wrong bytes are thrown away.

    Args:
        pause: seconds before the first repeated try; each further one waits as long again.
    """
    target = folder / remote.name
    if target.is_file() and md5_of(target) == remote.md5:
        return target
    part = folder / f"{remote.name}.part"
    failures: list[str] = []
    for url in remote.urls:
        try:
            _transfer_checked(url, part, remote, progress, pause)
        except _FailedTransfer as failure:
            failures.append(f"{url}: {failure}")
            continue
        part.replace(target)
        return target
    kept = f" {part.stat().st_size} bytes are kept in {part}: the same command resumes there." if part.exists() else ""
    raise DataError(f"{remote.name} could not be fetched. " + "; ".join(failures) + f".{kept}")


def md5_of(path: Path) -> str:
    """The hexadecimal MD5 of a file: what the publishers give; it guards against accidents, not against malice."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class _FailedTransfer(Exception):
    """Why one address did not give the file."""


def _transfer_checked(url: str, part: Path, remote: RemoteFile, progress: Progress | None, pause: float) -> None:
    """The whole file in `part`, or _FailedTransfer. Wrong bytes on top of an old part get one more try from zero."""
    had_old_bytes = part.exists() and part.stat().st_size > 0
    for may_repeat in (had_old_bytes, False):
        _transfer(url, part, progress, pause)
        found = md5_of(part)
        if found == remote.md5:
            return
        size = part.stat().st_size
        part.unlink()
        if not may_repeat:
            raise _FailedTransfer(f"found {size} bytes with MD5 {found}; expected MD5 {remote.md5}")


def _transfer(url: str, part: Path, progress: Progress | None, pause: float) -> None:
    """Ask again from where it broke off for as long as each try brings something."""
    idle_tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _one_request(url, part, progress)
            return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise _FailedTransfer(f"HTTP {error.code} {error.reason}") from error
            reason = f"HTTP {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:  # of the network: a failed write is a DataError
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        after = part.stat().st_size if part.exists() else 0
        idle_tries = 0 if after > before else idle_tries + 1
        if idle_tries >= TRIES_WITHOUT_PROGRESS:
            raise _FailedTransfer(f"broke off at {after} bytes, {idle_tries} tries brought no more ({reason})")
        time.sleep(pause * idle_tries)


def _one_request(url: str, part: Path, progress: Progress | None) -> None:
    """Append to `part` what the server sends; ConnectionError where that ends early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            error.close()
            return  # nothing lies beyond what is there; the checksum tells whether that is the file
        raise
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT and _starts_at(response, have)
        if response.status == http.HTTPStatus.PARTIAL_CONTENT and not resumes:
            part.unlink(missing_ok=True)
            raise ConnectionError(f"the server resumed at {response.headers.get('Content-Range')}, not at {have}")
        done = have if resumes else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with _opened_for_writing(part, append=resumes) as stream:
            while chunk := response.read(CHUNK):
                _write(stream, chunk, part)
                done += len(chunk)
                if progress is not None:
                    progress(part.name.removesuffix(".part"), done, total)
    if total is not None and done < total:
        raise ConnectionError(f"{done} of {total} bytes came")


def _starts_at(response: http.client.HTTPResponse, position: int) -> bool:
    return (response.headers.get("Content-Range") or "").startswith(f"bytes {position}-")


def _opened_for_writing(part: Path, append: bool):
    try:
        # Unbuffered, so that a killed process leaves in the part all that it had counted.
        return part.open("ab" if append else "wb", buffering=0)
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror})") from error


def _write(stream, chunk: bytes, part: Path) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[stream.write(view) :]
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror})") from error
