"""The Trainer of transformers within a budget, with texts of many lengths.

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
    """Measures the peak of every step, parameters and inputs included."""

    def training_step(self, model, inputs, *args, **kwargs):
        losses, random = [], torch.get_rng_state()
        run = super().training_step

        def step():
            model.zero_grad()
            torch.set_rng_state(random)
            losses.append(run(model, inputs, *args, **kwargs))

        step()  # captures and plans new lengths
        resident = [model, *inputs.values()]
        measured = ackpt.measure(step, resident=resident, warmup=0, repeats=0)
        self.peaks = [*getattr(self, "peaks", []), measured.peak_bytes]
        return losses[0]


def padded(rows):
    """A batch, padded at the end, where a causal model needs no mask."""
    texts = [row["input_ids"] for row in rows]
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(texts, batch_first=True), "labels": labels}


def trained(model, data):
    """The peak of every step in bytes."""
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
        trainer = MeasuringTrainer(model, arguments, padded, data, data[:8])
        trainer.train()
        return trainer.peaks


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256, n_positions=128, n_embd=64, n_layer=1, n_head=2, use_cache=False
)
config.bos_token_id = config.eos_token_id = 0
plain = GPT2LMHeadModel(config)
model = copy.deepcopy(plain)
lengths = torch.randint(16, 128, (4 * STEPS - 2,)).tolist()  # the last batch is smaller
data = [{"input_ids": torch.randint(256, (length,))} for length in lengths]

plans = []  # the next line is the one to add
model.compile(backend="ackpt", options={"budget": BUDGET, "on_plan": plans.append})
before, after = trained(plain, data), trained(model, data)

assert all(map(torch.equal, plain.parameters(), model.parameters()))
assert len(after) == STEPS and max(before) > 4 * 2**20 >= max(after)
for peak, planned in zip(before, after):
    print(f"plain {memory_format(peak)}, planned {memory_format(planned)}")
print(f"{len(plans)} sizes planned, parameters equal to the last bit")
