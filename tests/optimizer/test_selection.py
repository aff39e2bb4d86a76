import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.diagnostics.leaves import listed, parameter_paths
from jax_trainer.optimizer.transforms import is_match, require_match
from tests.rows import noted_row


def test_an_expression_is_tried_from_the_start_of_the_path():
    for regex, matched in [
        ("", []),
        (".*", ["block.0.kernel", "block.0.bias", "kernel_scale"]),
        ("block", ["block.0.kernel", "block.0.bias"]),
        ("kernel", ["kernel_scale"]),
        (".*kernel$", ["block.0.kernel"]),
        (r"block\.\d+\.(kernel|bias)", ["block.0.kernel", "block.0.bias"]),
    ]:
        with noted_row(regex, matched):
            paths = ["block.0.kernel", "block.0.bias", "kernel_scale"]
            assert [path for path in paths if is_match(regex, path)] == matched


def test_paths_are_dotted_also_through_lists():
    params = {"block": [{"kernel": 1}, {"kernel": 2}], "list": {0: 3, 1: 4}}
    assert parameter_paths(params) == ["block.0.kernel", "block.1.kernel", "list.0", "list.1"]


def test_an_expression_that_matches_nothing_is_an_error_that_lists_the_names():
    paths = [f"layer{index}.kernel" for index in range(50)]
    with pytest.raises(SettingsError) as caught:
        require_match("freeze", "encoder", paths)
    text = str(caught.value)
    assert text.startswith("`freeze` 'encoder' matches no parameter") and "layer0.kernel, layer1.kernel, " in text
    assert "prepend '.*'" in text
    with pytest.raises(SettingsError, match=r"'\.\*encoder' matches no parameter") as caught:
        require_match("freeze", ".*encoder", ["layer0.kernel"])
    assert "prepend" not in str(caught.value)
    assert "layer19.kernel and 30 more" in text
    assert "layer20.kernel" not in text
    assert listed(["a", "b"]) == "a, b"
