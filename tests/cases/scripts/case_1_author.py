"""Case 1's script as its author has it: Accelerate alone. test_case_01_author.py changes three lines of it.

A class token and a scale have one row each, so that on two ranks one of them holds nothing of either; the running mean is
a persistent buffer.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x - self.mean.to(x.dtype)))))


class Stem(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, width))
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Linear(4, width)

    def forward(self, x):
        return self.embed(x) * self.scale + self.token


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = Stem(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    for name in ("--weights", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator()
    model = Net()
    model.load_state_dict(torch.load(args.weights))
    torch.manual_seed(7)
    no_decay = [p for n, p in model.named_parameters() if n in ("stem.token", "stem.scale")]
    decay = [p for n, p in model.named_parameters() if n not in ("stem.token", "stem.scale")]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": no_decay, "weight_decay": 0.0, "lr": 0.05}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    if args.resume:
        accelerator.load_state(f"{args.out}/epoch-{args.resume}")
    for epoch in range(args.resume, args.epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state(f"{args.out}/epoch-{epoch + 1}")

    values = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}
    torch.save(values, f"{args.out}/values-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
