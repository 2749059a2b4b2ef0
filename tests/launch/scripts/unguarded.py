"""A script that forgets that loader processes import it again."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aladdin_mpi as am

am.init(out=sys.argv[1], progress="off")
model = nn.Linear(4, 1)
optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
plain = "plain" in sys.argv
start = "spawn" if plain else None
data = DataLoader(TensorDataset(torch.ones(32, 4)), num_workers=1, multiprocessing_context=start)
loader = data if plain else am.partition(data)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
am.finish(model)
