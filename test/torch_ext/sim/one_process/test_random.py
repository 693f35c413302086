"""Every device draws from its own generator."""

import pytest
import torch

SIM = torch.get_device_module("sim")


def test_seed_decides_device_numbers_and_host_seed_does_not():
    torch.manual_seed(5)
    first = torch.rand(8, device="sim")
    torch.rand(3)
    torch.random.default_generator.manual_seed(99)
    second = torch.rand(8, device="sim")
    SIM.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device="sim")) and torch.equal(second, torch.rand(8, device="sim"))
    assert not torch.equal(first, second)


def test_state_is_seed_and_offset_and_restores_the_sequence():
    SIM.manual_seed(7)
    torch.rand(5, device="sim")
    state = SIM.get_rng_state()
    assert state.view(torch.int64).tolist() == [7, 4]
    numbers = torch.randn(4, device="sim")
    SIM.set_rng_state(state)
    assert torch.equal(numbers, torch.randn(4, device="sim"))
    with pytest.raises(RuntimeError, match="RNG state is wrong size: expected 16 bytes"):
        SIM.set_rng_state(state[:7])
    SIM.set_rng_state(state[:8])  # the seed alone
    assert SIM.get_rng_state().view(torch.int64).tolist() == [7, 0]


def test_offset_advances_as_by_the_threads_of_a_gpu_with_one_multiprocessor():
    SIM.manual_seed(7)
    for numbers, expected in ((5, 4), (8192, 8), (8193, 16), (1 << 20, 16 + 512)):  # 2048 threads draw 4 at a time
        torch.rand(numbers, device="sim")
        assert SIM.get_rng_state().view(torch.int64)[1] == expected


def test_devices_have_their_own_generators_and_reject_foreign_ones():
    generator = torch.Generator("sim:1").manual_seed(3)
    one = torch.rand(4, device="sim:1", generator=generator)
    assert torch.equal(one, torch.rand(4, device="sim:1", generator=torch.Generator("sim:1").manual_seed(3)))
    for foreign in (torch.Generator(), torch.Generator("sim:0")):
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(4, device="sim:1", generator=foreign)
    SIM.manual_seed_all(1)
    assert torch.equal(torch.rand(4, device="sim:0").cpu(), torch.rand(4, device="sim:2").cpu())
