"""Models on real data: scikit-learn's digits and the text of Python's own help, which every machine has; Fashion-MNIST.

That text is of the Python that runs: compare perplexities of one version only.

Fashion-MNIST is read from FOLDER, where Debian's package `dataset-fashion-mnist` puts it.
A task's batches depend on seed, rank and step alone, so that all exchanges see the same data. Models are trained on a
GPU where there is one; all ranks then share it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 48  # characters of a sequence
TRAIN = 1437  # of 1,797 digits
FOLDER = Path("/usr/share/datasets")
TESTED = 5000  # of 10,000 test images of clothing
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Task:
    """model: () -> a new one on the CPU, out of torch's generator. batch: samples of all ranks together, a step.

    rates: learning rate of each optimizer that it is for, at which dense does well. data: kind of the training, as
    `thinwire.advise` names it; text is of characters, whose score is a perplexity. images: () -> those to train on and
    their labels, those to test on and theirs. points: of a curve. large: a training takes minutes, so that
    `python -m bench convergence` takes it only if it is asked for.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: int
    steps: int
    rates: dict[str, float]
    data: str
    images: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    points: int = 6
    large: bool = False

    @property
    def text(self) -> bool:
        return self.data.startswith("text")

    def loss(self, model: nn.Module, *, seed: int, rank: int, size: int, step: int) -> Tensor:
        """Of this rank's share of a step's batch."""
        count = self.batch // size
        if self.images is None:
            inputs, labels = _text_batch(count, seed, rank, size, step)
        else:
            images, targets, _, _ = self.images()
            chosen = _chosen(len(images), count, seed, rank, size, step)
            inputs, labels = images[chosen], targets[chosen]
        device = next(model.parameters()).device
        return F.cross_entropy(model(inputs.to(device)), labels.to(device))

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy in percent on the test images; of text the perplexity of a character."""
        model.eval()
        device = next(model.parameters()).device
        if self.images is None:
            held_out = characters()[1][: 192 * LENGTH + 1].to(device)
            found = F.cross_entropy(model(held_out[:-1].view(-1, LENGTH)), held_out[1:].view(-1, LENGTH))
            model.train()
            return math.exp(found.item())
        _, _, inputs, labels = self.images()
        found = torch.cat([model(some.to(device)).argmax(1).cpu() for some in torch.split(inputs, 500)])
        model.train()
        return 100 * float((found == labels).float().mean())


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and labels to train on, then those to test on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]


@cache
def characters() -> tuple[Tensor, Tensor, int]:
    """Text to train on, and to test on (its last twentieth), as numbers; and how many characters there are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    cut = len(numbers) * 19 // 20
    return numbers[:cut], numbers[cut:], len(known)


@cache
def clothing() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fashion-MNIST: inputs and labels to train on, then the first `TESTED` of those to test on."""
    from thinwire_cifar.data.fashion_mnist import load
    from thinwire_trainer.errors import RunError

    try:
        data = load(FOLDER)
    except RunError as missing:
        raise SystemExit(
            f"Fashion-MNIST: apt-get install dataset-fashion-mnist, or set FOLDER in {__name__}: {missing}"
        ) from missing
    everything, tested = torch.arange(len(data.train.labels)), torch.arange(TESTED)
    train, test = (
        (split.read(chosen, None).float() - data.mean[0]) / data.deviation[0]
        for split, chosen in ((data.train, everything), (data.test, tested))
    )
    return train, data.train.labels, test, data.test.labels[:TESTED]


def _chosen(samples: int, count: int, seed: int, rank: int, size: int, step: int) -> Tensor:
    """A rank's indices in a step: every sample once an epoch."""
    a_step = count * size
    epoch, place = divmod(step, samples // a_step)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return order[place * a_step + rank * count :][:count]


def _text_batch(count: int, seed: int, rank: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    text, _, _ = characters()
    generator = torch.Generator().manual_seed((1000 * seed + step) * size + rank)
    starts = torch.randint(len(text) - LENGTH - 1, (count, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """Attention and a perceptron, each after a norm, added to what came in."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.heads = causal, 4
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class ViT(nn.Module):
    """A row of pixels is a token."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.Sequential(Block(width, causal=False), Block(width, causal=False))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to (batch, 10)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.rows(images[:, 0]) + self.places)).mean(1))
        return logits


class TransformerLM(nn.Module):
    """Characters to the next ones, (batch, tokens) to (batch, characters, tokens)."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        count = characters()[2]
        self.embedding, self.places = nn.Embedding(count, width), nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, count)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens) + self.places)
        logits: Tensor = self.head(self.norm(x))
        return logits.transpose(1, 2)


class LSTMLM(nn.Module):
    """As `TransformerLM`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        count = characters()[2]
        self.embedding, self.lstm = nn.Embedding(count, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, count)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits.transpose(1, 2)


def cnn() -> nn.Module:
    """Two convolutions and a perceptron."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def resnet20(size: int = 8) -> nn.Module:
    """The cifar app's, for one channel and images of size × size.

    BatchNorm takes the mean of each rank's own batch, as under DDP, and the running statistics that are scored are
    rank 0's, which DDP would copy to all ranks. Dense SGD is at 98 % after 176 steps; it has 264 as the others, since
    at a density of 1 % an entry waits about 100.
    """
    from thinwire_cifar.models import resnet_cifar

    model: nn.Module = resnet_cifar.resnet20(channels=1, classes=10, size=size)
    return model


CONVOLUTIONAL, GPT = "images/convolutional", "text/transformer"
TASKS = {
    task.name: task
    for task in (
        Task("cnn-digits", cnn, 64, 264, {"sgd": 0.1, "adamw": 3e-3}, CONVOLUTIONAL, digits),
        Task("vit-digits", ViT, 64, 264, {"sgd": 0.1, "adamw": 3e-3, "muon": 6e-3}, "images/transformer", digits),
        Task("resnet20-digits", resnet20, 64, 264, {"sgd": 0.1, "adamw": 3e-3}, CONVOLUTIONAL, digits),
        Task("transformer-text", TransformerLM, 16, 2400, {"sgd": 0.3, "adamw": 6e-3, "muon": 6e-3}, GPT),
        Task("lstm-text", LSTMLM, 16, 2400, {"sgd": 2.0, "adamw": 1e-2}, "text/recurrent"),
        Task("gpt-text", partial(TransformerLM, 256, 4), 16, 1200, {"adamw": 1e-3}, GPT, points=24, large=True),
        Task(
            *("resnet20-clothing", partial(resnet20, 28), 128, 936, {"sgd": 0.1}, CONVOLUTIONAL, clothing),
            points=12,
            large=True,
        ),
    )
}
