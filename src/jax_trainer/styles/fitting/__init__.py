"""`fit`: a model, data and a loss."""
