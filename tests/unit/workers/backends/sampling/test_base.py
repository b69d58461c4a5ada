from __future__ import annotations

import numpy as np

from workers.backends.sampling.base import alternatives_seed, sample_seed


def test_no_two_samples_of_any_seeds_have_the_same_random_numbers():
    """SeedSequence splits its numbers into words of 32 bits and pads them with zeros, so some pairs would be the same
    words."""
    words = (0, 1, 2, 5, 7, 2**32 - 1)
    seeds = [low + high * 2**32 for low in words for high in words]
    streams = [sample_seed(seed, index) for seed in seeds for index in words]
    streams += [alternatives_seed(seed) for seed in seeds]
    assert len({stream.generate_state(2, np.uint64).tobytes() for stream in streams}) == len(streams)


def test_samples_of_seeds_below_two_to_the_32_are_those_of_earlier_versions():
    for seed, index in ((0, 0), (3, 1), (2**32 - 1, 5), (3, 2**32)):
        earlier = np.random.SeedSequence([seed, index])
        assert sample_seed(seed, index).generate_state(4).tolist() == earlier.generate_state(4).tolist()
