"""DeepSpeech2: what padding must not change, and the published sizes."""

import pytest
import torch
from thinwire_deepspeech.decoding import LABELS
from thinwire_deepspeech.model import Convolution, DeepSpeech2, Lookahead, Size, deepspeech2, lstman4, small
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence

FRONT = (
    Convolution(channels=2, kernel=(5, 5), stride=(4, 2)),
    Convolution(channels=3, kernel=(3, 3), stride=(2, 1)),
)


def tiny(bins=17, **given):
    size = Size(**({"convolutions": FRONT, "cell": "gru", "hidden": 4, "layers": 2} | given))
    torch.manual_seed(0)
    return DeepSpeech2(size, labels=5, bins=bins)


def padded(utterances):
    return pad_sequence([each.T for each in utterances], batch_first=True).transpose(1, 2)


def utterances(*lengths, bins=17):
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(bins, length, generator=drawn) for length in lengths]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_padded_batch_gives_what_each_utterance_gives_alone(cell, bidirectional):
    model, heard = tiny(cell=cell, bidirectional=bidirectional, context=3), utterances(7, 30, 1, 12)
    model(padded(heard), torch.tensor([7, 30, 1, 12]))  # running statistics that are not those of the beginning
    model.eval()
    together, lengths = model(padded(heard), torch.tensor([7, 30, 1, 12]))
    assert lengths.tolist() == [4, 15, 1, 6] == model.output_lengths(torch.tensor([7, 30, 1, 12])).tolist()
    for number, each in enumerate(heard):
        alone, length = model(each[None], torch.tensor([each.shape[1]]))
        torch.testing.assert_close(together[: lengths[number], number], alone[:, 0])
        assert length == lengths[number]


def test_padding_does_not_enter_statistics():
    """Trained on the same batch with more zeros behind it, the model gives and learns the same."""
    heard, lengths = padded(utterances(9, 20)), torch.tensor([9, 20])
    results = []
    for zeros in (0, 31):
        model = tiny()
        log_probabilities, _ = model(torch.nn.functional.pad(heard, (0, zeros)), lengths)
        results.append((log_probabilities[:10], dict(model.named_buffers())))
    torch.testing.assert_close(results[0], results[1])


def test_first_statistics_are_those_of_the_frames():
    """Of the second normalisation of frames, against the frames by hand."""
    model, heard = tiny(), utterances(9, 20)
    layer = model.convolutions[0]
    alone = [layer.convolution(each[None, None])[0, :, :, : (each.shape[1] + 1) // 2].flatten(1) for each in heard]
    frames = torch.cat(alone, 1)  # [channels, all frames of all bins]
    model(padded(heard), torch.tensor([9, 20]))
    torch.testing.assert_close(layer.norm.running_mean, 0.1 * frames.mean(1))
    torch.testing.assert_close(layer.norm.running_var, 0.9 + 0.1 * frames.var(1))


def test_lookahead_is_a_weighted_sum_of_what_comes():
    layer, x = Lookahead(2, context=2), torch.rand(1, 5, 2)
    expected = torch.zeros_like(x)
    for t in range(5):
        for ahead in range(3):
            if t + ahead < 5:
                expected[0, t] += layer.weight[:, ahead] * x[0, t + ahead]
    torch.testing.assert_close(layer(x), expected.clamp(0, 20))


def test_every_parameter_is_trained():
    for bidirectional in (True, False):
        model = tiny(bidirectional=bidirectional)
        log_probabilities, lengths = model(padded(utterances(9, 20)), torch.tensor([9, 20]))
        labels = torch.tensor([1, 2, 2])
        ctc_loss(log_probabilities, labels, lengths, torch.tensor([1, 2]), reduction="sum").backward()
        assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        (lstman4(), 27_569_568),  # Li & Hoefler, PPoPP 2022 (Ok-Topk), table 1
        (deepspeech2(), 54_823_168),  # by the sizes of its layers, as the published code builds them
        (small(), 305_728),
    ],
)
def test_published_sizes(size, parameters):
    with torch.device("meta"):
        model = DeepSpeech2(size, labels=len(LABELS))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("size", [lstman4(), deepspeech2()], ids=["lstman4", "deepspeech2"])
def test_models_of_published_size_take_a_step(size):
    """On a quarter of a second."""
    torch.manual_seed(0)
    model = DeepSpeech2(size, labels=len(LABELS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    heard, labels = utterances(24, bins=161)[0][None], torch.tensor([1, 2])

    def loss():
        log_probabilities, lengths = model(heard, torch.tensor([24]))
        return ctc_loss(log_probabilities, labels, lengths, torch.tensor([2]), reduction="sum")

    before = loss()
    before.backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        assert loss() < before


def test_bfloat16_autocast():
    model = tiny()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probabilities, _ = model(padded(utterances(9, 20)), torch.tensor([9, 20]))
    assert log_probabilities.dtype == torch.float32
    assert log_probabilities.isfinite().all()
