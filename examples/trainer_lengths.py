"""Train on texts of many lengths with the transformers Trainer within a budget.

python examples/trainer_lengths.py
"""

import copy
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ackpt
from ackpt.metering.meter import memory_format

STEPS, BUDGET = 4, "4MiB"


class MeasuringTrainer(Trainer):
    """Measures the peak of every step, including parameters and inputs."""

    def training_step(self, model, inputs, *args, **kwargs):
        losses, rng_state = [], torch.get_rng_state()
        run = super().training_step

        def step():
            model.zero_grad()
            torch.set_rng_state(rng_state)
            losses.append(run(model, inputs, *args, **kwargs))

        step()  # captures and plans a new length
        resident = [model, *inputs.values()]
        measured = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
        self.peaks = [*getattr(self, "peaks", []), measured.peak_bytes]
        return losses[0]


def collate(rows):
    """A batch padded at the end: a causal model then needs no mask."""
    texts = [row["input_ids"] for row in rows]
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(texts, batch_first=True), "labels": labels}


def train(model, data):
    """Train; returns the peak of every step in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            eval_on_start=True,  # evaluation runs the model itself
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        trainer = MeasuringTrainer(model, arguments, collate, data, data[:8])
        trainer.train()
        return trainer.peaks


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256, n_positions=128, n_embd=64, n_layer=1, n_head=2, use_cache=False
)
config.bos_token_id = config.eos_token_id = 0
baseline = GPT2LMHeadModel(config)
model = copy.deepcopy(baseline)
lengths = torch.randint(16, 128, (4 * STEPS - 2,)).tolist()  # the last batch is smaller
data = [{"input_ids": torch.randint(256, (length,))} for length in lengths]

plans = []  # add the next line to your script
model.compile(backend="ackpt", options={"budget": BUDGET, "on_plan": plans.append})
baseline_peaks, peaks = train(baseline, data), train(model, data)

assert all(map(torch.equal, baseline.parameters(), model.parameters()))
assert len(peaks) == STEPS and max(baseline_peaks) > 4 * 2**20 >= max(peaks)
for baseline_peak, peak in zip(baseline_peaks, peaks):
    print(f"baseline {memory_format(baseline_peak)}, planned {memory_format(peak)}")
print(f"{len(plans)} sizes planned; parameters equal the baseline's to the last bit")
