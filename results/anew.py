"""What is made from the records here: docs/results.md, README's table, the pictures in docs/img, and index.html.

`make results` runs it from the repository's root; the tests compare all of it with the records.
"""

import shutil
import subprocess
import sys
from pathlib import Path

PAGE = Path("runs/page")
BEGIN, END = "<!-- smoothout reproduce results --digest -->", "<!-- end of what it prints -->"


def reproduced(*options: str) -> str:
    """What `smoothout reproduce results` prints."""
    command = [sys.executable, "-m", "smoothout", "reproduce", "results", *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout


def main() -> None:
    Path("docs/results.md").write_text(reproduced("--markdown"), encoding="utf-8")
    readme = Path("README.md")
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{reproduced('--digest').strip()}\n\n{END}{after}", encoding="utf-8")
    shutil.rmtree(PAGE, ignore_errors=True)
    reproduced("--out", str(PAGE))
    shutil.copy(PAGE / "index.html", "results/index.html")
    for picture in Path("docs/img").glob("*.png"):
        shutil.copy(PAGE / picture.name, picture)


if __name__ == "__main__":
    main()
