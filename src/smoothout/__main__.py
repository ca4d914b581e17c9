"""`python -m smoothout`, `torchrun -m smoothout` and the command `smoothout`."""

from __future__ import annotations

import sys

from smoothout.extras import install


def main() -> None:
    """Run the command line; without the extra `lab`, say in one sentence what is missing."""
    try:
        from smoothout.lab.cli import run
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("smoothout"):
            raise
        sys.exit(f"error: the commands need {name!r}, which is not installed: {install('lab')}")
    sys.exit(run())


if __name__ == "__main__":
    main()
