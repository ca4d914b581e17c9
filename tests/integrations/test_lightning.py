"""Lightning's real Trainer: the callback trains as the explicit loop does, and everybody else finds clean weights."""

import copy
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cases import assert_equal_models, assert_same, explicit_epoch, snapshot
from smoothout import SmoothOut
from smoothout.integrations.lightning import SmoothOutCallback

L = pytest.importorskip("lightning.pytorch")

EPOCHS, ACCUMULATE, SETTINGS = 4, 2, {"scale": "filter", "seed": 3}


def loader(seed=1, rows=48):
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator))
    return DataLoader(data, batch_size=8, generator=generator)  # its own generator: dropout sees the same numbers


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


class Regression(L.LightningModule):
    """Calls a part of itself, not its own forward, and checks at every turn which weights it has."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.validated = self.saved = self.noisy = 0
        self.clean = self.copy()

    def copy(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def is_clean(self):
        return all(torch.equal(p, self.clean[name]) for name, p in self.net.named_parameters())

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_epoch_start(self):
        torch.manual_seed(self.current_epoch)  # dropout of a resumed run

    def on_train_batch_start(self, batch, batch_idx):
        assert self.is_clean()

    def training_step(self, batch, batch_idx):
        self.noisy += not self.is_clean()
        return {"loss": self.loss(batch)}

    def on_after_backward(self):
        assert self.is_clean()

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.clean = self.copy()

    def validation_step(self, batch, batch_idx):
        assert self.is_clean()
        self.validated += 1
        self.log("val_loss", self.loss(batch))

    def on_save_checkpoint(self, checkpoint):
        for name, p in self.clean.items():
            assert torch.equal(checkpoint["state_dict"][f"net.{name}"], p), name
        self.saved += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(module, callbacks, folder, ckpt_path=None, train=None, trainer_class=L.Trainer, **settings):
    defaults = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}
    defaults |= {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = trainer_class(default_root_dir=folder, callbacks=callbacks, **(defaults | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # ours: an optimizer's step without a perturbed forward
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
        trainer.fit(module, loader() if train is None else train, loader(seed=2, rows=16), ckpt_path=ckpt_path)
    return trainer


def explicit(strength=0.3):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    smooth = SmoothOut(model, strength, **SETTINGS)
    batches = list(loader())
    for epoch in range(EPOCHS):
        torch.manual_seed(epoch)
        explicit_epoch(model, optimizer, smooth, batches, ACCUMULATE)
    return model


def test_equals_the_explicit_loop_bit_for_bit_with_validation_and_checkpoints_inside(tmp_path):
    module, callback = Regression(), SmoothOutCallback(0.3, **SETTINGS)
    saver = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = fit(module, [saver, callback], tmp_path, val_check_interval=3)
    assert_equal_models(module.net, explicit())
    batches = 6
    assert module.noisy == EPOCHS * batches
    assert module.validated == 2 + EPOCHS * 2 * 2  # the sanity check too
    assert module.saved == EPOCHS * batches // ACCUMULATE // 2
    assert callback.smooth.step_count == trainer.global_step == EPOCHS * batches // ACCUMULATE
    assert "training_step" not in vars(trainer.strategy)


def test_strength_zero_is_plain_training(tmp_path):
    plain, zero = Regression(), Regression()
    fit(plain, [], tmp_path)
    fit(zero, [SmoothOutCallback(0.0)], tmp_path)
    assert_equal_models(plain, zero)


def test_resume_at_an_epochs_end_is_bit_equal(tmp_path):
    whole = Regression()
    fit(whole, [SmoothOutCallback(0.3, **SETTINGS)], tmp_path)
    fit(Regression(), [SmoothOutCallback(0.3, **SETTINGS)], tmp_path / "half", max_epochs=2)
    (checkpoint,) = tmp_path.glob("half/**/*.ckpt")
    resumed, callback = Regression(), SmoothOutCallback(0.3, scale="filter", seed=99)  # the seed is the checkpoint's
    resumed.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    resumed.clean = resumed.copy()
    trainer = fit(resumed, [callback], tmp_path / "rest", ckpt_path=checkpoint)
    assert_equal_models(resumed, whole)
    assert callback.smooth.step_count == 12
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)["callbacks"][callback.state_key]
    assert (again["step"], again["seed"]) == (12, 3)


def test_a_second_fit_goes_on_where_the_first_ended(tmp_path):
    module, callback = Regression(), SmoothOutCallback(0.3, **SETTINGS)
    trainer = fit(module, [callback], tmp_path, max_epochs=2)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(module, loader(), loader(seed=2, rows=16))
    assert callback.smooth.step_count == 12


def test_a_second_fit_has_the_layers_that_are_there_now(tmp_path):
    module, callback = Regression(), SmoothOutCallback(0.3, **SETTINGS)
    module.net[0].requires_grad_(False)
    fit(module, [callback], tmp_path, max_epochs=2)
    callback.smooth.strength = 0.2
    module.net[0].requires_grad_(True)
    module.net[4] = nn.Linear(8, 3)
    module.clean = module.copy()
    fit(module, [callback], tmp_path, max_epochs=2)
    own = [row.plain_name for row in callback.smooth._perturbation.selected]
    assert own == ["net.0.weight", "net.0.bias", "net.4.weight", "net.4.bias"]
    assert (callback.smooth.step_count, callback.smooth.strength) == (12, 0.2)
    module.net[4].bias = None
    module.clean = module.copy()
    fit(module, [callback], tmp_path, max_epochs=1)
    assert (len(callback.smooth._perturbation.selected), callback.smooth.step_count) == (3, 15)
    fit(Regression(), [callback], tmp_path, max_epochs=2)
    assert (callback.smooth.step_count, callback.smooth.strength) == (6, 0.3)  # another module begins anew


class Unwatched(Regression):
    def is_clean(self):
        return True  # validation has the checkpoint's weights


def test_a_second_fit_has_the_layers_that_are_there_now_after_a_search_for_a_learning_rate(tmp_path):
    module, callback = Unwatched(), SmoothOutCallback(0.3, **SETTINGS)
    module.net[0].requires_grad_(False)
    fit(module, [callback], tmp_path, max_epochs=2)
    module.net[0].requires_grad_(True)
    search = L.callbacks.LearningRateFinder(num_training_steps=5, update_attr=False)
    fit(module, [search, callback], tmp_path, max_epochs=2)
    assert len(callback.smooth._perturbation.selected) == 4
    assert callback.smooth.step_count == 12


def test_a_second_fit_goes_on_within_an_update_that_an_exception_ended(tmp_path):
    class Failing(Unwatched):
        def training_step(self, batch, batch_idx):
            self.draws.append((callback.smooth.step_count, callback.smooth._draw))  # the next one's
            if len(self.draws) == 4:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    module, callback = Failing(), SmoothOutCallback(0.3, draw="forward", **SETTINGS)
    module.draws = []
    with pytest.raises(ZeroDivisionError):
        fit(module, [callback], tmp_path)
    fit(module, [callback], tmp_path, max_epochs=1)
    assert module.draws[3:6] == [(1, 2), (1, 3), (1, 4)]
    assert len(set(module.draws)) == len(module.draws)  # no noise comes twice


def test_a_state_that_is_loaded_by_hand_is_where_the_next_fit_begins(tmp_path):
    class Broken(Unwatched):
        def on_fit_start(self):
            raise ZeroDivisionError

    first, callback = SmoothOutCallback(0.3, **SETTINGS), SmoothOutCallback(0.3, scale="filter")
    fit(Regression(), [first], tmp_path, max_epochs=2)
    (checkpoint,) = tmp_path.glob("**/*.ckpt")
    callback.load_state_dict(first.state_dict() | {"step": 100})
    trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu", default_root_dir=tmp_path / "test")
    trainer.validate(Unwatched(), loader(), ckpt_path=checkpoint, verbose=False)
    with pytest.raises(ZeroDivisionError):
        fit(Broken(), [callback], tmp_path / "broken", ckpt_path=checkpoint)
    fit(Regression(), [callback], tmp_path / "second", max_epochs=1)
    assert (callback.smooth.step_count, callback.smooth.perturbation.seed) == (103, 3)


def test_a_checkpoint_that_is_tested_does_not_move_the_noise(tmp_path):
    module, callback = Unwatched(), SmoothOutCallback(0.3, **SETTINGS)
    assert callback.state_dict() == {}  # a checkpoint made before training
    saver = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = fit(module, [saver, callback], tmp_path, max_epochs=2)
    before = copy.deepcopy(module.state_dict())
    trainer.validate(module, loader(), ckpt_path=min(tmp_path.glob("*.ckpt")), verbose=False)
    assert callback.state_dict()["step"] == 2  # a checkpoint made now has these weights
    module.load_state_dict(before)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(module, loader(), loader(seed=2, rows=16))
    assert callback.smooth.step_count == 12


def test_a_search_for_a_learning_rate_after_training_began_leaves_the_noise_where_it_was(tmp_path):
    class Search(L.callbacks.LearningRateFinder):
        def on_fit_start(self, trainer, module):
            pass

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 0:
                self.lr_find(trainer, module)
                assert module.noisy == 5 * ACCUMULATE  # the search has noise as well
                module.clean = module.copy()

    module, callback = Regression(), SmoothOutCallback(0.3, **SETTINGS)
    fit(module, [Search(num_training_steps=5, update_attr=False), callback], tmp_path)
    assert callback.smooth.step_count == 12
    assert_equal_models(module.net, explicit())


@pytest.mark.parametrize("moment", ["training_step", "between", "backward", "validation"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_an_exception_the_weights_are_clean(tmp_path, moment, error):
    def fail(*_):
        raise error

    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            if batch_idx == 3 and moment == "training_step":
                fail()
            if batch_idx == 3 and moment == "backward":
                self.net[0].weight.register_hook(fail)
            return output

        def on_before_zero_grad(self, optimizer):
            if self.noisy == 3 and moment == "between":
                assert not self.is_clean()
                fail()

        def validation_step(self, batch, batch_idx):
            if self.noisy and moment == "validation":
                fail()

    module, callback = Failing(), SmoothOutCallback(0.3)
    # Lightning turns an interrupt into an exit, after its own clean-up, and from then on ignores Ctrl-C.
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(module, [callback], tmp_path)
    signal.signal(signal.SIGINT, handler)
    assert module.is_clean()
    assert not module.net._state_dict_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_batch_without_loss_is_skipped(tmp_path):
    class Skipping(Regression):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else output

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    module, callback = Skipping(), SmoothOutCallback(0.3)
    fit(module, [callback], tmp_path, max_epochs=1, accumulate_grad_batches=1)
    assert module.noisy == 6


def test_one_theta_per_step_or_per_batch(tmp_path):
    class Remembering(Regression):
        def training_step(self, batch, batch_idx):
            self.seen.append((self.net[0].weight - self.clean["0.weight"]).detach())
            return super().training_step(batch, batch_idx)

    for draw, same in (("step", True), ("forward", False)):
        module = Remembering()
        module.seen = []
        fit(module, [SmoothOutCallback(0.3, draw=draw)], tmp_path, max_epochs=1)
        assert torch.equal(module.seen[0], module.seen[1]) is same
        assert not torch.equal(module.seen[1], module.seen[2])


def test_a_module_that_is_copied_or_pickled_during_training(tmp_path):
    class Copying(Regression):
        def on_train_batch_end(self, *_):
            copied = copy.deepcopy(self.net)
            assert all(torch.equal(p, q) for p, q in zip(copied.parameters(), self.net.parameters()))
            torch.save(self.net, tmp_path / "whole.pt")

    fit(Copying(), [SmoothOutCallback(0.3)], tmp_path, max_epochs=1)


def test_weight_averaging_beside_it(tmp_path):
    """Its last epoch has no backward, but measures BatchNorm's statistics: at the averaged weights, without noise."""

    class Averaged(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            self.clean = self.copy()  # what averaging left there

        def on_save_checkpoint(self, checkpoint):
            pass

    module = Averaged()
    averaging = L.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    trainer = fit(module, [averaging, SmoothOutCallback(0.3)], tmp_path)
    assert trainer.current_epoch == EPOCHS + 1
    assert module.noisy == EPOCHS * 6
    assert module.is_clean()


def test_select_sees_the_modules_own_names(tmp_path):
    names = []

    def first_layer(name, parameter, module):
        names.append(name)
        return name.startswith("net.0")

    callback = SmoothOutCallback(0.3, select=first_layer)
    fit(Regression(), [callback], tmp_path, max_epochs=1)
    assert "net.4.weight" in names
    assert [row.plain_name for row in callback.smooth._perturbation.selected] == ["net.0.weight", "net.0.bias"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions(tmp_path, precision):
    class Cast(Regression):
        def on_fit_start(self):
            self.clean = self.copy()

        def loss(self, batch):
            return (self.net(batch[0]) - batch[1]).float().square().mean()

    module = Cast()
    fit(module, [SmoothOutCallback(0.3, **SETTINGS)], tmp_path, precision=precision)
    assert module.noisy == EPOCHS * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_half_precision_on_cuda(tmp_path, precision):
    class Moved(Regression):
        def on_fit_start(self):
            self.clean = self.copy()

    module = Moved()
    fit(module, [SmoothOutCallback(0.3, **SETTINGS)], tmp_path, precision=precision, accelerator="gpu", devices=1)
    assert module.noisy == EPOCHS * 6
    assert module.validated > 0
    assert module.saved > 0


def test_the_same_library_under_its_older_name(tmp_path):
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        on_train_epoch_start, training_step = Regression.on_train_epoch_start, lambda self, batch, _: self.loss(batch)
        loss, configure_optimizers = Regression.loss, Regression.configure_optimizers

    module = Older()
    fit(module, [SmoothOutCallback(0.3, **SETTINGS)], tmp_path, trainer_class=older.Trainer)
    assert_equal_models(module.net, explicit())


def test_what_is_not_supported_is_refused_before_training_starts(tmp_path):
    class Manual(Regression):
        automatic_optimization = False

    class DeepSpeedStrategy(L.strategies.SingleDeviceStrategy):
        """Found by its name: the real one cannot be made where DeepSpeed is not installed."""

    class Replicated(Regression):
        def __init__(self):
            super().__init__()
            self.net = nn.DataParallel(self.net)

    with pytest.raises(ValueError, match=r"automatic_optimization=False.*with smooth.perturbed\(\)"):
        fit(Manual(), [SmoothOutCallback()], tmp_path, gradient_clip_val=None, accumulate_grad_batches=1)
    L.Trainer(callbacks=[SmoothOutCallback()], logger=False, accelerator="cpu").validate(Manual(), loader())
    with pytest.raises(ValueError, match="DeepSpeed keeps the weights in buffers of its own"):
        fit(Regression(), [SmoothOutCallback()], tmp_path, strategy=DeepSpeedStrategy(torch.device("cpu")))
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        fit(Replicated(), [SmoothOutCallback()], tmp_path)


def test_lbfgs_is_refused_and_nothing_is_left_behind(tmp_path):
    class Lbfgs(Regression):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    module = Lbfgs()
    before = snapshot(module)
    with pytest.raises(ValueError, match="LBFGS evaluates its closure at several points"):
        fit(module, [SmoothOutCallback(0.3)], tmp_path, gradient_clip_val=None)
    assert_same(module, before)


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="strength=-1"):
        SmoothOutCallback(-1)
    with pytest.raises(ValueError, match="noise='loud'"):
        SmoothOutCallback(noise="loud")
    with pytest.raises(ValueError, match="draw='epoch'"):
        SmoothOutCallback(draw="epoch")
    with pytest.raises(TypeError, match="select=3"):
        SmoothOutCallback(select=3)
    with pytest.raises(TypeError, match="sead"):
        SmoothOutCallback(sead=3)


def test_layers_that_are_unfrozen_are_told_of(tmp_path):
    class Finetuned(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

    class Unfreeze(L.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    trainer = L.Trainer(
        max_epochs=4, callbacks=[SmoothOutCallback(0.1), Unfreeze()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"net\.0\.weight and 1 other parameters, frozen when .* take no noise"):
        trainer.fit(Finetuned(), loader())
