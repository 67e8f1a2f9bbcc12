"""Train LoRA adapters within a budget (needs `pip install ".[hf]"`).

python examples/lora.py
"""

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ackpt
from ackpt.metering.meter import memory_format

ADAPTERS = LoraConfig(
    r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
)


def llama():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        vocab_size=64,
        use_cache=False,
    )
    config.num_attention_heads = config.num_key_value_heads = 2
    return LlamaForCausalLM(config).bfloat16()  # the adapters are float32


def step(model, batch):
    """The gradients of one step, with float32 adapters and bfloat16 frozen weights."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {name: grad for name, grad in gradients.items() if grad is not None}


def measure_peak(model, batch):
    """The peak of one step in bytes."""
    resident = [model, *batch.values()]
    return ackpt.measure(
        lambda: step(model, batch), resident=resident, warmup=0, repeats=0
    ).peak_bytes


torch.manual_seed(0)
baseline = get_peft_model(llama(), ADAPTERS)
model = copy.deepcopy(baseline)
ids = torch.randint(64, (8, 128))
batch: dict[str, Any] = {"input_ids": ids, "labels": ids}

with torch.autocast("cpu", torch.bfloat16):  # as the step will run
    planned = ackpt.apply_budget(model, batch, budget="5MiB")  # the line to add

baseline_peak, peak = measure_peak(baseline, batch), measure_peak(model, batch)
torch.manual_seed(1)  # for dropout
expected = step(baseline, batch)
torch.manual_seed(1)
gradients = step(model, batch)
assert all("lora" in name for name in gradients)  # frozen weights have no gradients
assert gradients.keys() == expected.keys()
assert all(torch.equal(gradients[name], expected[name]) for name in expected)
planned_peak = planned.plan.peak_bytes
assert peak <= planned_peak <= 5 * 2**20 < baseline_peak

# The same model without data: this works for a model of any size.
shapes = ackpt.from_shapes(lambda: get_peft_model(llama(), ADAPTERS))
with torch.autocast("cpu", torch.bfloat16):
    graph = ackpt.trace(shapes, **batch)
assert graph.gradient_bytes == sum(each.nbytes for each in gradients.values())
print(f"baseline {memory_format(baseline_peak)}, plan {memory_format(planned_peak)}")
print(f"measured {memory_format(peak)}, cost {planned.plan.cost:.1%} of the step")
print("gradients of the adapters equal the baseline's to the last bit")
