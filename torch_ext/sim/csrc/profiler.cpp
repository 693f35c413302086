#include "profiler.h"

// Without these torch's header is empty, and kineto's headers need a separate library.
#define USE_KINETO
#define FMT_HEADER_ONLY
#include <ActivityType.h>
#include <GenericTraceActivity.h>
#include <IActivityProfiler.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "device.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {

std::atomic<bool> profiling{false};

namespace {

thread_local std::vector<int64_t> correlations;

struct Recorded {
  std::mutex mutex;
  std::vector<DeviceWork> work;
};

Recorded& recorded = *new Recorded(); // never freed: threads may outlive static objects

// For the profiler of torch.autograd, which times each operator by two events around it.
struct Stubs final : torch::profiler::impl::ProfilerStubs {
  void record(
      c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    if (device != nullptr) {
      *device = current_device();
    }
    *event = std::make_shared<int64_t>(stream_clock());
    if (cpu_ns != nullptr) {
      *cpu_ns = c10::getTime();
    }
  }
  float elapsed(
      const torch::profiler::impl::ProfilerVoidEventStub* first,
      const torch::profiler::impl::ProfilerVoidEventStub* second) const override {
    constexpr float kNanosecondsPerMicrosecond = 1e3F;
    const auto since = *static_cast<const int64_t*>(first->get()), until = *static_cast<const int64_t*>(second->get());
    return static_cast<float>(until - since) / kNanosecondsPerMicrosecond;
  }
  void mark(const char* /*name*/) const override {}
  void rangePush(const char* /*name*/) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> act) const override {
    for (int device = 0; device < device_count(); ++device) {
      act(device);
    }
  }
  void synchronize() const override {}
};

using libkineto::ActivityType;

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    to_epoch_ = c10::getTime() - stream_clock();
    std::lock_guard<std::mutex> lock(recorded.mutex);
    recorded.work.clear();
    profiling = true;
  }

  void stop() override {
    profiling = false;
    std::lock_guard<std::mutex> lock(recorded.mutex);
    work_ = std::exchange(recorded.work, {});
  }

  std::vector<std::string> errors() override { return {}; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, INT64_MAX);
  }

  void processTrace(
      libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t /*first*/,
      int64_t /*last*/) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span.name = kSimName;
    buffer_->gpuOpCount = 0;
    for (const auto& work : work_) {
      buffer_->emplace_activity(buffer_->span, ActivityType::CONCURRENT_KERNEL, work.name);
      auto& activity = libkineto::CpuTraceBuffer::toRef(buffer_->activities.back());
      activity.startTime = work.started + to_epoch_;
      activity.endTime = work.ended + to_epoch_;
      activity.id = static_cast<int32_t>(work.correlation);
      activity.device = work.device;
      activity.resource = static_cast<int32_t>(work.row);
      activity.threadId = static_cast<int32_t>(work.row);
      activity.flow.id = static_cast<uint32_t>(work.correlation);
      activity.flow.type = libkineto::kLinkAsyncCpuGpu;
      activity.linked = work.correlation == 0 ? nullptr : linked(static_cast<int32_t>(work.correlation));
      logger.handleGenericActivity(activity);
      rows_[{work.device, work.row}] += 1;
    }
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> rows;
    for (const auto& [row, count] : rows_) {
      const auto name = row.second == kLaneRow ? "collectives and transfers" : "stream " + std::to_string(row.second);
      rows.push_back({row.second, row.second, row.first, name});
    }
    return rows;
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  void pushCorrelationId(uint64_t id) override { correlations.push_back(static_cast<int64_t>(id)); }
  void popCorrelationId() override {
    if (!correlations.empty()) {
      correlations.pop_back();
    }
  }

 private:
  int64_t to_epoch_ = 0; // from the clock of streams
  std::vector<DeviceWork> work_;
  std::map<std::pair<int64_t, int64_t>, int64_t> rows_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return available_; }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config& /*config*/) override {
    return wanted.count(ActivityType::CONCURRENT_KERNEL) != 0 ? std::make_unique<Session>() : nullptr;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t /*start_ms*/, int64_t /*duration_ms*/, const std::set<ActivityType>& wanted,
      const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  const std::string name_ = kSimName;
  const std::set<ActivityType> available_{ActivityType::CONCURRENT_KERNEL};
};

} // namespace

int64_t current_correlation() noexcept {
  return is_profiling() && !correlations.empty() ? correlations.back() : 0;
}

void record_device_work(DeviceWork work) {
  std::lock_guard<std::mutex> lock(recorded.mutex);
  recorded.work.push_back(std::move(work));
}

void register_profiler() {
  static Stubs stubs;
  const auto make = []() -> std::unique_ptr<libkineto::IActivityProfiler> { return std::make_unique<Profiler>(); };
  if (kIsCuda) {
    torch::profiler::impl::registerCUDAMethods(&stubs);
    libkineto::api().registerProfilerFactory(make);
  } else {
    torch::profiler::impl::registerPrivateUse1Methods(&stubs);
    torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(make);
  }
}

} // namespace torch_ext::sim
