"""A character-level LSTM on text that ships with Python (its own documentation): which character comes next?

python examples/text/char_lstm.py
"""

import math
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

from smoothout import AdaSmoothOut

LENGTH, BATCH, STEPS = 32, 32, 120


class CharLstm(nn.Module):
    def __init__(self, characters, width=64):
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text):
        return self.head(self.lstm(self.embed(text))[0])


def bits_per_character(model, text):
    """Of text that the model was not trained on."""
    model.eval()
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    with torch.no_grad():
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item() / math.log(2)


def main():
    torch.manual_seed(0)
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))[:100_000].lower()
    alphabet = sorted(set(topics))
    text = torch.tensor([alphabet.index(c) for c in topics])
    train, test = text[:-5_000], text[-5_000:]

    model = CharLstm(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    smooth = AdaSmoothOut(model, strength=0.05)  # filters of an LSTM: each row of its gates
    smooth.attach(optimizer)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)

    before = bits_per_character(model, test)
    model.train()
    for step in range(STEPS):
        starts = torch.randint(len(train) - LENGTH, (BATCH, 1))
        windows = train[starts + torch.arange(LENGTH)]
        F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    print(f"test bits per character {before:.2f} before, {bits_per_character(model, test):.2f} after {STEPS} steps")


main()
