// Random numbers of a device.
//
// Note [Random numbers]
// A generator's state is that of a GPU's Philox generator, 16 bytes, little endian:
//     bytes 0-7   seed
//     bytes 8-15  offset, a multiple of 4
// Every random kernel draws from a host generator seeded with a hash of both, and advances the offset by what CUDA's
// kernels use (calc_execution_policy in torch): the numbers that each of their threads draws, four at a time. So equal
// states give equal numbers, any change of seed or offset changes the numbers, and code that computes offsets (DTensor
// does, per shard) works as on GPUs. A GPU's numbers differ.
#pragma once

#include <ATen/core/Generator.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// Finaliser of the splitmix64 generator (Steele, Lea, Flood 2014): every input bit reaches every output bit.
uint64_t mix(uint64_t value);

struct PhiloxState {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};
using GeneratorState = std::shared_ptr<PhiloxState>;

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return state_->offset; }
  uint64_t current_seed() const override { return state_->seed; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  const GeneratorState& state() const { return state_; }

  // A seed for a host generator that is to produce `count` numbers; advances the offset.
  uint64_t draw(uint64_t count);

 private:
  c10::GeneratorImpl* clone_impl() const override;

  // Shared with the generators that graphsafe_get_state hands out.
  GeneratorState state_ = std::make_shared<PhiloxState>();
};

// Does not count as a use of the device: a process may seed generators and fork afterwards.
const at::Generator& default_generator(c10::DeviceIndex device);

// A host generator for one kernel on `device`. Draws from `given`, which must belong to the device, or from the default
// generator. Locks the generator while it draws.
at::Generator host_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device, uint64_t count);

} // namespace torch_ext::sim
