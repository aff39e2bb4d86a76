import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "src/jax_trainer/configs").glob("*.yaml"))
# those for a large GPU, and those that need another run, or a checkpoint, first
ELSEWHERE = {
    "cifar10_dit.yaml",
    "cifar10_speedrun.yaml",
    "gpt2.yaml",
    "digits_distillation.yaml",
    "finetune_lora.yaml",
}
REST_OF_COMMAND = {
    "cifar10_speedrun.yaml": " examples/cifar10_speedrun.py",
    "digits_distillation.yaml": " trainer.teacher=runs/ConditionalMLP/<that run>",
}
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "run_configs.py"))


def test_the_headers_of_configurations_say_the_command_and_what_comes_out():
    commands = {file: f"{file.stem}{REST_OF_COMMAND.get(file.name, '')}" for file in CONFIGS}
    lacking = {file: command for file, command in commands.items() if f"train {command}\n" not in file.read_text()}
    assert lacking == {}
    assert all(SCRIPT["Promise"].of(file).seconds > 0 for file in CONFIGS if file.name not in ELSEWHERE)


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
    digits = ROOT / "src/jax_trainer/configs" / "digits.yaml"
    assert SCRIPT["Promise"].of(digits).is_kept_by(SCRIPT["run"](digits, tmp_path))
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 1
