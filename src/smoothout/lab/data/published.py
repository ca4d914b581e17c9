"""What the publishers say of their files: addresses, archive checksums and the checksums of the files inside."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch: its name, where it is to be had, in order of preference, and its published checksum."""

    name: str
    urls: tuple[str, ...]
    md5: str


@dataclass(frozen=True)
class Source:
    """How a dataset is fetched.

    Args:
        folder: its name under the data root once it is there.
        files: what to fetch.
        archive: True where the one file is a tar archive that holds `folder`; False where the files go into it.
    """

    folder: str
    files: tuple[RemoteFile, ...]
    archive: bool


def _mnist_file(name: str, md5: str) -> RemoteFile:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    return RemoteFile(name, tuple(mirror + name for mirror in mirrors), md5)


def _cifar_archive(name: str, md5: str) -> tuple[RemoteFile]:
    return (RemoteFile(name, (f"https://www.cs.toronto.edu/~kriz/{name}",), md5),)


MNIST_FILES = (
    _mnist_file("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    _mnist_file("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    _mnist_file("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    _mnist_file("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)

# The binary versions: plain bytes need no unpickling.
SOURCES: dict[str, Source] = {
    "mnist": Source("mnist", MNIST_FILES, archive=False),
    "cifar10": Source(
        "cifar-10-batches-bin",
        _cifar_archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        archive=True,
    ),
    "cifar100": Source(
        "cifar-100-binary",
        _cifar_archive("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
        archive=True,
    ),
    "imagenette": Source(
        "imagenette2-160",
        (
            RemoteFile(
                "imagenette2-160.tgz",
                ("https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",),
                "e793b78cc4c9e9a4ccc0c1155377a412",
            ),
        ),
        archive=True,
    ),
}

# Checksums of the files as they lie on disk, by folder: what `verify` compares with. Only those known for sure.
FILE_MD5: dict[str, dict[str, str]] = {
    "mnist": {file.name: file.md5 for file in MNIST_FILES},
    "cifar-10-batches-bin": {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    "cifar-10-batches-py": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar-100-python": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}
