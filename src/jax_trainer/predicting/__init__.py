"""Predictions written to a file while they are computed: JSON lines, Parquet or npz, in bounded memory, resumable."""

from jax_trainer.predicting.formats import FORMATS
from jax_trainer.predicting.writing import PredictionFile, Predictor, write_predictions

__all__ = ["FORMATS", "PredictionFile", "Predictor", "write_predictions"]
