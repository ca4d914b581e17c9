"""Runs the code blocks of a Markdown page, unmodified and in order, in a process of its own.

| fence | what is done with it |
|---|---|
| `python` | executed; the blocks of a page share one fresh namespace |
| `python`, first line `# name.py` | a file: written as it is; a later `sh` block of the page must run it |
| `sh` | executed by bash, which stops at the first command that fails; under docs/, blocks of plain `smoothout`
commands run in the page's process, which has loaded them already (README's run as installed) |
| `diff` | both sides executed: the lines before the change, and those after it |
| `text` | what the block before it printed, compared; `...` stands for anything |
| none | a tree of files: every name in it must exist |

There is no marker to skip a block, and any other fence fails.
"""

import contextlib
import doctest
import io
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import gloo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The names that a reader's own training script has. README alone may use them; every page under docs/ stands alone.
READERS_OWN = """
import torch
from torch import nn
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
loss_fn = nn.functional.cross_entropy
"""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of its first line, counted from 1

    @property
    def file(self) -> str | None:
        """The name of the file that a python block is, if it is one."""
        first = re.match(r"# (\w+\.py)\n", self.text)
        return first.group(1) if self.language == "python" and first else None


def blocks(page: Path) -> list[Block]:
    """Every fenced block. Fences of other kinds (indented, tildes) would be overlooked, and so are refused."""
    found, opened = [], None
    lines = page.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if re.match(r"\s+```|\s*~~~", line):
            raise ValueError(f"{page.name}:{number}: fences begin at the margin, with three backticks")
        if line.startswith("```"):
            if opened is None:
                opened = (number, line[3:].strip())
            else:
                first, language = opened
                found.append(Block(language, "\n".join([*lines[first : number - 1], ""]), first + 1))
                opened = None
    if opened is not None:
        raise ValueError(f"{page.name}:{opened[0]}: this block is never closed")
    return found


class Reader:
    """Does what a page says, as somebody would who reads it in a checkout."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.names: dict = {"__name__": f"page_{page.stem.replace('-', '_')}"}
        self.printed = ""
        for name in ("benchmarks", "docs", "examples", "results"):
            (folder / name).symlink_to(ROOT / name)
        if page.name == "README.md":
            exec(READERS_OWN, self.names)

    def run(self) -> None:
        all_blocks = blocks(self.page)
        os.chdir(self.folder)
        for i, block in enumerate(all_blocks):
            try:
                if block.file is not None:
                    Path(block.file).write_text(block.text)
                    later = [each.text for each in all_blocks[i:] if each.language == "sh"]
                    assert any(block.file in text for text in later), f"no later block runs {block.file}"
                else:
                    getattr(self, f"run_{block.language or 'tree'}")(block)
            except BaseException as error:
                raise AssertionError(f"{self.page.relative_to(ROOT)}, the block at line {block.line}") from error

    def run_python(self, block: Block, names: dict | None = None) -> None:
        # Blank lines in front: a traceback names the page's own line.
        code = compile("\n" * (block.line - 1) + block.text, str(self.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.names if names is None else names)
        self.printed = out.getvalue()

    def run_sh(self, block: Block) -> None:
        commands = block.text.replace("\\\n", " ").strip().split("\n")
        plain = all(re.fullmatch(r"smoothout [\w ./,:=-]+", command) for command in commands)
        if plain and self.page.name != "README.md":
            self.run_smoothout(commands)
            return
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
        done = gloo.run(["bash", "-euo", "pipefail", "-c", block.text], timeout=200, env=environment)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.printed = done.stdout

    def run_smoothout(self, commands: list[str]) -> None:
        from in_process import smoothout

        self.printed = ""
        for command in commands:
            done = smoothout(*command.split()[1:], cwd=".")
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            self.printed += done.stdout

    def run_diff(self, block: Block) -> None:
        for dropped in "+-":
            side = [line[1:] for line in block.text.split("\n") if not line.startswith(dropped)]
            self.run_python(Block("python", "\n".join(side), block.line), dict(self.names))

    def run_text(self, block: Block) -> None:
        ended = "".join(f"{line.rstrip()}\n" for line in self.printed.rstrip().split("\n"))
        alike = doctest.OutputChecker().check_output(block.text, ended, doctest.ELLIPSIS)
        assert alike, f"the page shows\n{block.text}\nand it printed\n{ended}"

    def run_tree(self, block: Block) -> None:
        folder, named = ROOT, set()
        for line in block.text.split("\n"):
            at_margin = re.match(r"[\w./]+/", line)
            if at_margin:
                folder = ROOT / at_margin.group(0) if (ROOT / at_margin.group(0)).is_dir() else ROOT
                assert (ROOT / at_margin.group(0)).is_dir(), at_margin.group(0)
            inside = re.findall(r"(?:^[├└]── |\s{2,})(\w+(?:\.py|/))(?=\s)", line)
            for name in inside if not at_margin else ():
                assert (folder / name).exists(), f"{name} is not in {folder}"
                named.add(folder / name)
        for package in {path.parent for path in named}:
            left_out = {path for path in package.glob("[!_]*.py") if path not in named}
            assert not left_out, f"not in the tree: {left_out}"


def run_page(page: Path, folder: Path, connection) -> None:
    """In a process of its own; sends None, or what went wrong."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    os.environ["COLUMNS"] = "120"
    try:
        Reader(page, folder).run()
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())
