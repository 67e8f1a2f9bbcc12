"""``offload_pays`` on numbers that are easy to verify by hand."""

import pytest
import torch
from conftest import raises

import ackpt
from ackpt.core.errors import OffloadError
from ackpt.offloading.pays import OffloadPays, _covers_from, _fit, offload_pays

MS = 1e-3


@pytest.mark.parametrize(
    "measured, parts",
    [
        ({100: 2.0}, (0, 0.02, 0)),
        ({1: 3.0, 2: 5.0}, (1, 2, 0)),  # a fixed part: times grow more slowly than lengths
        ({1: 3.0, 2: 10.0}, (0, 1, 2)),  # a quadratic part: they grow faster
        ({1: 6.0, 2: 11.0, 3: 18.0}, (3, 2, 1)),
        ({1: 6.0, 2: 11.0, 3: 18.0, 10: 123.0}, (3, 2, 1)),
        ({2: 6.0, 4: 12.0, 8: 24.0}, (0, 3, 0)),
        ({7: 5.0, 70: 5.0}, (5, 0, 0)),
        ({1: 2.0, 2: 8.0, 5: 50.0}, (0, 0, 2)),
    ],
)
def test_the_fit_recovers_exact_times(measured, parts):
    assert _fit(measured) == pytest.approx(parts, abs=1e-9)


@pytest.mark.parametrize(
    "window, copy, start",
    [
        ((0, 2, 0), 1, 1),
        ((0, 1, 0), 1, 1),
        ((0, 1, 0), 2, None),
        ((9, 1, 0), 2, None),  # short ones overlap with the fixed part, long ones do not
        ((0, 0, 1), 10, 10),
        ((0, 3, 1), 10, 7),
        ((0, 0, 2), 5, 3),  # 2.5
        ((6, 0, 1), 5, 3),  # (T - 2)(T - 3): complete up to 2 and from 3 on
        ((7, 0, 1), 5, 1),  # no root
        ((0, 6, 1), 5, 1),
    ],
)
def test_the_length_from_which_compute_covers_a_copy(window, copy, start):
    assert _covers_from(window, copy) == start


def test_a_region_at_one_length():
    # 1000 tokens of 4000 bytes: 4 MB, at 1 GB/s 4 ms. Forward 8 ms, half of backward (16 ms) 8 ms: both cover it.
    pays = offload_pays(4000, {1000: 8 * MS}, bandwidth=1e9)
    assert pays == OffloadPays(
        tokens=1000,
        overlapped=True,
        overlapped_share=1.0,
        copy_seconds=pytest.approx(4 * MS),
        forward_seconds=pytest.approx(8 * MS),
        backward_seconds=pytest.approx(16 * MS),
        overlapped_from=1,
        bandwidth=1e9,
    )


def test_the_length_from_which_offload_pays():
    # Forward T^2 ns, copy 500 T ns: complete overlap from 500 on. At 100 tokens a fifth.
    seconds = {n: n**2 * 1e-9 for n in (100, 1000)}
    pays = offload_pays(500, seconds, bandwidth=1e9, tokens=100)
    assert (pays.overlapped, pays.overlapped_from) == (False, 500)
    assert pays.overlapped_share == pytest.approx(0.2)
    assert offload_pays(500, seconds, bandwidth=1e9, tokens=500).overlapped_share == pytest.approx(1)
    assert offload_pays(500, seconds, bandwidth=1e9).tokens == 1000
    # A backward that is only as long as the forward covers the copy in from 1000 tokens on: that decides.
    slow = offload_pays(500, seconds, backward_seconds=seconds, bandwidth=1e9)
    assert slow.overlapped_from == 1000


def test_a_bandwidth_is_measured(monkeypatch):
    sizes = []

    monkeypatch.setattr("ackpt.offloading.cpu_streams.Event.seconds", lambda event: 1.0 if event.done() else 0.0)
    monkeypatch.setattr("ackpt.offloading.transport._move", lambda buffer, target, source, size: sizes.append(size))
    pays = offload_pays(100, {8: 1.0}, tokens=50)
    assert pays.bandwidth == 5000  # 50 tokens in a second
    assert set(sizes) == {5000} and len(sizes) == 12


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bytes_per_token": 0}, "bytes_per_token must be a positive number; got 0"),
        ({"bytes_per_token": True}, "bytes_per_token must be a positive number"),
        ({"seconds": {}}, "seconds must be {tokens: seconds} with at least one length"),
        ({"seconds": 0.1}, "seconds must be {tokens: seconds}"),
        ({"seconds": {8: -1.0}}, r"seconds\[8\] must be a positive number; got -1.0"),
        ({"seconds": {0: 1.0}}, "a length in seconds must be a whole number of tokens"),
        ({"backward_seconds": {}}, "backward_seconds must be"),
        ({"bandwidth": -1}, "bandwidth must be a positive number; got -1"),
        ({"tokens": 0}, "tokens must be a whole number of tokens, 1 or more; got 0"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        offload_pays(**{"bytes_per_token": 4, "seconds": {8: 1.0}, "bandwidth": 1e9, **arguments})


def test_devices_without_streams_are_refused():
    raises(OffloadError, "no copy streams", lambda: offload_pays(4, {8: 1.0}, device="meta"))
    if not torch.cuda.is_available():
        raises(ValueError, "give the bandwidth", lambda: offload_pays(4, {8: 1.0}, device="cuda"))
    message = "device='tpu' is unknown: choose 'cpu' or 'cuda'"
    raises(ValueError, message, lambda: ackpt.offload_pays(4, {10: 1.0}, device="tpu"))


def test_a_model_is_refused_with_what_to_give():
    with pytest.raises(TypeError, match=r"got a model: it takes what one block offloads per token.*ackpt.audit\(model"):
        offload_pays(torch.nn.Linear(8, 8), torch.ones(4, 8))
