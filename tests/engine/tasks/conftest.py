"""Data sets of detection and segmentation, and small networks for them."""

from __future__ import annotations

import pytest
from task_recipes import MAKERS

from downstream_data import write_masks, write_models, write_voc


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Makes "tiny_models:detector" and the like importable, and gives the folder they are in."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="session")
def data(tmp_path_factory, tiny_models):
    """The folder of the data of a recipe."""
    folders = {
        "voc": write_voc(tmp_path_factory.mktemp("voc")),
        "masks": write_masks(tmp_path_factory.mktemp("masks"), ignored=11),
    }
    return lambda chosen: folders[chosen.dataset]


@pytest.fixture(params=list(MAKERS))
def make(request):
    """Makes a recipe of either task."""
    return MAKERS[request.param]
