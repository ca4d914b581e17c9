"""The commands: flags, files, messages, exit codes."""

import json
import platform
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import smoothout as smoothout_package
from smoothout.lab import data as datasets
from smoothout.lab.cli import run
from smoothout.lab.config import Config, resolve
from smoothout.lab.runs import load_run

QUICK = ["--model", "mlp", "--epochs", "1", "--batch-size", "400", "--device", "cpu"]


@pytest.fixture
def smoothout(monkeypatch, capsys):
    """Call the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["smoothout", *map(str, arguments)])
        try:
            code = run()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    return call


def test_train_says_what_it_does_and_leaves_a_run(smoothout, tmp_path):
    out = tmp_path / "run"
    shape = [
        "--dataset",
        "digits",
        "--method",
        "smoothout",
        "--strength",
        "0.02",
        "--ghost-batch-size",
        "100",
        "--seed",
        "3",
    ]
    code, said, error = smoothout("train", *QUICK, *shape, "--out", out)
    assert (code, error) == (0, "")
    assert "mlp on digits: smoothout, strength 0.02 (constant), one draw a step, batch 400 in ghosts of 100" in said
    assert "preset ours: " in said
    assert "ResNet44" not in said  # of which it is no run, and the strength is given
    assert ", 1 epoch, seed 3" in said.replace("\n", " ")
    assert "epoch 1/1  loss " in said
    config = load_run(out).config
    assert (config.strength, config.ghost_batch_size, config.seed, config.epochs) == (0.02, 100, 3, 1)
    code, said, _ = smoothout("train", *QUICK, *shape, "--out", out)
    assert code == 0
    assert said.startswith(f"{out} is done: ")
    assert said.count("\n") == 1


def test_several_seeds(smoothout, tmp_path):
    code, said, _ = smoothout("train", *QUICK, "--seed", 4, "--seeds", 2, "--out", tmp_path)
    assert code == 0
    assert said.count("preset ours: ") == 1
    assert [line for line in said.splitlines() if line.startswith("seed ")] == ["seed 5"]
    assert said.index("\nseed 5\n") < said.index(f"{tmp_path / 'seed-5'}: ")
    assert {load_run(tmp_path / name).record.config.seed for name in ("seed-4", "seed-5")} == {4, 5}


def test_a_batch_larger_than_the_data_is_said(smoothout, tmp_path):
    command = ["train", "--model", "mlp", "--epochs", 1, "--device", "cpu", "--method", "plain"]
    _, said, _ = smoothout(*command, "--batch-size", 100_000, "--out", tmp_path / "run")
    assert "batch 100000 is more than the 1437 training images: one update an epoch\n" in said
    _, said, _ = smoothout(*command, "--batch-size", 1437, "--out", tmp_path / "other")
    assert "training images" not in said


def test_flags_win_over_the_file(smoothout, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "mlp"\nepochs = 7\nmilestones = [2, 5]\ndenoise = false\n')
    code, said, _ = smoothout("train", "--config", file, "--epochs", 9, "--denoise", "--dry-run")
    assert code == 0
    settings = json.loads(said[: said.index("}") + 1])
    assert settings.pop("hash") == resolve(model="mlp", epochs=9, milestones=(2, 5), denoise=True).hash
    assert (settings["epochs"], settings["milestones"], settings["denoise"]) == (9, [2, 5], True)
    assert "preset ours: " in said
    assert "ResNet44 was trained" in said.replace("\n    ", " ")  # all that the preset assumes


def test_every_setting_has_a_flag(smoothout):
    code, said, _ = smoothout("train", "--help")
    assert code == 0
    for setting in fields(Config):
        assert f"--{setting.name.replace('_', '-')}" in said


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("--method", "smoothout"),
        ("--preset", "ours"),
        ("--model", "by the dataset"),
        ("--epochs", "by the model"),
        ("--batch-size", "128"),
        ("--strength", "by the method"),
        ("--draws", "by the preset"),
        ("--seed", "0"),
        ("--no-denoise", "denoise"),
        ("--no-perturb-weights", "perturb-weights"),
    ],
)
def test_the_help_of_train_shows_what_applies_by_default(smoothout, flag, default):
    _, said, _ = smoothout("train", "--help")
    words = " ".join(said.replace("│", " ").split())
    of_flag = words[words.index(f" {flag} ", words.index("─ Data ─")) + len(flag) + 2 :]
    assert f"[default: ({default})]" in of_flag[: of_flag.index(" --")]


def test_the_help_says_whose_strengths_preset_ours_has(smoothout):
    for command, words in (
        ("train", "ours has the paper's strengths here"),
        ("reproduce", "ours has strengths chosen"),
    ):
        _, said, _ = smoothout(command, "--help")
        assert words in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(("scale", "is_told"), [("tiny", False), ("paper", True)])
def test_a_list_tells_minutes_of_a_gpu_only_of_what_is_for_one(smoothout, tmp_path, scale, is_told):
    code, said, _ = smoothout(
        "reproduce", "table1", "--list", "--scale", scale, "--out", tmp_path, "--results", tmp_path
    )
    assert code == 0
    assert ("minutes on an H200" in said) == is_told
    cells = said.splitlines()[1].split()
    assert cells[:2] == ["table1", "paper"]


COMMANDS = ("demo", "train", "measure", "reproduce", "report", "data", "doctor")
SUBCOMMANDS = {
    "measure": ("sharpness", "sensitivity", "landscape", "curvature", "interpolate"),
    "data": ("list", "fetch", "verify"),
}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_worked_examples(smoothout, command):
    code, said, _ = smoothout(*command.split(), "--help")
    assert code == 0
    assert said.count(f"smoothout {command}") >= 3  # the usage line and two examples


@pytest.mark.parametrize("command", [f"{one} {two}" for one, several in SUBCOMMANDS.items() for two in several])
def test_help_of_a_subcommand_has_a_worked_example(smoothout, command):
    code, said, _ = smoothout(*command.split(), "--help")
    assert code == 0
    assert said.count(f"smoothout {command}") >= 2  # the usage line and the example


NETWORKS = """
from torch import nn

def number():
    return 3

def frozen(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--bach-size", "3"], 2, "--batch-size"),
        (["train", "--epochs", "x"], 2, "--epochs"),
        (["train", "--method", "smothout"], 1, "error: method='smothout' is not known: did you mean 'smoothout'?"),
        (["train", "--dataset", "cifra10"], 1, "error: dataset='cifra10' is not known: did you mean 'cifar10'?"),
        (["train", "--model", "mpl"], 1, "error: model='mpl' is not known: did you mean 'mlp'?"),
        (
            ["train", "--model", "my_networks:number"],
            1,
            "error: model='my_networks:number': it returned a int, not a torch",
        ),
        (
            ["train", "--model", "my_networks:frozen"],
            1,
            "error: model='my_networks:frozen': it has no trainable parameter",
        ),
        (["train", "--model", "my_networks:frozen", "--method", "plain"], 1, "it has no trainable parameter"),
        (["train", "--model", "resnt"], 1, "error: model='resnt' is not known: did you mean 'resnet20', "),
        (["train", "--hold-out", "5000"], 1, "error: hold_out: n=5000, but digits has 1437 training images"),
        (["train", "--dataset", "mnist"], 1, "error: mnist: not found. Looked in"),
        (["train", "--model", "mlp", "--augment", "random-crop"], 1, "error: augment='random-crop': it makes"),
        (["train", "--device", "mps"], 1, "error: device='mps': expected auto, cpu, cuda or cuda:1"),
        (["train", "--noise", "bernoulli"], 1, "error: noise='bernoulli' needs scale='weight'"),
        (["train", "--method", "ensemble", "--no-denoise"], 1, "error: denoise=False: method='ensemble' does not use"),
        (
            ["reproduce", "table1", "--models", "foo", "--dry-run"],
            1,
            "error: --models: no 'foo' in table1: at scale paper there are c1, c3, f1",
        ),
        (
            ["reproduce", "table2", "--models", "resnet44", "--scale", "tiny", "--dry-run"],
            1,
            "at scale tiny, where small networks stand in for the paper's, there are c1, resnet20",
        ),
        (
            ["reproduce", "figure1", "--models", "f1", "--dry-run"],
            1,
            "no 'f1' in figure1: at scale paper there are none",
        ),
        (["train", "--config", "none.toml"], 1, "error: none.toml: cannot be read"),
        (["data", "verify", "mnist", "--data-root", "nowhere"], 1, "error: mnist: not found. Looked in"),
        (["data", "fetch", "digits"], 1, "error: digits: embedded"),
        (
            ["report", "runs", "--out", "a.pdf"],
            1,
            "error: out='a.pdf': the page is HTML, give a file that ends in .html",
        ),
        (["report", "runs", "--out", "a.jsonl"], 1, "in .html; --pack writes records"),
        (["report", "runs", "--markdown", "--figures", "f"], 1, "error: figures='f': they are those of a page"),
        (["trian"], 2, "No such command"),
    ],
)
def test_an_error_is_one_clear_message(smoothout, monkeypatch, tmp_path, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SMOOTHOUT_DATA", raising=False)
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)
    (tmp_path / "my_networks.py").write_text(NETWORKS)
    found, said, error = smoothout(*arguments)
    assert found == code
    assert message in error
    assert "Traceback" not in error
    assert not said.strip()  # nothing is announced that does not come
    assert {each.name for each in tmp_path.iterdir()} <= {"my_networks.py", "__pycache__"}  # and nothing is left


@pytest.mark.parametrize("more", [[], ["--markdown"], ["--pack", "p.jsonl"]])
def test_a_report_of_nothing_finished(smoothout, monkeypatch, tmp_path, more):
    monkeypatch.chdir(tmp_path)
    smoothout("train", *QUICK, "--out", "run", "--quiet", "--minutes", "0")
    code, _, error = smoothout("report", "run", *more)
    assert code == 1
    assert error.endswith("error: none of these runs is finished: run their commands again, and they go on\n")
    assert not (tmp_path / "p.jsonl").exists()


def test_a_folder_of_another_configuration(smoothout, tmp_path):
    smoothout("train", *QUICK, "--out", tmp_path / "run", "--quiet")
    code, _, error = smoothout("train", *QUICK, "--lr", "0.3", "--out", tmp_path / "run", "--quiet")
    assert code == 1
    assert "another configuration:\n  lr: 0.1 there, 0.3 asked for\nChoose another --out." in error


def test_a_spent_time_budget_has_its_own_exit_code(smoothout, tmp_path):
    code, _, error = smoothout("train", *QUICK, "--out", tmp_path / "run", "--quiet", "--minutes", "0")
    assert code == 75
    assert (
        error == "stopped in epoch 1, after step 1 (the time budget is spent). The same command goes on from there.\n"
    )


def test_the_version_names_what_it_runs_on(smoothout):
    code, said, _ = smoothout("--version")
    assert (code, said) == (
        0,
        f"smoothout {smoothout_package.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n",
    )


def test_a_folder_that_is_named_twice_is_looked_in_once(smoothout, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SMOOTHOUT_DATA", str(tmp_path))
    code, said, _ = smoothout("data", "--data-root", tmp_path)
    assert (code, said.splitlines()[-1]) == (0, f"looked in {tmp_path}, {tmp_path / 'cache' / 'smoothout' / 'data'}")


def test_data_lists_what_is_there(smoothout, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SMOOTHOUT_DATA", raising=False)
    for arguments in (["data"], ["data", "list"]):
        code, said, _ = smoothout(*arguments)
        assert code == 0
        assert "digits      embedded" in said
        assert "mnist       not here: smoothout data fetch mnist" in said
        assert str(tmp_path) in said


def test_fetch_prints_the_path_alone(smoothout, monkeypatch, tmp_path):
    def fetch(name, root, show):
        show("a.gz", 1, 2)
        return tmp_path / name

    monkeypatch.setattr(datasets, "fetch", fetch)
    assert smoothout("data", "fetch", "mnist") == (0, f"{tmp_path / 'mnist'}\n", "")


@pytest.mark.parametrize("arguments", [["list"], ["fetch", "mnist"], ["verify", "mnist"]])
def test_data_root_may_stand_before_or_after_the_subcommand(smoothout, monkeypatch, arguments):
    seen = []
    roots = {"status": 0, "fetch": 1, "verify": 1}

    for name, place in roots.items():

        def look(*given, place=place):
            seen.append(given[place])
            raise ValueError("enough")

        monkeypatch.setattr(datasets, name, look)
    smoothout("data", "--data-root", "group", *arguments)
    smoothout("data", *arguments, "--data-root", "own")
    smoothout("data", "--data-root", "group", *arguments, "--data-root", "own")
    smoothout("data", *arguments)
    assert seen == [Path("group"), Path("own"), Path("own"), None]


def test_data_verifies(smoothout):
    code, said, _ = smoothout("data", "verify", "digits")
    assert code == 0
    assert "digits: 1437 training and 360 test images read without fault" in said


def test_doctor_reports_and_finds_faults(smoothout, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SMOOTHOUT_DATA", raising=False)
    code, said, _ = smoothout("doctor", "--out", tmp_path)
    assert (code, said.strip().splitlines()[-1]) == (0, "problems: none")
    for part in ("torch ", "peft ", "pytorch_optimizer ", "cpu: ", "data: digits here", "disk: "):
        assert part in said
    (tmp_path / "mnist").write_text("no folder")
    code, said, _ = smoothout("doctor", "--data-root", tmp_path)
    assert code == 1
    assert f"{tmp_path / 'mnist'}: is no folder" in said


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_that_torch_does_not_find_is_a_problem_and_none_at_all_is_not(smoothout, monkeypatch, there):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi" if there else None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, said, _ = smoothout("doctor")
    assert (code, "check the driver" in said) == (there, there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said, _ = smoothout("doctor")
    assert (code, "cuda: none, CUDA_VISIBLE_DEVICES hides all" in said) == (0, True)


def test_doctor_names_a_gpu_that_is_full_and_goes_on(smoothout, monkeypatch):
    def full(index):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("torch.cuda.mem_get_info", full)
    code, said, _ = smoothout("doctor")
    assert code == 1
    assert "data: digits here" in said
    assert said.endswith("problems:\n  - cuda:0: a GPU does not compute: CUDA error: out of memory\n")


def test_without_the_extra_one_sentence_says_so():
    program = "import sys; sys.modules['typer'] = None; from smoothout.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: the commands need 'typer', which is not installed: "
        "pip install 'smoothout[lab]', or '.[lab]' in a checkout\n"
    )
