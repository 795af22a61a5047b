"""A small search, and epochs of it, for the tests of RepNAS."""

import torch
from torch.optim.swa_utils import AveragedModel

import dyrep
from dyrep import RepNAS, RepNASConfig
from training import make_batches, make_net, train_epoch

BATCHES = make_batches()
X = BATCHES[0][0]
FAVOURITES = {  # six of nineteen branches, and one block that does without its own kernel
    "0": ["KxK", "1x1"],
    "3": ["1x1-KxK", "residual"],
    "5": ["KxK", "Kx1"],
}
FAVOURITES_ALONE = {"0": ["KxK"], "3": ["1x1-KxK", "residual", "1x1"], "5": ["1xK", "Kx1"]}


def start(seed=0, total=5, log=None, convert_first=False, averaged=False, **settings):
    """A model, its optimizer and a search: random in epoch 1, learning in 2 and 3, the rest with what was found."""
    model = make_net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    averages = []
    if convert_first or averaged:
        dyrep.convert_(model, "repnas", example_input=X, optimizer=optimizer)
    if averaged:
        averages = [AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))]
    settings = {"random_share": 0.2, "search_share": 0.6, "strength_lr": 0.01, **settings}
    config = RepNASConfig(total=total, **settings)
    search = RepNAS(model, optimizer, config, example_input=X, log=log, ema=averages)
    return (model, optimizer, search, *averages)


def favour_(search, favourites=None):
    """Make some branches so strong that they win."""
    for index, (layer, branch) in enumerate(search.gates.names):
        if branch in (favourites or FAVOURITES)[layer]:
            search.strengths.data[index] += 5
    search.refresh()


def run_epoch(model, optimizer, search, favourites=None):
    """An epoch whose random numbers depend on its number alone."""
    torch.manual_seed(100 + search.epoch)
    if search.epoch == 1:
        favour_(search, favourites)
    train_epoch(model, optimizer, BATCHES)
    return search.epoch_end(BATCHES)
