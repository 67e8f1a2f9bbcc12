"""Steps of the experiments: one training step with each method, its settings, failures and predictions."""
