"""The whole round on models people use: expand, train, deploy, and load into the plain model and a prepared one."""

from __future__ import annotations

import copy

import pytest
import timm
import timm.utils
import torch
import torchvision
from torch import nn

import dyrep
from surgery_helpers import relative_change, train_step
from training import eval_output

TORCHVISION = ("resnet18", "mobilenet_v2", "vgg16_bn", "regnet_y_400mf", "densenet121")
TIMM = ("repvgg_a0", "efficientnet_b0", "convnext_tiny", "resnext50_32x4d", "mobilenetv3_small_100")
MODELS = (*TORCHVISION, *TIMM, "hand-written")


class HandWritten(nn.Module):
    """A net with a convolution at top level, one with a bias and no norm, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.conv3 = nn.Conv2d(8, 16, (1, 3), padding="same", padding_mode="reflect")
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.conv3(torch.relu(self.conv2(x))))
        return self.fc(x.mean((2, 3)))


def small_vgg16_bn() -> nn.Module:
    """vgg16_bn with a small classifier, made without drawing the 100 million weights of the large one."""
    with torch.device("meta"):
        model = torchvision.models.vgg16_bn(init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Linear(512, 10)
    model.features.to_empty(device="cpu")
    for module in model.features:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def build(name: str) -> nn.Module:
    if name == "hand-written":
        return HandWritten()
    if name == "vgg16_bn":
        return small_vgg16_bn()
    if name in TORCHVISION:
        return torchvision.models.get_model(name, weights=None, num_classes=10)
    return timm.create_model(name, pretrained=False, num_classes=10)


def settle_(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Give the model's own norms statistics of the data, so that eval mode is not degenerate."""
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)


def spread(names: list[str], count: int) -> list[str]:
    """First, middle and last, or all where there are no more."""
    if len(names) <= count:
        return names
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


def whole_round(name: str, layers: int | None, dtype: torch.dtype, tolerance: float) -> None:
    model = build(name).to(dtype)
    keys = list(model.state_dict())
    batches = [torch.randn(2, 3, 64, 64, dtype=dtype) for _ in range(3)]
    x = torch.randn(2, 3, 64, 64, dtype=dtype)
    settle_(model, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    eligible = [target.name for target in dyrep.targets(model) if target.eligible]
    chosen = spread(eligible, layers) if layers else eligible
    assert chosen

    before = eval_output(model, x)
    edits = dyrep.expand_(model, chosen, calibration=batches, calibration_batches=2, optimizer=optimizer)
    assert [edit.layer for edit in edits] == chosen
    assert relative_change(eval_output(model, x), before) <= tolerance

    origin = model.get_submodule(chosen[0]).weight.detach().clone()
    train_step(model, optimizer, batches[0])
    assert not torch.equal(model.get_submodule(chosen[0]).weight, origin)
    evolved = eval_output(model, x)
    assert relative_change(evolved, before) > 0

    plain = dyrep.deploy(model)
    assert list(plain.state_dict()) == keys
    assert not any("Rep" in type(m).__name__ and type(m).__module__.startswith("dyrep") for m in plain.modules())
    report = dyrep.verify(model, plain, x)
    assert report.passed, str(report)
    assert relative_change(eval_output(plain, x), evolved) <= tolerance

    fresh = build(name).to(dtype)
    assert [type(m) for m in fresh.modules()] == [type(m) for m in plain.modules()]
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(eval_output(fresh, x), eval_output(plain, x))

    prepared = dyrep.prepare_(build(name).to(dtype))
    assert list(prepared.state_dict()) == keys
    prepared.load_state_dict(model.state_dict(), strict=True)
    assert dyrep.structure(prepared) == dyrep.structure(model)
    for key, value in prepared.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    assert relative_change(eval_output(prepared, x), evolved) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_model_keeps_its_function_through_expansion_training_deployment_and_loading(name):
    whole_round(name, layers=3, dtype=torch.float32, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_keeps_its_function_with_every_eligible_layer_expanded(name):
    whole_round(name, layers=None, dtype=torch.float64, tolerance=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_every_conv_is_either_eligible_or_has_a_reason(name):
    model = build(name)
    found = dyrep.targets(model)
    assert {target.name for target in found} == {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    for target in found:
        assert target.eligible == (not target.reason) == bool(target.branches), str(target)
    assert any(target.eligible for target in found)


def test_convnext_refuses_only_pointwise_convs_and_drops_duplicates_of_depthwise_ones():
    found = dyrep.targets(timm.create_model("convnext_tiny", pretrained=False, num_classes=10, conv_mlp=True))
    refused = [target for target in found if not target.eligible]
    assert refused
    assert {target.reason for target in refused} == {"the kernel is 1x1: a branch could only repeat it"}
    depthwise = [target for target in found if target.name.endswith("conv_dw")]
    assert len(depthwise) == 18
    for target in depthwise:
        assert target.branches == ("1x1-AVG", "1xK", "Kx1", "residual")
    stem = next(target for target in found if target.name == "stem.0")
    assert stem.kernel_size == (4, 4)
    assert stem.left_out == {"residual": "the residual needs as many output as input channels (3 in, 96 out)"}


def test_tf_variant_of_efficientnet_explains_its_same_padding_convs():
    found = dyrep.targets(timm.create_model("tf_efficientnet_b0", pretrained=False, num_classes=10))
    refused = [target for target in found if not target.eligible and target.kernel_size != (1, 1)]
    assert refused
    for target in refused:
        assert target.reason.startswith("Conv2dSame is a subclass of Conv2d")


def expanded(name: str, count: int) -> tuple[nn.Module, torch.Tensor]:
    model = build(name)
    batches = [torch.randn(3, 3, 64, 64) for _ in range(2)]
    settle_(model, batches)
    eligible = [target.name for target in dyrep.targets(model) if target.eligible]
    dyrep.expand_(model, spread(eligible, count), gamma=0.1, calibration=batches)
    return model.eval(), torch.randn(2, 3, 64, 64)


def test_repvgg_folded_by_timm_after_deploy_computes_the_same():
    model, x = expanded("repvgg_a0", 4)
    before = eval_output(model, x)
    folded = timm.utils.reparameterize_model(dyrep.deploy(model))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in folded.modules()) == 0
    assert relative_change(eval_output(folded, x), before) <= 1e-5


def test_resnet_folded_by_timm_without_deploy_computes_the_same():
    model, x = expanded("resnet18", 4)
    before = eval_output(model, x)
    folded = timm.utils.reparameterize_model(model)
    assert not any(isinstance(m, dyrep.RepConv2d) for m in folded.modules())
    assert relative_change(eval_output(folded, x), before) <= 1e-5


def test_expanded_model_survives_deepcopy():
    model, x = expanded("hand-written", 4)
    twin = copy.deepcopy(model)
    assert torch.equal(eval_output(twin, x), eval_output(model, x))
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in model.parameters())
    dyrep.cut_(twin, "conv1")
    assert isinstance(model.conv1, dyrep.RepConv2d)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_grown_model_can_be_traced_and_exported_and_a_deployed_one_scripted():
    model, x = HandWritten().eval(), torch.randn(2, 3, 16, 16)
    dyrep.expand_(model, ["conv1", "conv2", "conv3"], calibration=[x])
    plain = dyrep.deploy(model)
    with pytest.raises(ValueError, match="ModuleDict"):
        torch.jit.script(model)
    made = (torch.jit.trace(model, x), torch.export.export(model, (x,), strict=False).module(), torch.jit.script(plain))
    for other in made:
        assert relative_change(other(x), model(x)) <= 1e-5
