"""`TrainLoop`: the loop is the user's own."""
