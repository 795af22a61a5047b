"""`measure_executions`: every block is timed in what it really runs as, and the model does not notice."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dyrep
from dyrep.block import RepConv
from dyrep.errors import ConfigError, DyRepError, IneligibleLayerError, UnreachedLayerError
from dyrep.execution import dispatch
from dyrep.surgery import timing
from dyrep.surgery.timing import LayerTimes, measure_executions, median_ms
from surgery_helpers import assert_same_picture, conv_bn_net, picture

CPU = torch.device("cpu")
BATCH = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
INNER = "3.branches.1x1-KxK.conv"


def grown_net(**options):
    model = conv_bn_net()
    dyrep.expand_(model, ["0", "3"], gamma=0.5, **options)
    return model


@pytest.fixture
def timed(monkeypatch):
    """What `_time` is asked to time; it answers at once, with a number for each execution."""
    seen = []

    def time(module, x, repeats, calls=1):
        name = module.execution.name if isinstance(module, RepConv) else "plain"
        seen.append(SimpleNamespace(module=module, name=name, x=x, repeats=repeats, calls=calls))
        return {"plain": 1.0, "eager": 5.0, "fused": 2.0, "folded": 1.5}[name]

    monkeypatch.setattr(timing, "_time", time)
    return seen


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """Blocks choose as if their inputs were on a GPU with Triton."""
    monkeypatch.setattr(dispatch, "unavailable", lambda: "")
    monkeypatch.setattr(timing, "choose", lambda block, settings, x: dispatch.choose(block, settings, gpu(x)))
    reason = timing._reason
    monkeypatch.setattr(timing, "_reason", lambda block, x, auto, times: reason(block, gpu(x), auto, times))


def gpu(x):
    return SimpleNamespace(is_cuda=True, dtype=x.dtype, shape=x.shape, numel=x.numel)


# What is found ------------------------------------------------------------------------------------------------------


def test_every_block_is_timed_in_every_execution():
    found = measure_executions(grown_net(), (BATCH, "labels"), repeats=2)
    assert [times.layer for times in found] == ["0", "3"]
    assert [times.input_shape for times in found] == [(4, 3, 8, 8), (4, 6, 8, 8)]
    assert found[1].branches == ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual")
    for times in found:
        assert list(times.ms) == ["eager", "fused", "folded"]
        assert min(times.plain_ms, *times.ms.values()) > 0


def test_on_the_cpu_fused_and_auto_are_eager_and_are_not_timed_again():
    (first, _) = measure_executions(grown_net(), BATCH, executions=("eager", "fused", "auto"), repeats=1)
    assert first.runs_as == {"auto": "eager", "eager": "eager", "fused": "eager", "folded": "folded"}
    assert first.ms["eager"] == first.ms["fused"] == first.ms["auto"]
    assert (first.auto, first.reason) == ("eager", "not on a GPU: blocks run eagerly")
    assert first.fastest_exact == "eager"


def test_without_executions_it_only_says_what_blocks_run_as(timed):
    (first, _) = measure_executions(grown_net(), BATCH, executions=())
    assert (first.ms, first.fastest_exact, first.runs_as["folded"]) == ({}, None, "folded")
    assert [call.name for call in timed] == ["plain", "plain"]


def test_what_is_timed_runs_as_it_is_called_on_what_the_model_gives_it(timed):
    found = measure_executions(grown_net(), BATCH, repeats=3)
    assert [call.name for call in timed] == ["plain", "eager", "folded"] * 2
    assert all(times.ms == {"eager": 5.0, "fused": 5.0, "folded": 1.5} for times in found)
    assert {call.repeats for call in timed} == {3}
    assert all(torch.equal(call.x, BATCH) for call in timed[:3])
    # nobody asks for the gradient of an image
    assert [call.x.requires_grad for call in timed] == [False] * 3 + [True] * 3
    plain = timed[0].module
    assert type(plain) is nn.Conv2d


def test_the_plain_convolution_is_the_one_that_the_block_folds_into(timed):
    model = grown_net()
    measure_executions(model, BATCH)
    expected, _ = model[3].folded()
    torch.testing.assert_close(timed[3].module.weight, expected)


def test_folded_blocks_are_timed_over_steps_that_measure_and_steps_that_do_not(timed):
    model = grown_net()
    dyrep.set_execution_(model, "eager", images=3, gradient="none", every=4)
    measure_executions(model, BATCH)
    assert [call.calls for call in timed[:3]] == [1, 1, 4]
    settings = timed[2].module.execution
    assert (settings.images, settings.gradient, settings.clock.every) == (3, "none", 4)
    measured = []
    for _ in range(8):
        measured.append(settings.clock.due)
        timed[2].module(timed[2].x)
    assert sum(measured) == 2


def test_a_pass_goes_back_to_the_input_and_all_parameters(monkeypatch):
    asked, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda y, inputs, *a, **k: asked.append(inputs) or grad(y, inputs, *a, **k)
    )
    model = grown_net()
    measure_executions(model, BATCH, executions=("eager",), repeats=1)
    counts = {len(inputs) for inputs in asked}
    parameters = [len(list(block.parameters())) for block in (model[0], model[3])]
    assert counts == {1, parameters[0], 2, parameters[1] + 1}  # plain and eager, without and with the input's gradient


def test_a_block_inside_a_branch_is_timed_with_the_one_around_it(timed):
    model = grown_net()
    dyrep.expand_(model, INNER)
    assert [times.layer for times in measure_executions(model, BATCH)] == ["0", "3"]
    block = timed[-1].module
    inner = block.get_submodule(INNER.removeprefix("3."))
    assert inner.execution.name == "folded"


def test_a_model_that_is_one_block_has_no_name_to_tell():
    block = nn.Conv2d(3, 3, 3, padding=1)
    dyrep.expand_(block, "")
    assert [times.layer for times in measure_executions(block, BATCH, repeats=1)] == [""]


def test_a_block_that_is_called_twice_is_timed_on_its_first_input(timed):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.MaxPool2d(2), conv)
    dyrep.expand_(model, "0")
    (times,) = measure_executions(model, BATCH)
    assert times.input_shape == (4, 3, 8, 8)


def test_a_single_image_without_batch_dimension_will_do():
    block = nn.Conv2d(3, 3, 3, padding=1)
    dyrep.expand_(block, "")
    (times,) = measure_executions(block, BATCH[0], repeats=1)
    assert times.input_shape == (3, 8, 8)
    assert times.runs_as["folded"] == "folded"


def test_a_block_that_looks_at_no_batch_is_one_convolution_in_any_execution():
    model = conv_bn_net()
    dyrep.convert_(model, "orepa", example_input=BATCH)
    found = measure_executions(model, BATCH, repeats=1)
    assert {times.runs_as[name] for times in found for name in ("eager", "fused", "folded")} == {"frozen"}
    assert found[0].reason == "it does not look at the batch: one convolution"
    assert len(set(found[0].ms.values())) == 1


def test_autocast_holds_for_what_is_timed(timed):
    with torch.autocast("cpu", torch.bfloat16):
        measure_executions(grown_net(), BATCH)
        assert {call.module(call.x).dtype for call in timed} == {torch.bfloat16}


def test_layouts_are_kept(timed):
    model = grown_net().to(memory_format=torch.channels_last)
    measure_executions(model, BATCH.contiguous(memory_format=torch.channels_last))
    assert timed[-1].x.is_contiguous(memory_format=torch.channels_last)
    assert timed[-1].module.weight.is_contiguous(memory_format=torch.channels_last)


def test_norms_that_are_frozen_stay_so_and_those_of_an_eval_model_are_trained(timed):
    model = grown_net()
    model[3].branches["1x1"].norm.eval()
    found = measure_executions(model, BATCH)
    assert [times.runs_as["folded"] for times in found] == ["folded", "eager"]
    assert [times.runs_as["folded"] for times in measure_executions(model.eval(), BATCH)] == ["folded"] * 2


# What auto does, and why --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_on_a_gpu_auto_is_fused_and_the_gain_is_told(timed):
    for times in measure_executions(grown_net(), BATCH):
        assert times.runs_as == {"auto": "fused", "eager": "eager", "fused": "fused", "folded": "folded"}
        assert (times.auto, times.reason) == ("fused", "exact, and 2.5 x faster than eager here")
        assert times.fastest_exact == "fused"


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_the_reason_why_a_block_is_not_fused_is_the_one_that_training_gives(timed):
    model = grown_net()
    model[3].branches["1x1"].norm.eps = 1e-3
    fused, eager = measure_executions(model, BATCH)
    assert (fused.auto, eager.auto) == ("fused", "eager")
    assert eager.reason == "its norms differ in ε"
    assert eager.runs_as["fused"] == "eager"
    assert eager.ms["fused"] == eager.ms["eager"] == 5.0


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"eager": 3.0, "fused": 1.0}, "exact, and 3 x faster than eager here"),
        ({"eager": 1.0, "fused": 1.5}, "exact, but 1.5 x slower than eager here"),
        ({"eager": 1.0, "fused": 1.02}, "exact, and as fast as eager here"),
        ({"folded": 1.0}, "exact"),
    ],
)
def test_being_fused_is_not_praised_where_it_is_no_faster(times, reason):
    assert timing._reason(grown_net()[0], gpu(BATCH), "fused", times) == reason


def test_the_fastest_exact_way_is_never_the_folded_one():
    ways = {"eager": "eager", "fused": "fused", "folded": "folded"}
    times = LayerTimes("a", (1,), (), 1.0, {"eager": 3.0, "fused": 2.0, "folded": 1.0}, ways, "fused", "")
    assert times.fastest_exact == "fused"


def test_a_block_that_cannot_be_folded_is_no_reason_to_warn_here_but_still_is_in_training():
    model = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1))
    dyrep.expand_(model, "0")
    dispatch._tell.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (times,) = measure_executions(model, BATCH[..., 0], repeats=1)
    assert times.runs_as["folded"] == "eager"
    dyrep.set_execution_(model, "folded")
    with pytest.warns(UserWarning, match="only two-dimensional convolutions are folded"):
        model(BATCH[..., 0])


# What stays as it was -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_nothing_about_the_model_changes(training):
    model = grown_net().train(training)
    dyrep.set_execution_(model, "folded", images=2, every=3)
    model(BATCH).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    before, settings = picture(model), {n: m.execution for n, m in model.named_modules() if isinstance(m, RepConv)}
    steps, random = model[0].execution.clock.step, torch.get_rng_state()
    measure_executions(model, BATCH, repeats=1)
    assert_same_picture(picture(model), before)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(model.get_submodule(name).execution is setting for name, setting in settings.items())
    assert model[0].execution.clock.step == steps
    assert torch.equal(torch.get_rng_state(), random)
    assert not model[0]._forward_pre_hooks


def test_hooks_of_others_see_the_model_run_once_and_no_more():
    model, calls = grown_net(), []
    model[0].register_forward_hook(lambda *_: calls.append("block"))
    model[0].branches["1x1"].register_forward_hook(lambda *_: calls.append("branch"))
    measure_executions(model, BATCH, repeats=2)
    assert calls == ["branch", "block"]


def test_hooks_that_cannot_be_copied_do_not_matter():
    class Owner:
        def __deepcopy__(self, memo):
            raise TypeError("not this one")

        def hook(self, *_):
            return None

    model = grown_net()
    model[0].register_forward_hook(Owner().hook)
    assert measure_executions(model, BATCH, repeats=1)


def test_it_works_where_gradients_are_off_and_leaves_them_off():
    with torch.no_grad():
        assert measure_executions(grown_net(), BATCH, repeats=1)
        assert not torch.is_grad_enabled()


# What cannot be timed -----------------------------------------------------------------------------------------------


def test_a_model_without_blocks_has_to_be_expanded_first():
    with pytest.raises(DyRepError, match="no blocks to time: expand"):
        measure_executions(conv_bn_net(), BATCH)


def test_a_block_that_is_never_called_is_named():
    model = nn.ModuleDict({"used": nn.Conv2d(3, 3, 3), "idle": nn.Conv2d(3, 3, 3)})
    dyrep.expand_(model, ["used", "idle"])
    with pytest.raises(UnreachedLayerError, match=r"never calls 'idle' on this batch.*dyrep\.cut_"):
        measure_executions(model, BATCH, forward=lambda model, batch: model["used"](batch))
    assert not model["used"]._forward_pre_hooks


def test_memory_that_does_not_suffice_is_told_with_the_layer(monkeypatch):
    def time(module, *_):
        if isinstance(module, RepConv):
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")
        return 1.0

    monkeypatch.setattr(timing, "_time", time)
    told = r"layer '0' cannot be run eager on this batch \(CUDA out of memory\.\): use a smaller batch"
    with pytest.raises(DyRepError, match=told):
        measure_executions(grown_net(), BATCH)


@pytest.mark.parametrize("repeats", [0, True, 1.5])
def test_repeats_are_a_positive_number(repeats):
    with pytest.raises(ConfigError, match="repeats="):
        measure_executions(grown_net(), BATCH, repeats=repeats)


def test_unknown_executions_are_refused():
    with pytest.raises(ConfigError, match="execution='quick' is unknown; valid are auto"):
        measure_executions(grown_net(), BATCH, executions=("quick",))


# The clock ----------------------------------------------------------------------------------------------------------


def test_a_median_is_taken_over_rounds_and_divided_by_their_calls(monkeypatch):
    now, calls = iter([0.0, 1.0, 11.0, 13.0]), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert median_ms(lambda: calls.append(1), CPU, 3, calls=2) == 1000
    assert len(calls) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_times_itself():
    model = grown_net().cuda()
    for times in measure_executions(model, BATCH, repeats=3):
        assert times.auto == times.runs_as["fused"] == "fused"
        assert times.reason.startswith("exact, ")
        assert min(times.plain_ms, *times.ms.values()) > 0
        assert len(set(times.ms.values())) == 3


def test_block_with_a_pruned_kernel_has_no_plain_convolution_to_compare_with():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    dyrep.expand_(model, "0", ["1x1"])
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    with pytest.raises(IneligibleLayerError, match=r"^layer '0' cannot be folded: its weight is computed"):
        dyrep.measure_executions(model, torch.randn(2, 4, 8, 8), repeats=1)
