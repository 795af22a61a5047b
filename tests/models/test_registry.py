"""Models by name: what papers print of them, and what a person reads who gets a name wrong."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import dyrep
from dyrep import models
from dyrep.errors import ConfigError, MissingPackageError
from dyrep.models import build, names
from dyrep.models.repvgg import NAMES


def without_weights(name: str, **arguments) -> nn.Module:
    """A model that takes no memory and no time to draw."""
    with torch.device("meta"):
        return build(name, **{"num_classes": 1000, **arguments})


def rounded(value: float, digits: int) -> float:
    return round(value, digits)


def cut_off(value: float, digits: int) -> float:
    return math.floor(value * 10**digits) / 10**digits


# as printed: multiply-adds and parameters in millions, and how many digits of each; the parameters of RepVGG are cut
# off after the second digit (A2 has 25.499944 M), as its authors print them, those of the others are rounded
@pytest.mark.parametrize(
    ("name", "options", "macs", "macs_digits", "parameters", "parameter_digits", "shortened"),
    [
        ("vgg16", {"num_classes": 10}, 313, 0, 15.0, 1, rounded),
        ("mobilenet_v1", {}, 570, -1, 4.2, 1, rounded),
        ("resnet18", {}, 1810, -1, 11.7, 1, rounded),
        ("resnet34", {}, 3660, -1, 21.8, 1, rounded),
        ("resnet50", {}, 4090, -1, 25.6, 1, rounded),
        ("repvgg_a2", {"form": "bias"}, 5100, -2, 25.49, 2, cut_off),
        ("repvgg_b2g4", {"form": "bias"}, 11300, -2, 55.77, 2, cut_off),
        ("repvgg_b3", {"form": "bias"}, 26200, -2, 110.96, 2, cut_off),
    ],
)
def test_model_costs_what_papers_print(name, options, macs, macs_digits, parameters, parameter_digits, shortened):
    size = 32 if name == "vgg16" else 224
    found = dyrep.costs(without_weights(name, **options), torch.empty(1, 3, size, size, device="meta"))
    assert round(found.macs / 1e6, macs_digits) == macs, found.macs
    assert shortened(found.parameters / 1e6, parameter_digits) == parameters, found.parameters


@pytest.mark.parametrize(
    ("name", "macs", "parameters"),
    [
        ("vgg16", 313_463_808, 14_986_698),
        ("mobilenet_v1", 568_740_352, 4_231_976),
        ("repvgg_a2", 5_116_951_552, 25_499_944),
        ("repvgg_b2g4", 11_331_899_392, 55_777_512),
        ("repvgg_b3", 26_208_882_688, 110_960_872),
    ],
)
def test_model_costs_exactly_this_much(name, macs, parameters):
    options = {"form": "bias"} if name.startswith("repvgg") else {}
    classes, size = (10, 32) if name == "vgg16" else (1000, 224)
    model = without_weights(name, num_classes=classes, **options)
    found = dyrep.costs(model, torch.empty(1, 3, size, size, device="meta"))
    assert (found.macs, found.parameters) == (macs, parameters)


@pytest.mark.parametrize("name", names())
def test_every_conv_that_is_more_than_pointwise_can_grow(name):
    model = without_weights(name).to_empty(device="cpu")
    targets = dyrep.targets(model)
    assert len(targets) == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    for target in targets:
        assert target.eligible == (target.kernel_size != (1, 1)), str(target)


def test_names_are_those_the_package_offers_and_three_of_torchvision():
    offered = {name for name in models.__all__ if name.startswith(("vgg", "small_", "mobilenet"))}
    offered |= {f"repvgg_{size}" for size in NAMES}
    assert set(names()) == offered | {"resnet18", "resnet34", "resnet50"}
    assert len(names()) == len(set(names())) == 19


def test_options_reach_the_function_of_the_model():
    model = build("small_vgg", num_classes=4, in_channels=2, widths=((4,), (8,)))
    assert model(torch.randn(2, 2, 4, 4)).shape == (2, 4)
    assert build("timm:resnet18", num_classes=4, stem_width=8, stem_type="deep").conv1[0].out_channels == 8


def test_timm_and_torchvision_models_have_the_classes_and_channels_asked_for():
    timm_model = build("timm:repvgg_a0", num_classes=4, in_channels=1).eval()
    assert timm_model(torch.randn(1, 1, 32, 32)).shape == (1, 4)
    torchvision_model = build("torchvision:squeezenet1_1", num_classes=4).eval()
    assert torchvision_model(torch.randn(1, 3, 32, 32)).shape == (1, 4)
    assert build("resnet18", num_classes=4).fc.out_features == 4


def test_a_detector_of_torchvision_comes_without_a_downloaded_backbone(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    assert isinstance(without_weights("torchvision:lraspp_mobilenet_v3_large", num_classes=2), nn.Module)


def test_importing_the_zoo_needs_torch_alone():
    code = "import sys, dyrep.models; print([m for m in ('torchvision', 'timm', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def refusal(spec: str, **arguments) -> str:
    with pytest.raises(ConfigError) as refused:
        build(spec, **{"num_classes": 10, **arguments})
    assert spec in str(refused.value)
    return str(refused.value)


def test_unknown_name_is_answered_with_close_ones_and_all():
    message = refusal("vgg_16")
    assert "(did you mean vgg16 " in message
    assert all(name in message for name in names())
    assert "package.module:function" in refusal("my_models.net")


@pytest.mark.parametrize("spec", [":net", "module:", "timm:", "torchvision:", ":"])
def test_incomplete_spec_is_answered_with_how_to_write_it(spec):
    assert "lacks a part; write it as package.module:function, timm:NAME or torchvision:NAME" in refusal(spec)


@pytest.mark.parametrize("arguments", [{"num_classes": 0}, {"in_channels": -1}, {"num_classes": "ten"}], ids=str)
def test_senseless_numbers_are_refused(arguments):
    (name, value), *_ = arguments.items()
    assert f"{name}={value!r}; use an integer of at least 1" in refusal("vgg16", **arguments)


def test_unknown_option_is_answered_with_the_known_ones():
    assert "does not take depth; it takes num_classes, in_channels, widths" in refusal("small_vgg", depth=3)
    assert "ConfigError: form='x' is not a form" in refusal("repvgg_a0", form="x")
    assert "TypeError" in refusal("timm:resnet18", no_such_option=1)
    assert "TypeError" in refusal("resnet18", no_such_option=1)


@pytest.mark.parametrize(("spec", "library"), [("timm:resnet18", "timm"), ("resnet18", "torchvision")])
def test_missing_library_is_answered_with_how_to_install_it(spec, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingPackageError, match=rf"model '{spec}' needs {library}, .*: pip install"):
        build(spec, num_classes=2)


def test_unknown_timm_and_torchvision_names_are_answered_with_close_ones():
    assert "timm has no model 'repvgg_a00'" in refusal("timm:repvgg_a00")
    assert "did you mean repvgg_a0 " in refusal("timm:repvgg_a00")
    assert "torchvision has no model 'resnet81'" in refusal("torchvision:resnet81")
    assert "did you mean resnet18" in refusal("torchvision:resnet81")


@pytest.mark.parametrize("spec", ["resnet18", "torchvision:resnet18"])
def test_torchvision_takes_three_channels_only_and_says_so(spec):
    assert "3 channels, not in_channels=1; use timm:NAME or" in refusal(spec, in_channels=1)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A function that writes a module into the current directory and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)

    def write(text: str, name: str = "users_own_net") -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("users_own"):
            del sys.modules[name]


def test_function_in_the_current_directory_is_found_and_given_what_it_takes(user_module):
    module = user_module(
        "from torch import nn\n"
        "def both(num_classes, in_channels): return nn.Linear(in_channels, num_classes)\n"
        "def anything(**given): return nn.Linear(given['in_channels'], given['num_classes'])\n"
        "def classes(*, num_classes): return nn.Linear(7, num_classes)\n"
        "def nothing(): return nn.Linear(7, 7)\n"
        "def sized(num_classes, size=1): return nn.Linear(size, num_classes)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes): super().__init__(1, num_classes)\n"
    )

    def features(name: str, **options) -> tuple[int, int]:
        model = build(f"{module}:{name}", num_classes=5, in_channels=2, **options)
        return model.in_features, model.out_features

    assert features("both") == features("anything") == (2, 5)
    assert features("classes") == (7, 5)
    assert features("nothing") == (7, 7)
    assert features("sized", size=9) == (9, 5)
    assert features("Net") == (1, 5)
    assert "does not take size; it takes no arguments" in refusal(f"{module}:nothing", size=9)


def test_function_in_a_package_of_the_current_directory_is_found(user_module, tmp_path):
    (tmp_path / "users_own_package").mkdir()
    user_module("from torch import nn\ndef net(): return nn.Identity()\n", "users_own_package/nets")
    assert isinstance(build("users_own_package.nets:net", num_classes=2), nn.Identity)


def test_module_that_is_not_there_is_answered_with_where_it_was_looked_for(user_module, tmp_path):
    message = refusal("users_own_nowhere:net")
    assert "ModuleNotFoundError: No module named 'users_own_nowhere'" in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def net(:", "SyntaxError"),
        ("import users_own_missing", "No module named 'users_own_missing'"),
        ("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
        ("import sys; sys.exit('usage: net')", "SystemExit: usage: net"),
    ],
)
def test_module_that_fails_is_answered_with_its_own_message(text, reason, user_module):
    message = refusal(f"{user_module(text)}:net")
    assert "cannot be imported" in message
    assert reason in message


def test_things_that_do_not_make_a_model_are_refused(user_module):
    module = user_module(
        "from torch import nn\n"
        "def my_net(): return nn.Identity()\n"
        "number = 3\n"
        "made = nn.Identity()\n"
        "def words(): return 'a model'\n"
        "def broken(num_classes): raise KeyError('depth')\n"
        "def needy(num_classes, depth): return nn.Identity()\n"
    )
    assert "has no 'mynet' (did you mean my_net?)" in refusal(f"{module}:mynet")
    assert "names something of type int; name a function" in refusal(f"{module}:number")
    assert "names something of type Identity; name a function" in refusal(f"{module}:made")
    assert "returned 'str' and not an nn.Module; return the model itself" in refusal(f"{module}:words")
    assert "cannot be built with num_classes=10: KeyError: 'depth'" in refusal(f"{module}:broken")
    assert "missing 1 required positional argument: 'depth'" in refusal(f"{module}:needy")
