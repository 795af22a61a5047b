import math

import pytest
import torch
from torch import nn

from dyrep import scoring


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3)


def one_backward(conv, scale=1.0):
    conv.zero_grad()
    (conv(torch.randn(2, 3, 6, 6)).square().mean() * scale).backward()


def expected(conv):
    pairs = [(p.detach().double(), p.grad.double()) for p in conv.parameters()]
    return {
        "synflow_summed": sum(float((t * g).sum()) for t, g in pairs),
        "snip": sum(float((t * g).abs().sum()) for t, g in pairs),
        "grad_norm": math.sqrt(sum(float((g**2).sum()) for _, g in pairs)),
        "invariant": float(pairs[0][0].norm() * pairs[0][1].norm()),
    }


def watched(conv, optimizer, metrics=scoring.STEP_METRICS):
    scorer = scoring.StepScorer(optimizer, metrics)
    scorer.watch({"conv": list(conv.parameters())})
    return scorer


def test_scores_are_the_formulas_averaged_over_steps(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    per_step = []
    for _ in range(3):
        one_backward(conv)
        per_step.append(expected(conv))
        optimizer.step()
    seen = scorer.read()
    assert seen.steps == 3
    for metric in scoring.STEP_METRICS:
        mean = sum(step[metric] for step in per_step) / 3
        assert seen.means[metric]["conv"] == pytest.approx(mean, rel=1e-5, abs=1e-8)


def test_gradient_accumulation_counts_as_one_step_with_the_summed_gradient(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    for _ in range(4):
        conv(torch.randn(2, 3, 6, 6)).square().mean().backward()
    value = expected(conv)["snip"]
    optimizer.step()
    seen = scorer.read()
    assert seen.steps == 1
    assert seen.means["snip"]["conv"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_scores_are_of_unscaled_gradients_under_grad_scaler(conv, fused, unscale_first):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1, fused=fused)
    scorer = watched(conv, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(conv(torch.randn(2, 3, 6, 6)).square().mean()).backward()
    true = {metric: value / 1024 for metric, value in expected(conv).items()}
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    seen = scorer.read()
    assert seen.steps == 1
    for metric, value in true.items():
        assert seen.means[metric]["conv"] == pytest.approx(value, rel=1e-5)


def test_an_overflow_under_a_fused_optimizer_with_grad_scaler_is_skipped_and_counted(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1, fused=True)
    scorer = watched(conv, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(conv(torch.randn(2, 3, 6, 6)).square().mean()).backward()
    conv.bias.grad[0] = float("inf")
    scaler.step(optimizer)
    seen = scorer.read()
    assert (seen.steps, seen.skipped) == (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(conv, bad):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.0)
    scorer = watched(conv, optimizer)
    one_backward(conv)
    good = expected(conv)
    optimizer.step()
    conv.weight.grad[0, 0, 0, 0] = bad
    optimizer.step()
    seen = scorer.read()
    assert (seen.steps, seen.skipped) == (1, 1)
    assert seen.means["snip"]["conv"] == pytest.approx(good["snip"], rel=1e-5)


def test_an_operation_without_gradient_scores_zero(conv):
    other = nn.Conv2d(1, 1, 3)
    optimizer = torch.optim.SGD([*conv.parameters(), *other.parameters()], lr=0.1)
    scorer = scoring.StepScorer(optimizer, ["snip"])
    scorer.watch({"conv": list(conv.parameters()), "other": list(other.parameters())})
    one_backward(conv)
    optimizer.step()
    assert scorer.read().means["snip"]["other"] == 0


def test_sums_are_preallocated_float32_and_written_in_place(conv):
    conv.to(torch.bfloat16)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    sums, counts = scorer._sums, scorer._counts
    conv(torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    assert scorer._sums is sums
    assert scorer._counts is counts
    assert sums.dtype == counts.dtype == torch.float32
    assert bool(sums.any())


def test_closing_stops_the_watch(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    scorer.close()
    one_backward(conv)
    optimizer.step()
    assert scorer.read().steps == 0


def test_state_continues_exactly_and_ignores_operations_no_longer_watched(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    one_backward(conv)
    optimizer.step()
    other = scoring.StepScorer(optimizer, scoring.STEP_METRICS)
    other.watch({"new": [conv.bias], "conv": list(conv.parameters())})
    other.load_state_dict(scorer.state_dict())
    read = other.read()
    assert read.means["snip"]["conv"] == scorer.read().means["snip"]["conv"]
    assert read.means["snip"]["new"] == 0
    assert read.steps == 1


def test_synflow_of_a_conv_followed_by_batch_norm_is_noise_and_invariant_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scorer = scoring.StepScorer(optimizer, scoring.STEP_METRICS)
    scorer.watch({"normed": [model[0].weight], "bare": [model[3].weight]})
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    means = scorer.read().means
    assert scoring.noisy(means["synflow_summed"], means["snip"]) == ["normed"]
    assert means["invariant"]["normed"] > 0.01 * means["invariant"]["bare"]


def test_invariant_does_not_change_when_weights_before_a_norm_are_rescaled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, eps=1e-20), nn.ReLU()).double()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)

    def invariant():
        model.zero_grad()
        model(x).pow(3).sum().backward()
        return float(model[0].weight.detach().norm() * model[0].weight.grad.norm())

    before = invariant()
    model[0].weight.data *= 7
    assert invariant() == pytest.approx(before, rel=1e-9)


def test_grasp_equals_the_dense_hessian_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    x = torch.randn(3, 1, 3, 3, dtype=torch.float64)

    def loss(net, batch):
        return net(batch).square().mean()

    parameters = dict(model.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters.values()])

    def of_flat(vector):
        pieces, at = {}, 0
        for name, p in parameters.items():
            pieces[name] = vector[at : at + p.numel()].view_as(p)
            at += p.numel()
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return torch.func.functional_call(model, {**pieces, **buffers}, (x,)).square().mean()

    hessian = torch.autograd.functional.hessian(of_flat, flat)
    gradient = torch.autograd.functional.jacobian(of_flat, flat)
    weight = parameters["0.weight"].numel()
    true = -float((flat * (hessian @ gradient))[:weight].sum())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    scores = scoring.grasp_scores(model, {"conv": [model[0].weight]}, [x, x], loss, max_batches=2)
    assert scores["conv"] == pytest.approx(true, rel=1e-5)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert all(p.grad is None for p in model.parameters())


def test_grasp_without_data_is_refused(conv):
    with pytest.raises(Exception, match="needs data"):
        scoring.grasp_scores(conv, {"conv": [conv.weight]}, [], lambda m, b: m(b).sum())


def test_vote_goes_to_the_most_votes_and_ties_to_the_better_mean_rank():
    metrics = {
        "m1": {"a": 3, "b": 2, "c": 1},
        "m2": {"a": 1, "b": 3, "c": 2},
        "m3": {"a": 1, "b": 2, "c": 3},
    }
    votes = scoring.vote(metrics)  # one vote each; mean ranks: a 1.67, b 0.67, c 1.0
    assert sorted(votes, key=votes.get, reverse=True) == ["b", "c", "a"]
    metrics["m4"] = {"a": 9, "b": 1, "c": 0}
    votes = scoring.vote(metrics)
    assert max(votes, key=votes.get) == "a"


def test_random_scores_follow_their_generator():
    draw = [scoring.random_scores("abc", torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_step_with_a_closure_is_scored_by_the_gradients_the_closure_computes(conv, as_keyword):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    x = torch.randn(2, 3, 6, 6)
    conv(x).square().mean().backward()
    true = expected(conv)
    optimizer.zero_grad()
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = conv(x).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    seen = scorer.read()
    assert len(calls) == seen.steps == 1
    assert float(loss.detach()) > 0
    for metric, value in true.items():
        assert seen.means[metric]["conv"] == pytest.approx(value, rel=1e-5)


def test_lbfgs_is_scored_once_per_step_at_the_weights_before_it(conv):
    optimizer = torch.optim.LBFGS(conv.parameters(), lr=0.1, max_iter=4)
    scorer = watched(conv, optimizer, ["snip"])
    x = torch.randn(2, 3, 6, 6)
    conv(x).square().mean().backward()
    true = expected(conv)["snip"]

    def closure():
        optimizer.zero_grad()
        loss = conv(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert scorer.read().steps == 1
    assert scorer.read().means["snip"]["conv"] == pytest.approx(true, rel=1e-5)


def test_a_step_without_any_gradient_does_not_count(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer)
    optimizer.step()
    assert scorer.read().steps == 0


def test_a_state_with_other_metrics_starts_the_window_over(conv):
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    scorer = watched(conv, optimizer, ["snip"])
    one_backward(conv)
    optimizer.step()
    other = watched(conv, optimizer, ["grad_norm"])
    other.load_state_dict(scorer.state_dict())
    assert other.read().steps == 0


def test_votes_are_over_the_operations_every_metric_knows():
    votes = scoring.vote({"a": {"x": 1, "y": 2, "frozen": 9}, "b": {"x": 5, "y": 9}})
    assert set(votes) == {"x", "y"}


def test_every_nth_step_is_scored_and_the_place_survives_saving():
    conv = nn.Conv2d(2, 3, 3)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.0)
    scorer = scoring.StepScorer(optimizer, ["snip"], every=3)
    scorer.watch({"conv": [conv.weight]})
    due = []
    for step in range(7):
        due.append(scorer.due)
        conv.weight.grad = torch.full_like(conv.weight, float(step))
        optimizer.step()
    assert due == [True, False, False, True, False, False, True]
    seen = scorer.read()
    assert seen.steps == 3
    expected = conv.weight.abs().sum().item() * (0 + 3 + 6) / 3
    assert seen.means["snip"]["conv"] == pytest.approx(expected, rel=1e-5)
    other = scoring.StepScorer(optimizer, ["snip"], every=3)
    other.watch({"conv": [conv.weight]})
    other.load_state_dict(scorer.state_dict())
    assert other.step == 7
    assert not other.due
