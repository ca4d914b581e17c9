import pytest

from smoothout.lab.config import resolve
from smoothout.lab.train.regime import learning_rate, scaled_rate
from smoothout.lab.train.strength import strength_schedule


@pytest.mark.parametrize(
    ("model", "batch_size", "scaling", "rate"),
    [
        ("resnet44", 2048, "sqrt", 0.4),
        ("resnet44", 1024, "sqrt", 0.283),
        ("resnet44", 1024, "linear", 0.8),
        ("alexnet", 16384, "sqrt", 0.113),
        ("resnet18", 16384, "sqrt", 1.13),
    ],
)
def test_rates_of_the_paper(model, batch_size, scaling, rate):
    config = resolve(model=model, batch_size=batch_size, lr_scaling=scaling)
    assert scaled_rate(config) == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "epochs", "milestones"),
    [
        ("resnet44", None, (81, 122, 164)),
        ("resnet44", 400, (162, 244, 328)),
        ("resnet44", 100, (40, 61, 82)),
        ("alexnet", 120, (40, 80)),
        ("resnet18", None, (30, 60)),
        ("f1", None, (10, 20, 30)),
        ("c1", None, ()),
        ("f1", 1, (1, 1, 1)),
    ],
)
def test_decay_points_keep_their_place(model, epochs, milestones):
    assert resolve(model=model, epochs=epochs).milestones == milestones


def test_adam_of_the_shallow_networks_is_not_scaled():
    config = resolve(dataset="cifar10", batch_size=5000)
    assert (config.optimizer, scaled_rate(config), config.epochs, config.augment) == ("adam", 1e-3, 100, "none")


def test_the_rate_decays_and_warms_up():
    config = resolve(model="mlp", lr=1.0, milestones="2,4", lr_warmup=1, epochs=6)
    rates = [learning_rate(config, epoch, step, 4) for epoch in range(6) for step in (0, 3)]
    expected = [0.25, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    assert rates == pytest.approx(expected)


def test_a_warm_up_may_end_within_an_epoch_and_after_a_milestone():
    config = resolve(model="mlp", lr=2.0, milestones="1", lr_warmup=2.5, epochs=4)
    rates = [learning_rate(config, epoch, step, 3) for epoch in range(4) for step in range(3)]
    decayed = [1.0] * 3 + [0.1] * 9
    assert rates == pytest.approx([2.0 * factor * min(1, (i + 1) / 7.5) for i, factor in enumerate(decayed)])


@pytest.mark.parametrize(
    ("name", "ends"),
    [("constant", (1, 1)), ("linear", (0, 1)), ("cosine", (0, 1)), ("tanh", (0, 1)), ("tanh-falling", (1, 0))],
)
def test_strength_goes_from_one_end_to_the_other_over_training(name, ends):
    schedule = strength_schedule(name, steps=100)
    assert (schedule(0), schedule(100)) == pytest.approx(ends, abs=1e-4)


def test_strength_warms_up_on_top_of_its_schedule():
    schedule = strength_schedule("tanh-falling", steps=100, warmup_steps=10)
    assert [schedule(step) for step in (0, 5)] == pytest.approx([0, 0.5], abs=1e-3)
