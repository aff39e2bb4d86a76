import json

from jax_trainer.logger import JsonlWriter


def test_lines_are_json_and_on_disk_at_once(tmp_path):
    writer = JsonlWriter(tmp_path / "new" / "metrics.jsonl")
    writer.write(1, {"loss": 0.5, "bad": float("nan"), "huge": float("inf")})
    assert json.loads(writer.path.read_text()) == {"step": 1, "loss": 0.5, "bad": "nan", "huge": "inf"}
    writer.close("completed")


def test_an_existing_file_is_continued(tmp_path):
    for step in (1, 2):
        writer = JsonlWriter(tmp_path / "metrics.jsonl")
        writer.write(step, {})
        writer.close("completed")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"ste')
    writer = JsonlWriter(file)
    writer.write(2, {})
    writer.close("completed")
    assert file.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
