"""Datasets by name: where they are looked for, loading, what is there, fetching and verifying."""

import os
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from smoothout.lab.data.cifar import CIFAR10, CIFAR100, read_cifar_binary, read_cifar_pickle
from smoothout.lab.data.dataset import Dataset
from smoothout.lab.data.digits import read_digits
from smoothout.lab.data.download import Progress, download, md5_of
from smoothout.lab.data.errors import DataError
from smoothout.lab.data.folder import check_images, read_folder
from smoothout.lab.data.idx import read_mnist
from smoothout.lab.data.published import FILE_MD5, SOURCES, Source

ROOT_VARIABLE = "SMOOTHOUT_DATA"
FOLDER_PREFIX = "imagefolder:"

Reader = Callable[[Path], Dataset]

# Per dataset the folders it may lie in, in order of preference, and what reads each.
LAYOUTS: dict[str, dict[str, Reader]] = {
    "mnist": {"mnist": read_mnist, "MNIST/raw": read_mnist},
    "cifar10": {
        "cifar-10-batches-bin": partial(read_cifar_binary, cifar=CIFAR10),
        "cifar-10-batches-py": partial(read_cifar_pickle, cifar=CIFAR10),
    },
    "cifar100": {
        "cifar-100-binary": partial(read_cifar_binary, cifar=CIFAR100),
        "cifar-100-python": partial(read_cifar_pickle, cifar=CIFAR100),
    },
    "imagenette": {
        "imagenette128": partial(read_folder, name="imagenette"),
        "imagenette2-160": partial(read_folder, name="imagenette"),
    },
}
NAMES = ("digits", *LAYOUTS)


@dataclass(frozen=True)
class Status:
    """Where a dataset is. `path` is None where it is embedded or not there."""

    name: str
    is_here: bool
    path: Path | None


@dataclass(frozen=True)
class Verification:
    """A dataset that reads without fault.

    `published` are its files with the published checksum. Those in `other` have another one and yet read without
    fault: they may be in another order, or packed anew. Files whose checksum is not known here are in neither.
    """

    name: str
    path: Path | None
    train_images: int
    test_images: int
    published: tuple[str, ...]
    other: tuple[str, ...]


def data_roots(root: str | Path | None = None) -> tuple[Path, ...]:
    """The places to look in, in order: `root`, $SMOOTHOUT_DATA, the user's cache folder."""
    named = [Path(place) for place in (root, os.environ.get(ROOT_VARIABLE)) if place]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return tuple(dict.fromkeys((*named, cache / "smoothout" / "data")))  # once, whoever names them


def load(name: str, root: str | Path | None = None) -> Dataset:
    """Read a dataset: `digits`, `mnist`, `cifar10`, `cifar100`, `imagenette` or `imagefolder:PATH`."""
    if name == "digits":
        return read_digits()
    path, read = _find(name, root)
    return read(path)


def status(root: str | Path | None = None) -> list[Status]:
    """Whether each named dataset is there, without reading it."""
    found = [Status("digits", is_here=True, path=None)]
    for name in LAYOUTS:
        path, _ = _first(name, root) or (None, None)
        found.append(Status(name, path is not None, path))
    return found


def is_here(name: str, root: str | Path | None = None) -> bool:
    """Whether a dataset is there, without reading it."""
    return name == "digits" or _first(name, root) is not None


def verify(name: str, root: str | Path | None = None) -> Verification:
    """Read every file of a dataset, and compare with the published checksums; DataError where it is broken."""
    if name == "digits":
        dataset, path = read_digits(), None
    else:
        path, read = _find(name, root)
        dataset = read(path)
        check_images(dataset.train)
        check_images(dataset.test)
    known = FILE_MD5.get(path.name, {}) if path else {}
    matches = {file: md5_of(path / file) == md5 for file, md5 in known.items() if path and (path / file).is_file()}
    return Verification(
        name=name,
        path=path,
        train_images=len(dataset.train),
        test_images=len(dataset.test),
        published=tuple(file for file, same in matches.items() if same),
        other=tuple(file for file, same in matches.items() if not same),
    )


def fetch(
    name: str,
    root: str | Path | None = None,
    progress: Progress | None = None,
    *,
    source: Source | None = None,
    pause: float = 1.0,
) -> Path:
    """Fetch a dataset into the first data root, unpack it and give its folder; one that is there stays as it is.

    A fetch that broke off goes on where it stopped when called again. The folder appears only when it is whole.

    Args:
        progress: called with (file name, bytes so far, bytes in all or None).
        source: another place to fetch from.
        pause: seconds between repeated tries, see `download`.
    """
    if source is None:
        if name == "digits":
            raise DataError("digits: embedded, there is nothing to fetch")
        if name not in SOURCES:
            raise DataError(f"{name}: no address is known for it; expected one of {', '.join(SOURCES)}")
        source = SOURCES[name]
    into = data_roots(root)[0]
    target = into / source.folder
    if os.path.lexists(target):
        return target
    try:
        into.mkdir(parents=True, exist_ok=True)
        return (_fetch_archive if source.archive else _fetch_files)(source, into, progress, pause)
    except OSError as error:
        raise DataError(f"{into}: {name} cannot be stored there ({error.strerror or error})") from error


def _fetch_files(source: Source, into: Path, progress: Progress | None, pause: float) -> Path:
    # A name of its own that stays, so that a second try finds the files that came.
    gathering = into / f"{source.folder}.incomplete"
    gathering.mkdir(exist_ok=True)
    for file in source.files:
        download(file, gathering, progress, pause)
    return gathering.rename(into / source.folder)


def _fetch_archive(source: Source, into: Path, progress: Progress | None, pause: float) -> Path:
    (file,) = source.files
    archive = download(file, into, progress, pause)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{source.folder}-") as unpacked:
        try:
            with tarfile.open(archive) as tar:
                # "data" refuses paths and links that lead out of the folder, devices and the like.
                tar.extractall(unpacked, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise DataError.at(archive, found=f"no sound tar archive ({error})", expected=source.folder) from error
        folder = Path(unpacked) / source.folder
        if not folder.is_dir():
            raise DataError.at(archive, found=f"no folder {source.folder}", expected="an archive that holds it")
        target = folder.rename(into / source.folder)
    archive.unlink()
    return target


def _find(name: str, root: str | Path | None) -> tuple[Path, Reader]:
    """The folder of a dataset and its reader, or a DataError with the places looked in."""
    if found := _first(name, root):
        return found
    looked = "".join(f"\n  {place}" for place in _places(name, root))
    remedy = (
        f"smoothout data fetch {name}" if name in SOURCES else "give the path of a folder with train/ and val/ in it"
    )
    raise DataError(f"{name}: not found. Looked in{looked}\nTo get it: {remedy}")


def _first(name: str, root: str | Path | None) -> tuple[Path, Reader] | None:
    """The first place that is there. A link to nothing is: reading it says what is wrong with it."""
    return next(((place, read) for place, read in _places(name, root).items() if os.path.lexists(place)), None)


def _places(name: str, root: str | Path | None) -> dict[Path, Reader]:
    roots = data_roots(root)
    if name.startswith(FOLDER_PREFIX):
        path = name.removeprefix(FOLDER_PREFIX)
        return {place: partial(read_folder, name=name) for place in (Path(path), *(each / path for each in roots))}
    if name not in LAYOUTS:
        raise DataError(f"{name}: no such dataset; expected one of {', '.join(NAMES)} or {FOLDER_PREFIX}PATH")
    return {each / folder: read for each in roots for folder, read in LAYOUTS[name].items()}
