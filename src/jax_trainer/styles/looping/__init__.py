"""`TrainLoop`: the user writes the loop."""
