"""Which way a block is run: what was asked for where that is possible, else eagerly, with the reason."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from execution_helpers import assert_same, eager, folded_with, images, make_block, norms_of, seven_branches, step
from torch import nn

import dyrep
from dyrep import scoring
from dyrep.block import origin_scaling_for
from dyrep.execution import EXECUTIONS, Clock, Execution, choose, dispatch, eagerly
from strategies import CONVS
from training import loss_of, make_batches, make_net

explicit = pytest.mark.parametrize("name", ["fused", "folded"])
CALLS_FOR = "a block set to execution={!r} runs eagerly: .*{}"


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch):
    dispatch._tell.cache_clear()
    monkeypatch.setattr(dispatch, "unavailable", lambda: "")


class OnGpu:
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def __init__(self, x):
        self._x = x

    def __getattr__(self, name):
        return getattr(self._x, name)

    def __len__(self):
        return len(self._x)


def on_gpu(*shape, dtype=torch.float32):
    return OnGpu(torch.empty(shape or (2, 4, 6, 6), dtype=dtype))


def way(name, block, x, **options):
    return choose(block, Execution(name, **options), x)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/together", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# What is asked for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["auto", "eager", "fused"])
def test_on_the_cpu_all_but_folded_silently_mean_eager(name, training):
    block, x = seven_branches().train(training), images()
    twin = copy.deepcopy(block)
    block.execution = Execution(name)
    assert way(name, block, x) == "eager"
    assert torch.equal(block(x), twin._added(x))


@pytest.mark.parametrize(("name", "chosen"), [("auto", "fused"), ("fused", "fused"), ("folded", "folded")])
def test_on_a_gpu_blocks_run_as_they_are_told_and_fused_by_themselves(name, chosen):
    assert way(name, seven_branches(torch.float32), on_gpu()) == chosen


def test_eager_is_eager_everywhere():
    for training in (True, False):
        assert way("eager", seven_branches(torch.float32).train(training), on_gpu()) == "eager"


@pytest.mark.parametrize("name", ["auto", "fused", "folded"])
def test_in_eval_mode_the_kernel_depends_on_no_batch(name):
    assert way(name, seven_branches(torch.float32).eval(), on_gpu()) == "frozen"
    assert way(name, seven_branches(torch.float32).eval(), on_gpu(1, 4, 1, 1)) == "frozen"


def test_folded_works_on_the_cpu():
    assert way("folded", seven_branches().train(), images()) == "folded"


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_folded_block_in_eval_mode_is_one_convolution_with_the_same_result(bias, mode, monkeypatch):
    block, x = seven_branches(bias=bias, padding_mode=mode).eval(), images()
    expected = step(block, x, lambda block, x: eager(block.eval(), x))
    calls, conv2d = [], torch.nn.functional.conv2d
    monkeypatch.setattr("torch.nn.functional.conv2d", lambda *args: calls.append(1) or conv2d(*args))
    block.execution = Execution("folded")
    plain = block.eval()(x)
    assert len(calls) == 1
    assert_same({"output": plain}, {"output": expected["output"]})


def test_a_folded_block_in_training_is_run_with_its_own_settings():
    block, x = seven_branches().train(), images()
    block.execution = Execution("folded", images=2, values=1)
    expected = step(block, x, folded_with(images=2))["output"]
    assert torch.equal(block(x), expected)
    assert not torch.allclose(block._added(x), expected)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_folded_block_takes_a_single_image_without_batch_dimension(training, mode):
    block, x = seven_branches(padding_mode=mode).train(training), images(1)
    block.execution = Execution("folded", gradient="full")
    y = block(x[0])
    assert y.shape == (4, 6, 5)
    assert torch.allclose(y, block(x)[0], atol=1e-12)


# What cannot be, and why --------------------------------------------------------------------------------------------


def calibrated(block):
    norms_of(block)[0].start_calibration()


def partly_frozen(block):
    block.branches["1x1"].norm.eval()


def of_different_eps(block):
    block.branches["1x1"].norm.eps = 1e-3


def without_some_norm(block):
    block.origin_norm = origin_scaling_for(block, "linear")


REASONS = {
    calibrated: "its norms are being calibrated, or some of them are frozen",
    partly_frozen: "its norms are being calibrated, or some of them are frozen",
    of_different_eps: "its norms differ in ε",
    without_some_norm: "some of its branches are not normalised",
}
every_reason = pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)


@explicit
@every_reason
def test_norms_that_cannot_be_run_together_run_eagerly_with_the_reason(name, change):
    block = seven_branches(torch.float32).train()
    change(block)
    with pytest.warns(UserWarning, match=CALLS_FOR.format(name, REASONS[change])):
        assert way(name, block, on_gpu()) == "eager"


@every_reason
def test_auto_says_nothing(change):
    block = seven_branches(torch.float32).train()
    change(block)
    assert way("auto", block, on_gpu()) == "eager"


@every_reason
def test_a_folded_block_that_cannot_be_folded_computes_what_an_eager_one_does(change):
    block, x = seven_branches().train(), images()
    change(block)
    twin = copy.deepcopy(block)
    block.execution = Execution("folded", images=2)
    with pytest.warns(UserWarning, match="runs eagerly"):
        y = block(x)
    assert torch.equal(y, twin._added(x))


@explicit
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (0, 4, 6, 6)], ids=["one value", "no image"])
def test_there_has_to_be_more_than_one_value_per_channel(name, shape):
    with pytest.warns(UserWarning, match=CALLS_FOR.format(name, "one value per channel")):
        assert way(name, seven_branches(torch.float32), on_gpu(*shape)) == "eager"


@explicit
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_what_counts_are_the_values_of_the_output(name, mode):
    block = make_block(nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode=mode), ["1x1", "1xK"]).train()
    size = (1, 1) if mode == "zeros" else (3, 3)  # padded by now
    with pytest.warns(UserWarning, match=CALLS_FOR.format(name, "one value per channel")):
        assert way(name, block, on_gpu(1, 4, *size)) == "eager"
    assert way(name, block, on_gpu(2, 4, *size)) == name
    assert way(name, block, on_gpu(1, 4, size[0] + 2, size[1])) == name


@pytest.mark.parametrize("values", [1, 4])
def test_a_single_image_with_a_single_position_is_not_enough_to_measure_on(values):
    block, x = make_block(nn.Conv2d(4, 4, 3, dtype=torch.float64), ["1x1"]).train(), images(6, size=(3, 3))
    block.execution = Execution("folded", images=1, values=values)
    assert block(x).isfinite().all()
    assert block.branches["1x1"].norm.running_var.isfinite().all()


@pytest.mark.parametrize("ndim", [1, 3])
def test_only_two_dimensional_convolutions_are_folded(ndim):
    block = make_block(CONVS[ndim - 1](4, 4, 3, padding=1, dtype=torch.float64)).train()
    block.execution = Execution("folded")
    x = images(size=(5,) * ndim)
    twin = copy.deepcopy(block)
    with pytest.warns(UserWarning, match=CALLS_FOR.format("folded", "only two-dimensional convolutions are folded")):
        y = block(x)
    assert torch.equal(y, twin._added(x))
    assert way("fused", block, on_gpu(2, 4, *(5,) * ndim)) == "fused"


def test_double_precision_is_not_fused_but_folded():
    x = on_gpu(dtype=torch.float64)
    with pytest.warns(UserWarning, match=CALLS_FOR.format("fused", "the kernels compute in float32")):
        assert way("fused", seven_branches(), x) == "eager"
    assert way("auto", seven_branches(), x) == "eager"
    assert way("folded", seven_branches(), x) == "folded"


def test_a_block_in_place_of_a_norm_is_folded_with_the_full_gradient_alone():
    """Nothing else would take scale and mean out of the gradient of what it passes on."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)).double()
    dyrep.convert_(model, "dbb", example_input=images(), replace="conv+norm")
    block = model.train()[0]
    assert way("folded", block, images(), gradient="full") == "folded"
    with pytest.warns(UserWarning, match="execution='folded' runs exactly: .* needs gradient='full'"):
        assert way("folded", block, images()) == "eager"
    assert way("folded", block, on_gpu(), gradient="none") == "fused"


def test_without_triton_nothing_is_fused(monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda: "Triton is not installed")
    with pytest.warns(UserWarning, match=CALLS_FOR.format("fused", "Triton is not installed")):
        assert way("fused", seven_branches(torch.float32), on_gpu()) == "eager"
    assert way("folded", seven_branches(torch.float32), on_gpu()) == "folded"


@explicit
def test_statistics_shared_between_processes_are_not_run_together(name, one_process):
    block = dyrep.sync_norms_(seven_branches(torch.float32)).train()
    with pytest.warns(UserWarning, match=CALLS_FOR.format(name, "its statistics are shared between processes")):
        assert way(name, block, on_gpu()) == "eager"
    assert way("auto", block, on_gpu()) == "eager"


@explicit
def test_synchronised_norms_of_a_single_process_have_nothing_to_share(name):
    assert way(name, dyrep.sync_norms_(seven_branches(torch.float32)), on_gpu()) == name


def test_a_reason_is_given_once(recwarn):
    for _ in range(3):
        for change in (partly_frozen, of_different_eps):
            block = seven_branches(torch.float32).train()
            change(block)
            with warnings.catch_warnings():
                warnings.filterwarnings("always")
                way("fused", block, on_gpu())
    assert [str(w.message).split(": ")[1] for w in recwarn] == [REASONS[partly_frozen], REASONS[of_different_eps]]


def assert_runs_eagerly(block, twin, x, name):
    with pytest.warns(UserWarning, match=CALLS_FOR.format(name, REASONS[partly_frozen])):
        assert way(name, block, on_gpu()) == "eager"
    block.execution = Execution("folded")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(block(x), twin._added(x))


@explicit
@pytest.mark.parametrize("nested", [False, True], ids=["inner norm", "nested block"])
def test_a_norm_frozen_inside_a_branch_keeps_its_statistics(name, nested):
    block, x = seven_branches().train(), images()
    chain = block.branches["1x1-KxK"]
    make_block(chain.conv, ["1x1"])
    frozen = chain.conv.branches["1x1"].norm if nested else chain.inner_norm
    frozen.eval()
    before, twin = frozen.running_var.clone(), copy.deepcopy(block)
    assert_runs_eagerly(block, twin, x, name)
    assert torch.equal(frozen.running_var, before)


@explicit
def test_a_block_whose_outer_norms_alone_are_frozen_is_not_frozen(name):
    block, x = seven_branches().eval(), images()
    block.branches["1x1-KxK"].inner_norm.train()
    twin = copy.deepcopy(block)
    assert_runs_eagerly(block, twin, x, name)


# Eagerly, whatever the setting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXECUTIONS)
def test_eagerly_wins_over_every_setting(name):
    block = seven_branches(torch.float32)
    for training in (True, False):
        with eagerly():
            assert way(name, block.train(training), on_gpu()) == "eager"


def test_eagerly_lasts_as_long_as_its_block_and_can_be_nested():
    block, x = seven_branches().train(), images()
    with eagerly():
        with eagerly():
            pass
        assert way("folded", block, x) == "eager"
    assert way("folded", block, x) == "folded"


def test_eagerly_is_over_after_an_exception():
    with pytest.raises(KeyError), eagerly():
        raise KeyError
    assert way("folded", seven_branches().train(), images()) == "folded"


def test_run_eagerly_branches_are_modules_that_hooks_see_and_the_clock_stands_still():
    block, x = seven_branches().train(), images()
    clock = Clock(2)
    block.execution = Execution("folded", clock=clock)
    seen = []
    for name, branch in block.branches.items():
        branch.register_forward_hook(lambda *_, name=name: seen.append(name))
    expected = step(block, x, eager)["output"]
    seen.clear()
    with eagerly():
        assert torch.equal(block(x), expected)
    assert seen == list(block.branches)
    assert clock.step == 0


def test_a_folded_model_is_calibrated_and_counted_eagerly():
    """Calibration looks into nested convolutions, which folded blocks do not run by themselves."""
    found = []
    for name in ("eager", "folded"):
        model = make_net()
        dyrep.expand_(model, "3", generator=torch.Generator().manual_seed(0))
        dyrep.set_execution_(model, name, images=2, values=1)
        inner = "3.branches.1x1-KxK.conv"
        dyrep.expand_(model, [inner, "5"], calibration=make_batches(), generator=torch.Generator().manual_seed(1))
        found.append((model.state_dict(), dyrep.costs(model, make_batches()[0])))
    (state, costs), (other, other_costs) = found
    assert all(torch.equal(other[key], value) for key, value in state.items())
    assert costs == other_costs


def test_gradients_of_gradients_are_those_of_eager_blocks():
    found = []
    for name in ("eager", "folded"):
        model = make_net()
        dyrep.expand_(model, ["0", "3"], generator=torch.Generator().manual_seed(0))
        dyrep.set_execution_(model, name, images=2, values=1)
        watched = {key: [model[int(key)].weight] for key in ("0", "3")}
        found.append(scoring.grasp_scores(model, watched, make_batches(1), loss_of))
    assert found[0] == found[1]
