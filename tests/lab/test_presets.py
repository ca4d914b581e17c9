import pytest

from smoothout.lab.config import resolve
from smoothout.lab.presets import PRESETS


def switches(**settings):
    config = resolve(**settings)
    names = (
        "draws",
        "ghost_batch_size",
        "reset_optimizer_every_epoch",
        "clip",
        "perturb_bn",
        "strength_schedule",
        "report",
    )
    return tuple(getattr(config, name) for name in names)


def test_paper_is_algorithm_1():
    assert switches(preset="paper", dataset="cifar10", batch_size=5000) == (
        "one",
        0,
        False,
        0,
        False,
        "constant",
        "last",
    )


def test_paper_has_ghost_batches_on_the_networks_of_table_2():
    config = resolve(
        preset="paper", dataset="cifar10", model="resnet44", method="adasmoothout", batch_size=2048, epochs=400
    )
    assert (config.draws, config.ghost_batch_size, config.lr_scaling) == ("one", 128, "sqrt")
    assert resolve(preset="paper", model="resnet44", batch_size=128).ghost_batch_size == 0


def test_authors_is_the_code_of_2018():
    expected = ("ghost", 128, True, 5, True, "tanh-falling", "best")
    assert switches(preset="authors", dataset="cifar10", batch_size=5000) == expected
    assert switches(preset="authors", model="resnet44", method="adasmoothout")[5] == "constant"
    assert resolve(preset="authors", model="resnet44", method="adasmoothout").scale_epsilon == 1e-6
    assert resolve(preset="authors", model="resnet18").weight_decay == 1e-4
    assert resolve(preset="paper", model="resnet18").weight_decay == 0


def test_the_baseline_of_authors_takes_no_noise():
    config = resolve(preset="authors", dataset="cifar10", method="plain", batch_size=5000)
    assert (config.strength, config.draws, config.strength_schedule) == (0, "one", "constant")
    assert (config.ghost_batch_size, config.clip) == (128, 5)


def test_ours_reports_the_last_epoch_and_keeps_the_optimizer():
    assert switches(preset="ours", dataset="mnist", batch_size=6000) == ("one", 0, False, 0, False, "constant", "last")


def test_ours_trains_deep_networks_at_large_batch_as_resnet44_gained():
    def of(**settings):
        config = resolve(preset="ours", **{"model": "resnet44", "batch_size": 2048, **settings})
        return config.draws, config.ghost_batch_size, config.strength_schedule, config.lr_warmup, config.remeasure_bn

    expected = ("ghost", 128, "constant", 5, "clean")
    assert of() == of(method="adasmoothout", epochs=400) == of(model="resnet18", batch_size=256, epochs=100) == expected
    assert of(method="plain") == ("one", *expected[1:])  # or noise would be compared with another training
    assert of(epochs=40)[3] == 2  # of a short training not all is warm-up
    assert of(method="swa")[4] == "no"  # which measures its own
    assert of(batch_size=128) == ("one", 0, "constant", 0, "no")


def test_a_flag_wins_over_a_preset():
    assert resolve(preset="authors", clip=1, draws="one").clip == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prints_its_assumptions(name):
    text = str(PRESETS[name])
    assert text.startswith(f"preset {name}: ")
    assert all(f"  - {assumption}" in text for assumption in PRESETS[name].assumptions)
    assert len(PRESETS[name].assumptions) >= 2


DEEP = {"dataset": "cifar10", "model": "resnet44", "batch_size": 2048}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "mlp", "method": "plain"}, []),
        ({"model": "mlp"}, ["the strength is the paper's"]),
        ({"model": "mlp", "strength": 0.01}, []),
        ({**DEEP, "method": "plain"}, ["one draw a step on the networks of Table 1; on the others"]),
        ({**DEEP, "method": "adasmoothout"}, ["one draw a step on", "the strength is the paper's"]),
        ({"preset": "paper", "method": "plain"}, ["the text does not say which epoch", "the optimizer of F1"]),
        ({"preset": "authors", "model": "mlp", "method": "plain"}, ["the optimizer is rebuilt", "choosing the best"]),
    ],
)
def test_of_a_run_only_what_concerns_it_is_told(settings, words):
    config = resolve(**settings)
    summary, *told = PRESETS[config.preset].told_of(config).splitlines()
    assert summary.startswith(f"preset {config.preset}: ")
    assert [line.startswith(f"  - {each}") for line, each in zip(told, words, strict=True)] == [True] * len(words)


@pytest.mark.parametrize("name", PRESETS)
def test_every_assumption_concerns_some_run(name):
    runs = [
        resolve(preset=name, **settings)
        for settings in (
            {"dataset": "mnist", "method": "adasmoothout"},
            {"dataset": "cifar10"},
            DEEP,
            {"dataset": "imagenette", "method": "adasmoothout", "batch_size": 512},
        )
    ]
    for assumption in PRESETS[name].assumptions:
        assert any(assumption.concerns(config) for config in runs), assumption.text
