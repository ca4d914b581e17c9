"""The method on other libraries' models: Transformers' own layers, tied embeddings, LoRA adapters of PEFT."""

import copy

import pytest
import torch
from torch import nn

from cases import assert_equal_models, assert_moved, assert_same, snapshot
from smoothout import AdaSmoothOut, SmoothOut
from smoothout.filters import filter_layout

hf = pytest.importorskip("transformers")

TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama():
    config = hf.LlamaConfig(**TOKENS, **SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    return hf.LlamaForCausalLM(config)


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(**TOKENS, **SMALL, max_position_embeddings=16))


def t5():
    config = hf.T5Config(**TOKENS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def mamba():
    return hf.MambaForCausalLM(hf.MambaConfig(**TOKENS, hidden_size=16, state_size=4, num_hidden_layers=2))


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "mamba": mamba}
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def loss_of(model):
    tokens = torch.randint(1, 32, (3, 8), generator=torch.Generator().manual_seed(1))
    return model(input_ids=tokens, labels=tokens).loss


def trained(model, attach):
    """By the hooks, or by the explicit loop."""
    optimizer = torch.optim.AdamW((p for p in model.train().parameters() if p.requires_grad), lr=1e-2)
    smooth = AdaSmoothOut(model, 0.1)
    if attach:
        smooth.attach(optimizer)
    for _ in range(3):
        if attach:
            loss_of(model).backward()
        else:
            with smooth.perturbed():
                loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@each_model
@pytest.mark.parametrize("method", [SmoothOut, AdaSmoothOut])
def test_perturbed_restored_exactly_and_trained(build, method):
    model = build().train()
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.02)  # zeros have no norm for AdaSmoothOut to scale to
    before = snapshot(model)
    smooth = method(model, 0.1)
    with smooth.perturbed():
        loss_of(model).backward()
        assert_moved(model, before, smooth)
        assert all(torch.equal(p, before[name][0]) for name, p in model.state_dict().items() if name in before)
    assert_same(model, before)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@each_model
def test_attached_equals_explicit(build):
    def run(attach):
        torch.manual_seed(0)
        return trained(build(), attach)

    assert_equal_models(run(attach=True), run(attach=False))


@each_model
def test_the_norms_of_transformers_take_no_noise(build):
    """LayerNorm of torch, and LlamaRMSNorm, T5LayerNorm, MambaRMSNorm of Transformers' own."""
    model = build()
    smooth = SmoothOut(model, 0.1)
    norms = {id(p): name for name, m in model.named_modules() if "Norm" in type(m).__name__ for p in m.parameters()}
    assert len(norms) >= 3
    assert not [norms[id(s.parameter)] for s in smooth._perturbation.selected if id(s.parameter) in norms]


@pytest.mark.parametrize("build", [gpt2, llama, bert, t5])
def test_tied_embeddings_take_one_theta(build):
    model = build()
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert inputs is outputs
    smooth = AdaSmoothOut(model, 0.1)
    assert sum(s.parameter is inputs for s in smooth._perturbation.selected) == 1
    clean = inputs.detach().clone()
    with smooth.perturbed():
        noise = inputs.detach() - clean
        assert model.get_output_embeddings().weight is inputs
    ratio = noise.norm(dim=1) / clean.norm(dim=1)
    rows = clean.norm(dim=1) > 0  # a padding row is zero and stays clean
    torch.testing.assert_close(ratio[rows], torch.full_like(ratio[rows], 0.1), rtol=1e-5, atol=0)


def test_filters_of_conv1d_are_its_columns():
    """Transformers' `Conv1D` stores (inputs, outputs): y = x·W + b, so one output is a column."""
    model = gpt2()
    layer = model.transformer.h[0].attn.c_attn
    assert type(layer).__name__ == "Conv1D"
    assert layer.weight.shape == (16, 48)
    assert filter_layout(layer, "weight", layer.weight).axis == 1
    clean = layer.weight.detach().clone()
    with AdaSmoothOut(model, 0.1).perturbed():
        noise = layer.weight.detach() - clean
    torch.testing.assert_close(noise.norm(dim=0), 0.1 * clean.norm(dim=0), rtol=1e-5, atol=0)
    rows = noise.norm(dim=1) / clean.norm(dim=1)
    assert rows.std() > 1e-3  # the rows are not scaled


def test_filters_of_attention_are_rows_of_its_projections():
    """torch's `in_proj_weight` is q, k and v on top of one another; each of their outputs is a row."""
    layer = nn.MultiheadAttention(16, 2)
    clean = layer.in_proj_weight.detach().clone()
    with AdaSmoothOut(layer, 0.1).perturbed():
        noise = layer.in_proj_weight.detach() - clean
    assert noise.shape == (48, 16)
    torch.testing.assert_close(noise.norm(dim=1), 0.1 * clean.norm(dim=1), rtol=1e-5, atol=0)


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def with_lora(base):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    transposed = base.config.model_type == "gpt2"
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=transposed)
    return peft.get_peft_model(copy.deepcopy(base), config)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_lora_adapters_are_perturbed_alone(build):
    model = with_lora(build()).train()
    before = snapshot(model)
    smooth = AdaSmoothOut(model, 0.1)
    assert smooth._perturbation.selected
    assert all(".lora_" in s.name for s in smooth._perturbation.selected)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [s.name for s in smooth._perturbation.selected] == trainable
    with smooth.perturbed():
        loss_of(model).backward()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name][0])}
    assert_same(model, before)
    assert moved == {name for name in trainable if "lora_A" in name}  # B starts at zero: no filter to scale to
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora_" not in name)


def test_absolute_noise_moves_lora_b_from_its_zeros():
    model = with_lora(gpt2())
    before = snapshot(model)
    smooth = SmoothOut(model, 0.1)
    with smooth.perturbed():
        assert_moved(model, before, smooth)
    assert_same(model, before)


def test_lora_trained_attached_equals_explicit_and_leaves_the_base_alone():
    base = gpt2()
    explicit, attached = (trained(with_lora(base), attach) for attach in (False, True))
    assert_equal_models(explicit, attached)
    assert_equal_models(attached.unload(), base)


def test_an_adapter_saved_under_noise_is_clean(tmp_path):
    model = with_lora(gpt2())
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with SmoothOut(model, 0.1).perturbed():
        model.save_pretrained(tmp_path)
    saved = pytest.importorskip("safetensors.torch").load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == len(before)
    for name, p in saved.items():
        assert torch.equal(p, before[name.replace(".weight", ".default.weight")]), name
