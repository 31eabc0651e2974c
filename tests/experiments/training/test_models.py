"""The paper's models have the shapes that its tables state, in every variant."""

import pytest
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import nn

from opacus_bc.experiments.training.models import (
    MODELS,
    bn_lenet5,
    build,
    convnet,
    replace_batch_norm,
    resnet18,
)

SHAPES = {"bn_lenet5": (1, 32, 32), "convnet": (3, 32, 32), "resnet18": (3, 32, 32), "smallnet": (1, 32, 32)}


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]


@pytest.mark.parametrize(
    ("name", "modules", "tensors", "numbers"),
    [("bn_lenet5", 8, 16, 61_990), ("convnet", 9, 18, 132_042), ("resnet18", 41, 62, 11_173_962)],
)
def test_layer_and_tensor_counts_are_the_papers(name, modules, tensors, numbers):
    model = MODELS[name]()
    assert len(layers(model)) == modules
    assert len(list(model.parameters())) == tensors
    assert sum(p.numel() for p in model.parameters()) == numbers


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_variant_maps_images_to_logits(name, norm):
    model = build(name, norm=norm, num_classes=7).eval()
    assert model(torch.randn(2, *SHAPES[name])).shape == (2, 7)
    kinds = {type(m) for m in model.modules()}
    assert (nn.BatchNorm2d in kinds) == (norm == "batch")
    assert (nn.GroupNorm in kinds) == (norm == "group")


def test_feature_maps_of_bn_lenet5_have_the_sizes_of_the_table():
    x, sizes = torch.randn(2, 1, 32, 32), {}
    for name, layer in bn_lenet5().named_children():
        x = layer(x)
        sizes[name] = tuple(x.shape[1:])
    assert sizes["conv1"] == (6, 28, 28)
    assert sizes["pool1"] == (6, 14, 14)
    assert sizes["conv2"] == (16, 10, 10)
    assert sizes["pool2"] == (16, 5, 5)
    assert sizes["conv3"] == (120, 1, 1)
    assert sizes["fc1"] == (84,)


def test_the_order_of_norm_and_activation_can_be_chosen():
    assert [n for n, _ in bn_lenet5().named_children()][:3] == ["conv1", "act1", "norm1"]
    assert [n for n, _ in convnet(order="conv-norm-act").named_children()][:3] == ["conv1", "norm1", "act1"]
    assert isinstance(bn_lenet5(activation="relu").get_submodule("act4"), nn.ReLU)


@pytest.mark.parametrize("name", list(MODELS))
def test_group_variant_is_what_opacus_would_make_of_the_batch_variant(name):
    def described(model):
        return [(n, type(m), getattr(m, "num_groups", None)) for n, m in model.named_modules()]

    fixed = ModuleValidator.fix(MODELS[name](norm="batch"))
    assert described(MODELS[name](norm="group")) == described(fixed)
    assert ModuleValidator.validate(fixed, strict=False) == []


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", list(MODELS))
def test_opacus_hooks_give_every_sample_its_gradient(name):
    torch.manual_seed(0)
    plain = build(name, norm="group")
    x, y = torch.randn(3, *SHAPES[name]), torch.tensor([1, 0, 2])
    nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    hooked = GradSampleModule(plain, loss_reduction="sum")
    hooked.zero_grad()
    nn.functional.cross_entropy(hooked(x), y, reduction="sum").backward()
    for parameter, gradient in zip(hooked.parameters(), expected, strict=True):
        assert parameter.grad_sample.shape[0] == 3
        torch.testing.assert_close(parameter.grad_sample.sum(0), gradient, rtol=1e-3, atol=1e-4)


def own_model(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(num_classes)
    )


NOT_A_FACTORY = 5


@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("none", nn.Identity)]
)
def test_own_factories_are_called_and_their_batch_norm_replaced(norm, kind):
    for factory in (own_model, f"{__name__}:own_model"):
        model = build(factory, norm=norm, in_channels=1, num_classes=4)
        assert isinstance(model[1], kind)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 4)


def test_torchvisions_factories_get_the_number_of_classes():
    model = build("torchvision.models:resnet18", norm="group", in_channels=3, num_classes=4)
    assert model.fc.out_features == 4
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())


def test_a_lone_batch_norm_layer_is_replaced_too():
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(6), "group"), nn.GroupNorm)
    assert replace_batch_norm(nn.BatchNorm1d(6, affine=False), "group").weight is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lenet",
            r"'lenet': not one of bn_lenet5, convnet, resnet18, smallnet, mlp, nor of the form 'package",
        ),
        ("no_such_package.x:make", r"cannot import module 'no_such_package.x'"),
        (":make", r"cannot import module ''"),
        (f"{__name__}:nothing", r"has no 'nothing'"),
        (f"{__name__}:NOT_A_FACTORY", r"is a int, not a callable"),
        ("builtins:dict", r"returned a dict, not a torch module"),
    ],
)
def test_a_missing_factory_is_one_clear_line(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(name)
    assert "\n" not in str(caught.value)


def test_unknown_choices_are_named():
    for wrong in (
        lambda: build("convnet", norm="layer"),
        lambda: resnet18("x"),
        lambda: bn_lenet5(activation="elu"),
    ):
        with pytest.raises(ValueError, match="choose one of"):
            wrong()
