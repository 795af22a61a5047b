import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

import dyrep
from dyrep.errors import ConfigError
from dyrep.models import fold_norms, from_timm_deployed, repvgg

TIMM_HAS = ("a0", "a1", "a2", "b0", "b1", "b1g4", "b2", "b2g4", "b3", "b3g4")


def settle_(model: nn.Module, size: int = 32) -> nn.Module:
    """Give every norm statistics and parameters that matter, and leave the model in eval mode."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.1)
    with torch.no_grad():
        for _ in range(10):
            model.train()(torch.randn(2, 3, size, size))
    return model.eval()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def timm_deployed(name: str) -> nn.Module:
    return reparameterize_model(settle_(timm.create_model(name, pretrained=False, num_classes=10), size=64))


@pytest.mark.parametrize("name", TIMM_HAS)
def test_deployed_form_has_the_layers_of_timms(name):
    with torch.device("meta"):
        theirs = reparameterize_model(timm.create_model(f"repvgg_{name}", pretrained=False))
        ours = repvgg(name, form="bias")
    found = from_timm_deployed(theirs.state_dict())
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert list(found) == list(ours.state_dict())

    def shapes(model: nn.Module) -> list[tuple]:
        return [(m.stride, m.padding, m.groups) for m in model.modules() if isinstance(m, nn.Conv2d)]

    assert shapes(ours) == shapes(theirs)


@pytest.mark.parametrize("name", ["repvgg_a0", "repvgg_b1g4"])
@torch.no_grad()
def test_weights_of_timm_compute_the_same_in_our_chain(name):
    theirs = timm_deployed(name)
    ours = repvgg(name.removeprefix("repvgg_"), num_classes=10, form="bias")
    ours.load_state_dict(from_timm_deployed(theirs.state_dict()), strict=True)
    x = torch.randn(2, 3, 64, 64)
    expected = theirs(x)
    assert expected.std() > 0
    assert relative_error(ours.eval()(x), expected) <= 1e-6


def test_weights_of_timm_before_deployment_are_refused():
    with torch.device("meta"):
        state = timm.create_model("repvgg_a0", pretrained=False).state_dict()
    with pytest.raises(ConfigError, match=r"weight 'stem\.\S+' is not one of .*reparameterize_model"):
        from_timm_deployed(state)


@torch.no_grad()
def test_folding_the_norms_gives_the_bias_form_of_the_same_function():
    model = settle_(repvgg("a0", num_classes=10))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folded = fold_norms(model)
    x = torch.randn(2, 3, 32, 32)
    assert relative_error(folded(x), model(x)) <= 1e-5
    twin = repvgg("a0", num_classes=10, form="bias")
    twin.load_state_dict(folded.state_dict(), strict=True)
    assert [type(m) for m in twin] == [type(m) for m in folded]
    assert torch.equal(twin.eval()(x), folded(x))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_folded_chain_shares_nothing_with_its_model_and_can_be_trained():
    model = repvgg("a0", num_classes=10).double().train()
    folded = fold_norms(model)
    assert folded.training
    assert {id(p) for p in model.parameters()}.isdisjoint(id(p) for p in folded.parameters())
    assert all(p.requires_grad and p.dtype == torch.float64 for p in folded.parameters())


@torch.no_grad()
def test_a_grown_chain_is_folded_by_way_of_deploy():
    model = settle_(repvgg("a0", num_classes=10))
    x = torch.randn(2, 3, 32, 32)
    dyrep.expand_(model, "conv3", calibration=[x])
    model.eval()
    with pytest.raises(ConfigError, match=r"norm 'norm3' follows a RepConv2d.*dyrep\.deploy"):
        fold_norms(model)
    assert relative_error(fold_norms(dyrep.deploy(model))(x), model(x)) <= 1e-5


def test_norms_that_cannot_be_folded_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"takes an nn\.Sequential, not a Conv2d"):
        fold_norms(nn.Conv2d(3, 3, 3))
    with pytest.raises(ConfigError, match="norm '0' follows no layer"):
        fold_norms(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ConfigError, match="norm '2' follows a ReLU"):
        fold_norms(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.BatchNorm2d(3)))
    with pytest.raises(ConfigError, match="norm '1' keeps no running statistics"):
        fold_norms(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)))


def test_names_of_parameters_follow_the_number_of_the_layer():
    with torch.device("meta"):
        norm, bias = repvgg("b0"), repvgg("b0", form="bias")
    layers = range(28)
    learned = [name for n in layers for name in (f"conv{n}.weight", f"norm{n}.weight", f"norm{n}.bias")]
    head = ["classifier.weight", "classifier.bias"]
    assert [name for name, _ in norm.named_parameters()] == learned + head
    biased = [name for n in layers for name in (f"conv{n}.weight", f"conv{n}.bias")]
    assert [name for name, _ in bias.named_parameters()] == biased + head


@pytest.mark.parametrize(("name", "groups"), [("b1g2", 2), ("b1g4", 4)])
def test_every_second_conv_after_the_stem_is_grouped(name, groups):
    with torch.device("meta"):
        convs = [m for m in repvgg(name) if isinstance(m, nn.Conv2d)]
    assert [m.groups for m in convs] == [1] + [1, groups] * 13 + [1]


@pytest.mark.parametrize("form", ["norm", "bias"])
def test_repvgg_runs_and_trains_with_other_channels_and_classes(form):
    model = repvgg("a0", num_classes=3, in_channels=1, form=form)
    output = model.train()(torch.randn(2, 1, 32, 32))
    output.sum().backward()
    assert output.shape == (2, 3)
    assert all(p.grad is not None for p in model.parameters())
    assert 1e-3 < model.eval()(torch.randn(2, 1, 32, 32)).std() < 1e3


def test_unknown_sizes_and_forms_are_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"no RepVGG 'b0g4'; use one of a0, .*b3g4"):
        repvgg("b0g4")
    with pytest.raises(ConfigError, match="form='deploy' is not a form of RepVGG; use 'norm' to train or 'bias'"):
        repvgg("a0", form="deploy")
