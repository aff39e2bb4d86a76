import pytest
from jax.sharding import PartitionSpec

from jax_trainer.core import LayoutError, Partitioning, make_mesh

P = PartitionSpec
SHAPES = {"blocks.0.kernel": (8, 12), "blocks.0.bias": (12,), "blocks.1.kernel": (12, 8), "scale": ()}


def specs(mesh=None, said=None, shapes=None, **options):
    mesh = make_mesh(data=2, fsdp=2, tensor=2) if mesh is None else mesh
    return Partitioning(smallest=1, **options).specs(SHAPES if shapes is None else shapes, mesh, said or {})


def test_the_first_rule_that_matches_the_whole_name_decides():
    found = specs(rules={r"blocks\.0\.kernel": [None, "tensor"], r"blocks\..*": ["fsdp"]}, fsdp="off")
    assert found == {
        "blocks.0.kernel": P(None, "tensor"),
        "blocks.0.bias": P("fsdp"),
        "blocks.1.kernel": P("fsdp"),
        "scale": P(),
    }


def test_several_axes_can_split_one_dimension():
    assert specs(rules={".*0.kernel": [("fsdp", "tensor"), None]})["blocks.0.kernel"] == P(("fsdp", "tensor"))


def test_what_the_model_says_comes_after_the_rules_and_before_the_rest():
    said = {"blocks.0.kernel": P("tensor"), "blocks.1.kernel": P("tensor", None), "blocks.0.bias": P(None)}
    found = specs(rules={r".*0\.kernel": [None, "fsdp"]}, said=said)
    assert (found["blocks.0.kernel"], found["blocks.1.kernel"]) == (P(None, "fsdp"), P("tensor"))
    assert found["blocks.0.bias"] == P(), "a model can say that a parameter stays whole"


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 12), P(None, "fsdp")),
        ((8, 8), P("fsdp")),  # equal ones: the first
        ((9, 2, 3), P(None, "fsdp")),  # the largest that divides
        ((3, 5), P()),
        ((), P()),
    ],
)
def test_automatically_the_largest_dimension_that_divides_is_split(shape, spec):
    assert specs(shapes={"x": shape})["x"] == spec


def test_small_parameters_stay_whole():
    found = Partitioning(smallest=96).specs({"a": (8, 12), "b": (8, 11)}, make_mesh(fsdp=2), {})
    assert found == {"a": P(None, "fsdp"), "b": P()}


def test_without_an_fsdp_axis_or_when_it_is_off_parameters_stay_whole():
    assert set(specs(mesh=make_mesh()).values()) == set(specs(fsdp="off").values()) == {P()}


def test_axes_of_one_device_split_nothing():
    rules = {".*kernel": ["fsdp", "tensor"]}
    assert specs(mesh=make_mesh(fsdp=2), rules=rules)["blocks.0.kernel"] == P("fsdp")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"kernel": ["fsdp"]}, r"'kernel' matches no parameter.*whole name.*blocks\.0\.kernel, blocks\.0\.bias"),
        ({".*0.kernel": ["model"]}, r"splits `blocks.0.kernel` \[8, 12\] over 'model'.*axes data, fsdp, tensor"),
        ({".*bias": ["fsdp", "tensor"]}, r"`blocks.0.bias` \[12\] along 2 dimensions, and it has 1"),
        ({".*0.kernel": ["fsdp", "fsdp"]}, "twice over 'fsdp'"),
        ({".*0.kernel": [["data", "fsdp", "tensor"]], ".*1.kernel": [["data", "fsdp", "tensor"]]}, "12 is not.*by 8"),
        ({"(": ["fsdp"]}, "no regular expression"),
        ({".*": "fsdp"}, r"must have a list, one entry per dimension: \[fsdp\]"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_with_the_leaf_and_its_shape(rules, message):
    with pytest.raises(LayoutError, match=message):
        specs(rules=rules)


def test_what_a_model_says_of_axes_that_are_not_there_is_refused():
    with pytest.raises(LayoutError, match=r"What the model says itself splits `scale` \[4\] over 'model'.*a rule can"):
        specs(shapes={"scale": (4,)}, said={"scale": P("model")})


def test_another_word_for_fsdp_is_refused():
    with pytest.raises(LayoutError, match="one of auto, off, got 'on'"):
        Partitioning(fsdp="on")  # type: ignore[arg-type]
