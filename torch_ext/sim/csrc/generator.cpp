#include "generator.h"

#include "device.h"
#include "graph.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr uint64_t kOffsetStep = 4;
constexpr uint64_t kThreads = 256;            // of a block
constexpr uint64_t kBlocks = 2048 / kThreads; // that run at a time, on the device's one multiprocessor (table.py)
constexpr int64_t kSeedBytes = 8, kStateBytes = 16;
static_assert(kStateBytes == 2 * sizeof(uint64_t), "the state is the seed followed by the offset");

} // namespace

uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

GeneratorImpl::GeneratorImpl(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(kSimKey)) {}

void GeneratorImpl::set_current_seed(uint64_t seed) {
  *state_ = {seed, 0};
}

void GeneratorImpl::set_offset(uint64_t offset) {
  TORCH_CHECK(offset % kOffsetStep == 0, "offset must be a multiple of 4, but got ", offset, ".");
  state_->offset = offset;
}

uint64_t GeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return state_->seed;
}

void GeneratorImpl::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK_TYPE(
      state.device_type() == c10::DeviceType::CPU && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
      "RNG state must be a torch.ByteTensor on the host.");
  TORCH_CHECK(
      (state.numel() == kStateBytes || state.numel() == kSeedBytes) && state.is_contiguous(),
      "RNG state is wrong size: expected ", kStateBytes, " bytes (seed and offset) or ", kSeedBytes,
      " (the seed), but got ", state.numel(), ".");
  std::array<uint64_t, 2> parts{};
  std::memcpy(parts.data(), state.data(), state.numel());
  set_current_seed(parts[0]);
  set_offset(parts[1]);
}

c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  const std::array<uint64_t, 2> parts{state_->seed, state_->offset};
  at::Tensor state = at::detail::empty_cpu({kStateBytes}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), parts.data(), kStateBytes);
  return state.getIntrusivePtr();
}

void GeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) {
  auto* other = dynamic_cast<GeneratorImpl*>(state.get());
  TORCH_CHECK_TYPE(
      other != nullptr, "Expected a generator of a ", kSimName, " device, but got one of ", state->device(), ".");
  state_ = other->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> GeneratorImpl::graphsafe_get_state() const {
  auto shared = c10::make_intrusive<GeneratorImpl>(device_.index());
  shared->state_ = state_;
  return shared;
}

c10::GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto* copy = new GeneratorImpl(device_.index());
  *copy->state_ = *state_;
  return copy;
}

uint64_t GeneratorImpl::draw(uint64_t count) {
  const uint64_t seed = mix(mix(state_->seed) ^ state_->offset);
  if (count == 0) {
    return seed; // nothing is launched
  }
  const uint64_t blocks = std::min(kBlocks, (count + kThreads - 1) / kThreads);
  state_->offset += ((count - 1) / (kThreads * blocks * kOffsetStep) + 1) * kOffsetStep;
  return seed;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* created = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < kMaxDevices; ++index) {
      created->push_back(at::make_generator<GeneratorImpl>(index));
    }
    return created;
  }();
  const auto index = device == -1 ? current_device() : device;
  TORCH_CHECK(
      index >= 0 && index < device_count(), kSimTitle, " error: invalid device ordinal: there is no generator for ",
      kSimName, ":", static_cast<int>(index), " among ", static_cast<int>(device_count()), " devices.");
  return generators->at(static_cast<size_t>(index));
}

at::Generator host_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device, uint64_t count) {
  const bool own = given.has_value() && given->defined();
  at::Generator source = own ? *given : default_generator(device);
  TORCH_CHECK(
      source.device().type() == kSim, "Expected a '", kSimName, "' device type for generator but found '",
      source.device().type(), "'");
  TORCH_CHECK(
      source.device() == c10::Device(kSim, device), "Expected a '", kSimName, ":", static_cast<int>(device),
      "' generator device but found '", source.device(), "'.");
  std::lock_guard<std::mutex> lock(source.mutex());
  auto* impl = static_cast<GeneratorImpl*>(source.unsafeGetGeneratorImpl());
  if (auto* recording = Recording::current) {
    recording->capture.check_generator(impl->state());
  }
  return at::detail::createCPUGenerator(impl->draw(count));
}

} // namespace torch_ext::sim
