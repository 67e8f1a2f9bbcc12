"""`AckptCallback`: the Trainer of transformers trains within a budget, with the same weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ackpt import BudgetError  # noqa: E402
from ackpt.planner.step.planned_step import in_place_of  # noqa: E402
from ackpt.planner.trainer_callback import AckptCallback  # noqa: E402


def trained(folder, *callbacks, **options):
    """The weights after three steps, and the model."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    rows = torch.randint(0, 64, (16, 16))
    data = [{"input_ids": row.clone(), "labels": row.clone()} for row in rows]
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[*callbacks]).train()
    return {name: value.clone() for name, value in model.state_dict().items()}, model


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_training_has_the_weights_of_the_baseline(tmp_path, options):
    expected, _ = trained(tmp_path, **options)
    with pytest.raises(BudgetError) as refused:
        trained(tmp_path, AckptCallback(1), **options)
    callback = AckptCallback(refused.value.least_bytes)
    weights, model = trained(tmp_path, callback, **options)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert callback.step is not None and callback.step.plan.peak_bytes <= (refused.value.least_bytes or 0)
    assert callback.step.plan.recompute_flops > 0 and in_place_of(model) is None


def test_an_invalid_budget_is_refused_at_once():
    with pytest.raises(ValueError, match="is not a budget"):
        AckptCallback("much")
    with pytest.raises(TypeError, match="sloowdown"):
        AckptCallback("6GiB", sloowdown=0.1)


def test_a_training_that_failed_is_followed_by_another_and_a_second_budget_is_refused(tmp_path):
    model, callback = torch.nn.Linear(2, 2), AckptCallback("1GiB")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for _ in range(2):  # on_train_end does not run after an error
        callback.on_train_begin(arguments, None, None, model, torch.optim.SGD(model.parameters()))
        assert in_place_of(model) is callback.step
    with pytest.raises(ValueError, match="the model has a budget"):
        AckptCallback("1GiB").on_train_begin(arguments, None, None, model)
    callback.on_train_end(arguments, None, None, model)
    assert in_place_of(model) is None
