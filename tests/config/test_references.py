from pathlib import Path

from jax_trainer.config import config_from
from tests.config.config_things import Paper, complaint, complaints, sketch, written
from tests.rows import each


def test_a_reference_alone_has_the_type_of_what_it_stands_for(tmp_path: Path):
    text = "pages: 5\nscale: 1e-3\nis_draft: true\nextra:\n- ${pages}\n- ${scale}\n- ${ is_draft }\n"
    extra = sketch(tmp_path, text).extra
    assert extra == [5, 0.001, True]
    assert [type(value) for value in extra] == [int, float, bool]
    assert sketch(tmp_path, "title: '5'\nextra: ${title}\n").extra == "5"
    assert sketch(tmp_path, "limit:\nextra: ${limit}\n").extra is None


def test_a_reference_within_text_is_put_into_it_as_it_is_written(tmp_path: Path):
    text = "pages: 5\nscale: 0.5\nis_draft: true\nlimit:\ntitle: a-${pages}-${scale}-${is_draft}-${limit}.txt\n"
    assert sketch(tmp_path, text).title == "a-5-0.5-true-null.txt"


def test_references_lead_through_sections_lists_and_other_references(tmp_path: Path):
    text = "extra: {deep: [1, {x: '${paper.width}'}]}\npaper: {width: '${pages}'}\npages: 8\nlimit: ${extra.deep.1.x}\n"
    made = sketch(tmp_path, text)
    assert (made.limit, made.paper.width, made.extra) == (8, 8, {"deep": [1, {"x": 8}]})


def test_references_see_overrides_and_overrides_may_be_references(tmp_path: Path):
    text = "pages: 5\ntitle: ${pages} pages\n"
    assert sketch(tmp_path, text, "pages=7").title == "7 pages"
    assert sketch(tmp_path, text, "limit=${pages}", "pages=8").limit == 8


def test_references_see_what_is_included_and_what_is_changed(tmp_path: Path):
    written(tmp_path, "pages: 5\ntitle: ${pages} pages\n", "base.yaml")
    assert sketch(tmp_path, "include: base.yaml\npages: 6\nlimit: ${pages}\n").title == "6 pages"


@each(
    "written_as, means",
    [
        ("$${pages}", "${pages}"),
        ("a$$${b", "a$${b"),
        ("$5 {x} $", "$5 {x} $"),
        ("$${", "${"),
        ("}$${}${pages}", "}${}1"),
    ],
)
def test_a_doubled_dollar_is_a_plain_one(tmp_path: Path, written_as: str, means: str):
    assert sketch(tmp_path, f"pages: 1\ntitle: '{written_as}'\n").title == means


@each(
    "text, message",
    [
        ("limit: ${pagse}\n", "limit: `${pagse}` refers to a key that does not exist. Did you mean `pages`?"),
        (
            "limit: ${paper.widht}\n",
            "limit: `${paper.widht}` refers to a key that does not exist. Did you mean `paper.width`?",
        ),
        ("limit: ${}\n", "limit: `${}` refers to a key that does not exist."),
        ("limit: ${extra.2}\n", "limit: `${extra.2}` refers to a key that does not exist. Did you mean `extra.1`?"),
        ("title: a ${paper} b\n", "title: `${paper}` is a section or list. Refer to a scalar."),
        ("limit: ${extra}\n", "limit: `${extra}` is a section or list. Refer to a scalar."),
        ("limit: ${limit}\n", "limit: `${limit}` is a circular reference."),
        ("title: ${title}x\n", "title: `${title}` is a circular reference."),
        ("title: ${pages\n", "title: `${` has no closing `}`. For a literal `${`, write `$${`."),
        ("title: '${${pages}}'\n", "title: `${` has no closing `}`. For a literal `${`, write `$${`."),
    ],
)
def test_a_reference_that_stands_for_nothing_is_an_error_at_its_line(tmp_path: Path, text: str, message: str):
    base = "pages: 1\npaper: {width: 1}\nextra: [1, 2]\n"
    assert complaint(tmp_path, base + text) == f"sketch.yaml:4: {message}"


def test_a_reference_that_yaml_takes_for_a_section_must_be_quoted(tmp_path: Path):
    message = complaint(tmp_path, "pages: 1\nmargins: [${pages}, 1]\n")
    assert message.endswith("Quote a reference inside [] or {}.")
    assert sketch(tmp_path, "pages: 1\nmargins: ['${pages}', 1]\n").margins == (1, 1)


def test_a_reference_of_the_wrong_type_is_an_error_at_the_reference(tmp_path: Path):
    message = complaint(tmp_path, "title: ten\npages: ${title}\n")
    assert message.startswith("sketch.yaml:2: pages: ") and message.endswith("found 'ten'.")


def test_a_circular_reference_is_reported_once(tmp_path: Path):
    message = complaint(tmp_path, "extra: {a: '${extra.b}', b: 'x${extra.c}', c: '${extra.a}'}\n")
    assert message == "sketch.yaml:1: extra.c: `${extra.a}` is a circular reference."


def test_a_broken_reference_hides_nothing_else(tmp_path: Path):
    problems = complaints(tmp_path, "title: ${nothing}\npages: 0\nscal: 1\nshape: {class_name: '${nothing}'}\n")
    assert [(problem.location.line, problem.key) for problem in problems] == [
        (1, "title"),
        (2, "pages"),
        (3, "scal"),
        (4, "shape.class_name"),
    ]


def test_a_long_chain_of_references_is_refused_and_not_followed(tmp_path: Path):
    links = "".join(f"  k{i}: ${{extra.k{i + 1}}}\n" for i in range(2000))
    problems = complaints(tmp_path, f"extra:\n{links}  k2000: 1\n")
    assert "longer than 40" in problems[0].text


def test_texts_that_grow_by_references_are_bounded(tmp_path: Path):
    doubling = "".join(f"  k{i}: ${{extra.k{i + 1}}}${{extra.k{i + 1}}}\n" for i in range(35))
    problems = complaints(tmp_path, f"extra:\n{doubling}  k35: xxxxxxxxxx\n")
    assert "100,000 characters" in problems[0].text
    many = "${extra.long}" * 5000
    message = complaint(tmp_path, f"extra:\n  long: {'y' * 9000}\n  all: {many}\n")
    assert message.endswith("more than 100,000 characters.")


def test_references_work_in_python_data():
    assert config_from({"width": 3, "height": "${width}"}, Paper) == Paper(3, 3)
