"""Which convolutions can grow, what is said about the others, and how models inside wrappers are treated."""

from __future__ import annotations

import contextlib
import types

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import Conv2dSame, ScaledStdConv2d, StdConv2d
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import dyrep
from dyrep.errors import BranchError, IneligibleLayerError, OptimizerError, UnknownLayerError, WrappedModelError
from surgery_helpers import assert_same_picture, conv_bn_net, images, picture, relative_change
from training import eval_output


class Doubled(nn.Conv2d):
    """A convolution that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def plain(**arguments) -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1, **arguments)


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


def with_frozen_bias() -> nn.Module:
    conv = plain()
    conv.bias.requires_grad_(False)
    return conv


def integer() -> nn.Module:
    conv = plain().requires_grad_(False)
    conv.weight = nn.Parameter(torch.ones(4, 4, 3, 3, dtype=torch.int8), requires_grad=False)
    return conv


def complex_valued() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1, dtype=torch.complex64)


def with_instance_forward() -> nn.Module:
    conv = plain()
    conv.forward = types.MethodType(lambda self, x: self._conv_forward(x, self.weight * 2, self.bias), conv)
    return conv


def with_computed_bias() -> nn.Module:
    conv = plain()
    parametrize.register_parametrization(conv, "bias", nn.Tanh())
    return conv


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.ConvTranspose2d(4, 4, 3), "ConvTranspose2d is a transposed convolution"),
        (lambda: nn.LazyConvTranspose2d(4, 3), "LazyConvTranspose2d is a transposed convolution"),
        (lambda: StdConv2d(4, 4, 3), "StdConv2d is a subclass of Conv2d and may compute something else"),
        (lambda: ScaledStdConv2d(4, 4, 3), "ScaledStdConv2d is a subclass of Conv2d and may compute something else"),
        (lambda: Conv2dSame(4, 4, 3), "Conv2dSame is a subclass of Conv2d and may compute something else"),
        (lambda: Doubled(4, 4, 3), "Doubled is a subclass of Conv2d and may compute something else"),
        (lambda: parametrizations.weight_norm(plain()), "its weight is computed"),
        (lambda: parametrizations.spectral_norm(plain()), "its weight is computed"),
        (lambda: nn.utils.weight_norm(plain()), "its weight is computed"),
        (lambda: nn.utils.spectral_norm(plain()), "its weight is computed"),
        (lambda: prune.l1_unstructured(plain(), "weight", amount=0.5), "make it permanent first"),
        (with_computed_bias, "make it permanent first"),
        (lambda: prune.l1_unstructured(plain(), "bias", amount=2), "make it permanent first"),
        (lambda: nn.LazyConv2d(4, 3), "LazyConv2d has no shape yet; run one forward pass in eval mode first"),
        (frozen, "its weight is frozen (requires_grad=False)"),
        (with_frozen_bias, "its bias is frozen (requires_grad=False)"),
        (lambda: plain(device="meta"), "its weight is on the meta device"),
        (integer, "its weight is torch.int8, not floating point"),
        (complex_valued, "its weight is torch.complex64, not floating point"),
        (with_instance_forward, "its forward was replaced on the instance"),
    ],
    ids=[
        "transposed",
        "lazy transposed",
        "weight-standardised",
        "scaled weight-standardised",
        "Conv2dSame",
        "own subclass",
        "parametrized weight norm",
        "parametrized spectral norm",
        "old weight norm",
        "old spectral norm",
        "pruned weight",
        "parametrized bias",
        "pruned bias",
        "lazy",
        "frozen",
        "frozen bias",
        "meta",
        "integer",
        "complex",
        "instance forward",
    ],
)
def test_conv_that_cannot_be_rewritten_is_listed_and_refused_with_the_reason(make, reason):
    model = nn.Sequential(plain(), make())
    good, bad = dyrep.targets(model)
    assert good.eligible
    assert not bad.eligible
    assert bad.branches == ()
    assert reason in bad.reason
    assert str(bad) == f"1: left alone: {bad.reason}"
    kinds = [type(module) for module in model]
    with pytest.raises(IneligibleLayerError) as error:
        dyrep.expand_(model, ["0", "1"])
    assert "layer '1' cannot be expanded: " in str(error.value)
    assert reason in str(error.value)
    assert [type(module) for module in model] == kinds


def test_pointwise_conv_is_listed_and_refused_with_the_reason():
    model = nn.Sequential(nn.Conv2d(4, 8, 1))
    (target,) = dyrep.targets(model)
    assert not target.eligible
    assert target.reason == "the kernel is 1x1: a branch could only repeat it"
    with pytest.raises(BranchError, match="layer '0' has no branch to add: the kernel is 1x1"):
        dyrep.expand_(model, "0")
    assert type(model[0]) is nn.Conv2d


def test_lazy_conv_is_eligible_after_its_first_forward_pass():
    model = nn.Sequential(nn.LazyConv2d(4, 3, padding=1))
    model(torch.randn(1, 4, 8, 8))
    (target,) = dyrep.targets(model)
    assert target.eligible
    assert "residual" in target.branches


def test_conv_is_eligible_once_its_parametrization_is_permanent():
    model = nn.Sequential(parametrizations.weight_norm(plain()))
    parametrize.remove_parametrizations(model[0], "weight")
    assert dyrep.targets(model)[0].eligible
    x = torch.randn(2, 4, 8, 8)
    before = eval_output(model, x)
    dyrep.expand_(model, "0", calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-5


def test_weight_shared_between_two_convs_is_refused_for_both():
    model = nn.Sequential(plain(), plain())
    model[1].weight = model[0].weight
    for index, target in enumerate(dyrep.targets(model)):
        assert not target.eligible
        assert target.reason == "its weight is shared with another module (Conv2d), which would change too"
        with pytest.raises(IneligibleLayerError, match=f"layer '{index}' cannot be expanded: its weight is shared"):
            dyrep.expand_(model, str(index))


def test_bias_shared_between_two_convs_does_not_change_the_function():
    model = nn.Sequential(plain(), nn.ReLU(), plain())
    model[2].bias = model[0].bias
    x = torch.randn(4, 4, 8, 8) + 1
    before = eval_output(model, x)
    with contextlib.suppress(IneligibleLayerError):  # refusing it is exact too
        dyrep.expand_(model, "0", gamma=1.0, calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-5


class Aliased(nn.Module):
    """One convolution under two names, called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = plain()
        self.norm = nn.BatchNorm2d(4)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def test_conv_under_two_names_is_listed_once():
    assert [target.name for target in dyrep.targets(Aliased())] == ["first"]
    assert dyrep.targets(Aliased())[0].eligible


@pytest.mark.parametrize("names", ["first", "second", ["first", "second"]], ids=str)
def test_conv_under_two_names_is_expanded_cut_and_deployed_exactly(names):
    model = Aliased().double()
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    before = eval_output(model, x)
    dyrep.expand_(model, names, gamma=0.5, calibration=[x], optimizer=optimizer)
    assert model.first is model.second
    assert relative_change(eval_output(model, x), before) <= 1e-10
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    plain_model = dyrep.deploy(model)
    assert list(plain_model.state_dict()) == keys
    assert plain_model.first is plain_model.second
    assert relative_change(eval_output(plain_model, x), before) <= 1e-10
    assert dyrep.verify(model, plain_model, x).passed
    dyrep.cut_(model, names, ["1x1", "residual"], optimizer=optimizer)
    assert relative_change(eval_output(model, x), before) <= 1e-10
    dyrep.cut_(model, names, optimizer=optimizer)
    assert type(model.first) is nn.Conv2d
    assert relative_change(eval_output(model, x), before) <= 1e-10


class TopLevel(nn.Module):
    """A hand-written net whose first convolution has no dot in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.stage = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x):
        return self.stage(torch.relu(self.bn1(self.conv1(x))))


def test_top_level_conv_is_listed_expanded_and_cut():
    model = TopLevel()
    assert [target.name for target in dyrep.targets(model)] == ["conv1", "stage.0"]
    x = torch.randn(2, 3, 8, 8)
    before = eval_output(model, x)
    dyrep.expand_(model, "conv1", calibration=[x])
    assert isinstance(model.conv1, dyrep.RepConv2d)
    assert relative_change(eval_output(model, x), before) <= 1e-5
    dyrep.cut_(model, "conv1")
    assert type(model.conv1) is nn.Conv2d


def test_model_that_is_itself_a_conv_has_the_empty_name():
    model = plain()
    (target,) = dyrep.targets(model)
    assert target.name == ""
    x = torch.randn(2, 4, 8, 8)
    before = eval_output(model, x)
    dyrep.expand_(model, "", ["1x1-KxK"], calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-5
    depths = {target.name: target.depth for target in dyrep.targets(model)}
    assert depths == {"": 0, "branches.1x1-KxK.point": 1, "branches.1x1-KxK.conv": 1}


def test_branches_left_out_are_listed_with_their_reasons():
    dense, depthwise, strided = dyrep.targets(
        nn.ModuleList([nn.Conv2d(4, 8, 3), nn.Conv2d(4, 4, 3, padding=1, groups=4), plain(stride=2)])
    )
    assert dense.left_out == {"residual": "the residual needs as many output as input channels (4 in, 8 out)"}
    assert dense.branches == ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1")
    assert depthwise.branches == ("1x1-AVG", "1xK", "Kx1", "residual")
    assert depthwise.left_out == {
        "1x1": "with one channel per group the 1x1 is the residual branch up to scale",
        "1x1-KxK": "with one channel per group it is the origin up to scale",
    }
    assert strided.left_out == {"residual": "the residual needs stride 1, not 2x2"}


def test_target_reports_present_branches_depth_and_kernel():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1", "1x1-KxK"])
    inner = "3.branches.1x1-KxK.conv"
    dyrep.expand_(model, inner, ["1x1-KxK"])
    by_name = {target.name: target for target in dyrep.targets(model)}
    assert by_name["3"].present == ("1x1", "1x1-KxK")
    assert by_name["3"].branches == ("1x1-AVG", "1xK", "Kx1", "residual")
    assert by_name["3"].kernel_size == (3, 3)
    assert str(by_name["3"]) == "3 (has 1x1, 1x1-KxK): can grow 1x1-AVG, 1xK, Kx1, residual"
    depths = {name: target.depth for name, target in by_name.items()}
    assert depths["0"] == depths["3"] == 0
    assert depths["3.branches.1x1.conv"] == depths[inner] == 1
    assert depths[f"{inner}.branches.1x1-KxK.conv"] == 2
    assert not by_name["3.branches.1x1.conv"].eligible
    assert by_name[inner].eligible


def test_conv_with_every_branch_is_not_eligible_and_says_so():
    model = conv_bn_net()
    dyrep.expand_(model, "3")
    target = next(target for target in dyrep.targets(model) if target.name == "3")
    assert not target.eligible
    assert target.reason == "it has every branch already"
    with pytest.raises(BranchError, match="layer '3' has no branch to add: it has every branch already"):
        dyrep.expand_(model, "3")


class HighResolution(nn.Module):
    """A module of the user's own called ``branches``, as in HRNet."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([plain(), plain()])

    def forward(self, x):
        return sum(branch(x) for branch in self.branches)


def test_module_called_branches_of_the_user_does_not_count_as_depth():
    model = nn.Sequential(plain(), HighResolution())
    x = torch.randn(2, 4, 8, 8)
    before = eval_output(model, x)
    dyrep.expand_(model, ["0", "1.branches.0"], ["1x1-KxK"], calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-5
    depths = {target.name: target.depth for target in dyrep.targets(model)}
    assert depths == {
        "0": 0,
        "0.branches.1x1-KxK.point": 1,
        "0.branches.1x1-KxK.conv": 1,
        "1.branches.0": 0,
        "1.branches.0.branches.1x1-KxK.point": 1,
        "1.branches.0.branches.1x1-KxK.conv": 1,
        "1.branches.1": 0,
    }
    twin = nn.Sequential(plain(), HighResolution())
    assert list(dyrep.deploy(model).state_dict()) == list(twin.state_dict())
    dyrep.restructure_(twin, dyrep.structure(model))
    assert list(twin.state_dict()) == list(model.state_dict())


def test_convs_of_self_folding_parents_carry_a_note():
    model = timm.create_model("repvgg_a0", pretrained=False, num_classes=10)
    eligible = [target for target in dyrep.targets(model) if target.eligible]
    assert eligible
    for target in eligible:
        assert "folds itself by reading this weight: call dyrep.deploy before folding it" in target.note
        assert "RepVggBlock" in target.note
        assert target.note in str(target)
    stem = next(target for target in eligible if target.name == "stem.conv_kxk.conv")
    assert stem.note.startswith("stem (RepVggBlock) folds itself")


def test_convs_without_self_folding_parents_carry_no_note():
    model = conv_bn_net()
    dyrep.expand_(model, "0", ["1x1-KxK"])
    assert all(target.note == "" for target in dyrep.targets(model))


@pytest.mark.parametrize("operate", [dyrep.expand_, dyrep.cut_])
def test_unknown_name_suggests_close_ones(operate):
    model = TopLevel()
    before = picture(model)
    with pytest.raises(UnknownLayerError, match=r"no layer 'stage\.0\.conv'; did you mean stage\.0, conv1\?"):
        operate(model, ["conv1", "stage.0.conv"])
    with pytest.raises(UnknownLayerError, match=r"no layer 'conv2'; did you mean conv1\?"):
        operate(model, "conv2")
    with pytest.raises(UnknownLayerError, match=r"no layer 'xyzzy'; dyrep\.targets\(model\) lists all"):
        operate(model, "xyzzy")
    assert_same_picture(picture(model), before)


@pytest.mark.parametrize("operate", [dyrep.expand_, dyrep.cut_])
def test_name_of_something_else_is_refused(operate):
    model = TopLevel()
    before = picture(model)
    with pytest.raises(UnknownLayerError, match="layer 'bn1' is a BatchNorm2d, not a convolution"):
        operate(model, ["conv1", "bn1"])
    assert_same_picture(picture(model), before)


def assert_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(WrappedModelError, match=message):
        dyrep.targets(model)
    with pytest.raises(WrappedModelError, match=message):
        dyrep.expand_(model, "module.0")
    with pytest.raises(WrappedModelError, match=message):
        dyrep.cut_(model, "module.0")
    with pytest.raises(WrappedModelError, match=message):
        dyrep.prepare_(model)
    with pytest.raises(WrappedModelError, match=message):
        dyrep.restructure_(model, {"format": 1, "blocks": {}})


@pytest.fixture
def lone_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_rank")
def test_distributed_data_parallel_is_refused_with_the_way_out():
    model = nn.parallel.DistributedDataParallel(conv_bn_net())
    assert_refused(model, r"wrapped in DistributedDataParallel.*pass model\.module and wrap it again")
    x = images(1)[0]
    dyrep.expand_(model.module, "3", ["1x1"], calibration=[x])
    assert list(dyrep.structure(model)["blocks"]) == ["3"]
    assert dyrep.verify(model, dyrep.deploy(model), x).passed


def test_data_parallel_is_refused_with_the_way_out():
    model = nn.DataParallel(conv_bn_net())
    assert_refused(model, r"wrapped in DataParallel: use DistributedDataParallel, or pass model\.module")
    with pytest.raises(WrappedModelError, match="wrapped in DataParallel"):
        dyrep.deploy(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_script_module_is_refused_with_the_reason(how):
    model = conv_bn_net().eval()
    scripted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, images(1)[0])
    assert_refused(scripted, "TorchScript module, whose code is fixed: pass the module it was made from")


def test_compiled_model_is_listed_by_its_own_names():
    model = conv_bn_net()
    compiled = torch.compile(model, backend="eager")
    assert dyrep.targets(compiled) == dyrep.targets(model)
    assert [target.name for target in dyrep.targets(compiled)] == ["0", "3"]


def test_model_that_folds_itself_as_a_whole_is_noted():
    class Folding(nn.Sequential):
        def fuse(self):
            return self

    assert dyrep.targets(Folding(plain()))[0].note.startswith("the model (Folding) folds itself")


def test_sharded_weights_and_wrappers_are_refused_by_name():
    class DTensor(torch.Tensor):
        pass

    class FullyShardedDataParallel(nn.Module):
        pass

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    model = nn.Sequential(plain())
    with pytest.raises(WrappedModelError, match="FullyShardedDataParallel, which flattens the weights"):
        dyrep.targets(FullyShardedDataParallel())
    with pytest.raises(OptimizerError, match="ZeroRedundancyOptimizer splits parameters over ranks"):
        dyrep.expand_(model, "0", optimizer=ZeroRedundancyOptimizer(model.parameters(), lr=0.1))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(DTensor))
    assert dyrep.targets(model)[0].reason == "its weight is sharded over several processes (DTensor)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_conv_in_a_scripted_part_is_listed_and_refused_and_the_others_grow(how):
    part, x = nn.Sequential(plain(), nn.ReLU()), torch.randn(2, 4, 8, 8)
    model = nn.Sequential(plain(), torch.jit.script(part) if how == "script" else torch.jit.trace(part, x))
    good, scripted = dyrep.targets(model)
    assert (good.name, good.eligible) == ("0", True)
    assert (scripted.name, scripted.eligible) == ("1.0", False)
    assert "part of a TorchScript module, whose code is fixed; use the module" in scripted.reason
    with pytest.raises(
        IneligibleLayerError, match=r"layer '1\.0' cannot be expanded: it is part of a TorchScript module"
    ):
        dyrep.expand_(model, ["0", "1.0"])
    with pytest.raises(BranchError, match=r"layer '1\.0' has no branches to cut"):
        dyrep.cut_(model, "1.0")
    output = eval_output(model, x)
    dyrep.expand_(model, "0", gamma=0.5)
    assert relative_change(eval_output(dyrep.deploy(model), x), output) <= 1e-4
