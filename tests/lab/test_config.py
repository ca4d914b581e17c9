import json

import pytest

from smoothout.lab.config import Config, ConfigError, differences, read_toml, resolve


def test_later_sources_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('dataset = "cifar10"\nbatch-size = 512\nlr = 0.5\nmilestones = [3, 9]\n')
    config = resolve(read_toml(file), lr=0.25)
    assert (config.dataset, config.batch_size, config.milestones) == ("cifar10", 512, (3, 9))  # the file
    assert config.lr == 0.25  # the flag, over the file
    assert (config.model, config.optimizer, config.epochs) == ("c1", "adam", 100)  # the regime of the default model


def test_json_and_back():
    config = resolve(dataset="cifar100", model="resnet44", method="adasmoothout", batch_size=1024, epochs=400)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_hash_is_of_what_determines_the_result():
    config = resolve(epochs=3)
    assert config.hash == resolve(epochs="3").hash
    assert len({config.hash, config.with_seed(1).hash, resolve(epochs=4).hash, resolve(epochs=3, lr=1).hash}) == 4


def test_hash_is_stable():
    # Runs are found again by it: a change here means that old runs are no longer recognised.
    assert Config().hash == "44136fa355b3"
    assert resolve(dataset="cifar10", method="plain", batch_size=5000).hash == "873feae56d2f"


def test_hash_of_an_old_run_survives_a_new_setting():
    settings = resolve(epochs=7).to_dict()
    del settings["antithetic"]  # as if the run were from before this setting
    assert Config.from_dict(settings).hash == resolve(epochs=7).hash


def test_statistics_of_an_old_run_were_measured_at_clean_weights_or_not():
    for old, how in ((False, "no"), (True, "uncut")):
        assert Config.from_dict({**resolve().to_dict(), "remeasure_bn": old}) == resolve(remeasure_bn=how)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methd": "plain"}, "did you mean 'method'"),
        ({"method": "smothout"}, "did you mean 'smoothout'"),
        ({"preset": "xyz"}, "choose one of paper, authors, ours"),
        ({"epochs": "many"}, "epochs='many': expected a whole number"),
        ({"epochs": 0}, "epochs=0: at least 1"),
        ({"batch_size": 12.5}, "batch_size=12.5: expected a whole number"),
        ({"lr": -1}, "lr=-1.0: a finite number that is not negative"),
        ({"strength": float("nan")}, "strength=nan"),
        ({"denoise": 1}, "denoise=1: expected true or false"),
        ({"milestones": "3,x"}, "milestones='3,x': expected whole numbers"),
        ({"draws": "two"}, "expected one, ghost, or a number"),
        ({"draws": "²"}, "expected one, ghost, or a number"),
        ({"draws": 0}, "at least 1"),
        ({"draws": 3, "antithetic": True}, "an even number"),
        ({"draws": "ghost", "ghost_by": "layer"}, "ghost_by='loop' is needed"),
        ({"clean_share": 0.5}, "needs draws='ghost'"),
        ({"clean_share": 0.5, "draws": "ghost", "antithetic": True}, "no antithetic pairs"),
        ({"clean_share": 0.5, "draws": "ghost"}, "needs several ghost batches"),
        ({"clean_share": 0.5, "draws": "ghost", "ghost_batch_size": 100}, "needs several ghost batches"),
        ({"ghosts_per_draw": 2}, "ghosts_per_draw=2 needs draws='ghost'"),
        ({"ghosts_per_draw": 2, "draws": "ghost", "denoise": False}, "noise that is taken back"),
        ({"ghosts_per_draw": 2, "draws": "ghost"}, "needs several ghost batches"),
        ({"ghosts_per_draw": 0, "draws": "ghost"}, "ghosts_per_draw=0: at least 1"),
        ({"clean_share": 1.0, "draws": "ghost"}, "clean_share=1.0: a number from 0 to below 1"),
        ({"scale": "filter"}, "that is method='adasmoothout'"),
        ({"method": "adasmoothout", "scale": "absolute", "strength": 1}, "that is method='smoothout'"),
        ({"noise": "rademacher"}, "no strength is known"),
        ({"noise": "bernoulli", "strength": 1}, "needs scale='weight'"),
        ({"noise": "bernoulli"}, "needs scale='weight'"),
        ({"method": "ensemble", "strength_schedule": "linear"}, "strength_schedule='linear': method='ensemble' does"),
        ({"method": "ensemble", "strength_warmup": 2}, "strength_warmup=2.0: method='ensemble' does not use it"),
        ({"method": "ensemble", "denoise": False}, "denoise=False: method='ensemble' does not use it"),
        ({"method": "ensemble", "draws": 4, "antithetic": True}, "antithetic=True: method='ensemble' does not use it"),
        ({"dropout": 2}, "a probability"),
        ({"seed": -1}, "seed=-1"),
        ({"method": "sam", "log_smoothed_loss": True}, "method='sam' draws none"),
        ({"method": "sam", "strength": -1}, "strength=-1.0"),
        ({"method": "lpfsgd", "scale": "absolute"}, "that is method='smoothout'"),
        ({"method": "swa", "swa_start": 1}, "swa_start=1.0: a number from 0 to below 1"),
        ({"method": "ema", "ema_decay": float("nan")}, "ema_decay=nan"),
        ({"stop_after": -1}, "stop_after=-1"),
        ({"epochs": 3, "stop_after": 4}, "stop_after=4 is beyond the last of epochs=3"),
        ({"method": "swa", "stop_after": 1}, "averages the end of training"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        resolve(**settings)


def test_fixed_copies_have_no_schedule_though_their_preset_has_one():
    of_preset = {"model": "f1", "preset": "authors", "draws": 4}
    assert resolve(method="smoothout", **of_preset).strength_schedule == "tanh-falling"
    config = resolve(method="ensemble", **of_preset)
    assert config.strength_schedule == "constant"
    assert resolve(method="ensemble", strength_schedule="constant", denoise=True, **of_preset) == config
    # A run that was saved with one before it was refused can be read.
    assert Config.from_dict(config.to_dict() | {"strength_schedule": "linear"}).strength_schedule == "linear"


@pytest.mark.parametrize(
    ("content", "message"),
    [("epochs = ", "no valid TOML"), ("epoch = 3", "did you mean 'epochs'"), (b"\xff\xfe", "no valid TOML")],
)
def test_a_wrong_file_is_named(tmp_path, content, message):
    file = tmp_path / "run.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=rf"run\.toml: .*{message}"):
        read_toml(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


def test_differences_name_the_settings():
    assert differences(resolve(epochs=3), resolve(epochs=3, seed=4)) == ["seed: 0 there, 4 asked for"]


@pytest.mark.parametrize(
    ("settings", "strength"),
    [
        ({"method": "smoothout"}, 0.0375),
        ({"method": "smoothout", "noise": "gaussian"}, 0.025),
        ({"method": "adasmoothout"}, 0.15),
        ({"method": "adasmoothout", "noise": "gaussian"}, 0.20),
        ({"method": "smoothout", "noise": "bernoulli", "scale": "weight"}, 1.0),
        ({"method": "plain", "strength": 0.1}, 0.0),
    ],
)
def test_strengths_of_the_paper(settings, strength):
    assert resolve(**settings).strength == strength


@pytest.mark.parametrize("preset", ["paper", "authors", "ours"])
def test_what_makes_a_rival_is_the_same_in_every_preset(preset):
    def of(method, **settings):
        config = resolve(method=method, preset=preset, **settings)
        return config.strength, config.noise, config.scale, config.strength_schedule

    assert of("sam") == (0.05, "uniform", "absolute", "constant")
    assert of("asam")[0] == 0.5
    assert of("sam", strength=0.2)[0] == 0.2
    assert of("swa")[0] == of("ema", strength=1)[0] == 0
    assert of("lpfsgd") == (0.2, "gaussian", "filter", "cosine")
    assert of("lpfsgd", strength_schedule="linear", strength=0.1) == (0.1, "gaussian", "filter", "linear")


def test_to_stop_after_the_last_epoch_is_not_to_stop():
    assert resolve(epochs=3, stop_after=3).hash == resolve(epochs=3).hash
    assert [resolve(epochs=3, stop_after=n).epochs_trained for n in (0, 2, 3)] == [3, 2, 3]


@pytest.mark.parametrize(("one", "other"), [("1", "one"), ("04", 4)])
def test_a_number_of_draws_is_one_run_however_it_is_written(one, other):
    assert resolve(draws=one).hash == resolve(draws=other).hash
