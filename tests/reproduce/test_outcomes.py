"""Studies are carried out: what is there is used, what can be is trained, and all else is said."""

from __future__ import annotations

import json
import math

import pytest
import torch

from dyrep.errors import ConfigError
from dyrep.records import read_json, write_json
from dyrep.reproduce import SCALES, STUDIES, Row, Study, Training
from dyrep.reproduce import outcomes as module
from dyrep.reproduce.outcomes import Workshop, planned

CIFAR = "cifar10-vgg16"


def study(*rows, columns=("accuracy", "macs", "cost")):
    return Study("some", "Table 0", "something", columns, rows)


@pytest.fixture
def trained(monkeypatch):
    """Recipes that are trained; every run has an accuracy of 90 plus its seed."""
    recipes = []

    def train(recipe, settings):
        recipes.append(recipe)
        summary = {"test_accuracy_folded": 90.0 + recipe.seed, "seconds": 120.0}
        summary |= {"mean_macs": 3e6, "mean_parameters": 2e6}
        summary["recipe"] = recipe.to_dict()
        settings.out.mkdir(parents=True)
        (settings.out / "summary.json").write_text(json.dumps(summary))
        return summary

    monkeypatch.setattr(module, "train", train)
    return recipes


@pytest.fixture
def shop(tmp_path):
    return lambda scale="smoke", **options: Workshop(tmp_path, SCALES[scale], say=lambda text: None, **options)


def test_every_row_is_trained_with_every_seed(trained, shop):
    (found,) = shop(seeds=2).carry_out(study(Row("a", {}, Training(CIFAR, "dbb"))))
    assert [recipe.seed for recipe in trained] == [0, 1]
    assert found.state == "done"
    assert found.figures == {"accuracy": [90, 91], "cost": [2, 2], "macs": [3, 3], "parameters": [2, 2]}
    assert [run.name for run in found.runs] == ["cifar10-vgg16-dbb-seed0", "cifar10-vgg16-dbb-seed1"]


def test_what_is_there_is_not_trained_again_by_any_study(trained, shop):
    row = Row("a", {}, Training(CIFAR))
    shop().carry_out(study(row))
    again = shop(seeds=2).carry_out(study(Row("b", {}, Training(CIFAR, dyrep={"interval": 15}))))
    assert [recipe.seed for recipe in trained] == [0, 1]
    assert again[0].figures["accuracy"] == [90, 91]


def test_a_run_with_other_settings_is_not_taken_for_ours(trained, shop, tmp_path):
    shop().carry_out(study(Row("a", {}, Training(CIFAR))))
    file = tmp_path / "smoke" / "cifar10-vgg16-dyrep-seed0" / "summary.json"
    file.write_text(file.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    (found,) = shop().carry_out(study(Row("a", {}, Training(CIFAR))))
    assert found.state == "not run"
    assert "was trained with other settings (lr: 0.2 against 0.1): move it away" in found.reason


def test_a_metric_that_is_not_defined_is_a_gap_and_no_more(trained, shop, tmp_path):
    row = Row("a", {}, Training(CIFAR))
    shop(seeds=2).carry_out(study(row))
    for seed, left in ((0, [91.0]), (1, None)):
        file = tmp_path / "smoke" / f"cifar10-vgg16-dyrep-seed{seed}" / "summary.json"
        write_json(file, {**read_json(file), "test_accuracy_folded": math.nan})
        (found,) = shop(seeds=2).carry_out(study(row))
        assert (found.state, found.figures["cost"], found.figures.get("accuracy")) == ("done", [2, 2], left)


def test_rows_that_are_the_same_at_a_scale_share_their_runs_and_say_so(trained, shop):
    rows = [Row(f"t = {t}", {}, Training(CIFAR, dyrep={"interval": t}), group="VGG") for t in (5, 10, 50)]
    first, second, third = shop("short").carry_out(study(*rows))
    assert [recipe.dyrep.interval for recipe in trained] == [1, 5]
    assert second.reason == "at this scale the same runs as VGG, t = 5"
    assert second.runs == first.runs != third.runs


def test_without_training_only_what_is_there_is_shown(trained, shop):
    (found,) = shop(trains=False).carry_out(study(Row("a", {}, Training(CIFAR))))
    assert (found.state, found.reason) == ("not run", "not trained yet")
    assert not trained


def test_what_fails_is_said_and_the_rest_goes_on(trained, shop, monkeypatch):
    train = module.train

    def fails(recipe, settings):
        if recipe.method == "dbb":
            raise ConfigError("no data here\nand more")
        return train(recipe, settings)

    monkeypatch.setattr(module, "train", fails)
    rows = [Row("a", {}, Training(CIFAR, "dbb")), Row("b", {}, Training(CIFAR))]
    first, second = shop().carry_out(study(*rows, columns=("accuracy",)))
    assert (first.state, first.reason) == ("not run", "no data here")
    assert second.state == "done"


def test_structures_are_counted_where_they_never_change(trained, shop):
    rows = [Row(method, {}, Training("imagenet-resnet18", method)) for method in ("origin", "dbb", "dyrep")]
    origin, dbb, dyrep = shop().carry_out(study(*rows))
    assert not trained
    assert origin.state == dbb.state == "counted"
    assert origin.figures["macs"][0] == pytest.approx(1814, rel=0.01)
    assert dbb.figures["parameters"][0] == pytest.approx(26.3, rel=0.01)
    assert (dyrep.state, dyrep.figures) == ("not run", {})


def test_a_fixed_structure_is_taken_from_the_run_of_dyrep(trained, shop, monkeypatch):
    taken = []

    def structure_of_run(reference):
        taken.append(reference.rpartition("/")[2])
        return {"format": 1, "blocks": {"conv1": {"branches": ["1x1"]}}, "source": reference}

    monkeypatch.setattr(module, "structure_of_run", structure_of_run)
    (found,) = shop("short").carry_out(study(Row("a", {}, Training(CIFAR, "fixed", stop=200))))
    assert taken == ["cifar10-vgg16-dyrep-seed0@20"]
    assert [recipe.method for recipe in trained] == ["dyrep", "fixed"]
    assert found.runs[0].name == "cifar10-vgg16-fixed-at200-seed0"


def test_baselines_are_counted_as_they_are_deployed(shop):
    (found,) = shop(device="cpu").carry_out(
        study(Row("a", {}, model="resnet34", why_not="quoted"), columns=("speed", "macs"))
    )
    assert found.state == "counted"
    assert found.figures["macs"][0] == pytest.approx(3664, rel=0.01)
    assert found.figures["parameters"] == [pytest.approx(21.78916)]  # norms are folded into convolutions: 21.797672
    assert "speed" not in found.figures


@pytest.mark.slow
def test_every_deployed_network_has_the_parameters_that_the_paper_gives(shop):
    rows = {row.model: row for row in STUDIES["repvgg"].rows}
    assert len(rows) == 8
    for row in rows.values():
        (found,) = shop("smoke", device="cpu").carry_out(study(row, columns=("speed", "parameters")))
        assert math.floor(100 * found.figures["parameters"][0]) / 100 == row.paper["parameters"], row.label


def test_speed_is_in_images_of_whole_batches_per_second(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "median_ms", lambda run, device, repeats: (run(), 64.0)[1])
    model = torch.nn.Identity()
    model.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert module._images_per_second(model, torch.device("cpu")) == 2000
    assert set(seen) == {(128, 3, 224, 224)}
    assert len(seen) > 1  # it has been warmed up


def test_operation_spaces_are_those_of_the_paper(shop):
    for found in shop().carry_out(STUDIES["operation-spaces"]):
        assert found.figures["branches"] == [found.row.paper["branches"]]


def test_plans_name_every_run_once():
    assert planned(STUDIES["dep"], SCALES["short"], 2) == [
        f"{CIFAR}-{method}-seed{seed}" for method in ("origin", "dyrep", "dyrep-nodep") for seed in (0, 1)
    ]
    assert (
        planned(STUDIES["imagenet"], SCALES["smoke"], 1)
        == planned(STUDIES["operation-spaces"], SCALES["full"], 1)
        == []
    )


def test_data_is_drawn_whole_or_not_at_all(monkeypatch, shop, tmp_path):
    recipe, drawn = "bccd-fasterrcnn", []
    folder, draw, settings = module.DRAWN[recipe]

    def killed(place):
        drawn.append(place)
        (place / "JPEGImages").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setitem(module.DRAWN, recipe, (folder, killed, settings))
    with pytest.raises(KeyboardInterrupt):
        shop()._data(recipe)
    place = tmp_path / "smoke" / "data" / folder
    assert drawn[0] != place
    assert not place.exists()
    monkeypatch.setitem(module.DRAWN, recipe, (folder, draw, settings))
    assert shop()._data(recipe) == place
    assert {file.name for file in place.iterdir()} == {"JPEGImages", "Annotations", "ImageSets"}
    assert list(place.parent.iterdir()) == [place]  # nothing is left of the first attempt
    monkeypatch.setitem(module.DRAWN, recipe, (folder, killed, settings))
    assert shop()._data(recipe) == place
    assert len(drawn) == 1


def test_data_that_another_process_has_drawn_meanwhile_is_taken(monkeypatch, shop):
    recipe = "bccd-fasterrcnn"
    folder, draw, settings = module.DRAWN[recipe]

    def slow(place):
        draw(shop().root / "smoke" / "data" / folder)
        return draw(place)

    monkeypatch.setitem(module.DRAWN, recipe, (folder, slow, settings))
    assert (shop()._data(recipe) / "ImageSets" / "Main" / "test.txt").is_file()


def test_downstream_tasks_go_on_from_the_classifier_of_their_row(monkeypatch, shop, tmp_path):
    trained = []

    def train(recipe, settings):
        trained.append((settings.out.name, recipe.method, None if recipe.backbone is None else recipe.backbone))
        metric = {"voc": "map", "masks": "miou"}.get(recipe.dataset, "accuracy")
        costs = {"seconds": 1.0, "mean_macs": 1e6, "mean_parameters": 1e6}
        summary = {"recipe": recipe.to_dict(), f"test_{metric}": 5.0, f"test_{metric}_folded": 5.0, **costs}
        settings.out.mkdir(parents=True)
        (settings.out / "summary.json").write_text(json.dumps(summary))
        assert settings.data.is_dir()
        return summary

    monkeypatch.setattr(module, "train", train)
    found = shop().carry_out(STUDIES["downstream"])
    assert all(outcome.figures.keys() >= {"accuracy", "mAP", "mIoU"} for outcome in found)
    runs = {name: (method, backbone) for name, method, backbone in trained}
    assert len(runs) == len(trained) == 3 + 2 * 5
    before = str(tmp_path / "smoke" / "tiny-imagenet-resnet18-dbb-seed0")
    assert runs["bccd-fasterrcnn-origin-from-dbb-seed0"] == ("origin", before)
    assert runs["camvid-pspnet-dyrep-from-origin-seed0"][0] == "dyrep"
    shop().carry_out(STUDIES["downstream"])
    assert len(trained) == 13
    assert len(planned(STUDIES["downstream"], SCALES["smoke"], 1)) == 13
