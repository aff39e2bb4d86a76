import pytest
from jax.sharding import PartitionSpec

from jax_trainer.sharding import LayoutError, Partitioning, make_mesh

P = PartitionSpec
SHAPES = {"blocks.0.kernel": (8, 12), "blocks.0.bias": (12,), "blocks.1.kernel": (12, 8), "scale": ()}


def specs(mesh=None, model_specs=None, shapes=None, **options):
    mesh = make_mesh(data=2, fsdp=2, tensor=2) if mesh is None else mesh
    return Partitioning(smallest=1, **options).specs(SHAPES if shapes is None else shapes, mesh, model_specs or {})


def test_the_first_rule_that_matches_the_full_path_is_used():
    found = specs(rules={r"blocks\.0\.kernel": [None, "tensor"], r"blocks\..*": ["fsdp"]}, fsdp="off")
    assert found == {
        "blocks.0.kernel": P(None, "tensor"),
        "blocks.0.bias": P("fsdp"),
        "blocks.1.kernel": P("fsdp"),
        "scale": P(),
    }


def test_several_axes_can_split_one_dimension():
    assert specs(rules={".*0.kernel": [("fsdp", "tensor"), None]})["blocks.0.kernel"] == P(("fsdp", "tensor"))


def test_model_specs_apply_after_rules_and_before_fsdp():
    model_specs = {"blocks.0.kernel": P("tensor"), "blocks.1.kernel": P("tensor", None), "blocks.0.bias": P(None)}
    found = specs(rules={r".*0\.kernel": [None, "fsdp"]}, model_specs=model_specs)
    assert (found["blocks.0.kernel"], found["blocks.1.kernel"]) == (P(None, "fsdp"), P("tensor"))
    assert found["blocks.0.bias"] == P(), "a model spec can replicate a parameter"


def test_auto_shards_the_largest_dimension_that_divides():
    for shape, spec in [
        ((8, 12), P(None, "fsdp")),
        ((8, 8), P("fsdp")),  # equal ones: the first
        ((9, 2, 3), P(None, "fsdp")),  # the largest that divides
        ((3, 5), P()),
        ((), P()),
    ]:
        assert specs(shapes={"x": shape})["x"] == spec, (shape, spec)


def test_small_parameters_are_replicated():
    found = Partitioning(smallest=96).specs({"a": (8, 12), "b": (8, 11)}, make_mesh(fsdp=2), {})
    assert found == {"a": P(None, "fsdp"), "b": P()}


def test_without_an_fsdp_axis_or_when_it_is_off_parameters_are_replicated():
    assert set(specs(mesh=make_mesh()).values()) == set(specs(fsdp="off").values()) == {P()}


def test_axes_of_one_device_split_nothing():
    rules = {".*kernel": ["fsdp", "tensor"]}
    assert specs(mesh=make_mesh(fsdp=2), rules=rules)["blocks.0.kernel"] == P("fsdp")


def test_rules_that_do_not_fit_are_an_error_with_the_leaf_and_its_shape():
    for rules, message in [
        ({"kernel": ["fsdp"]}, r"'kernel' matches no parameter.*blocks\.0\.kernel, blocks\.0\.bias"),
        ({".*0.kernel": ["model"]}, r"splits `blocks.0.kernel` \[8, 12\] over 'model'.*axes data, fsdp, tensor"),
        ({".*bias": ["fsdp", "tensor"]}, r"`blocks.0.bias` \[12\] along 2 dimensions.* 1"),
        ({".*0.kernel": ["fsdp", "fsdp"]}, "twice over 'fsdp'"),
        ({".*0.kernel": [["data", "fsdp", "tensor"]], ".*1.kernel": [["data", "fsdp", "tensor"]]}, "12 is not.*by 8"),
        ({"(": ["fsdp"]}, "regular expression"),
        ({".*": "fsdp"}, r"must have a list, one entry per dimension: \[fsdp\]"),
    ]:
        with pytest.raises(LayoutError, match=message):
            specs(rules=rules)


def test_a_model_spec_with_unknown_axes_is_an_error():
    with pytest.raises(LayoutError, match=r"`scale` \[4\] over 'model'"):
        specs(shapes={"scale": (4,)}, model_specs={"scale": P("model")})


def test_an_unknown_value_of_fsdp_is_an_error():
    with pytest.raises(LayoutError, match="one of auto, off, got 'on'"):
        Partitioning(fsdp="on")  # type: ignore[arg-type]
