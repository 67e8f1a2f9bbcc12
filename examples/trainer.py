"""Use the transformers Trainer within a budget (needs `pip install ".[hf]"`).

python examples/trainer.py
"""

import copy
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ackpt
from ackpt.metering.meter import memory_format

STEPS, MICRO_BATCHES = 4, 2
ARGUMENTS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "use_cpu": True,
}


class MeasuringTrainer(Trainer):
    """Measures the peak of the last micro-batch, with the accumulated gradients."""

    peak, calls = 0, 0

    def training_step(self, model, inputs, *args, **kwargs):
        self.calls += 1
        if self.calls != STEPS * MICRO_BATCHES:
            return super().training_step(model, inputs, *args, **kwargs)
        losses, run = [], super().training_step

        def step():
            losses.append(run(model, inputs, *args, **kwargs))

        resident = [self.model, self.optimizer, *inputs.values()]
        measured = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
        self.peak = measured.peak_bytes
        return losses[0]


def train(model, folder, resume=None):
    arguments = TrainingArguments(folder, **ARGUMENTS)
    trainer = MeasuringTrainer(model, arguments, None, data, data[:4])
    trainer.train(resume_from_checkpoint=resume)
    logs = [each for log in trainer.state.log_history for each in log.items()]
    return trainer, [value for name, value in logs if "loss" in name]


torch.manual_seed(0)
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
baseline = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=64))
model, resumed = copy.deepcopy(baseline), copy.deepcopy(baseline)
texts = torch.randint(64, (32, 64))
data: Any = [{"input_ids": row, "labels": row} for row in texts]
batch = {"input_ids": texts[:4].clone(), "labels": texts[:4].clone()}
options = {"budget": "1.9MiB", "optimizer": "adamw", "accumulation": True}
step = ackpt.apply_budget(model, batch, **options)  # the line to add
ackpt.apply_budget(resumed, batch, **options)
with tempfile.TemporaryDirectory() as folder:
    reference, expected = train(baseline, folder + "/0")
    trainer, losses = train(model, folder)
    train(resumed, folder, resume=folder + "/checkpoint-2")
    saved = LlamaForCausalLM.from_pretrained(folder + "/checkpoint-4")
assert losses == expected
for each in (model, resumed, saved):
    assert all(map(torch.equal, baseline.parameters(), each.parameters()))
planned_peak = step.plan.peak_bytes
assert trainer.peak <= planned_peak <= 1.9 * 2**20 < reference.peak
peaks = map(memory_format, (reference.peak, planned_peak, trainer.peak))
print("baseline {}, plan {}, measured {}".format(*peaks))
print("parameters equal the baseline's to the last bit, also after resuming")
