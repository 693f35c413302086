"""Random numbers: the generator's state, what draws advance it by, and Philox's numbers."""

import struct

import torch

from torch_ext.conformance.parity import program, raised

SOURCE = "aten/src/ATen/cuda/CUDAGeneratorImpl.cpp"

def state(gpu, device=0):
    """Return the seed and the offset of the default generator."""
    return [*struct.unpack("QQ", bytes(gpu.get_rng_state(device).tolist()))]

@program(f"{SOURCE}: get_state (8 bytes of seed, 8 of offset, on the host)", [16, "torch.uint8", "cpu"])
def shape_of_a_state(gpu):
    found = gpu.get_rng_state()
    return [found.numel(), str(found.dtype), str(found.device)]

@program("torch/csrc/Generator.cpp: THPGenerator_manualSeed (unsigned, else wrapped)", {
    0: 0, 1: 1, -1: (1 << 64) - 1, (1 << 63) + 5: (1 << 63) + 5, -(1 << 63): 1 << 63,
})
def seed_of_manual_seed(gpu, seed):
    gpu.manual_seed(seed)
    return state(gpu)[0] if gpu.initial_seed() == state(gpu)[0] else "initial_seed differs"

@program(f"{SOURCE}: set_current_seed (the offset begins anew)", [[3, 0], [3, 0]])
def offset_of_a_new_seed(gpu):
    gpu.manual_seed(3)
    found = [state(gpu)]
    torch.rand(1, device=gpu.type)
    gpu.manual_seed(3)
    return [*found, state(gpu)]

@program("aten/src/ATen/native/cuda/DistributionTemplates.h: calc_execution_policy (at least one call of curand: 4)", {
    "rand": 4, "randn": 4, "randint": 4, "rand of nothing": 0, "rand of 1000": 4, "dropout": 4, "bernoulli": 4,
    "exponential": 4, "two": 8, "uniform_": 4,
})
def offset_after_a_draw(gpu, what):
    gpu.manual_seed(0)
    ones = torch.ones(5, device=gpu.type)
    calls = {
        "rand": lambda: torch.rand(1, device=gpu.type), "randn": lambda: torch.randn(5, device=gpu.type),
        "randint": lambda: torch.randint(3, (5,), device=gpu.type),
        "rand of nothing": lambda: torch.rand(0, device=gpu.type),
        "rand of 1000": lambda: torch.rand(1000, device=gpu.type), "dropout": lambda: torch.dropout(ones, 0.5, True),
        "bernoulli": lambda: torch.bernoulli(ones), "exponential": ones.exponential_, "uniform_": ones.uniform_,
        "two": lambda: [torch.rand(1, device=gpu.type) for _ in range(2)],
    }
    calls[what]()
    return state(gpu)[1]

@program(f"{SOURCE}: set_state", {
    7: "RuntimeError: RNG state is wrong size", 17: "RuntimeError: RNG state is wrong size", 16: "raises nothing",
    8: "raises nothing",
})
def size_of_a_state(gpu, size):
    return raised(lambda: gpu.set_rng_state(torch.zeros(size, dtype=torch.uint8)))

@program("aten/src/ATen/core/Generator.h: check_rng_state", "TypeError: RNG state must be a torch.ByteTensor")
def type_of_a_state(gpu):
    generator = gpu.default_generators[0] if hasattr(gpu, "default_generators") else torch.Generator(gpu.type)
    return raised(lambda: generator.set_state(torch.zeros(16)))

@program(f"{SOURCE}: set_philox_offset_per_thread",
         {3: "RuntimeError: offset must be a multiple of 4", 8: "raises nothing"})
def offset_of_a_generator(gpu, offset):
    return raised(lambda: torch.Generator(gpu.type).set_offset(offset))

@program(f"{SOURCE}: CUDAGeneratorImpl (default_rng_seed_val)", [67280421310721, 0])
def new_generator(gpu):
    made = torch.Generator(gpu.type)
    return [made.initial_seed(), made.get_offset()]

@program("torch/random.py: fork_rng", [True, True])
def forked_generator(gpu):
    before = state(gpu)
    with torch.random.fork_rng(devices=[0], device_type=gpu.type):
        torch.rand(1, device=gpu.type)
        inside = state(gpu) != before
    return [inside, state(gpu) == before]

@program("torch/random.py: manual_seed (all devices)", [[5, 0], 5])
def seed_of_torch(gpu):
    torch.manual_seed(5)
    return [state(gpu), torch.initial_seed()]

@program("torch/cuda/random.py: manual_seed, manual_seed_all", [[1, 2], [3, 3]], devices=2)
def seed_of_each_device(gpu):
    for device in (0, 1):
        with gpu.device(device):
            gpu.manual_seed(device + 1)
    found = [state(gpu, device)[0] for device in (0, 1)]
    gpu.manual_seed_all(3)
    return [found, [state(gpu, device)[0] for device in (0, 1)]]

def philox(seed, subsequence, offset=0):
    """Return the first 32 bits of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3")."""
    low, word = seed & 0xFFFFFFFF, 0xFFFFFFFF
    high, a, b, c, d = seed >> 32, offset // 4, 0, subsequence, 0
    for _ in range(10):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (two >> 32) ^ b ^ low, two & word, (one >> 32) ^ d ^ high, one & word
        low, high = (low + 0x9E3779B9) & word, (high + 0xBB67AE85) & word
    return a

def uniform(seed, index, offset=0):
    """Return curand_uniform of thread ``index``: over 0, up to 1, in float32."""
    return torch.tensor(philox(seed, index, offset) * 2.0**-32 + 2.0**-33, dtype=torch.float32).item()

@program("cuRAND Library, Philox_4x32_10; aten/src/ATen/native/cuda/DistributionTemplates.h: uniform_and_transform",
         {seed: [round(uniform(seed, index), 5) for index in range(4)] for seed in (0, 1, 1 << 40)})
def first_numbers(gpu, seed):
    gpu.manual_seed(seed)
    return [round(each, 5) for each in torch.rand(4, device=gpu.type).tolist()]
