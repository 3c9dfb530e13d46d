"""Trains a graph network of PyTorch Geometric."""

import torch
from checks import check, digest, exact, random_number
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(4, 8), SAGEConv(8, 3)

    def forward(self, data: Data) -> torch.Tensor:
        hidden = functional.dropout(self.conv1(data.x, data.edge_index).relu(), 0.2, self.training)
        return self.conv2(hidden, data.edge_index)


graph = Data(torch.randn(20, 4), torch.randint(0, 20, (2, 60)), y=torch.randint(0, 3, (20,)))
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    model.train()
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(graph), graph.y)
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        check(step, exact(loss), exact(model(graph).sum()))
check("final", digest(model), random_number())
