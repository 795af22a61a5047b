"""A detector, run as the guide says: list inputs, targets in training mode, frozen norms."""

import pytest
import torch
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

import dyrep


@pytest.mark.slow
def test_a_detector_with_frozen_norms_evolves_its_backbone():
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=FrozenBatchNorm2d
    )
    model = FasterRCNN(backbone, num_classes=3, min_size=96, max_size=96)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    controller = dyrep.DyRep(
        model,
        optimizer,
        dyrep.DyRepConfig.paper(interval=1, score="snip", include=("backbone.*",)),
        forward=lambda model, batch: model.backbone(torch.stack(list(batch[0]))),
    )
    target = {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    batch = ([torch.rand(3, 96, 96) for _ in range(2)], [target, target])
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        sum(model(*batch).values()).backward()
        optimizer.step()
        edits = controller.epoch_end([batch])
        assert edits
        assert all(edit.layer.startswith("backbone.") for edit in edits)
        assert all(edit.detail["drift"] < 1e-5 and edit.detail["train_drift"] < 1e-2 for edit in edits)
    plain = controller.deploy().eval()
    with torch.no_grad():
        images = torch.rand(1, 3, 96, 96)
        evolved, folded = model.eval().backbone(images), plain.backbone(images)
    for key, value in evolved.items():
        torch.testing.assert_close(folded[key], value, rtol=1e-4, atol=1e-4)
