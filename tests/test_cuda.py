"""What only a GPU can show. Skipped where there is none."""

import pytest
import torch
from torch import nn

import dyrep
from dyrep import scoring
from dyrep.normflow import has_flow
from training import loss_of, make_batches, make_net, train_epoch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BATCHES = [(images.cuda(), labels.cuda()) for images, labels in make_batches()] if torch.cuda.is_available() else []


@pytest.fixture(autouse=True)
def _exact_convolutions():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def eval_output(model):
    model.eval()
    with torch.no_grad():
        return model(BATCHES[0][0])


def test_growing_cutting_and_folding_keep_the_function():
    model = make_net().cuda()
    train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.05), BATCHES)
    before = eval_output(model)
    scale = before.abs().max()
    dyrep.expand_(model, ["0", "3", "5"], calibration=BATCHES)
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", calibration=BATCHES)
    assert (eval_output(model) - before).abs().max() / scale < 1e-5
    dyrep.cut_(model, "3", ["1x1-KxK", "residual"])
    assert (eval_output(model) - before).abs().max() / scale < 1e-5
    assert dyrep.verify(model, dyrep.deploy(model), BATCHES[0]).error < 1e-5


def test_batches_are_moved_to_the_model():
    model = make_net().cuda()
    dyrep.expand_(model, "3", calibration=make_batches())
    assert all(p.is_cuda for p in model.parameters())


def test_a_seed_means_the_same_weights_on_every_device():
    grown = []
    for device in ("cpu", "cuda"):
        model = make_net().to(device)
        dyrep.expand_(model, "3", generator=torch.Generator().manual_seed(3))
        grown.append(model[3].branches["1x1"].conv.weight.detach().cpu())
    assert torch.equal(*grown)


def test_calibration_leaves_the_devices_random_numbers_alone():
    model = nn.Sequential(make_net()[:3], nn.Dropout(0.5), nn.Conv2d(8, 8, 3)).cuda()
    torch.cuda.manual_seed(5)
    dyrep.expand_(model, "2", calibration=BATCHES)
    drawn = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_channels_last_trains_and_evolves(dtype):
    model = make_net().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    controller = dyrep.DyRep(model, optimizer, dyrep.DyRepConfig.paper(interval=1, score="snip", calibration_batches=2))
    for _ in range(4):
        model.train()
        for images, labels in BATCHES:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                value = loss_of(model, (images.to(memory_format=torch.channels_last), labels))
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert controller.epoch_end(BATCHES)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model[3].branches["1x1-KxK"].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).error < 1e-4


def test_compiled_blocks_equal_eager_ones():
    model = make_net().cuda()
    dyrep.expand_(model, ["0", "3", "5"], calibration=BATCHES, gamma=0.3)
    twin = make_net().cuda()
    dyrep.restructure_(twin, dyrep.structure(model)).load_state_dict(model.state_dict())
    compiled = torch.compile(twin, fullgraph=True)
    for one in (model, compiled):
        loss_of(one, BATCHES[0]).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-5, msg=name)
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6, msg=name)


def test_scoring_never_waits_for_the_device():
    model = make_net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scorer = scoring.StepScorer(optimizer, scoring.STEP_METRICS)
    norms = {name: norm for name, norm in model.named_modules() if has_flow(norm)}
    scorer.watch({name: [model.get_submodule(name).weight] for name in ("0", "3", "5")}, norms)
    loss_of(model, BATCHES[0]).backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scorer.read().steps == 2


def test_a_captured_graph_replays_scores_and_step_count():
    model = make_net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.0, device="cuda"), momentum=0.9, fused=True)
    scorer = scoring.StepScorer(optimizer, ["snip"])
    norms = {name: norm for name, norm in model.named_modules() if has_flow(norm)}
    scorer.watch({"3": [model[3].weight]}, norms)
    images, labels = BATCHES[0]

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, (images, labels)).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    scorer.reset_()
    step()
    eager = scorer.read()
    scorer.reset_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    scorer.reset_()
    for _ in range(5):
        graph.replay()
    seen = scorer.read()
    assert seen.steps == 5
    assert seen.means["snip"]["3"] == pytest.approx(eager.means["snip"]["3"], rel=1e-4)
    assert seen.flows == pytest.approx(eager.flows, rel=0.2)  # running variances go on
    assert seen.flows
