"""`train_fn`: training with the user's own gradient step."""
