"""Which number a convolution is ranked by."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig
from dyrep.errors import ScoreNoiseWarning
from training import make_batches, train_epoch

BATCHES = make_batches()


def make_chain():
    torch.manual_seed(0)
    parts = [m for _ in range(3) for m in (nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(192, 4))


def begin(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, DyRep(model, optimizer, DyRepConfig.paper(interval=1, **settings))


def test_synflow_comes_from_the_norm_that_follows():
    model = make_chain()
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES)
    flows = controller.scorer.read().flows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controller.epoch_end(BATCHES)
    assert controller.events[-1]["scores"] == {"0": flows["1"], "3": flows["4"], "6": flows["7"]}


def test_synflow_under_autocast_has_the_order_that_it_has_in_float64():
    model = make_chain()
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES * 10)  # until running variances mean something
    controller.scorer.reset_()
    exact = dict.fromkeys(("0", "3", "6"), 0.0)
    for images, labels in BATCHES * 5:
        twin = copy.deepcopy(model).double()
        twin.zero_grad()
        F.cross_entropy(twin(images.double()), labels).backward()
        for name in exact:
            conv = twin.get_submodule(name)
            exact[name] += float((conv.weight.detach() * conv.weight.grad).sum())
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
    controller.epoch_end(BATCHES)
    scores = controller.events[-1]["scores"]
    assert sorted(scores, key=scores.get) == sorted(exact, key=exact.get)


@pytest.mark.parametrize(
    ("score", "batches", "remedy"),
    [
        ("synflow", None, r"With batches, epoch_end\(loader\), it is taken from that norm"),
        ("synflow_summed", BATCHES, "With score='synflow' it is taken from that norm"),
    ],
)
def test_sums_that_are_noise_are_warned_about(score, batches, remedy):
    model = make_chain()
    optimizer, controller = begin(model, score=score)
    train_epoch(model, optimizer, BATCHES)
    means = controller.scorer.read().means["synflow_summed"]
    with pytest.warns(ScoreNoiseWarning, match=rf"^{score} is .* 3 of 3 convolutions.*{remedy}"):
        assert controller.epoch_end(batches)
    assert controller.events[-1]["scores"] == means


def test_without_norms_synflow_is_the_sum_and_quiet():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES)
    means = controller.scorer.read().means["synflow_summed"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controller.epoch_end(BATCHES)
    assert controller.events[-1]["scores"] == means


@pytest.mark.parametrize("execution", ["eager", "folded"])
def test_inside_a_block_the_norm_of_the_branch_counts_unless_its_deviation_is_taken_as_constant(execution):
    model = make_chain()
    dyrep.expand_(model, "3", calibration=BATCHES, gamma=0.1)
    dyrep.set_execution_(model, execution)
    optimizer, controller = begin(model, square_only=False)
    train_epoch(model, optimizer, BATCHES)
    seen = controller.scorer.read()
    controller.epoch_end(BATCHES)
    scores = controller.events[-1]["scores"]
    inside = [name for name in scores if ".branches." in name]
    assert len(inside) == 3
    for name in inside:
        norm = name.removesuffix("conv") + "norm"
        expected = seen.flows[norm] if execution == "eager" else seen.means["synflow_summed"][name]
        assert scores[name] == expected != 0


def test_a_kernel_with_branches_beside_it_is_scored_by_its_own_terms():
    model = make_chain()
    dyrep.expand_(model, "3", ["1x1"], calibration=BATCHES)
    optimizer, controller = begin(model, regrow=True)
    train_epoch(model, optimizer, BATCHES)
    seen = controller.scorer.read()
    controller.epoch_end(BATCHES)
    scores = controller.events[-1]["scores"]
    assert scores["3"] == seen.means["synflow_summed"]["3"]
    assert scores["0"] == seen.flows["1"]


def test_a_frozen_norm_leaves_the_sum():
    model = make_chain()
    optimizer, controller = begin(model)
    model.train()
    model[4].eval()
    for images, labels in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    seen = controller.scorer.read()
    controller.epoch_end(BATCHES)
    assert controller.events[-1]["scores"]["3"] == seen.means["synflow_summed"]["3"]


def test_a_norm_that_the_optimizer_does_not_train_is_not_asked():
    model = make_chain()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "4.weight"], lr=0.1)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1))
    train_epoch(model, optimizer, BATCHES)  # its gradient is never set to zero
    assert list(controller.scorer.read().flows) == ["1", "7"]


def test_scores_that_need_no_norms_do_not_watch_them():
    model = make_chain()
    optimizer, controller = begin(model, score="snip")
    train_epoch(model, optimizer, BATCHES)
    assert controller.scorer.read().flows == {}


def test_a_norm_on_the_kernel_itself_tells_its_score():
    model = make_chain()
    dyrep.expand_(model, "3", ["1x1"], calibration=BATCHES, origin_norm="reference")
    optimizer, controller = begin(model, regrow=True)
    train_epoch(model, optimizer, BATCHES)
    flows = controller.scorer.read().flows
    controller.epoch_end(BATCHES)
    assert controller.events[-1]["scores"]["3"] == flows["3.origin_norm"]


def test_a_step_that_is_not_finite_adds_nothing_to_flows():
    model = make_chain()
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES)
    before = controller.scorer.read()
    model[1].weight.grad.fill_(torch.inf)
    optimizer.step()
    after = controller.scorer.read()
    assert (after.steps, after.skipped, after.flows) == (3, 1, before.flows)


def test_an_update_without_batches_after_one_with_them_is_scored_by_sums():
    model = make_chain()
    optimizer, controller = begin(model, macs_limit=None, max_depth=1)
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    train_epoch(model, optimizer, BATCHES)
    means = controller.scorer.read().means["synflow_summed"]
    with pytest.warns(ScoreNoiseWarning, match="2 of 2 convolutions"):
        controller.epoch_end()
    scores = controller.events[-1]["scores"]
    assert len(scores) == 2
    assert scores == means


def test_a_state_of_an_earlier_version_is_gone_on_with():
    model = make_chain()
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES)
    state = copy.deepcopy(controller.state_dict())
    state["scorer"]["metrics"] = ["synflow", "snip"]
    del state["scorer"]["flows"]
    twin = make_chain()
    _, other = begin(twin)
    other.load_state_dict(state)
    seen = other.scorer.read()
    assert (seen.steps, seen.flows) == (3, {})
    assert seen.means == controller.scorer.read().means


def test_the_same_operations_are_watched_in_the_same_tensors():
    model = make_chain()
    optimizer, controller = begin(model, macs_limit=1.0)
    scorer = controller.scorer
    train_epoch(model, optimizer, BATCHES)
    before = scorer.beginnings
    assert controller.epoch_end(BATCHES) == []
    assert (scorer.beginnings, controller.attempts) == (before, 0)
    assert (scorer.read().steps, scorer.step, scorer.read().means["snip"]["0"]) == (0, 0, 0.0)
    scorer.watch({"0": [model[0].weight]})
    assert scorer.beginnings == before + 1
    scorer.watch({"0": [model[3].weight]})
    assert scorer.beginnings == before + 2


def test_edits_are_counted_though_what_is_scored_stays_the_same():
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.expand_(model, "3", ["1x1", "residual"], calibration=BATCHES, optimizer=optimizer)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip", macs_limit=1.0, cut_threshold=0.0))
    train_epoch(model, optimizer, BATCHES)
    before = controller.scorer.beginnings
    assert [edit.kind for edit in controller.epoch_end(BATCHES)] == ["cut"]
    assert (controller.scorer.beginnings, controller.attempts) == (before, 1)


def test_scores_survive_saving_and_loading():
    model = make_chain()
    optimizer, controller = begin(model)
    train_epoch(model, optimizer, BATCHES)
    twin = make_chain()
    _, other = begin(twin)
    other.load_state_dict(copy.deepcopy(controller.state_dict()))
    assert other.scorer.read() == controller.scorer.read()
    assert other.scorer.read().steps == 3


@pytest.mark.parametrize("score", ["snip", "synflow", "random"])
def test_where_nothing_can_grow_ranks_exchange_nothing(score, monkeypatch):
    """Sums of nothing are nowhere: on a GPU ranks could not send them."""
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score=score, branches=("1x1", "residual")))
    train_epoch(model, optimizer, BATCHES)
    monkeypatch.setattr("dyrep.surgery.ranks.distributed", lambda wanted=None: True)
    assert controller.scorer.scores(model, BATCHES, seed=0)[0] == {}
