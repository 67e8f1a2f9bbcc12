"""Steps of the experiments: one training step by every method, its settings, failures and predictions."""
