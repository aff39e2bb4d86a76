"""`train_fn`: the step that finds gradients is the user's own."""
