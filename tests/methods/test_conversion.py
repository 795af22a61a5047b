"""Networks turned into those of other methods: trained, folded, refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from methods_helpers import (
    BLOCK_METHODS,
    assert_same_picture,
    blocks,
    held,
    look_trained_,
    picture,
    relative_error,
    small_net,
)
from torch import nn

import dyrep
from dyrep.errors import ConfigError, DyRepError, IneligibleLayerError, OptimizerError, StructureError
from dyrep.methods import METHODS, conversion
from dyrep.models import build
from dyrep.passing import PassedNorm
from training import eval_output

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net_of(name):
    return small_net(8, groups=2) if name == "grouped" else build(name, num_classes=10, in_channels=3)


def train_and_deploy(name, method, replace):
    """Convert, look at every gradient, take three steps, deploy, and load the result into a plain net."""
    size = 8 if name == "grouped" else 32
    x, labels = torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 3])
    model = net_of(name)
    keys = list(model.state_dict())
    edits = dyrep.convert_(model, method, example_input=x, replace=replace)
    assert edits
    assert set(blocks(model)) == {edit.layer for edit in edits}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        if step == 0:
            for parameter_name, p in model.named_parameters():
                if p.requires_grad:
                    assert p.grad is not None, parameter_name
                    assert p.grad.isfinite().all(), parameter_name
        optimizer.step()
    plain = dyrep.deploy(model)
    assert list(plain.state_dict()) == keys
    report = dyrep.verify(model, plain, x)
    assert report.passed, str(report)
    fresh = net_of(name)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert [type(m) for m in fresh.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(eval_output(fresh, x), eval_output(plain, x))
    assert eval_output(fresh, x).std() > 0


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_every_method_trains_and_deploys_a_grouped_net(method, replace):
    train_and_deploy("grouped", method, "conv" if method == "orepa" else replace)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vgg16", "mobilenet_v1", "repvgg_a0"])
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_every_method_trains_and_deploys_a_real_net_as_published(method, name):
    train_and_deploy(name, method, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v1"])
@pytest.mark.parametrize("method", [m for m in BLOCK_METHODS if m != "orepa"])
def test_every_method_trains_and_deploys_a_real_net_beside_its_norms(method, name):
    train_and_deploy(name, method, "conv")


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_norms_of_a_plain_net_step_aside_exactly_where_they_are_replaced(method):
    for replace in ("conv", "conv+norm"):
        if method == "orepa" and replace == "conv+norm":
            continue
        model = small_net()
        edits = dyrep.convert_(model, method, example_input=X, replace=replace)
        aside = [name for name, module in model.named_modules() if isinstance(module, PassedNorm)]
        assert aside == (["1", "4", "7"] if replace == "conv+norm" else [])
        assert [e.detail for e in edits] == ([{"replaces": name} for name in aside] or [{}] * 3)
        assert all(not model.get_submodule(name).weight.requires_grad for name in aside)
        assert all(model[i].origin_norm.bias is None for i in (0, 3, 6)) == (replace == "conv")


def test_published_methods_replace_norms_by_default_and_orepa_does_not():
    for method in BLOCK_METHODS:
        model = small_net()
        dyrep.convert_(model, method, example_input=X)
        assert (type(model[1]) is PassedNorm) == (method != "orepa")


def test_the_origin_is_the_networks_own_kernel_and_every_branch_counts():
    model = small_net()
    before = model[3].weight.detach().clone()
    dyrep.convert_(model, "dbb", example_input=X)
    assert torch.equal(model[3].weight, before)
    whole = eval_output(model, X)
    for branch in model[3].branches.values():
        changed = copy.deepcopy(model)
        names = {id(m): n for n, m in model.named_modules()}
        changed.get_submodule(names[id(branch)]).norm.weight.data.zero_()
        assert relative_error(eval_output(changed, X), whole) > 1e-4


def test_origin_changes_nothing():
    model = small_net()
    before = picture(model)
    assert dyrep.convert_(model, "origin") == []
    assert_same_picture(picture(model), before)


def test_patterns_choose_the_layers():
    model = small_net()
    edits = dyrep.convert_(model, "dbb", example_input=X, include=("[036]",), exclude=("3",))
    assert [edit.layer for edit in edits] == ["0", "6"]
    assert type(model[3]) is nn.Conv2d
    assert type(model[4]) is nn.BatchNorm2d


def test_branches_of_ones_own_take_the_place_of_the_methods_where_they_fit():
    model = small_net()
    dyrep.convert_(model, "dbb7", branches=["residual", "1x1"], replace="conv")
    assert {name: list(block.branches) for name, block in blocks(model).items()} == {
        "0": ["1x1"],
        "3": ["residual", "1x1"],
        "6": ["1x1"],
    }


def test_the_stem_of_a_resnet_stays_plain_unless_asked_for():
    x = torch.randn(2, 3, 32, 32)
    model = build("resnet18", num_classes=10)
    layers = [e.layer for e in dyrep.convert_(model, "acnet", example_input=x)]
    assert type(model.conv1) is nn.Conv2d
    assert "layer1.0.conv1" in layers
    assert not any("downsample" in layer for layer in layers)
    whole = build("resnet18", num_classes=10)
    assert [e.layer for e in dyrep.convert_(whole, "acnet", example_input=x, max_kernel=None)] == ["conv1", *layers]
    none = build("resnet18", num_classes=10)
    with pytest.raises(IneligibleLayerError, match="conv1: the kernel is 7x7, larger than max_kernel=2"):
        dyrep.convert_(none, "acnet", example_input=x, max_kernel=2)


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("method", [m for m in BLOCK_METHODS if m != "orepa"])
def test_preserve_keeps_the_function_of_a_net_that_looks_trained(method, replace):
    model = look_trained_(small_net(8, groups=2)).double()
    x = X.double()
    before = eval_output(model, x)
    dyrep.convert_(model, method, example_input=x, replace=replace, preserve=True)
    assert relative_error(eval_output(model, x), before) < 1e-12
    gammas = [branch.norm.weight for block in blocks(model).values() for branch in block.branches.values()]
    assert gammas
    assert all(torch.equal(gamma, torch.full_like(gamma, 0.01)) for gamma in gammas)


def test_preserve_keeps_the_function_with_a_norm_of_another_eps_and_with_biases():
    model = look_trained_(small_net()).double()
    model[1].eps = 0.1
    model[3].bias = nn.Parameter(torch.randn(6, dtype=torch.float64))
    x = X.double()
    before = eval_output(model, x)
    dyrep.convert_(model, "dbb", example_input=x, preserve=True)
    assert relative_error(eval_output(model, x), before) < 1e-12
    assert relative_error(eval_output(dyrep.deploy(model), x), before) < 1e-12


def test_without_preserve_the_function_changes():
    model = look_trained_(small_net())
    before = eval_output(model, X)
    dyrep.convert_(model, "repvgg", example_input=X)
    assert relative_error(eval_output(model, X), before) > 1e-2


def test_gamma_is_that_of_every_branch_and_of_the_origin():
    model = small_net()
    dyrep.convert_(model, "repvgg", example_input=X, gamma=0.5)
    for block in blocks(model).values():
        for norm in (block.origin_norm, *(branch.norm for branch in block.branches.values())):
            assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.5))


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_new_parameters_join_the_optimizer_and_learn(method):
    model = small_net()
    norms = [p for m in model if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if all(p is not n for n in norms)]
    optimizer = torch.optim.SGD([{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], 0.1)
    dyrep.convert_(model, method, example_input=X, optimizer=optimizer)
    assert held(optimizer) == {id(p) for p in model.parameters()}
    undecayed = {id(p) for p in optimizer.param_groups[1]["params"]}
    block = model[3]
    assert id(block.weight) not in undecayed
    assert id(block.origin_norm.weight) in undecayed
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    # a scale of zero, as OREPA's cosine branch has, keeps its kernel where it is in the first step
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(X), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
    assert not [n for n, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]


def test_the_same_seed_gives_the_same_weights_whatever_else_is_drawn():
    def weights(seed, noise, method):
        torch.manual_seed(1)
        model = small_net()
        torch.manual_seed(noise)
        dyrep.convert_(model, method, example_input=X, generator=torch.Generator().manual_seed(seed))
        drawn = torch.rand(1)
        return model.state_dict(), drawn

    for method in BLOCK_METHODS:
        (first, drawn), (again, _), (other, _) = weights(3, 5, method), weights(3, 6, method), weights(4, 5, method)
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(1)), "the global random numbers were drawn from"


def test_a_convolution_that_no_norm_follows_is_converted_and_says_why():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
    first, second = dyrep.convert_(model, "dbb", example_input=X)
    assert first.detail == {"norm kept": "no batch norm reads its output"}
    assert second.detail == {"replaces": "3"}
    assert model[0].passed_norm is None
    assert model[0].origin_norm.bias is not None
    assert dyrep.verify(model, dyrep.deploy(model), X).passed


def test_a_frozen_norm_stays():
    model = small_net()
    model[4].eval()
    edits = dyrep.convert_(model, "dbb", example_input=X)
    assert type(model[4]) is nn.BatchNorm2d
    assert not model[4].training
    assert edits[0].detail == {"replaces": "1"}
    assert "the norm '4' cannot be replaced: it is in eval mode" in edits[1].detail["norm kept"]
    assert model[3].origin_norm.bias is None


def test_a_norm_that_two_convolutions_share_stays():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.second(self.norm(self.first(x)))).mean((2, 3))

    model = Shared()
    edits = dyrep.convert_(model, "repvgg", example_input=X)
    assert [edit.detail for edit in edits] == [{"norm kept": "the norm 'norm' reads other outputs too"}] * 2
    assert dyrep.verify(model, dyrep.deploy(model), X).passed


def test_looking_for_norms_leaves_statistics_and_modes_alone():
    model = look_trained_(small_net())
    model[2].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    dyrep.convert_(model, "acnet", example_input=X)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert [m.training for m in model] == [True, True, False, *[True] * 9]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_new_parts_have_the_mode_dtype_and_layout_of_the_model():
    model = small_net(8).double().to(memory_format=torch.channels_last)
    dyrep.convert_(model, "dbb", example_input=X.double())
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert model[3].branches["1x1-KxK"].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(m.training for m in model.modules())


REFUSED = {
    "an unknown method": ({"method": "dbb8"}, ConfigError, "method='dbb8' is unknown; valid are origin, "),
    "dyrep": ({"method": "dyrep"}, ConfigError, r"method='dyrep' changes the network while it trains.*dyrep\.DyRep"),
    "a variant of dyrep": ({"method": "dyrep4"}, ConfigError, "method='dyrep4' changes the network while it trains"),
    "another replace": ({"replace": "norm"}, ConfigError, r"replace='norm' is unknown; valid are conv, conv\+norm"),
    "no example": ({"example_input": None}, ConfigError, "pass example_input=batch, or replace='conv'"),
    "orepa in place of norms": (
        {"method": "orepa", "replace": "conv+norm"},
        ConfigError,
        "method='orepa' has no norms of its own and needs the model's: use replace='conv'",
    ),
    "orepa that preserves": ({"method": "orepa", "preserve": True}, ConfigError, "preserve=True is for the others"),
    "nothing to convert": (
        {"include": ("head",)},
        IneligibleLayerError,
        r"method 'dbb' finds nothing to convert \(0: excluded by include and exclude; 3: excluded",
    ),
    "fixed without structure": ({"method": "fixed"}, ConfigError, "'fixed' and structure= belong together"),
    "a structure of another method": (
        {"structure": {"format": 1, "blocks": {}}},
        ConfigError,
        "'fixed' and structure= belong together",
    ),
    "a structure with other layers": (
        {"method": "fixed", "structure": {"format": 1, "blocks": {"9.conv": {"branches": ["1x1"]}}}},
        StructureError,
        "names layer '9.conv', which this model does not have",
    ),
    "a structure with a branch that does not fit": (
        {
            "method": "fixed",
            "structure": {"format": 1, "blocks": {"3": {"branches": ["1x1"]}, "6": {"branches": ["residual"]}}},
        },
        StructureError,
        "layer '6': branch 'residual' is not possible",
    ),
    "gamma of zero": ({"gamma": 0.0}, ConfigError, "gamma=0.0: must be a positive, finite number"),
    "branches for no blocks": ({"method": "origin", "branches": ["1x1"]}, ConfigError, "'origin' has no blocks whose"),
    "branches that are none": ({"branches": ["1x1", "5x5"]}, ConfigError, r"branches=\['1x1', '5x5'\]: give a list"),
    "branches that orepa does not know": (
        {"method": "orepa", "branches": ["1x1", "residual"]},
        ConfigError,
        "orepa says nothing of how 'residual' starts; valid are ",
    ),
    "no branches": ({"branches": []}, ConfigError, r"branches=\[\]: give a list"),
    "no copies": ({"method": "mobileone", "copies": 0}, ConfigError, "copies=0"),
    "more copies than have names": ({"method": "mobileone", "copies": 100}, DyRepError, "copies=100"),
    "an optimizer that is none": ({"optimizer": object()}, OptimizerError, "object is not a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    arguments, error, message = REFUSED[case]
    arguments = {"method": "dbb", "example_input": X, **arguments}
    model = look_trained_(small_net())
    before = picture(model)
    with pytest.raises(error, match=message):
        dyrep.convert_(model, arguments.pop("method"), **arguments)
    assert_same_picture(picture(model), before)


def test_an_optimizer_that_lacks_a_layer_is_refused_before_anything_changes():
    model = small_net()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "3.weight"], 0.1)
    before = picture(model, optimizer)
    with pytest.raises(OptimizerError, match="the weight of layer '3' is not in the optimizer"):
        dyrep.convert_(model, "dbb", example_input=X, optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)


def test_converting_twice_is_refused():
    model = small_net()
    dyrep.convert_(model, "repvgg", example_input=X)
    before = picture(model)
    with pytest.raises(ConfigError, match=r"layer '0' has branches already: .*dyrep\.deploy it first"):
        dyrep.convert_(model, "dbb", example_input=X)
    assert_same_picture(picture(model), before)
    assert len(dyrep.convert_(dyrep.deploy(model), "dbb", example_input=X)) == 3


def test_a_net_without_convolutions_is_refused():
    with pytest.raises(IneligibleLayerError, match=r"finds nothing to convert \(no convolutions\)"):
        dyrep.convert_(nn.Sequential(nn.Linear(2, 2)), "dbb", example_input=torch.randn(1, 2))


def test_a_failure_half_way_is_taken_back(monkeypatch):
    model = look_trained_(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(X), torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()
    before = picture(model, optimizer)
    started = []

    def fails_at_the_second(*arguments):
        started.append(arguments)
        if len(started) == 2:
            raise RuntimeError("no memory")

    monkeypatch.setattr(conversion, "start_", fails_at_the_second)
    with pytest.raises(RuntimeError, match="no memory"):
        dyrep.convert_(model, "dbb", example_input=X, optimizer=optimizer)
    assert len(started) == 2
    assert_same_picture(picture(model, optimizer), before)


def test_a_structure_that_is_being_searched_cannot_be_fixed():
    source, model = small_net(8), small_net(8)
    dyrep.convert_(source, "repnas", example_input=X)
    before = picture(model)
    with pytest.raises(ConfigError, match="layer '0': the structure is that of a search which has not ended"):
        dyrep.convert_(model, "fixed", structure=dyrep.structure(source))
    assert_same_picture(picture(model), before)


@pytest.mark.parametrize("method", [method for method in BLOCK_METHODS if method != "repnas"])
def test_a_structure_of_another_instance_is_built_again(method):
    source = small_net(8, groups=2)
    dyrep.convert_(source, method, example_input=X)
    model = look_trained_(small_net(8, groups=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = eval_output(model, X)
    edits = dyrep.convert_(model, "fixed", structure=dyrep.structure(source), optimizer=optimizer)
    assert dyrep.structure(model) == dyrep.structure(source)
    assert {e.layer: e.branches for e in edits} == {n: tuple(b.branches) for n, b in blocks(source).items()}
    assert held(optimizer) == {id(p) for p in model.parameters()}
    assert relative_error(eval_output(model, X), before) < 1e-4
    model.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(eval_output(model, X), eval_output(source, X))
    assert dyrep.verify(model, dyrep.deploy(model), X).passed


def test_fixed_blocks_start_with_the_gamma_asked_for():
    structure = {"format": 1, "blocks": {"3": {"branches": ["1x1"]}}}
    for gamma, expected in ((None, 0.01), (1.0, 1.0)):
        model = small_net()
        dyrep.convert_(model, "fixed", structure=structure, gamma=gamma)
        assert torch.equal(model[3].branches["1x1"].norm.weight, torch.full((6,), expected))


@pytest.mark.parametrize("copies", [1, 2])
def test_mobileone_with_few_copies_is_described_by_its_structure(copies):
    def net():
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1, bias=False),  # with one copy there is nothing to add here
            nn.BatchNorm2d(4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    model = net()
    edits = dyrep.convert_(model, "mobileone", example_input=X, copies=copies)
    assert all(edit.branches for edit in edits)
    assert len(edits) == copies
    twin = net()
    dyrep.convert_(twin, "fixed", structure=dyrep.structure(model))
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(eval_output(twin, X), eval_output(model, X))


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_converted_nets_are_saved_and_loaded(method, tmp_path):
    model = look_trained_(small_net())
    dyrep.convert_(model, method, example_input=X)
    look_trained_(model)
    again = dyrep.load(dyrep.save(model, tmp_path / "net.safetensors"), small_net())
    assert dyrep.structure(again) == dyrep.structure(model)
    assert torch.equal(eval_output(again, X), eval_output(model, X))


def test_every_method_with_blocks_is_tested_here():
    assert set(BLOCK_METHODS) == {name for name, method in METHODS.items() if method.builds_blocks}


@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_one_pattern_that_is_not_in_a_tuple_is_refused_rather_than_read_letter_by_letter(setting):
    model = small_net()
    before = picture(model)
    with pytest.raises(ConfigError, match=rf"{setting}='backbone\.\*': give a tuple of patterns"):
        dyrep.convert_(model, "dbb", example_input=X, **{setting: "backbone.*"})
    assert_same_picture(picture(model), before)
