"""The benchmark of speed: the block it compares with is the published one, and its results are what they say."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dyrep

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    import profiling
    import published
    import speed

SHAPES = {
    "plain": {"in_channels": 4, "out_channels": 4},
    "wider": {"in_channels": 4, "out_channels": 6},
    "strided": {"in_channels": 4, "out_channels": 6, "stride": 2},
    "grouped": {"in_channels": 4, "out_channels": 4, "groups": 2},
    "stem": {"in_channels": 3, "out_channels": 8, "stride": 2, "kernel_size": 7, "padding": 3},
}


def make_conv(shape):
    options = {"kernel_size": 3, "padding": 1, "bias": False, "dtype": torch.float64} | SHAPES[shape]
    return nn.Conv2d(**options)


def shake_norms_(model):
    """Norms as they might be after some training."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.weight.data.uniform_(0.5, 1.5)
            norm.bias.data.normal_()
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)


def make_image(conv, batch=4, size=9):
    return torch.randn(batch, conv.in_channels, size, size, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_published_block_has_the_shape_of_its_convolution_and_trains_every_parameter(shape):
    conv = make_conv(shape)
    block, image = published.PublishedBlock(conv), make_image(conv)
    output = block(image)
    assert output.shape == conv(image).shape
    assert ("residual" in block.branches) == (shape in ("plain", "grouped"))
    output.mul(torch.randn_like(output)).sum().backward()
    assert conv.weight is block.branches["KxK"][0].weight
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def scale_of(norm):
    return (norm.weight / (norm.running_var + norm.eps).sqrt()).reshape(-1, 1, 1, 1)


def by_hand(name, branch, kernel_size):
    """The kernel of a published branch in eval mode, groups spread out into a dense one."""

    def dense(conv):
        blocks = torch.chunk(conv.weight, conv.groups)
        return torch.cat(
            [F.pad(b, (0, 0, 0, 0, i * b.shape[1], (conv.groups - 1 - i) * b.shape[1])) for i, b in enumerate(blocks)]
        )

    last, half = scale_of(branch[-1]), kernel_size // 2
    if name == "KxK":
        return last * dense(branch[0])
    if name == "1x1":
        return last * F.pad(dense(branch[0]), (half,) * 4)
    if name == "1xK":
        return last * F.pad(dense(branch[0]), (0, 0, half, half))
    if name == "Kx1":
        return last * F.pad(dense(branch[0]), (half, half, 0, 0))
    if name == "residual":
        return last * F.pad(torch.eye(len(last), dtype=last.dtype)[..., None, None], (half,) * 4)
    point = scale_of(branch[1].norm) * dense(branch[0])
    if name == "1x1-AVG":
        return last * point.expand(-1, -1, kernel_size, kernel_size) / kernel_size**2
    return last * torch.einsum("omhw,mi->oihw", dense(branch[2]), point[..., 0, 0])


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_published_branches_are_one_convolution_each_in_eval_mode(shape):
    conv = make_conv(shape)
    block, image = published.PublishedBlock(conv).eval(), make_image(conv)
    shake_norms_(block)
    whole = torch.zeros(())
    for name, branch in block.branches.items():
        constant = branch(torch.zeros_like(image))
        torch.testing.assert_close(constant, constant[:1, :, :1, :1].expand_as(constant))  # at the border too
        kernel = by_hand(name, branch, conv.kernel_size[0])
        expected = constant + F.conv2d(image, kernel, None, conv.stride, conv.padding)
        torch.testing.assert_close(branch(image), expected, msg=lambda text, name=name: f"{name}: {text}")
        whole = whole + expected
    torch.testing.assert_close(block(image), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_published_block_is_ours_in_training_mode_up_to_a_constant_per_channel(shape):
    conv = make_conv(shape)
    theirs, image = published.PublishedBlock(make_conv(shape)), make_image(conv)
    model = nn.Sequential(conv)
    dyrep.expand_(model, "0", gamma=1.0, origin_norm="reference")
    ours = model[0]
    assert ["KxK", *ours.branches] == list(theirs.branches)
    with torch.no_grad():
        theirs.branches["KxK"][0].weight.copy_(conv.weight)
        for name, branch in ours.branches.items():
            other = theirs.branches[name]
            if hasattr(branch, "point"):
                other[0].weight.copy_(branch.point.weight)
            if hasattr(branch, "conv"):
                other[-2].weight.copy_(branch.conv.weight)
            if isinstance(other[1] if len(other) > 2 else None, published.PaddedNorm):
                # the border comes from running statistics: only where they are the batch's is there no difference
                seen, norm = other[0](image), other[1].norm
                norm.momentum = 0.0
                norm.running_mean.copy_(seen.mean((0, 2, 3)))
                norm.running_var.copy_(seen.var((0, 2, 3), correction=0))
    for module in (*ours.modules(), *theirs.modules()):
        if hasattr(module, "eps"):
            module.eps = 1e-14  # a norm inside a branch leaves a trace only by its ε
    difference = (model(image) - theirs(image)).detach()
    torch.testing.assert_close(difference, difference.mean((0, 2, 3), keepdim=True).expand_as(difference))


def test_publishing_replaces_what_it_is_told_or_all_that_fits():
    def make():
        inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), inner, nn.Conv2d(4, 4, 5, padding=2))

    model = make()
    assert published.publish_(model, ["2"]) == ["2"]
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.Sequential, published.PublishedBlock]
    model = make()
    assert published.publish_(model) == ["0", "2"]
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4, 6, 6)
    with pytest.raises(ValueError, match="the padding is not half the kernel"):
        published.publish_(model, ["1.1"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolutions"),
        ("nvjet_tst_128x192_64x5_1x2_h_bz_TNT", "convolutions"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_bf16>(...)", "convolutions"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(...)", "convolutions"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>(cudnn::reduced_divisor)", "convolutions"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__nv_bfloat16, float, 512, true, 1>(...)", "statistics"),
        ("void at::native::batch_norm_collect_statistics_channels_last_kernel<...>(...)", "statistics"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>(...)", "statistics"),
        ("triton_red_fused__native_batch_norm_legit_functional_convolution_backward_12", "statistics"),
        ("_second_moments_kernel", "statistics"),
        ("_finish_statistics_kernel", "statistics"),
        ("_reduce_kernel", "statistics"),
        ("triton_poi_fused__native_batch_norm_legit_functional_relu_5", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<...>>(...)", "elementwise"),
        ("void at::native::(anonymous namespace)::max_pool_backward_nhwc<...>(...)", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "elementwise"),
        ("_weighted_sum_kernel", "elementwise"),
        ("_apply_kernel", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::FusedSgdMathFunctor<...>>(...)", "optimizer"),
        ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<...>(...)", "other"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert profiling.classify(name) == kind


def test_summary_of_a_profile():
    found = profiling.summarise({"nvjet_a": 2.0, "sm90_xmma_b": 1.0, "_apply_kernel": 0.5, "what": 0.25})
    assert found["kernels_ms"] == 3.75
    assert found["by_kind_ms"] == {
        "convolutions": 3.0,
        "statistics": 0.0,
        "elementwise": 0.5,
        "optimizer": 0.0,
        "other": 0.25,
    }
    assert [row["name"] for row in found["top"]] == ["nvjet_a", "sm90_xmma_b", "_apply_kernel", "what"]


def test_evolved_resnet_costs_what_the_paper_says():
    case = speed.CASES["resnet18-evolved"]
    layers = speed.expanded_layers(case)
    model = case.build()
    dyrep.expand_(model, layers, gamma=1.0)
    assert dyrep.costs(model, torch.zeros(1, 3, case.size, case.size)).macs == pytest.approx(2.42e9, rel=0.02)
    assert len({layer.split(".")[0] for layer in layers}) > 1  # not all in one place


def test_default_modes():
    gpu = torch.device("cuda")
    assert speed.default_modes("resnet50", "plain", gpu) == speed.FAST
    assert speed.default_modes("resnet50", "published", gpu) == ("eager",)
    assert speed.default_modes("resnet18-evolved", "eager", gpu) == ("graph",)
    assert speed.default_modes("resnet18", "folded", gpu) == ("graph", "compiled+graph")
    assert speed.default_modes("vgg16", "published", gpu) == ("graph",)
    assert speed.default_modes("vgg16", "fused", torch.device("cpu")) == ("eager",)


def test_ratios_are_against_the_fastest_plain_mode_that_is_not_eager():
    rows = [
        {"case": "a", "arm": "plain", "mode": "eager", "ms": 1.0, "peak_gib": 3.0},
        {"case": "a", "arm": "plain", "mode": "graph", "ms": 4.0, "peak_gib": 4.0},
        {"case": "a", "arm": "plain", "mode": "compiled", "ms": 2.0, "peak_gib": 2.0},
        {"case": "a", "arm": "fused", "mode": "graph", "ms": 6.0, "peak_gib": 8.0},
        {"case": "a", "arm": "folded", "mode": "graph", "ms": None, "peak_gib": None, "error": "RuntimeError: no"},
        {"case": "b", "arm": "fused", "mode": "graph", "ms": 6.0, "peak_gib": None},
    ]
    found = {(row["case"], row["arm"], row["mode"]): row for row in speed.ratios({"measurements": rows})}
    assert found["a", "plain", "compiled"]["time"] == 1
    assert (found["a", "fused", "graph"]["time"], found["a", "fused", "graph"]["memory"]) == (3, 4)
    assert ("a", "folded", "graph") not in found
    assert (found["b", "fused", "graph"]["time"], found["b", "fused", "graph"]["memory"]) == (None, None)


@pytest.fixture
def run_small(monkeypatch, tmp_path):
    monkeypatch.setitem(speed.CASES, "small", speed.Case("small_vgg", 2, 8, 10))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)

    def run(*arguments):
        out = tmp_path / "speed.json"
        quick = ["--device", "cpu", "--warmup", "1", "--steps", "1", "--blocks", "2"]
        speed.main(["--out", str(out), "--cases", "small", *quick, *arguments])
        return json.loads(out.read_text())

    return run


def test_benchmark_runs_on_a_cpu_and_writes_its_results(run_small, capsys):
    result = run_small("--arms", "plain", "published", "eager")
    assert list(result) == ["command", "versions", "hardware", "config", "measurements"]
    assert result["command"].startswith("python benchmarks/speed.py --out results/speed.json --cases small")
    assert result["config"]["cases"]["small"]["batch"] == 2
    assert result["config"]["cases"]["small"]["layers"] == [f"conv{i}" for i in range(1, 7)]
    assert [(row["arm"], row["mode"]) for row in result["measurements"]] == [
        (arm, "eager") for arm in ("plain", "published", "eager")
    ]
    for row in result["measurements"]:
        assert "error" not in row, row
        assert row["ms"] > 0
        assert len(row["blocks_ms"]) == 2
        assert (row["peak_gib"], row["reserved_gib"]) == (None, None)
        assert 0 < row["loss"] < 10
    printed = capsys.readouterr().out
    assert printed.count("published") == 2
    assert "1.00 x time" in printed


def test_a_measurement_that_fails_does_not_stop_the_others(run_small, monkeypatch):
    def refuse(*_):
        raise RuntimeError("it cannot be published\nfor reasons of its own")

    monkeypatch.setattr(published, "publish_", refuse)
    failed, plain = run_small("--arms", "published", "plain")["measurements"]
    assert failed["error"] == "RuntimeError: it cannot be published"
    assert failed["ms"] is None
    assert plain["ms"] > 0


def test_adding_to_results_of_the_same_setup(run_small):
    first = run_small("--arms", "plain")
    again = run_small("--arms", "published", "--add")
    assert again["measurements"][0] == first["measurements"][0]
    assert [row["arm"] for row in again["measurements"]] == ["plain", "published"]
    with pytest.raises(SystemExit, match="another setup"):
        run_small("--arms", "published", "--add", "--steps", "2")
    with pytest.raises(SystemExit, match="another batch or size"):
        run_small("--arms", "published", "--add", "--batch", "3")
