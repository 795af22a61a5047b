"""The moving average of the weights."""

import pytest
import torch
from torch import nn

import dyrep
from dyrep.engine.averages import WeightAverage
from training import make_batches, make_net, train_epoch


def test_the_average_is_the_exponential_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    average = WeightAverage(model, decay=0.75)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(4, 3).double())
        average.update()
        for name, value in model.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * value.detach()
            torch.testing.assert_close(average.module.state_dict()[name], expected[name], rtol=1e-14, atol=1e-14)
        for name, value in model.named_buffers():
            assert torch.equal(average.module.state_dict()[name], value)
        assert average.module[1].num_batches_tracked == step + 1


def test_the_average_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 8.0)
    average = WeightAverage(model, decay=0.5)
    values = []
    for weight in (0.0, 4.0, -2.0):
        nn.init.constant_(model.weight, weight)
        average.update()
        values.append(average.module.weight.item())
    assert values == [4.0, 4.0, 1.0]


def test_the_average_starts_as_the_model_and_is_not_trained():
    model = make_net()
    average = WeightAverage(model, decay=0.9)
    assert not average.module.training
    assert not any(p.requires_grad for p in average.module.parameters())
    ours, theirs = average.state_dict(), model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(ours[key].data_ptr() != theirs[key].data_ptr() for key in theirs)


@pytest.mark.parametrize("origin_norm", ["none", "calibrated"])
def test_the_average_follows_a_change_of_structure_and_then_goes_on_averaging(origin_norm):
    batches = make_batches()
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = WeightAverage(model, decay=0.5)
    config = dyrep.DyRepConfig.paper(
        interval=1, score="snip", calibration_batches=3, cut_threshold=0.0005, origin_norm=origin_norm
    )
    controller = dyrep.DyRep(model, optimizer, config, ema=[average.module])
    optimizer.register_step_post_hook(lambda *_: average.update())
    kinds = set()
    images = torch.randn(4, 3, 8, 8)
    for _ in range(5):
        train_epoch(model, optimizer, batches)
        with torch.no_grad():
            before = average.module(images)
        kinds |= {edit.kind for edit in controller.epoch_end(batches)}
        assert dyrep.structure(average.module) == dyrep.structure(model)
        assert list(average.module.state_dict()) == list(model.state_dict())
        assert not any(p.requires_grad for p in average.module.parameters())
        assert not any(module.training for module in average.module.modules())
        # branches are new to the average too, and whatever is cut from it is kept in its function
        with torch.no_grad():
            torch.testing.assert_close(average.module(images), before, rtol=1e-4, atol=1e-5)

        expected = {name: value.detach().clone() for name, value in average.module.named_parameters()}
        optimizer.zero_grad()
        model(batches[0][0]).square().mean().backward()
        optimizer.step()
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                average.module.get_parameter(name), 0.5 * expected[name] + 0.5 * value.detach(), rtol=1e-6, atol=1e-7
            )
    assert kinds == {"expand", "cut"}


def test_a_saved_average_comes_back():
    model = make_net()
    average = WeightAverage(model, decay=0.9)
    with torch.no_grad():
        model[0].weight.add_(1)
    average.update()
    saved = {key: value.clone() for key, value in average.state_dict().items()}
    other = WeightAverage(make_net(seed=1), decay=0.9)
    other.load_state_dict(saved)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in saved.items())
    assert not torch.equal(saved["0.weight"], model.state_dict()["0.weight"])
