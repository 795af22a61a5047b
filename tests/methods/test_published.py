"""The blocks against their publications: what they compute, what they cost, derived a second time here.

Nothing in this file uses the package's own folding to say what is expected.
"""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from methods_helpers import blocks, look_trained_, relative_error, small_net
from timm.models.byobnet import MobileOneBlock
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dyrep
from dyrep.models import build
from training import eval_output

SIZE = 5

# -- linear maps as dense matrices ------------------------------------------------------------------------------


def out_size(size, kernel, stride, padding):
    return (size + 2 * padding - kernel) // stride + 1


def conv_matrix(weight, size, stride, padding, groups):
    """The matrix of a convolution on a square image, entry by entry."""
    out_channels, per_group, kernel, _ = weight.shape
    to = out_size(size, kernel, stride, padding)
    matrix = torch.zeros(out_channels, to, to, per_group * groups, size, size, dtype=torch.float64)
    for o in range(out_channels):
        first = o // (out_channels // groups) * per_group
        for y in range(to):
            for x in range(to):
                for h in range(kernel):
                    for w in range(kernel):
                        row, column = y * stride - padding + h, x * stride - padding + w
                        if 0 <= row < size and 0 <= column < size:
                            matrix[o, y, x, first : first + per_group, row, column] += weight[o, :, h, w]
    return matrix.reshape(out_channels * to * to, -1)


def average_matrix(channels, size, kernel, stride, padding):
    """The matrix of average pooling that counts the padding: sums over windows, written out."""
    to = out_size(size, kernel, stride, padding)
    matrix = torch.zeros(channels, to, to, channels, size, size, dtype=torch.float64)
    for c in range(channels):
        for y in range(to):
            for x in range(to):
                for row in range(max(y * stride - padding, 0), min(y * stride - padding + kernel, size)):
                    for column in range(max(x * stride - padding, 0), min(x * stride - padding + kernel, size)):
                        matrix[c, y, x, c, row, column] = 1 / (kernel * kernel)
    return matrix.reshape(channels * to * to, -1)


def norm_map(norm, positions):
    """Diagonal and shift of a norm in eval mode, over all channels and positions."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    mean, bias = getattr(norm, "running_mean", None), getattr(norm, "bias", None)
    shift = torch.zeros_like(scale) if bias is None else bias - mean * scale
    return scale.repeat_interleave(positions), shift.repeat_interleave(positions)


def expected_map(block):
    """Matrix and shift of a whole block, from the parameters of its branches."""
    k, s, p, g = block.kernel_size[0], block.stride[0], block.padding[0], block.groups
    to = out_size(SIZE, k, s, p)
    inner = {
        "KxK": lambda _: conv_matrix(block.weight, SIZE, s, p, g),
        "1x1": lambda b: conv_matrix(b.conv.weight, SIZE, s, p - k // 2, g),
        "residual": lambda b: torch.eye(block.in_channels * SIZE * SIZE, dtype=torch.float64),
        "1x1-KxK": lambda b: (
            conv_matrix(b.conv.weight, SIZE, s, p, g)
            @ torch.diag(norm_map(b.inner_norm, SIZE * SIZE)[0])
            @ conv_matrix(b.point.weight, SIZE, 1, 0, g)
        ),
        "1x1-AVG": lambda b: (
            conv_matrix(b.point.weight, to, 1, 0, g) @ average_matrix(block.in_channels, SIZE, k, s, p)
        ),
    }
    matrix, shift = 0, 0
    for name, branch in {"KxK": None, **block.branches}.items():
        diagonal, constant = norm_map(block.origin_norm if branch is None else branch.norm, to * to)
        matrix = matrix + diagonal[:, None] * inner[name](branch)
        shift = shift + constant
    return matrix, shift


@torch.no_grad()
def found_map(model, channels):
    """Matrix and shift of a model in eval mode, by feeding it zeros and every unit vector."""
    basis = torch.eye(channels * SIZE * SIZE, dtype=torch.float64).reshape(-1, channels, SIZE, SIZE)
    shift = model.eval()(torch.zeros_like(basis[:1])).flatten()
    return (model(basis).flatten(1) - shift).T, shift


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "kernel"), [(4, 4, 1, 3), (2, 4, 1, 3), (4, 4, 2, 3), (4, 2, 2, 5), (2, 2, 1, 5)]
)
@pytest.mark.parametrize("method", ["dbb", "repvgg"])
@torch.no_grad()
def test_a_deployed_block_is_the_sum_of_its_branches_matrices(method, inputs, outputs, groups, kernel, stride, replace):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(outputs)).double()
    edit = dyrep.convert_(model, method, example_input=torch.randn(2, inputs, SIZE, SIZE).double(), replace=replace)
    dbb = 2 if groups == outputs else 3  # as published, no 1x1 where every group has one output
    assert len(edit[0].branches) == {"dbb": dbb, "repvgg": 2 if stride == 1 and inputs == outputs else 1}[method]
    look_trained_(model)
    model[1].running_mean.normal_()  # also where the norm lets everything through: what it saw must not matter
    model[1].running_var.uniform_(0.5, 2)
    matrix, shift = expected_map(model[0])
    if replace == "conv":
        diagonal, constant = norm_map(model[1], len(shift) // outputs)
        matrix, shift = diagonal[:, None] * matrix, diagonal * shift + constant
    else:
        assert shift.abs().max() > 0.1
    found, found_shift = found_map(dyrep.deploy(model), inputs)
    assert (found - matrix).abs().max() < 1e-9
    assert (found_shift - shift).abs().max() < 1e-9
    assert matrix.abs().max() > 0.1


# -- the published order of operations --------------------------------------------------------------------------


def batch_norm(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5)


def norm_and_pad(x, weight, bias, amount):
    """DBB's inner norm: what it pads with is what it makes of a zero."""
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    of_zero = bias - mean * weight / (var + 1e-5).sqrt()
    y = batch_norm(x, weight, bias)
    padded = of_zero.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2] + 2 * amount, x.shape[3] + 2 * amount)
    padded = padded.clone()
    padded[:, :, amount:-amount, amount:-amount] = y
    return padded


@pytest.mark.parametrize("inner_gamma", [1.0, 1000.0])
@pytest.mark.parametrize(("stride", "groups", "kernel"), [(1, 1, 3), (2, 1, 3), (1, 2, 3), (2, 2, 5)])
@torch.no_grad()
def test_a_dbb_block_computes_in_training_what_the_published_order_computes(stride, groups, kernel, inner_gamma):
    p = kernel // 2
    conv = nn.Conv2d(4, 6, kernel, stride, p, groups=groups, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(6)).double()
    x = 1000 * torch.randn(8, 4, 9, 9, dtype=torch.float64) + 300  # ε is nothing beside the variance of such a signal
    dyrep.convert_(model, "dbb", example_input=x)
    look_trained_(model)
    block, branches = model[0], model[0].branches
    assert list(branches) == ["1x1-KxK", "1x1-AVG", "1x1"]

    def last_norm(y, name):
        norm = block.origin_norm if name == "KxK" else branches[name].norm
        return batch_norm(y, norm.weight, norm.bias)

    first, second = branches["1x1-KxK"], branches["1x1-AVG"]
    origin = last_norm(F.conv2d(x, block.weight, None, stride, p, 1, groups), "KxK")
    small = last_norm(F.conv2d(x, branches["1x1"].conv.weight, None, stride, 0, 1, groups), "1x1")
    # the shift of the inner norms is any number: the last norm removes what becomes of it
    mixed = norm_and_pad(
        F.conv2d(x, first.point.weight, None, 1, 0, 1, groups), first.inner_norm.weight, torch.randn(4).double(), p
    )
    deep = last_norm(F.conv2d(mixed, first.conv.weight, None, stride, 0, 1, groups), "1x1-KxK")
    pointed = F.conv2d(x, second.point.weight, None, 1, 0, 1, groups)
    normed = norm_and_pad(pointed, torch.full((6,), inner_gamma).double(), torch.randn(6).double(), p)
    pooled = F.avg_pool2d(normed, kernel, stride)
    average = last_norm(pooled, "1x1-AVG")
    expected = origin + small + deep + average

    # Ours has no norm inside 1x1-AVG. The last norm divides by √(v + ε) either way, but of signals of two scales, so
    # the branch differs by a factor between 1/√(1 + ε/v) of ours and of theirs: at most ε/2 (1/v + 1/v') of it.
    ours = F.avg_pool2d(pointed, kernel, stride, p)
    spreads = [y.var(dim=(0, 2, 3), correction=0) for y in (ours, pooled)]
    explained = float((5e-6 * (1 / spreads[0] + 1 / spreads[1])).max() * average.abs().max())
    assert explained < (1e-7 if inner_gamma > 1 else 5e-3)
    found = model.train()(x)
    assert expected.std() > 0.5
    assert float((found - expected).abs().max()) <= explained + 1e-10


# -- timm -------------------------------------------------------------------------------------------------------


def copy_norm_(ours, theirs):
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(ours, name).copy_(getattr(theirs, name))


@torch.no_grad()
def test_repvgg_a0_is_timms_in_its_training_form():
    theirs = look_trained_(timm.create_model("repvgg_a0", pretrained=False, num_classes=10)).double()
    ours = build("repvgg_a0", num_classes=10).double()
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    dyrep.convert_(ours, "repvgg", example_input=x)

    def trained(model):
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    assert trained(ours) == trained(theirs)
    layers = [theirs.stem, *(layer for stage in theirs.stages for layer in stage)]
    assert len(layers) == len(blocks(ours)) == 22
    for block, layer in zip(blocks(ours).values(), layers, strict=True):
        block.weight.copy_(layer.conv_kxk.conv.weight)
        copy_norm_(block.origin_norm, layer.conv_kxk.bn)
        block.branches["1x1"].conv.weight.copy_(layer.conv_1x1.conv.weight)
        copy_norm_(block.branches["1x1"].norm, layer.conv_1x1.bn)
        assert ("residual" in block.branches) == (layer.identity is not None)
        if layer.identity is not None:
            copy_norm_(block.branches["residual"].norm, layer.identity)
    ours.classifier.load_state_dict(theirs.head.fc.state_dict())
    expected = eval_output(theirs, x)
    assert expected.std() > 0
    assert relative_error(eval_output(ours, x), expected) < 1e-10
    assert relative_error(eval_output(dyrep.deploy(ours), x), expected) < 1e-10
    assert relative_error(ours.train()(x), theirs.train()(x)) < 1e-9
    # and the statistics that both have gathered from it
    assert relative_error(eval_output(ours, x), eval_output(theirs, x)) < 1e-9


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(
    ("outputs", "stride", "depthwise"), [(8, 1, False), (12, 1, False), (8, 1, True), (8, 2, True)]
)
@torch.no_grad()
def test_a_mobileone_block_is_timms(kernel, outputs, stride, depthwise):
    group_size = 1 if depthwise else None
    theirs = look_trained_(MobileOneBlock(8, outputs, kernel, stride, group_size=group_size, num_conv_branches=4))
    theirs.double()
    groups = 8 if depthwise else 1
    conv = nn.Conv2d(8, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    ours = nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU()).double()
    x = torch.randn(4, 8, 7, 7, dtype=torch.float64)
    dyrep.convert_(ours, "mobileone", example_input=x, copies=4)
    block = ours[0]
    kernels = [(block.weight, block.origin_norm)]
    kernels += [(block.branches[f"KxK-{i}"].conv.weight, block.branches[f"KxK-{i}"].norm) for i in (2, 3, 4)]
    for (weight, norm), theirs_kernel in zip(kernels, theirs.conv_kxk, strict=True):
        weight.copy_(theirs_kernel.conv.weight)
        copy_norm_(norm, theirs_kernel.bn)
    assert ("1x1" in block.branches) == (theirs.conv_scale is not None)
    assert ("residual" in block.branches) == (theirs.identity is not None)
    if theirs.conv_scale is not None:
        block.branches["1x1"].conv.weight.copy_(theirs.conv_scale.conv.weight)
        copy_norm_(block.branches["1x1"].norm, theirs.conv_scale.bn)
    if theirs.identity is not None:
        copy_norm_(block.branches["residual"].norm, theirs.identity)
    assert sum(p.numel() for p in ours.parameters() if p.requires_grad) == sum(p.numel() for p in theirs.parameters())
    assert relative_error(eval_output(ours, x), eval_output(theirs, x)) < 1e-12
    assert relative_error(ours.train()(x), theirs.train()(x)) < 1e-12
    theirs.eval().reparameterize()
    assert relative_error(eval_output(dyrep.deploy(ours), x), eval_output(theirs, x)) < 1e-12


# -- costs ------------------------------------------------------------------------------------------------------


def training_costs(name, method, size, classes=1000):
    """Trained parameters in millions, multiply-adds in billions, and those with 1x1-AVG as published.

    In publication the 1x1 comes before the pooling, over all positions of the input; here after it.
    """
    model = build(name, num_classes=classes)
    x = torch.randn(1, 3, size, size)
    dyrep.convert_(model, method, example_input=x)
    found = dyrep.costs(model, x)
    later = 0
    for layer, block in blocks(model).items():
        if "1x1-AVG" in block.branches and not block.geometry.depthwise:
            places = found.positions[layer]
            later += block.in_channels * block.out_channels // block.groups * (places.input - places.output)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained / 1e6, found.macs / 1e9, (found.macs + later) / 1e9


def test_dbb_costs_on_cifars_vgg16_what_the_paper_says():
    parameters, macs, published = training_costs("vgg16", "dbb", 32, classes=10)
    assert parameters == pytest.approx(34.7, rel=0.02)
    assert macs == pytest.approx(0.728, rel=0.02)
    assert published == macs  # nothing is strided


@pytest.mark.parametrize(
    ("name", "method", "paper_parameters", "paper_macs"),
    [("resnet18", "dbb", 26.3, 4.13), ("resnet50", "dbb", 40.7, 6.79), ("resnet50", "dbb7", 48.3, 8.02)],
)
def test_dbb_costs_on_resnets_what_the_paper_says(name, method, paper_parameters, paper_macs):
    parameters, macs, published = training_costs(name, method, 224)
    assert parameters == pytest.approx(paper_parameters, rel=0.002)
    assert macs == pytest.approx(paper_macs, rel=0.02)
    assert round(published, 2) == paper_macs


def test_dbb_costs_on_mobilenet_nearly_what_the_paper_says():
    parameters, macs, _ = training_costs("mobilenet_v1", "dbb", 224)  # 4.36 M and 0.623 G against 4.3 M and 0.61 G
    assert parameters == pytest.approx(4.3, rel=0.02)
    assert macs == pytest.approx(0.61, rel=0.025)


# -- OREPA ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def orepa_kernel(block):
    """The kernel of an OREPA block, channel by channel and tap by tap."""
    branches, k, groups = block.branches, block.kernel_size[0], block.groups
    outputs, per_group = block.weight.shape[:2]
    middle_per_group = branches["1x1-KxK"].conv.weight.shape[1]
    kernel = torch.zeros(outputs, per_group, k, k, dtype=torch.float64)
    first_half = math.ceil(outputs / 2)
    for o in range(outputs):
        group = o // (outputs // groups)
        scale = {name: float(branch.norm.weight[o]) for name, branch in branches.items()}
        for i in range(per_group):
            for h in range(k):
                for w in range(k):
                    value = float(block.origin_norm.weight[o] * block.weight[o, i, h, w])
                    mixed = branches["1x1-AVG"].point  # a depthwise convolution has nothing to mix
                    value += scale["1x1-AVG"] * (1.0 if mixed is None else float(mixed.weight[o, i, 0, 0])) / (k * k)
                    wave = (h, o + 1) if o < first_half else (w, o + 1 - first_half)
                    cosine = math.cos(math.pi * (wave[0] + 0.5) * wave[1] / k)
                    value += scale["1x1-DCT"] * float(branches["1x1-DCT"].point.weight[o, i, 0, 0]) * cosine
                    for m in range(middle_per_group):
                        point = branches["1x1-KxK"].point.weight[group * middle_per_group + m, i, 0, 0]
                        value += scale["1x1-KxK"] * float(point * branches["1x1-KxK"].conv.weight[o, m, h, w])
                    if h == w == k // 2:
                        value += scale["1x1"] * float(branches["1x1"].conv.weight[o, i, 0, 0])
                    for e in range(8):
                        depthwise = branches["DW-1x1"].depthwise.weight[(group * per_group + i) * 8 + e, 0, h, w]
                        value += scale["DW-1x1"] * float(
                            depthwise * branches["DW-1x1"].point.weight[o, i * 8 + e, 0, 0]
                        )
                    kernel[o, i, h, w] = value
    return kernel


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "stride", "kernel"),
    [(3, 4, 1, 1, 3), (4, 6, 2, 2, 3), (4, 4, 4, 1, 3), (2, 2, 1, 1, 5)],
)
@torch.no_grad()
def test_the_kernel_of_an_orepa_block_is_that_of_its_parameters(inputs, outputs, groups, stride, kernel):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False).double()
    model = nn.Sequential(conv)
    dyrep.convert_(model, "orepa")
    for p in model.parameters():
        p.normal_()
    x = torch.randn(2, inputs, 7, 7, dtype=torch.float64)
    expected = F.conv2d(x, orepa_kernel(model[0]), None, stride, kernel // 2, 1, groups)
    # not less, because the cosines may have been rounded to float32
    assert relative_error(model.train()(x), expected) < 1e-7
    assert relative_error(model.eval()(x), expected) < 1e-7
    assert relative_error(dyrep.deploy(model)(x), expected) < 1e-7


def test_orepas_cosines_have_the_precision_of_the_model():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1).double())
    dyrep.convert_(model, "orepa")
    expected = [math.cos(math.pi * (k + 0.5) / 3) for k in range(3)]
    assert model[0].branches["1x1-DCT"].filters[0, :, 0].tolist() == pytest.approx(expected, abs=1e-15)


@torch.no_grad()
def test_an_orepa_block_begins_with_its_published_scales():
    model = small_net()
    dyrep.convert_(model, "orepa")
    published = {"1x1-AVG": 0.25, "1x1-DCT": 0.0, "1x1-KxK": 0.5, "1x1": 1.0, "DW-1x1": 0.5}
    for block in blocks(model).values():
        assert torch.equal(block.origin_norm.weight, torch.full((block.out_channels,), 0.25))
        assert {n: set(b.norm.weight.tolist()) for n, b in block.branches.items()} == {
            name: {scale} for name, scale in published.items()
        }


class CountConvolutions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "convolutions"), [("origin", 1), ("orepa", 1), ("dbb", 5), ("acnet", 3)])
def test_orepa_trains_with_one_convolution_per_block_and_others_with_one_per_kernel(method, convolutions):
    model = small_net().train()
    x = torch.randn(2, 3, 8, 8)
    dyrep.convert_(model, method, example_input=x)
    with CountConvolutions() as counter:
        loss = model(x).square().mean()
    assert counter.count == 3 * convolutions
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_orepas_folding_is_counted_apart_from_its_convolution():
    model, plain = small_net(), small_net()
    dyrep.convert_(model, "orepa")
    x = torch.randn(2, 3, 8, 8)
    found = dyrep.costs(model, x)
    assert found.macs == dyrep.costs(plain, x).macs
    assert found.folding_macs > 0
