"""Other ways to write a training: `fit`, `train_fn` and `TrainLoop`. Each is a translation, none has a loop."""
