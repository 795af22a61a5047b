"""The paper's tables and figures: what was trained, and what came out.

Figures are copied from the paper, even where they contradict each other: the origin on CIFAR-100 has 73.69 % in the
table of results and 74.10 % in that of scores.
"""

from __future__ import annotations

from typing import Any

from dyrep.reproduce.studies import BACKBONE, Row, Study, Training

CIFAR10, CIFAR100 = "cifar10-vgg16", "cifar100-vgg16"
_COSTS = ("cost", "macs", "parameters", "accuracy")


def _costs(cost: str, macs: float, parameters: float, accuracy: float | str) -> dict[str, float | str]:
    return dict(zip(_COSTS, (cost, macs, parameters, accuracy), strict=True))


_ORIGIN10 = Row("origin", _costs("2.4 h", 313, 15.0, "94.68 ± 0.08"), Training(CIFAR10, "origin"), group="CIFAR-10")
_DBB10 = Row("DBB", _costs("9.4 h", 728, 34.7, "94.97 ± 0.06"), Training(CIFAR10, "dbb"), group="CIFAR-10")
_DYREP10 = Row("DyRep", _costs("6.9 h", 597, 26.4, "95.22 ± 0.13"), Training(CIFAR10), group="CIFAR-10")
_OURS = "DyRep, our defaults"  # which the paper does not have


def _cifar_row(label: str, training: Training, **paper: Any) -> Row:
    return Row(label, paper, training)


def _imagenet(model: str, title: str, *figures: tuple[str, float, float, float]) -> tuple[Row, ...]:
    """Origin, DBB and DyRep of one network: days, G multiply-adds, M parameters, accuracy."""
    return tuple(
        Row(
            label,
            _costs(days, round(1000 * macs), parameters, accuracy),
            Training(f"imagenet-{model}", method),
            group=title,
        )
        for (label, method), (days, macs, parameters, accuracy) in zip(
            (("origin", "origin"), ("DBB", "dbb"), ("DyRep", "dyrep")), figures, strict=True
        )
    )


_RESNETS = (
    *_imagenet(
        "resnet18",
        "ResNet-18",
        ("4.8 d", 1.81, 11.7, 69.54),
        ("8.1 d", 4.13, 26.3, 70.99),
        ("6.3 d", 2.42, 16.9, 71.58),
    ),
    *_imagenet(
        "resnet34",
        "ResNet-34",
        ("5.3 d", 3.66, 21.8, 73.31),
        ("12.8 d", 8.44, 49.9, 74.33),
        ("7.7 d", 4.72, 33.1, 74.68),
    ),
    *_imagenet(
        "resnet50",
        "ResNet-50",
        ("7.5 d", 4.09, 25.6, 76.14),
        ("13.7 d", 6.79, 40.7, 76.71),
        ("8.5 d", 5.05, 31.5, 77.08),
    ),
)


def _inference(label: str, speed: int, macs: float, parameters: float, accuracy: float, **more: Any) -> Row:
    paper = {"speed": speed, "macs": round(1000 * macs), "parameters": parameters, "accuracy": accuracy}
    return Row(label, paper, **more)


def _repvgg(size: str, method: str) -> dict[str, Any]:
    return {"training": Training(f"imagenet-repvgg-{size}", method), "model": f"repvgg_{size}"}


_ELSEWHERE = "a baseline that the paper quotes; its network is counted and timed, not trained"


def _downstream(label: str, before: str, method: str, *figures: float) -> Row:
    """Top-1 accuracy, mAP and mIoU of a row: how the classifier was trained, and how the tasks."""
    tasks = {
        column: Training(name, method, backbone=before)
        for column, name in (("mAP", "bccd-fasterrcnn"), ("mIoU", "camvid-pspnet"))
    }
    paper = dict(zip(("accuracy", "mAP", "mIoU"), figures, strict=True))
    return Row(label, paper, Training(BACKBONE, before), tasks=tasks)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "operation-spaces",
            "Table 1",
            "What every method may add to a convolution",
            ("branches",),
            tuple(
                Row(label, {"branches": branches}, Training(CIFAR10, method))
                for label, method, branches in (
                    ("RepVGG", "repvgg", 3),
                    ("DBB", "dbb", 4),
                    ("RepNAS", "repnas", 7),
                    ("DyRep", "dyrep", 7),
                )
            ),
        ),
        Study(
            "accuracy-against-cost",
            "Figure 1",
            "Accuracy and training cost of ResNets on ImageNet",
            ("cost", "accuracy"),
            _RESNETS,
            picture="cost",
        ),
        Study(
            "cifar",
            "Table 2",
            "VGG-16 on CIFAR",
            _COSTS,
            (
                _ORIGIN10,
                _DBB10,
                _DYREP10,
                Row(_OURS, {}, Training(CIFAR10, "dyrep-default"), group="CIFAR-10"),
                Row(
                    "origin",
                    _costs("2.4 h", 313, 15.0, "73.69 ± 0.12"),
                    Training(CIFAR100, "origin"),
                    group="CIFAR-100",
                ),
                Row("DBB", _costs("9.4 h", 728, 34.7, "74.04 ± 0.08"), Training(CIFAR100, "dbb"), group="CIFAR-100"),
                Row("DyRep", _costs("6.7 h", 582, 27.1, "74.37 ± 0.11"), Training(CIFAR100), group="CIFAR-100"),
                Row(_OURS, {}, Training(CIFAR100, "dyrep-default"), group="CIFAR-100"),
            ),
        ),
        Study(
            "imagenet",
            "Table 3",
            "MobileNet and ResNets on ImageNet against DBB",
            _COSTS,
            (
                *_imagenet(
                    "mobilenet-v1",
                    "MobileNet",
                    ("2.3 d", 0.57, 4.2, 71.89),
                    ("4.2 d", 0.61, 4.3, 72.88),
                    ("2.4 d", 0.58, 4.3, 72.96),
                ),
                *_RESNETS,
            ),
        ),
        Study(
            "repvgg",
            "Table 4",
            "RepVGG networks on ImageNet, with inference speed",
            ("speed", "macs", "parameters", "accuracy"),
            (
                _inference("ResNet-34", 1419, 3.7, 21.78, 74.17, model="resnet34", why_not=_ELSEWHERE),
                _inference("RepVGG-A2", 1322, 5.1, 25.49, 76.48, **_repvgg("a2", "repvgg")),
                _inference("ODBB(A2)", 1322, 5.1, 25.49, 76.86, **_repvgg("a2", "repnas")),
                _inference("DyRep-A2", 1322, 5.1, 25.49, 76.91, **_repvgg("a2", "dyrep")),
                _inference("ResNet-50", 719, 3.9, 25.53, 76.31, model="resnet50", why_not=_ELSEWHERE),
                _inference("RepVGG-B2g4", 581, 11.3, 55.77, 79.38, **_repvgg("b2g4", "repvgg")),
                _inference("DyRep-B2g4", 581, 11.3, 55.77, 80.12, **_repvgg("b2g4", "dyrep")),
                _inference(
                    "ResNeXt-50", 484, 4.2, 24.99, 77.46, model="torchvision:resnext50_32x4d", why_not=_ELSEWHERE
                ),
                _inference("ResNet-101", 430, 7.6, 44.49, 77.21, model="torchvision:resnet101", why_not=_ELSEWHERE),
                _inference("RepVGG-B3", 363, 26.2, 110.96, 80.52, **_repvgg("b3", "repvgg")),
                _inference("ODBB(B3)", 363, 26.2, 110.96, 80.97, **_repvgg("b3", "repnas")),
                _inference("DyRep-B3", 363, 26.2, 110.96, 81.12, **_repvgg("b3", "dyrep")),
                _inference("ResNeXt-101", 295, 8.0, 44.10, 78.42, model="timm:resnext101_32x4d", why_not=_ELSEWHERE),
            ),
            note="Multiply-adds, parameters and speed are those of deployed networks, all norms folded into "
            "convolutions. ODBB is what RepNAS finds.",
        ),
        Study(
            "downstream",
            "Table 5",
            "Detection and segmentation with ResNet-50",
            ("accuracy", "mAP", "mIoU"),
            (
                _downstream("origin", "origin", "origin", 76.13, 37.4, 77.85),
                _downstream("DBB, C", "dbb", "origin", 76.78, 37.8, 78.18),
                _downstream("DyRep, C", "dyrep", "origin", 77.08, 38.0, 78.32),
                _downstream("DyRep, D", "origin", "dyrep", 76.13, 37.7, 78.09),
                _downstream("DyRep, C+D", "dyrep", "dyrep", 77.08, 38.1, 78.49),
            ),
            note="The paper's ResNet-50 is trained on ImageNet, COCO and Cityscapes, ours, a ResNet-18, on "
            "Tiny-ImageNet (100 classes), BCCD and CamVid: compare rows, not figures. C is in classification, D in the "
            "task.",
        ),
        Study(
            "dep",
            "Table 6",
            "DyRep with and without absorbing branches again",
            ("macs", "parameters", "accuracy"),
            (
                _ORIGIN10,
                _cifar_row("DyRep", Training(CIFAR10), macs=597, parameters=26.4, accuracy="95.22 ± 0.13"),
                _cifar_row(
                    "without Dep", Training(CIFAR10, "dyrep-nodep"), macs=658, parameters=29.3, accuracy="95.03 ± 0.15"
                ),
            ),
        ),
        Study(
            "initial-gamma",
            "Figure 4",
            "Initial γ of new branches",
            ("accuracy",),
            tuple(
                _cifar_row(f"γ = {gamma:g}", Training(CIFAR10, dyrep={"gamma": gamma}))
                for gamma in (10, 1, 0.1, 0.01, 0.001)
            ),
            note="The paper shows this as a bar chart without figures; its values of γ are 10 and smaller.",
        ),
        Study(
            "retrained",
            "Table 7",
            "Structures that DyRep had on the way, trained from the start",
            ("macs", "parameters", "accuracy"),
            (
                _ORIGIN10,
                *(
                    _cifar_row(f"DyRep-{stop}", Training(CIFAR10, "fixed", stop=stop), **paper)
                    for stop, paper in (
                        (200, {"macs": 466, "parameters": 18.2, "accuracy": "94.83 ± 0.06"}),
                        (400, {"macs": 587, "parameters": 20.3, "accuracy": "95.04 ± 0.07"}),
                        (600, {"macs": 766, "parameters": 24.4, "accuracy": "94.93 ± 0.05"}),
                    )
                ),
                _cifar_row("DyRep", Training(CIFAR10), macs=597, parameters=26.4, accuracy="95.22 ± 0.13"),
            ),
        ),
        Study(
            "convergence",
            "Figure 5",
            "ResNet-34 in training",
            ("accuracy",),
            tuple(row for row in _RESNETS if row.group == "ResNet-34"),
            picture="curves",
        ),
        Study(
            "structure",
            "Figure 6",
            "The first convolution of ResNet-18 at the end",
            ("accuracy",),
            tuple(row for row in _RESNETS if row.group == "ResNet-18" and row.label == "DyRep"),
            picture="block",
        ),
        Study(
            "operation-counts",
            "Table 8",
            "Four and seven operations on ResNet-50",
            _COSTS,
            (
                Row("origin", _costs("7.5 d", 4090, 25.6, 76.14), Training("imagenet-resnet50", "origin"), group="1"),
                Row("DBB", _costs("13.7 d", 6790, 40.7, 76.71), Training("imagenet-resnet50", "dbb"), group="4"),
                Row("DyRep", _costs("8.1 d", 4930, 30.2, 76.98), Training("imagenet-resnet50", "dyrep4"), group="4"),
                Row("DBB", _costs("17.3 d", 8020, 48.3, 76.87), Training("imagenet-resnet50", "dbb7"), group="7"),
                Row("DyRep", _costs("8.5 d", 5050, 31.5, 77.08), Training("imagenet-resnet50"), group="7"),
            ),
        ),
        Study(
            "intervals",
            "Table 9",
            "Epochs between updates",
            _COSTS,
            (
                _ORIGIN10,
                _DBB10,
                *(
                    Row(f"DyRep, t = {interval}", _costs(*paper), Training(CIFAR10, dyrep={"interval": interval}))
                    for interval, paper in (
                        (5, ("13.3 h", 1575, 83.4, 95.39)),
                        (10, ("8.8 h", 992, 33.6, 95.33)),
                        (15, ("6.9 h", 597, 26.4, 95.22)),
                        (30, ("5.8 h", 522, 23.7, 94.91)),
                        (50, ("4.1 h", 430, 20.3, 94.82)),
                    )
                ),
            ),
        ),
        Study(
            "scores",
            "Table 10",
            "What to choose operations by",
            ("accuracy",),
            tuple(
                Row(
                    score,
                    {"accuracy": accuracy},
                    Training(recipe, "origin") if score == "origin" else Training(recipe, dyrep={"score": score}),
                    group=group,
                )
                for recipe, group, figures in (
                    (CIFAR10, "CIFAR-10", (94.68, 94.25, 94.71, 94.97, 94.82, 95.22, 95.03)),
                    (CIFAR100, "CIFAR-100", (74.10, 74.03, 74.19, 74.56, 74.73, 74.91, 74.79)),
                )
                for score, accuracy in zip(
                    ("origin", "random", "grad_norm", "snip", "grasp", "synflow", "vote"), figures, strict=True
                )
            ),
        ),
        Study(
            "stages",
            "Figure 7",
            "DyRep for the first N of 100 epochs, then a fixed structure",
            ("accuracy",),
            tuple(
                Row(f"DyRep-{stop}", {}, Training(CIFAR100, settings={"epochs": 100}, stop=stop))
                for stop in (20, 40, 60, 80, 100)
            ),
            picture="curves",
            note="The paper shows curves without figures.",
        ),
    )
}
"""All tables and figures with results, by the name to type."""
