"""A small vision transformer on scikit-learn's handwritten digits, with what Adam does exchanged sparsely.

    pip install transformers accelerate scikit-learn
    torchrun --nproc-per-node 2 examples/transformers/digits.py

Trainer's Adam sees each rank's own gradients, and what it would do with them is exchanged. The lines are marked.
"""

import tempfile

import torch
from data_parallel import UpdateOptimizer
from data_parallel.integrations.transformers import DistributedOptimizers
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

EPOCHS, BATCH, RATE = 12, 16, 0.003


def main() -> None:
    """1,437 images to train on, 360 to test with, in patches of 2×2 pixels."""
    bunch = load_digits()
    pixels, labels = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": pixels[i], "labels": labels[i]} for i in order]
    arguments = TrainingArguments(  # it starts the process group
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
        seed=0,
    )
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "initializer_range": 0.2}
    model = ViTForImageClassification(ViTConfig(**image, **size))
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = UpdateOptimizer.for_model(adam, model, steps=EPOCHS * 45)  # line 1
    trainer = Trainer(model, arguments, train_dataset=rows[:1437], optimizers=(optimizer, None))
    trainer.add_callback(DistributedOptimizers(trainer))  # line 2
    trainer.train()
    accuracy = accuracy_of(model, pixels[order[1437:]], labels[order[1437:]])
    if trainer.is_world_process_zero():
        print(f"test accuracy {accuracy:.1%} on {arguments.world_size} ranks")


def accuracy_of(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    """How much is read right."""
    model.eval()
    with torch.no_grad():
        return float((model(pixel_values=pixels).logits.argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    main()
