import numpy as np

from quartet.services.executor.noise import uniform

PINNED = ["0x1.1c13ade1c7e5cp-3", "0x1.c0431c3004f88p-2", "0x1.c370e637f4e34p-1"]


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_the_function_is_part_of_what_a_seed_promises() -> None:
    noise = uniform(u64(0, 7, 2**63 - 1), u64(0, 1, 3), u64(0, 0, 100_000))
    assert [x.hex() for x in noise.tolist()] == PINNED


def test_each_number_depends_on_its_own_keys_only() -> None:
    alone = uniform(u64(11), u64(0), u64(5))[0]
    assert uniform(u64(3, 11, 99), u64(2, 0, 1), u64(1, 5, 7))[1] == alone


def test_numbers_are_uniform_and_streams_differ() -> None:
    index = np.arange(20_000, dtype=np.uint64)
    streams = [
        uniform(np.full_like(index, seed), np.full_like(index, choice), index)
        for seed, choice in ((0, 0), (0, 1), (1, 0))
    ]
    for stream in streams:
        counts, _ = np.histogram(stream, 100, (0, 1))
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert chi_square < 99 + 4 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.03
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(streams[one], streams[other])[0, 1]) < 0.03
    # By seed, too: neighbouring seeds' first numbers are as random as one seed's sequence.
    counts, _ = np.histogram(uniform(index, np.zeros_like(index), np.zeros_like(index)), 100, (0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 4 * np.sqrt(2 * 99)
