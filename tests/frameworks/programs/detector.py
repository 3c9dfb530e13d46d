"""Trains torchvision's Faster R-CNN for two steps and detects with it."""

import torch
from checks import check, digest, exact, random_number
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

torch.manual_seed(0)
model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = [torch.rand(3, 64, 96), torch.rand(3, 80, 64)]
boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
targets = [{"boxes": boxes, "labels": torch.tensor([label])} for label in (1, 2)]
for step in range(2):
    losses = model(images, targets)
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    check(step, {name: exact(loss) for name, loss in losses.items()})
model.eval()
with torch.no_grad():
    check("scores", exact(model(images)[0]["scores"].sum()))
check("final", digest(model), random_number())
