"""The whole search: its phases, what it keeps, what it logs."""

import copy
import json

import pytest
import torch
from methods_helpers import blocks, held, relative_error
from repnas_helpers import BATCHES, FAVOURITES, X, favour_, run_epoch, start
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dyrep
from dyrep import RepNAS, RepNASConfig
from dyrep.errors import ConfigError, DyRepError, StructureError
from dyrep.scaling import GatedNorm
from training import eval_output, make_net, train_epoch

# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total": 2}, "total=2: must be at least 3"),
        ({"keep": 0.0}, "keep=0.0: must be above 0 and at most 1"),
        ({"keep": 1.1}, "keep=1.1: must be above 0"),
        ({"random_share": -0.1}, "random_share=-0.1: must be from 0 to below 0.333"),
        ({"random_share": 0.4}, "random_share=0.4: must be from 0 to below 0.333"),
        ({"search_share": 1.0}, "search_share=1.0: must be below 1"),
        ({"strength_lr": 0.0}, "strength_lr=0.0: must be None or above 0"),
        ({"total": "9"}, "total='9': must be a whole number"),
        ({"keep": None}, "keep=None: must be a number"),
    ],
)
def test_settings_outside_their_range_are_refused_with_the_range(settings, message):
    with pytest.raises(ConfigError) as error:
        RepNASConfig(**{"total": 10, **settings})
    assert message in str(error.value)


def test_settings_are_written_and_read_back():
    config = RepNASConfig(total=12, keep=0.5, strength_lr=0.1)
    assert RepNASConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match=r"unknown settings epochs; valid are keep, .*strength_lr, total"):
        RepNASConfig.from_dict({"total": 12, "epochs": 3})


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"total": 150}, (15, 50)),
        ({"total": 120}, (12, 40)),
        ({"total": 3}, (1, 2)),
        ({"total": 10}, (1, 3)),
        ({"total": 10, "random_share": 0.0}, (1, 3)),
        ({"total": 5, "random_share": 0.2, "search_share": 0.6}, (1, 3)),
        ({"total": 10, "search_share": 0.99}, (1, 9)),
    ],
)
def test_the_parts_of_a_training_end_at_their_share(settings, ends):
    assert RepNASConfig(**settings).ends == ends


def test_there_is_an_epoch_at_least_for_every_part():
    for total in (3, 4, 5, 7, 10, 33):
        for random_share in (0.0, 0.1, 0.3, 0.6, 0.8, 0.9):
            for search_share in (0.05, 1 / 3, 0.7, 0.95, 0.99):
                if random_share < search_share:
                    config = RepNASConfig(total=total, random_share=random_share, search_share=search_share)
                    first, second = config.ends
                    assert 1 <= first < second < total, config


# -- the search -------------------------------------------------------------------------------------------------


def test_strengths_stay_at_zero_in_the_random_part_and_learn_afterwards():
    model, optimizer, search = start(total=6, random_share=0.34, search_share=0.7)
    assert search.config.ends == (2, 4)
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        assert not search.strengths.any()
        assert search.strengths.grad is None
        search.epoch_end()
    train_epoch(model, optimizer, BATCHES)
    moved = search.strengths.detach().clone()
    assert (moved != 0).all()
    assert moved.unique().numel() > 1
    search.epoch_end()
    assert search.gates is not None
    train_epoch(model, optimizer, BATCHES)
    assert search.epoch_end()
    assert search.gates is None
    after = search.strengths.clone()
    train_epoch(model, optimizer, BATCHES)
    assert search.epoch_end() == []
    assert torch.equal(search.strengths, after)


@pytest.mark.parametrize(("steps", "rate"), [(500, 17.5 / 2000), (3, 0.1)])
def test_strengths_can_move_as_far_as_in_publication_but_not_in_a_few_leaps(steps, rate):
    model, optimizer, search = start(total=10, random_share=0.2, search_share=0.6, strength_lr=None)
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES[:1])
        for _ in range(steps - 1):
            optimizer.step()
        search.epoch_end()
    (group,) = search._learner.param_groups
    assert group["lr"] == pytest.approx(rate)  # the search has four epochs
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.999), 5e-4)


def test_the_strength_of_a_branch_that_lowers_the_loss_rises():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    x = torch.randn(16, 4, 6, 6)
    target = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)  # what the residual computes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = RepNASConfig(total=10, keep=0.5, random_share=0.1, search_share=0.9, strength_lr=0.05)
    search = RepNAS(model, optimizer, config, example_input=x)
    for _ in range(8):
        for _ in range(20):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
        search.epoch_end()
    strengths = dict(zip(search.gates.names, search.strengths.tolist(), strict=True))
    assert max(strengths, key=strengths.get) == ("0", "residual")
    assert strengths["0", "residual"] > 0.2


def test_training_steps_draw_other_gates_each_and_eval_mode_goes_by_the_strongest():
    model, _, search = start()
    drawn = []
    norm = model[3].origin_norm
    handle = norm.register_forward_hook(lambda module, *_: drawn.append(module.drawn))
    model.train()
    for _ in range(20):
        model(X)
    assert {round(value.item()) for value in drawn} == {0, 1}
    assert norm.drawn is None
    drawn.clear()
    favour_(search)
    model.eval()
    first, second = model(X), model(X)
    assert torch.equal(first, second)
    assert drawn == [None, None]
    gates = dict(zip(search.gates.names, (float(norm.gate) for norm in search.gates._norms), strict=True))
    assert {name for name, gate in gates.items() if gate} == {(n, b) for n, bs in FAVOURITES.items() for b in bs}
    handle.remove()


def test_a_forward_that_fails_leaves_no_gates_of_its_step_behind():
    model, _, search = start()
    with pytest.raises(RuntimeError):
        model.train()(torch.randn(2, 5, 8, 8))
    assert all(norm.drawn is None for norm in search.gates._norms)
    copy.deepcopy(model)


def test_the_search_keeps_the_strongest_branches_and_the_function_they_have():
    model, optimizer, search = start()
    before_search = dyrep.structure(model)
    assert search.gates.kept == 6
    run_epoch(model, optimizer, search)
    run_epoch(model, optimizer, search)
    torch.manual_seed(0)
    train_epoch(model, optimizer, BATCHES)
    before = eval_output(model, X)
    deployed_before = eval_output(search.deploy(), X)
    edits = search.epoch_end()
    assert relative_error(eval_output(model, X), before) < 1e-6
    assert relative_error(eval_output(search.deploy(), X), deployed_before) < 1e-6
    assert dyrep.structure(model) != before_search
    found = {
        layer: [*(["KxK"] if not block.origin_off else []), *block.branches] for layer, block in blocks(model).items()
    }
    assert {layer: set(names) for layer, names in found.items()} == {n: set(b) for n, b in FAVOURITES.items()}
    cut = {edit.layer: set(edit.branches) for edit in edits}
    for layer, block in before_search["blocks"].items():
        assert cut[layer] == {"KxK", *block["branches"]} - set(FAVOURITES[layer])
    assert all(edit.kind == "cut" for edit in edits)
    assert not any(isinstance(m, GatedNorm) for m in model.modules())
    assert dyrep.verify(model, search.deploy(), X).passed


@pytest.mark.parametrize("keep", [0.06, 0.34, 1.0])
def test_as_many_branches_are_kept_as_asked_for_and_one_in_every_block(keep):
    model, optimizer, search = start(keep=keep)
    kept, names = search.gates.kept, search.gates.names
    assert kept == max(int(keep * 19), 1)
    for _ in range(3):
        run_epoch(model, optimizer, search, favourites={"0": [], "3": ["1x1"], "5": []})
    strongest = {names[i] for i in search.strengths.topk(kept).indices}
    empty = set(blocks(model)) - {layer for layer, _ in strongest}
    found = {(layer, branch) for layer, block in blocks(model).items() for branch in block.branches}
    found |= {(layer, "KxK") for layer, block in blocks(model).items() if not block.origin_off}
    assert found == strongest | {(layer, "KxK") for layer in empty}
    assert ("3", "1x1") in found
    assert dyrep.verify(model, search.deploy(), X).passed
    run_epoch(model, optimizer, search)
    assert dyrep.verify(model, search.deploy(), X).passed


def test_the_optimizer_forgets_what_is_dropped_and_keeps_the_momentum_of_the_rest():
    model, optimizer, search = start()
    run_epoch(model, optimizer, search)
    favour_(search)
    train_epoch(model, optimizer, BATCHES)
    everything = held(optimizer)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    momentum = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in trained.items()}
    search.finish()
    assert held(optimizer) == {id(p) for p in model.parameters()}
    assert held(optimizer) < everything
    assert {id(p) for p in optimizer.state} <= held(optimizer)
    for name in ("0.branches.1x1.conv.weight", "3.branches.1x1-KxK.norm.weight", "5.origin_norm.bias", "10.weight"):
        parameter = model.get_parameter(name)
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum[name])
        assert momentum[name].any()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    train_epoch(model, optimizer, BATCHES)
    assert not [n for n, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]
    assert not model[3].weight.any()


def test_a_step_without_new_gradients_after_the_search_leaves_a_dropped_kernel_at_zero():
    model, optimizer, search = start()
    favour_(search)
    train_epoch(model, optimizer, BATCHES)
    search.finish()
    optimizer.step()  # as at the end of an accumulation that began before
    assert not model[3].weight.any()
    assert dyrep.verify(model, search.deploy(), X).passed


def test_the_log_tells_the_whole_story(tmp_path):
    model, optimizer, search = start(log=tmp_path / "events.jsonl")
    for _ in range(4):
        run_epoch(model, optimizer, search)
    events = dyrep.read_events(tmp_path / "events.jsonl")
    assert events == json.loads(json.dumps(search.events))
    assert [event["type"] for event in events] == ["started", "search", "search", "update"]
    begun, random_part, learning, found = events
    assert RepNASConfig.from_dict(begun["config"]) == search.config
    assert (begun["gates"], begun["kept"]) == (19, 6)
    assert random_part["epoch"] == 1
    assert {s for layer in random_part["strengths"].values() for s in layer.values()} == {0.0}
    assert learning["strengths"]["3"]["residual"] > 4
    assert (found["epoch"], found["step"], found["update"]) == (3, 9, 2)
    assert {layer: set(names) for layer, names in found["kept"].items()} == {n: set(b) for n, b in FAVOURITES.items()}
    assert found["structure"] == json.loads(json.dumps(dyrep.structure(model)))
    assert found["parameters"] == dyrep.costs(model, X).parameters
    assert {edit["layer"] for edit in found["edits"]} == set(FAVOURITES)


def test_a_model_with_gated_blocks_already_is_taken_as_it_is():
    model, optimizer, search = start(convert_first=True)
    assert len(search.gates.names) == 19
    assert held(optimizer) == {id(p) for p in model.parameters()}


def test_options_of_the_conversion_are_passed_on():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = RepNAS(model, optimizer, RepNASConfig(total=3), replace="conv", include=("3", "5"))
    assert {layer for layer, _ in search.gates.names} == {"3", "5"}
    assert type(model[6]) is nn.BatchNorm2d


def test_accumulated_gradients_make_one_step_of_the_strengths():
    model, optimizer, search = start(strength_lr=0.25)
    train_epoch(model, optimizer, BATCHES)
    search.epoch_end()
    for images, _ in BATCHES:
        model(images).square().mean().backward()
        assert not search.strengths.any()
    optimizer.step()
    # the first step of Adam is as long as its rate, whatever the gradient
    torch.testing.assert_close(search.strengths.detach().abs(), torch.full((19,), 0.25), rtol=1e-3, atol=1e-4)
    assert search.strengths.grad is None


def test_an_overflow_does_not_spoil_the_strengths():
    model, optimizer, search = start()
    train_epoch(model, optimizer, BATCHES)
    search.epoch_end()
    search.strengths.grad = torch.full_like(search.strengths, float("inf"))
    search.strengths.grad[::2] = float("nan")
    optimizer.step()
    assert search.strengths.isfinite().all()


def test_a_step_that_overflowed_and_was_skipped_takes_no_part_in_the_next():
    def learned(*, overflow):
        torch.manual_seed(0)
        model, optimizer, search = start()
        train_epoch(model, optimizer, BATCHES)
        search.epoch_end()
        if overflow:  # as a gradient scaler leaves it, which does not let the optimizer take its step
            search.strengths.grad = torch.full_like(search.strengths, 3.0)
            search.strengths.grad[0] = float("inf")
        torch.manual_seed(1)
        train_epoch(model, optimizer, BATCHES[:1])
        return search.strengths.detach()

    assert torch.equal(learned(overflow=True), learned(overflow=False))


# -- what would go wrong silently -----------------------------------------------------------------------------------


def test_strengths_learn_from_the_loss_as_it_is_not_as_it_was_scaled():
    def learned(scale):
        torch.manual_seed(0)
        model = make_net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        config = RepNASConfig(total=5, random_share=0.2, search_share=0.8, strength_lr=0.01)
        search = dyrep.RepNAS(model, optimizer, config, example_input=X, scaler=scaler)
        for epoch in range(3):
            torch.manual_seed(epoch)
            for images, _ in BATCHES:
                optimizer.zero_grad()
                scaler.scale(0.01 * model(images).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            search.epoch_end()
        return search.strengths.detach()

    plain = learned(1)
    assert plain.abs().max() > 0.01
    assert torch.allclose(learned(1024.0), plain, atol=1e-4)


def test_a_search_that_no_gradient_reaches_says_so_after_the_first_epoch():
    model, optimizer, search = start()
    for images, labels in BATCHES:
        optimizer.zero_grad()
        logits = model[3:](model[:3](images))  # the model itself is never called
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    with pytest.raises(DyRepError, match=r"no gradient has reached the gates, .*: call the model itself"):
        search.epoch_end()


def test_a_moving_average_made_before_the_conversion_is_refused_at_once():
    model = make_net(0)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StructureError, match="a moving average was made before the model was converted"):
        dyrep.RepNAS(model, optimizer, RepNASConfig(total=5), example_input=X, ema=average)


def test_folding_a_model_that_is_being_searched_needs_no_help_from_the_search():
    model, optimizer, search = start()
    for _ in range(2):
        run_epoch(model, optimizer, search)
        for images, labels in BATCHES:  # in the middle of an epoch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        plain = dyrep.deploy(model)
        model.eval()
        assert relative_error(eval_output(plain, X), eval_output(model, X)) < 1e-5
        assert not plain._forward_pre_hooks
        assert not plain._forward_hooks
        model.train()


def test_finishing_twice_changes_nothing():
    model, optimizer, search = start()
    for _ in range(2):
        run_epoch(model, optimizer, search)
    assert search.finish()
    structure = dyrep.structure(model)
    assert search.finish() == []
    assert dyrep.structure(model) == structure
