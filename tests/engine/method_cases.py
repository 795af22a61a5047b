"""Small runs of every method, and what is read from their folders."""

from engine_helpers import lines, small_recipe

NESTED = {
    "format": 1,
    "blocks": {
        "conv2": {"branches": ["1x1", "1x1-KxK"], "origin_norm": False, "width": 1},
        "conv2.branches.1x1-KxK.conv": {"branches": ["residual", "1x1"], "origin_norm": False, "width": 1},
        "conv5": {"branches": ["1xK"], "origin_norm": True, "width": 1},
    },
}
"""A structure with a block inside of a branch, for the method fixed."""


def easy(**changes):
    """Few steps that are enough to learn something, with blocks whose sum is not normalised too."""
    return small_recipe(**{"lr": 0.03, "crop": "none", "flip": False, "cutout": 0, **changes})


CASES = {
    "origin": easy(method="origin"),
    "repvgg": easy(method="repvgg"),
    "acnet": easy(method="acnet"),
    "dbb": easy(method="dbb"),
    "dbb7": easy(method="dbb7"),
    "mobileone": easy(method="mobileone"),
    "mobileone, conv": easy(method="mobileone", replace="conv"),
    "orepa": easy(method="orepa"),
    "repnas": easy(method="repnas", epochs=6),
    "dyrep4": easy(method="dyrep4"),
    "dyrep-nodep": easy(method="dyrep-nodep", epochs=4, evolution={"cut_threshold": 0}),
    "dyrep-2": easy(method="dyrep-2", epochs=5),
    "fixed": easy(method="fixed", structure=NESTED),
    "dyrep-default": easy(method="dyrep-default"),
    "absorbed": easy(epochs=4, evolution={"start_with": ("1x1-KxK",), "interval": 9, "absorb_after": 2}),
}


def events_of(folder, kind):
    return [event for event in lines(folder / "events.jsonl") if event["type"] == kind]


def edits_of(folder, kind):
    return [edit for event in events_of(folder, "update") for edit in event["edits"] if edit["kind"] == kind]
