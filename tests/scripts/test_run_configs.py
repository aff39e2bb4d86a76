import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# those for a large GPU, and one that needs another run first
ELSEWHERE = {"cifar10_dit.yaml", "gpt2.yaml", "digits_distillation.yaml"}
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "run_configs.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_header_of_a_configuration_says_the_command_and_what_comes_out(file: Path):
    teacher = " trainer.teacher=runs/ConditionalMLP/<that run>" if file.name == "digits_distillation.yaml" else ""
    assert f"\n#   jax-trainer train configs/{file.name}{teacher}\n" in file.read_text()
    if file.name not in ELSEWHERE:
        assert SCRIPT["Promise"].of(file).seconds > 0


def test_what_comes_out_is_compared_with_the_promise(tmp_path: Path):
    file = tmp_path / "some.yaml"
    file.write_text("# Expected: test/bits ≤ 2.5 after about 160 s on two CPU cores.\n")
    promise = SCRIPT["Promise"].of(file)
    assert (promise.is_kept_by(2.5), promise.is_kept_by(2.51)) == (True, False)
    file.write_text("# Expected: something good\n")
    with pytest.raises(ValueError, match="some.yaml has no line `# Expected"):
        SCRIPT["Promise"].of(file)


@pytest.mark.slow
def test_the_digits_keep_their_promise(tmp_path: Path):
    digits = ROOT / "configs" / "digits.yaml"
    assert SCRIPT["Promise"].of(digits).is_kept_by(SCRIPT["run"](digits, tmp_path))
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 1
