"""Every step adds exactly 1 to every parameter, at its own pace on every worker; two servers have
two parts each.
"""

import sys
import time

import torch

import aladdin_mpi as am

if __name__ == "__main__":
    folder, servers, steps, resume, merges = sys.argv[1:6]
    am.init(
        "aladdin", out=folder, resume=resume, checkpoint_iterations=40, checkpoint_keep=100,
        replies=False, coalesce=False, progress="off", servers=int(servers),
        max_shard_bytes=1024 if servers == "2" else 0, merge_on_node=merges == "1",
    )  # fmt: skip
    x = torch.nn.Parameter(torch.zeros(1000))
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), model)
    x.grad = -torch.ones(1000)
    while am.iteration() < int(steps) and not am.should_stop():
        time.sleep(0.001 * (1 + am.rank()))
        optimizer.step()
    am.finish(model)
