"""The Trainer of transformers within a budget (needs `pip install "ackpt[hf]"`).

python examples/trainer.py
"""

import copy
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ackpt
from ackpt.metering.meter import memory_format

STEPS = 3


class MeasuringTrainer(Trainer):
    """Measures its last step: the most bytes that forward and backward allocate."""

    def training_step(self, model, inputs, *args, **kwargs):
        if self.state.global_step < STEPS - 1:
            return super().training_step(model, inputs, *args, **kwargs)
        losses, run = [], super().training_step

        def step():
            losses.append(run(model, inputs, *args, **kwargs))

        resident = [model, *inputs.values()]
        measurement = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
        self.peak = measurement.dynamic_peak_bytes
        return losses[0]


def trained(model, data):
    """The most bytes that a step allocates."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            dataloader_drop_last=True,  # a smaller batch would have a plan of its own
            max_steps=STEPS,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = MeasuringTrainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return trainer.peak


torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    vocab_size=64,
    use_cache=False,
)
plain = LlamaForCausalLM(config)
model = copy.deepcopy(plain)
texts = torch.randint(64, (4 * STEPS, 128))
data = [{"input_ids": row, "labels": row} for row in texts]

plans = []  # the next line is the one to add
model.compile(backend="ackpt", options={"budget": 0.7, "on_plan": plans.append})
before, after = trained(plain, data), trained(model, data)

(plan,) = plans  # one graph, one plan
for one, other in zip(plain.parameters(), model.parameters()):
    assert torch.equal(one, other)
promised = plan.dynamic_peak_bytes
assert after <= promised <= 0.7 * plan.baseline_dynamic_peak_bytes
print(f"plain {memory_format(before)}, planned {memory_format(promised)}")
print(f"measured {memory_format(after)}")
print(f"parameters after {STEPS} steps as without a plan, to the last bit")
