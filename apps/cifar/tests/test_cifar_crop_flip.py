"""The augmentation: shifted and mirrored copies, by each image's own key."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_cifar.data.cifar_images import PADDING, crop_flip
from thinwire_cifar.data.images import keys, uniform


@given(seed=st.integers(0, 2**32), n=st.integers(0, 5), height=st.integers(1, 9), width=st.integers(1, 9))
def test_augmented_images_are_shifted_and_mirrored_copies(seed: int, n: int, height: int, width: int) -> None:
    pixels = torch.randint(1, 256, (n, 3, height, width), dtype=torch.uint8)
    augmented = crop_flip(pixels, keys(seed, np.arange(n)))
    assert augmented.shape == pixels.shape
    assert augmented.dtype == torch.uint8
    for before, after in zip(pixels, augmented, strict=True):
        padded = torch.nn.functional.pad(before, (PADDING,) * 4)
        windows = [
            padded[:, top : top + height, left : left + width]
            for top in range(2 * PADDING + 1)
            for left in range(2 * PADDING + 1)
        ]
        assert any(torch.equal(after, window) or torch.equal(after, window.flip(2)) for window in windows)


def test_half_are_mirrored_and_every_shift_occurs() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    augmented = crop_flip(image.expand(4000, 1, 4, 4), keys(0, np.arange(4000)))
    unshifted = (augmented == image).flatten(1).all(1).sum()
    mirrored = (augmented == image.flip(3)).flatten(1).all(1).sum()
    assert 10 < unshifted < 45  # 4,000 / (81 · 2) = 25 in expectation
    assert 10 < mirrored < 45
    assert len({tuple(one.flatten().tolist()) for one in augmented}) > 81


@given(seed=st.integers(0, 2**64 - 1), order=st.permutations(range(7)), parts=st.integers(1, 7))
def test_an_images_numbers_are_its_own(seed: int, order: list[int], parts: int) -> None:
    """In whatever order and company it is read."""
    pixels = torch.randint(0, 256, (7, 3, 5, 6), dtype=torch.uint8)
    together = crop_flip(pixels, keys(seed, np.arange(7)))
    chosen = torch.tensor(order)
    apart = [crop_flip(pixels[some], keys(seed, some.numpy())) for some in chosen.tensor_split(parts) if len(some)]
    assert torch.equal(torch.cat(apart), together[chosen])


def test_numbers_are_even_and_unlike() -> None:
    numbers = uniform(keys(0, np.arange(10_000)), 4)
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = [np.histogram(column, bins=10, range=(0, 1))[0] for column in numbers.T]
    assert (np.abs(np.array(counts) - 1000) < 5 * 30).all()  # a standard deviation is 30
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.05
    assert not np.isin(uniform(keys(1, np.arange(10_000)), 4), numbers).any()


def test_the_stream_is_splitmix64() -> None:
    """Its published first numbers for the seed 0; a run of today must go on with the bits of a run of yesterday."""
    first = (uniform(np.array([0], np.uint64), 2) * 2**53).astype(np.uint64)
    assert first.tolist() == [[0xE220A8397B1DCDAF >> 11, 0x6E789E6AA1B965F4 >> 11]]
