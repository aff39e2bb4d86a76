from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.config import (
    ConfigError,
    as_data,
    config_from,
    dump_config,
    json_schema,
    load_config,
    redact,
    redact_text,
)
from jax_trainer.config.describing import describe
from jax_trainer.config.redaction import environment_secrets, is_secret
from jax_trainer.config.settings import Settings, SettingsError
from tests.config.config_things import Paper, Sketch, SketchCircleConfig, SketchShape, complaints, sketch, written  # type: ignore[import-not-found] - beside the tests of the configuration
from tests.rows import each

CANARY = "CANARY-9f3a"


SECRET = """
    password db_password PGPASSWORD dbPassword passwords MYSQL_PWD passphrase secret client_secret AWS_SECRET_ACCESS_KEY
    api_key apikey apiKey WANDB_API_KEY api-key private_key ssh_key HF_TOKEN token accessToken HFToken wandb.token
    token.0 auth auth.user oauth Authorization credentials
"""


@each("key", SECRET.split())
def test_these_names_are_secrets(key: str):
    assert is_secret(key)


NO_SECRET = """
    tokens max_tokens tokenizer author authors key keys monkey init_key public_key_file pad_token eos_token bos_token_id
    token_id loss_per_token mask_token class_token password_file secretary api_key_env passes compass bypass title .
"""


@each("key", NO_SECRET.split())
def test_these_names_are_ordinary(key: str):
    assert not is_secret(key)


ORDINARY = [
    *("tokens", "author: me", "max_tokens: 5", "tokenizer=bpe", "key=value", "12:30", "C:\\data\\token:1", "secret"),
    *("note: password rules apply", "password=see the manual", "token: described below", "Bearer of good news"),
    *("https://host/path?q=5", "https://host:8080/a@b", "me@host.org", "a://b", "s3://bucket/key", "/home/me/token"),
    *("<pad>", "auth = none", "what? token=5"),
]


@each("text", ORDINARY)
def test_ordinary_text_survives_in_what_is_stored(tmp_path: Path, text: str):
    config = Sketch(title=text, tags=[text], notes={"a": text, "eos_token": text}, extra={"max_tokens": 5, "key": text})
    assert redact(as_data(config)) == as_data(config)
    assert load_config(written(tmp_path, dump_config(config)), Sketch).value == config


@each(
    "data",
    [
        {"token": CANARY},
        {"wandb": {"api_key": CANARY}},
        {"credentials": {"user": CANARY, "more": [CANARY]}},
        {"token": CANARY, "copy": f"a {CANARY} b", "nested": [{"x": CANARY}]},
        {"url": f"https://me:{CANARY}@host/x"},
        {"url": f"https://{CANARY}@host"},
        {"url": f"postgres+psycopg://me:p@{CANARY}@host:5432/db"},
        {"url": f"https://host/x?a=1&token={CANARY}&b=2#c"},
        {f"https://me:{CANARY}@host": 1},
    ],
)
def test_a_secret_is_hidden_in_data(data: Any):
    assert CANARY not in str(redact(data))
    assert "<hidden>" in str(redact(data))


def test_only_the_secret_is_hidden():
    assert redact(
        {"url": "https://me:hunter2@host/x?a=1&token=abc&b=2", "token": "", "auth": None, "secret": True}
    ) == {
        "url": "https://<hidden>@host/x?a=1&token=<hidden>&b=2",
        "token": "",
        "auth": None,
        "secret": True,
    }
    assert redact({"password": 12345678, "pages": 3}) == {"password": "<hidden>", "pages": 3}


def test_a_secret_of_the_environment_is_hidden_wherever_it_stands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setenv("SOME_TOKEN", "it's \\ this")
    monkeypatch.setenv("SOME_AUTH", "short")
    config = Sketch(title=f"x{CANARY}x", notes={"a": "it's \\ this", "b": "in short"}, extra={CANARY: 1})
    text = dump_config(config)
    assert CANARY not in text and "it's" not in text and "this" not in text
    assert "in short" in text
    message = f"failed with {CANARY} and {config.notes['a']!r} and {config.notes['a']}"
    assert redact_text(message, environment_secrets()) == 'failed with <hidden> and "<hidden>" and <hidden>'


@each(
    "message, safe",
    [
        (f"password={CANARY}", "password=<hidden>"),
        (f"{{'password': '{CANARY} x', 'pages': 3}}", "{'password': '<hidden> x', 'pages': 3}"),
        ("get https://me:another@host/x failed", "get https://<hidden>@host/x failed"),
        ("get https://host/x?token=another failed", "get https://host/x?token=<hidden> failed"),
        ("at 12:30 max_tokens=5, author: me, key=x", "at 12:30 max_tokens=5, author: me, key=x"),
        ("the key `token` is missing: expected text", "the key `token` is missing: expected text"),
    ],
)
def test_a_message_is_kept_but_for_the_secret(message: str, safe: str):
    assert redact_text(message, [CANARY]) == safe


@each("text", ["a" * 100_000, "a.a-" * 25_000, "x://" * 25_000, "token" * 20_000, "a=" * 50_000, " =" * 50_000])
@pytest.mark.timeout(5)
def test_a_long_text_is_searched_in_no_time(text: str):
    assert redact_text(text, ()) == text
    assert redact({text: text}) == {text: text}


LEAKS = [
    ("token: [CANARY-9f3a]\n", ()),
    ("token: {a: CANARY-9f3a}\n", ()),
    ("token: CANARY-9f3a\npages: ${token}\n", ()),
    ("token: CANARY-9f3a\nshape: {class_name: '${token}'}\n", ()),
    ("token: CANARY-9f3a\nline: 'a ${token} b'\n", ()),
    ("token: CANARY-9f3a\npages: '" + "x" * 72 + "${token}'\n", ()),
    ("pages: {api_key: CANARY-9f3a}\n", ()),
    ("tags: [{password: CANARY-9f3a}]\n", ()),
    ("tags: {a: {secret: [CANARY-9f3a]}}\n", ()),
    ("include: {password: CANARY-9f3a}\n", ()),
    ("- password: CANARY-9f3a\n", ()),
    ("password: CANARY-9f3a\n", ()),
    ("token: &CANARY-9f3a x\n", ()),
    ("token: *CANARY-9f3a\n", ()),
    ("token: !CANARY-9f3a x\n", ()),
    ("token: !CANARY-9f3a!x y\n", ()),
    ("token: !<CANARY-9f3a\n", ()),
    ("token: @CANARY-9f3a\n", ()),
    ("token: %CANARY-9f3a\n", ()),
    ("token: 'CANARY-9f3a\n", ()),
    ('token: "\\CANARY-9f3a"\n', ()),
    ("token: [CANARY-9f3a\n", ()),
    ("token: CANARY-9f3a: x\n", ()),
    ("token: CANARY-9f3a\ntoken: CANARY-9f3a\n", ()),
    ("pages: https://me:CANARY-9f3a@host/x\n", ()),
    ("pages: https://host/?api_key=CANARY-9f3a\n", ()),
    ("title: x\n", ["token=[CANARY-9f3a]"]),
    ("title: x\n", ["token=!CANARY-9f3a"]),
    ("title: x\n", ["token=&CANARY-9f3a x"]),
    ("title: x\n", ["token='CANARY-9f3a"]),
    ("title: x\n", ["wandb.token=CANARY-9f3a"]),
    ("title: x\n", ["wandb.token = CANARY-9f3a"]),
    ("title: x\n", ["password: CANARY-9f3a"]),
    ("title: x\n", ["pages=https://me:CANARY-9f3a@host"]),
    ("token: CANARY-9f3a\n", ["token.x=1"]),
    ("title: x\n", ["token=CANARY-9f3a", "pages=${token}"]),
    ("notes: {api_key: CANARY-9f3a, b: 5}\n", ()),
]


@each("text, overrides", LEAKS)
def test_an_error_shows_no_secret(tmp_path: Path, text: str, overrides: Any):
    problems = complaints(tmp_path, text, *overrides)
    shown = " ".join([*map(str, problems), *(repr(problem.as_data()) for problem in problems)])
    assert "CANA" not in shown and "9f3a" not in shown


def test_an_error_shows_no_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    text = f"pages: {CANARY}\n{CANARY}: 5\nscale: ${{no.{CANARY}}}\n"
    problems = complaints(tmp_path, text, CANARY, f"my{CANARY}=5")
    assert len(problems) == 5
    assert CANARY not in str(problems)


@dataclass
class Printer(Settings):
    """Where sketches are printed.

    Args:
        token: opens it.
        level: how dark.
    """

    token: str = ""
    level: int = 1

    def problems(self) -> Any:
        """Both say too much."""
        if self.token:
            yield "token", f"`token` is {self.token!r}, which is old."
        if self.level == 2:
            yield "level", f"nothing fits {self.token!r}."


def test_the_message_of_a_class_about_a_secret_is_not_shown():
    with pytest.raises(ConfigError, match="token: .*not shown") as caught:
        config_from({"token": CANARY, "level": 2}, Printer)
    assert CANARY not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        config_from({"token": "abc"}, Printer)
    assert "abc" not in str(caught.value)


def test_an_error_after_loading_shows_no_secret(tmp_path: Path):
    loaded = load_config(written(tmp_path, f"token: {CANARY}\n"), Sketch)
    error = loaded.error(SettingsError([("token", f"got '{CANARY}'"), ("title", f"does not go with {CANARY}")]))
    assert CANARY not in str(error)
    assert len(error.problems) == 2


def test_a_stored_configuration_shows_no_secret_and_asks_for_it_when_it_is_read(tmp_path: Path):
    url = f"https://me:{CANARY}@host/x"
    config = Sketch(token=CANARY, title=url, notes={"a": f"see {CANARY}"}, extra={"deep": [{"password": CANARY}]})
    text = dump_config(config)
    assert CANARY not in text
    found = [(problem.key, problem.text) for problem in complaints(tmp_path, text)]
    assert [key for key, _ in found] == ["title", "token", "notes.a", "extra"]
    assert all("secret" in said for _, said in found)
    given = [f"token={CANARY}", "title=x", "notes.a=y", "extra=null"]
    assert sketch(tmp_path, text, *given).token == CANARY


def test_descriptions_and_schemas_show_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", CANARY)

    @dataclass
    class SketchStampConfig(Settings):
        """A stamp.

        Args:
            token: opens the drawer.
            place: where it is.
            paper: what is stamped.
        """

        token: str = "another secret"
        place: str = f"https://me:{CANARY}@host"
        paper: Paper = field(default_factory=Paper)

    class SketchStamp(SketchShape):
        config_class = SketchStampConfig

    shown = f"{describe(SketchShape, SketchStamp)} {json_schema(SketchStampConfig)}"
    assert CANARY not in shown and "another secret" not in shown


def test_redacting_leaves_what_it_was_given_alone():
    data = {"token": CANARY, "list": [1, {"password": CANARY}]}
    redact(data)
    assert data == {"token": CANARY, "list": [1, {"password": CANARY}]}
    assert redact(SketchCircleConfig()) == SketchCircleConfig()


def test_the_working_folder_is_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PWD", "/home/somebody/project")
    assert redact("/home/somebody/project/runs") == "/home/somebody/project/runs"
