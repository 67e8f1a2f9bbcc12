"""transformers and peft: budgets in place, wrappers, planning from shapes, and their own switches for checkpointing."""

import functools
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import ackpt
from ackpt.planner.capture.inspection.calls import as_trainer_calls

# peft asks transformers by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(layers=1):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, use_cache=False, **sizes)).train()


def gpt2(layers=1):
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **special)).train()


def adapted(make, dtype=torch.float32):
    targets = {"target_modules": ["q_proj", "v_proj"]} if make is llama else {"target_modules": ["c_attn"]}
    config = LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM", fan_in_fan_out=make is gpt2, **targets)
    model = get_peft_model(make(layers=2).to(dtype), config)  # gradients pass a frozen layer
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide errors
            torch.nn.init.normal_(parameter)
    return model


def gradients(run, model, dtype=torch.float32):
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = run(**BATCH).loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def adapted_and_expected(make, dtype):
    """An adapted model, and the gradients of one that is equal and not planned."""
    plain = adapted(make, dtype)
    expected = gradients(plain, plain, dtype)
    assert expected and all("lora" in name for name in expected)
    return adapted(make, dtype), expected


every_adapter = pytest.mark.parametrize("make", [llama, gpt2])
DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_adapter
def test_adapters_in_regions_are_bit_equal(make, dtype):
    model, expected = adapted_and_expected(make, dtype)
    ackpt.apply_activation_checkpointing(model)  # without enable_input_require_grads
    assert same(gradients(model, model, dtype), expected)


@pytest.mark.parametrize(("make", "dtype"), [*((llama, dtype) for dtype in DTYPES), (gpt2, torch.float16)])
def test_adapters_within_a_budget(make, dtype):
    model, expected = adapted_and_expected(make, dtype)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        step = ackpt.apply_budget(model, BATCH, budget=0.85)
    assert same(gradients(model, model, dtype), expected)
    model.zero_grad()
    run = functools.partial(gradients, model, model, dtype)
    measured = ackpt.measure(lambda: run() and None, resident=(model, IDS), warmup=0, repeats=0)
    assert measured.peak_bytes == step.plan.peak_bytes < step.plan.baseline_peak_bytes


def test_methods_of_peft_work_on_a_planned_model(tmp_path):
    model = adapted(llama)
    expected = gradients(model, model)
    expected = {name: grad.clone() for name, grad in expected.items()}
    ackpt.apply_budget(model, BATCH, budget=0.8)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(layers=2), tmp_path, is_trainable=True)
    assert same(gradients(loaded, loaded), expected)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(**BATCH).loss, llama(layers=2)(**BATCH).loss)
    model.merge_adapter()
    model.unmerge_adapter()
    assert type(model.merge_and_unload()) is LlamaForCausalLM


@every_adapter
def test_an_adapted_model_from_shapes_has_the_plan_of_the_real_one(make):
    model, batch = ackpt.from_shapes(lambda: (adapted(make), {name: torch.empty_like(IDS) for name in BATCH}))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    graph, real = ackpt.trace(model, **batch), ackpt.trace(adapted(make), **{n: IDS.clone() for n in BATCH})
    assert graph.hash == real.hash and not graph.has_data
    predicted = ackpt.predict(lambda: model(**batch).loss.backward(), resident=(model, *batch.values()))
    assert predicted.categories["gradients"] == graph.gradient_bytes


@pytest.mark.filterwarnings("ignore:The model was captured as torch.compile runs it")
def test_a_plan_from_shapes_leaves_out_the_workspace_of_kernels_unless_it_is_measured():
    real = ackpt.trace(adapted(llama), **BATCH)
    model, batch = ackpt.from_shapes(lambda: (adapted(llama), {name: torch.empty_like(IDS) for name in BATCH}))
    graph = ackpt.trace(model, **batch)
    promised = ackpt.plan(real, policy="full").dynamic_peak_bytes
    assert ackpt.plan(graph, policy="full").dynamic_peak_bytes < promised
    measured = ackpt.profile(graph, workspace="measured")
    assert ackpt.plan(graph, policy="full", profile=measured).dynamic_peak_bytes == promised


def test_shapes_of_a_constructor_that_reads_values():
    with pytest.raises(ackpt.TraceError, match="reads the values of a tensor while it is built"):
        ackpt.from_shapes(lambda: torch.nn.Linear(int(torch.ones(1).sum().item()), 2))
    tied = ackpt.from_shapes(lambda: gpt2())
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_a_compiled_model_forwards_attributes_and_methods_and_a_trainer_is_told(tmp_path):
    model = llama()
    step = ackpt.compile(model, **BATCH, budget=0.9)
    assert step.config is model.config and step.num_parameters() == model.num_parameters()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = step.nothing
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match="give it a budget by ackpt.apply_budget"):
        transformers.Trainer(model=step, args=arguments)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_trainer_trains_with_the_capture_of_the_example_batch(tmp_path, monkeypatch):
    """It passes num_items_in_batch, for which the step would be captured once more."""
    model, plain, trainer = llama(), llama(), transformers.Trainer  # imported, as by from transformers import Trainer
    step = ackpt.apply_budget(model, {"input_ids": IDS, "labels": IDS.clone()}, budget="8MiB", optimizer="adamw")
    data = [{"input_ids": row, "labels": row} for row in IDS]
    options = {"max_steps": 2, "per_device_train_batch_size": len(data), "use_cpu": True, "report_to": "none"}
    for each in (model, plain):
        given = transformers.TrainingArguments(str(tmp_path), save_strategy="no", disable_tqdm=True, **options)
        trainer(each, given, train_dataset=data).train()
    assert [event.kind for event in step.history] == ["capture"]
    assert same(model.state_dict(), plain.state_dict())

    added = {name: value for name, value in as_trainer_calls(plain, BATCH).items() if name not in BATCH}
    assert list(added) == ["num_items_in_batch"] and added["num_items_in_batch"].shape == ()
    assert as_trainer_calls(torch.nn.Linear(2, 2), BATCH) == BATCH
    monkeypatch.delitem(sys.modules, "transformers.trainer")  # a program that has its own loop
    assert as_trainer_calls(plain, BATCH) == BATCH


NEW = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
OLD = hasattr(transformers.PreTrainedModel, "gradient_checkpointing_enable")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"offload": "sync"}], ids=["recompute", "offload"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["activation_checkpointing_enable"] * NEW + ["gradient_checkpointing_enable"] * OLD)
def test_checkpoint_can_replace_that_of_transformers(name, every, options, monkeypatch):
    regions = []

    @functools.wraps(ackpt.checkpoint)
    def counted(*args, **kwargs):
        regions.append(kwargs.get("offload"))
        return ackpt.checkpoint(*args, **kwargs)

    plain, model = llama(layers=2), llama(layers=2)
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    getattr(model, name)(options, **({"every_n_layers": every} if NEW else {}))
    assert same(gradients(model, model), gradients(plain, plain))
    assert regions == [options.get("offload")] * (2 // every if NEW else 2)
