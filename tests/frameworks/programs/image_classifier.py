"""Trains a timm model as its scripts do: mixup, an EMA copy, accumulation, validation of both."""

import numpy
import timm
import torch
from checks import check, digest, exact, logged, random_number
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import nn

torch.manual_seed(0)
numpy.random.seed(0)
model = timm.create_model("resnet10t", num_classes=4)
optimizer = create_optimizer_v2(model, opt="lamb", lr=0.01)
average = ModelEmaV3(model, decay=0.9)
mixup = Mixup(mixup_alpha=0.2, num_classes=4)
train_loss, validate_loss = SoftTargetCrossEntropy(), nn.CrossEntropyLoss()
images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 4, (8,))
for epoch in range(2):
    model.train()
    for batch in range(4):
        inputs, targets = mixup(images.clone(), labels.clone())
        loss = train_loss(model(inputs), targets) / 2
        loss.backward()
        step = 2 * epoch + batch // 2
        logged("loss", step, loss)
        if batch % 2:
            logged("lr[0]", step, optimizer.param_groups[0]["lr"])
            gradients = [parameter.grad for parameter in model.parameters()]
            logged("grad_norm", step, nn.utils.get_total_norm(gradients))
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
    model.eval()
    with torch.no_grad():
        for validated in (model, average):
            check("validation", epoch, exact(validate_loss(validated(images), labels)))
check("final", digest(model), digest(average), random_number())
