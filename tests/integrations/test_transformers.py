"""Transformers' real Trainer on a tiny GPT-2 made from a configuration: no hub, no download."""

import os

import pytest
import torch
from torch import nn

from cases import assert_equal_models
from smoothout import SmoothOut, schedule
from smoothout.integrations.transformers import SmoothOutCallback

os.environ["HF_HUB_OFFLINE"] = "1"
hf, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
load_file = pytest.importorskip("safetensors.torch").load_file

STEPS, ACCUMULATE = 8, 2
SETTINGS = {"scale": "filter", "seed": 3}


def gpt2():
    torch.manual_seed(0)
    size = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    # No dropout inside attention: with it the Trainer's gradients differ from a loop's in the last bit, noise or none.
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def sentences(n=64, length=12):
    tokens = torch.randint(1, 32, (n, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Watch(hf.TrainerCallback):
    """Knows the clean weights from the end of each optimizer step, and compares what others see with them."""

    def __init__(self, model):
        self.model, self.batches = model, []  # as the Trainer hands them to the model
        self.noisy = self.evaluated = self.saved = 0
        self.remember()
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def remember(self):
        self.clean = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def is_clean(self):
        return all(torch.equal(p, self.clean[name]) for name, p in self.model.named_parameters())

    def look(self, model, args, kwargs):
        if model.training:
            self.batches.append(kwargs)
            self.noisy += not self.is_clean()
        else:
            self.evaluated += 1
            assert self.is_clean()

    def on_train_begin(self, *args, **kwargs):
        self.remember()  # what a resumed run has loaded

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)  # for dropout: the explicit loop does the same
        assert self.is_clean()

    def on_pre_optimizer_step(self, *args, **kwargs):
        assert self.is_clean()

    def on_optimizer_step(self, *args, **kwargs):
        self.remember()

    def on_save(self, args, state, control, **kwargs):
        saved = load_file(f"{args.output_dir}/checkpoint-{state.global_step}/model.safetensors")
        for name, p in saved.items():
            assert torch.equal(p, self.clean[name].cpu()), name
        self.saved += 1


def make_trainer(folder, callback, model=None, **settings):
    model = gpt2() if model is None else model
    watch = Watch(model)
    defaults = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": ACCUMULATE,
        "weight_decay": 0.0, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "adamw_torch",
        "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4, "logging_steps": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    trainer = hf.Trainer(
        model,
        hf.TrainingArguments(str(folder), **(defaults | settings)),
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        callbacks=[callback, watch] if callback else [watch],
    )
    return trainer, watch


def train(folder, callback, model=None, resume=None, **settings):
    trainer, watch = make_trainer(folder, callback, model, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch


def explicit(batches, strength=0.3):
    model = gpt2().train()
    smooth = SmoothOut(model, strength, **SETTINGS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        torch.manual_seed(step)
        parts = batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        with smooth.perturbed():
            for part in parts:
                model(**part).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_equals_the_explicit_loop_bit_for_bit_with_evaluation_and_checkpoints_inside(tmp_path):
    callback = SmoothOutCallback(0.3, **SETTINGS)
    trainer, watch = train(tmp_path, callback)
    assert_equal_models(trainer.model, explicit(watch.batches))
    assert (watch.noisy, watch.evaluated, watch.saved) == (STEPS * ACCUMULATE, 3, 2)
    assert callback.smooth.step_count == STEPS
    assert not trainer.model._forward_hooks  # all is taken away at the end


def test_strength_zero_is_plain_training(tmp_path):
    plain, _ = train(tmp_path / "plain", None)
    zero, watch = train(tmp_path / "zero", SmoothOutCallback(0.0))
    assert_equal_models(plain.model, zero.model)
    assert watch.noisy == 0


@pytest.mark.parametrize("restore_callbacks", [False, True])
def test_resume_is_bit_equal(tmp_path, restore_callbacks):
    whole, _ = train(tmp_path, SmoothOutCallback(0.3, **SETTINGS))
    callback = SmoothOutCallback(0.3, scale="filter", seed=99)  # the seed is the checkpoint's
    resumed, watch = train(
        tmp_path,
        callback,
        resume=f"{tmp_path}/checkpoint-4",
        restore_callback_states_from_checkpoint=restore_callbacks,
    )
    assert watch.noisy == STEPS * ACCUMULATE // 2
    assert_equal_models(whole.model, resumed.model)


def test_noise_may_begin_at_a_checkpoint_that_was_made_without(tmp_path):
    train(tmp_path, None, max_steps=4)
    callback = SmoothOutCallback(0.3, schedule=lambda step: step / 4)  # which the checkpoint at the end cannot hold
    _, watch = train(tmp_path, callback, resume=f"{tmp_path}/checkpoint-4")
    assert callback.smooth.step_count == 4
    assert (watch.noisy, watch.saved) == (3 * ACCUMULATE, 1)  # none in the first step


def test_a_second_training_starts_its_noise_anew(tmp_path):
    callback = SmoothOutCallback(0.3, **SETTINGS)
    trainer, _ = train(tmp_path, callback, max_steps=2)
    trainer.train()
    assert callback.smooth.step_count == 2


@pytest.mark.parametrize("draw", ["step", "forward"])
def test_one_theta_per_step_or_per_batch(tmp_path, draw):
    model, seen = gpt2(), []
    model.lm_head.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    train(tmp_path, SmoothOutCallback(0.3, draw=draw), model, max_steps=1)
    assert torch.equal(seen[0], seen[1]) is (draw == "step")


def test_bf16_and_gradient_checkpointing(tmp_path):
    _, watch = train(tmp_path, SmoothOutCallback(0.3, **SETTINGS), bf16=True, gradient_checkpointing=True)
    assert (watch.noisy, watch.evaluated, watch.saved) == (STEPS * ACCUMULATE, 3, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_cuda(tmp_path, precision):
    trainer, watch = train(tmp_path, SmoothOutCallback(0.3, **SETTINGS), use_cpu=False, **{precision: True})
    assert (watch.noisy, watch.saved) == (STEPS * ACCUMULATE, 2)
    assert watch.evaluated > 0
    assert watch.is_clean()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))


def test_restore_after_an_interrupted_backward(tmp_path):
    model, callback = gpt2(), SmoothOutCallback(0.3)
    before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}

    def interrupt(grad):
        raise KeyboardInterrupt

    model.transformer.wte.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callback, model)
    model.save_pretrained(tmp_path / "saved")
    for name, p in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert torch.equal(p, before[name]), name
    callback.restore()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_last_checkpoint_resumes_after_an_interrupted_backward(tmp_path, error):
    same_order = {"data_seed": 0}  # without it a Trainer that is used again shuffles anew, noise or none
    full, _ = train(tmp_path / "full", SmoothOutCallback(0.3, **SETTINGS), **same_order)
    model, backwards = gpt2(), []

    def interrupt(grad):
        backwards.append(1)
        if len(backwards) == (STEPS - 1) * ACCUMULATE:  # after the checkpoint in the middle
            raise error

    model.transformer.h[0].attn.c_attn.weight.register_hook(interrupt)
    interrupted, _ = make_trainer(tmp_path / "cut", SmoothOutCallback(0.3, **SETTINGS), model, **same_order)
    with pytest.raises(error):
        interrupted.train()
    interrupted.train(resume_from_checkpoint=True)
    assert_equal_models(interrupted.model, full.model)


def test_a_new_trainer_of_the_model_after_an_interrupted_backward(tmp_path):
    model, arguments = gpt2(), hf.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    clean = [p.detach().clone() for p in model.parameters()]

    def interrupt(grad):
        raise KeyboardInterrupt

    def new_trainer(strength):  # a notebook's cell, run again
        return hf.Trainer(model, arguments, train_dataset=sentences(), callbacks=[SmoothOutCallback(strength)])

    hook = model.transformer.wte.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        new_trainer(0.3).train()
    hook.remove()
    arguments.learning_rate = 0.0
    new_trainer(0.1).train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), clean))
    assert not model._forward_hooks


def test_what_is_not_supported_is_refused_before_training_starts(tmp_path, monkeypatch):
    def arguments(**attributes):
        args = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        for name, value in attributes.items():
            setattr(args, name, value)
        return args

    def start(args, **settings):
        return hf.Trainer(gpt2(), args, train_dataset=sentences(), callbacks=[SmoothOutCallback(**settings)])

    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        SmoothOutCallback().on_init_end(arguments(_n_gpu=2), None, None)
    SmoothOutCallback().on_init_end(arguments(_n_gpu=1), None, None)
    with pytest.raises(ValueError, match="DeepSpeed keeps the weights in buffers of its own"):
        SmoothOutCallback().on_init_end(arguments(deepspeed="zero.json"), None, None)
    by_accelerate = arguments()
    with monkeypatch.context() as launched, pytest.raises(ValueError, match="DeepSpeed keeps"):
        launched.setattr(by_accelerate.distributed_state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
        SmoothOutCallback().on_init_end(by_accelerate, None, None)
    with pytest.raises(ValueError, match="would lose schedule: leave it False"):
        start(arguments(restore_callback_states_from_checkpoint=True), schedule=schedule.Linear(5))
    trainer = start(arguments())
    trainer.add_callback(SmoothOutCallback())
    with pytest.raises(ValueError, match="two SmoothOutCallbacks"):
        trainer.train()
    with pytest.raises(ValueError, match="scale='layer'"):
        SmoothOutCallback(scale="layer")
