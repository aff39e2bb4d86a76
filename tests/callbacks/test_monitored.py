from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer.callbacks import EarlyStoppingConfig, ModelCheckpointConfig
from jax_trainer.callbacks.monitored import monitored
from jax_trainer.checkpoint.ranking import best_mode
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import SettingsError
from jax_trainer.styles import get_default_checkpointer
from jax_trainer.tools.tuning.objectives import Objective
from tests.rows import noted_row

LARGE = """
    acc accuracy top1 top5_accuracy top-5 valAcc acc@1 accuracy_top_1 balanced_accuracy F1 f1_macro F1Score fbeta f2 auc
    AUROC roc_auc pr_auc ap mAP mAP50 map_50 precision recall recall_at_fpr precision@5 ndcg@10 hits@10 hit_rate mrr r2
    R2Score r_squared iou mIoU mean_iou dice bleu bleu4 sacreBLEU rouge1 rouge_l ROUGE-L psnr ssim pearson spearman
    correlation kappa mcc elbo log_likelihood reward episode_return win_rate exact_match cosine_similarity
    neg_mean_squared_error 1-loss acc_max specificity top1acc accuracy_score
    explained_variance mean_reciprocal_rank
"""
SMALL = """
    loss val_loss trainLoss mse_loss accumulated_loss acc_loss f1_loss logloss error top1_error err err5 error_rate mse
    RMSE mae mape nll neg_log_likelihood negative_log_likelihood ce bce cross_entropy crossEntropy kl kl_divergence
    perplexity ppl bpc bits_per_dim wer CER fid distance cosine_distance regret time ece brier_score val_metric
    false_negative_rate false_positives fpr_at_95_tpr neg_elbo acc_std l2 nELBO accuracy_drop
    generalization_gap word_error_rate inaccuracy 1-acc
"""
UNKNOWN = (
    "score value metric x energy entropy rate total_score my_thing error_top5 loss_acc loss_accuracy test_time_acc "
    "loss_reduction error_reduction minus_acc one_minus_auc inverse_accuracy not_correct acc_minus_chance "
    "acc_non_padding"
)


def test_auto_goes_by_the_words_of_the_metrics_name():
    for names, mode in [(LARGE, "max"), (SMALL, "min")]:
        with noted_row(names, mode):
            found = {name: best_mode("auto", f"val/{name}") for name in names.split()}
            assert found == dict.fromkeys(found, mode)


def test_only_the_last_part_of_a_name_counts_and_an_explicit_mode_wins():
    assert best_mode("auto", "val_acc/perplexity") == "min"
    assert best_mode("auto", "val_loss") == "min"
    assert best_mode("max", "val/loss") == "max"
    assert best_mode("min", "val/score") == "min"


def test_a_name_that_does_not_say_which_way_is_an_error_that_asks_for_the_mode():
    for name in UNKNOWN.split():
        with noted_row(name):
            with pytest.raises(SettingsError, match=f"'val/{name}'.*`mode: min` or `mode: max`") as caught:
                best_mode("auto", f"val/{name}")
            assert [key for key, _ in caught.value.problems] == ["mode"]


def tuned(**options: Any) -> Any:
    return Objective(lambda values, trial: 0.0, **options)


MONITORING: dict[str, Callable[..., Any]] = {
    "ModelCheckpoint": lambda monitor, **mode: ModelCheckpointConfig(monitor=monitor, **mode).best_mode,
    "EarlyStopping": lambda monitor, **mode: EarlyStoppingConfig(monitor=monitor, **mode).best_mode,
    "CheckpointStore": lambda monitor, **mode: CheckpointStore(Path("x"), monitor=monitor, **mode)._retention.direction,
    "tune": lambda monitor, **mode: tuned(monitor=monitor, **mode).mode,
    "get_default_checkpointer": lambda monitor, **mode: (
        get_default_checkpointer(
            "x", save_every_n_steps=1, criterion_key=monitor, **{f"best_{name}": value for name, value in mode.items()}
        )[0]._store._retention.direction
    ),
}


def test_the_best_of_an_accuracy_is_the_highest_wherever_a_metric_is_monitored():
    for name in MONITORING:
        with noted_row(name):
            mode_of = MONITORING[name]
            assert (mode_of("val/acc"), mode_of("val/loss"), mode_of("val/acc", mode="min")) == ("max", "min", "min")
            with pytest.raises(SettingsError, match="'val/score'.*`(best_)?mode: min`"):
                mode_of("val/score")


def test_a_tuned_function_is_minimised_as_by_optuna_unless_a_direction_is_set():
    assert tuned().mode == "min"


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_which_are():
    with pytest.raises(ValueError, match="'val/f1'.*val/acc, val/loss"):
        monitored({"val/loss": 1.0, "val/acc": 0.5}, "val/f1")
    with pytest.raises(ValueError, match="Logged metrics: none."):
        monitored({}, "val/f1")


def test_an_array_cannot_be_monitored():
    with pytest.raises(ValueError, match=r"`monitor: val/m` must name a scalar, .* an array of shape \(2, 2\)"):
        monitored({"val/m": np.zeros((2, 2))}, "val/m")
    assert monitored({"val/m": np.float32(0.5)}, "val/m") == 0.5


def test_a_mode_that_keeps_the_worst_is_warned_about_once(caplog):
    for _ in range(2):
        assert best_mode("min", "val/some_accuracy") == "min"
        assert best_mode("max", "val/some_accuracy") == best_mode("max", "val/some_score") == "max"
    assert len(caplog.records) == 1
    assert all(word in caplog.text for word in ("min", "val/some_accuracy", "auto"))
