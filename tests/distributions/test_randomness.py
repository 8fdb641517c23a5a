"""Explicit random numbers: one stream per batch element, seeds that do not collide."""

import pytest
import torch
from support.laws import generator

from marigold_uq.randomness import base_seed, member_generators, member_seed, rand, randn


def test_a_generator_per_element_gives_the_bits_that_the_element_would_get_alone() -> None:
    like = torch.zeros(())
    for source in (rand, randn):
        together = source((3,), (4, 2, 5), like=like, generator=[generator(s) for s in range(4)])
        assert together.shape == (3, 4, 2, 5)
        for order in ([0], [3, 1], [2, 0, 3, 1]):
            some = source((3,), (len(order), 2, 5), like=like, generator=[generator(s) for s in order])
            assert torch.equal(some, together[:, order])


def test_a_single_generator_fills_the_whole_batch_as_torch_does() -> None:
    drawn = randn((3,), (4, 2), like=torch.zeros(()), generator=generator(7))
    assert torch.equal(drawn, torch.randn(3, 4, 2, generator=generator(7)))


def test_numbers_have_the_dtype_of_the_tensor_they_are_meant_for() -> None:
    for dtype in (torch.float32, torch.float64):
        assert rand((), (2,), like=torch.zeros((), dtype=dtype), generator=generator()).dtype == dtype


def test_too_few_generators_are_an_error_that_counts_both() -> None:
    with pytest.raises(ValueError, match="got 2 generators for a batch of 4"):
        randn((), (4, 2), like=torch.zeros(()), generator=[generator(), generator(1)])


def test_seeds_of_members_never_collide() -> None:
    """Indices that differ in length, in trailing zeros or by a carry into the base are different streams."""
    keys = [(7,), (7, 0), (7, 0, 0), (0, 7), (5, 1), (5, 1, 1), (5 + 2**32,), (5 + 2**32, 1), (5, 1, 1, 0)]
    keys += [(base, image, member) for base in range(3) for image in range(20) for member in range(20)]
    assert len({member_seed(*key) for key in keys}) == len(set(keys))


def test_member_m_is_the_same_however_many_members_are_asked_for() -> None:
    few, many = member_generators(3, 2, prefix=(9,)), member_generators(3, 50, prefix=(9,))
    assert [g.initial_seed() for g in few] == [g.initial_seed() for g in many[:2]]
    assert len({g.initial_seed() for g in many}) == 50
    assert few[1].initial_seed() == member_seed(3, 9, 1)


def test_a_base_seed_comes_from_the_generator_and_from_nothing_else() -> None:
    before = torch.get_rng_state()
    assert base_seed(generator(1)) == base_seed(generator(1))
    assert base_seed(generator(1)) != base_seed(generator(2))
    assert torch.equal(before, torch.get_rng_state())


def test_a_list_of_one_generator_serves_the_whole_batch_as_in_diffusers() -> None:
    one, alone = (torch.Generator().manual_seed(3) for _ in range(2))
    like = torch.zeros(())
    assert torch.equal(randn((2,), (4, 3), like=like, generator=[one]), randn((2,), (4, 3), like=like, generator=alone))
