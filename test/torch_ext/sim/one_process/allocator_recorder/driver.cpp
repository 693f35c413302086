// Runs sequences of calls (allocator_sequences.py) on CUDA's caching allocator, each in a process of its own, and
// prints a line for each. Needs libc10.so, libc10_cuda.so and the headers of torch's CUDA wheel, CUDA's runtime
// headers, zlib, and runtime.cpp in place of CUDA's runtime.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <iostream>
#include <map>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
extern "C" {
extern size_t stub_limit;
extern int stub_epoch;
void stub_make_busy(cudaStream_t s);
bool stub_find(const void* p, const char** base);
}
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}
namespace CA = c10::cuda::CUDACachingAllocator;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
static std::vector<int64_t> numbers() {
  auto s = CA::getDeviceStats(0);
  std::vector<int64_t> all;
  auto add = [&](const Stat& one) { all.insert(all.end(), {one.current, one.peak, one.allocated, one.freed}); };
  for (StatArray* a :
       {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
        &s.inactive_split_bytes, &s.requested_bytes})
    for (auto& one : *a)
      add(one);
  add(s.oversize_allocations);
  add(s.oversize_segments);
  all.insert(
      all.end(),
      {s.num_alloc_retries, s.num_ooms, s.num_sync_all_streams, s.num_device_alloc, s.num_device_free,
       s.max_split_size});
  return all;
}
static void run(const std::string& line, bool verbose) {
  std::istringstream in(line);
  std::string settings;
  double fraction;
  std::string ops;
  in >> settings >> stub_limit >> fraction;
  if (settings != "-")
    c10::CachingAllocator::setAllocatorSettings(settings);
  CA::init(1);
  if (fraction > 0)
    CA::setMemoryFraction(fraction, 0);
  std::vector<c10::cuda::CUDAStream> streams{c10::cuda::getDefaultCUDAStream(0)};
  for (int i = 0; i < 3; ++i)
    streams.push_back(c10::cuda::getStreamFromPool(false, 0));
  std::vector<c10::DataPtr> held;
  std::map<const char*, int> segments;
  uint32_t crc = 0;
  std::ostringstream places;
  std::string op;
  while (in >> op) {
    size_t a = 0, b = 0;
    char c = 0;
    std::istringstream(op.substr(1)) >> a >> c >> b;
    if (op[0] == 'a') {
      c10::cuda::setCurrentCUDAStream(streams[b]);
      try {
        held.push_back(CA::get()->allocate(a));
        const char* base = nullptr;
        stub_find(held.back().get(), &base);
        auto [it, fresh] = segments.try_emplace(base, (int)segments.size());
        places << ' ' << it->second << '+' << (static_cast<char*>(held.back().get()) - base) / 512;
      } catch (const c10::OutOfMemoryError&) {
        held.emplace_back();
        places << " oom";
      }
    } else if (op[0] == 'f') {
      held[a].clear();
    } else if (op[0] == 'r') {
      CA::recordStream(held[a], streams[b]);
    } else if (op[0] == 'b') {
      stub_make_busy(streams[a].stream());
    } else if (op[0] == 'd') {
      ++stub_epoch;
    } else if (op[0] == 'e') {
      CA::emptyCache();
    }
    auto n = numbers();
    if (verbose) {
      std::cout << op
                << places.str().substr(places.str().rfind(' ') == std::string::npos ? 0 : places.str().rfind(' '));
      for (auto x : n)
        std::cout << ' ' << x;
      std::cout << '\n';
    }
    crc = crc32(crc, reinterpret_cast<const Bytef*>(n.data()), n.size() * 8);
  }
  std::vector<int64_t> blocks;
  for (auto& s : CA::snapshot().segments)
    for (auto& b : s.blocks)
      blocks.insert(blocks.end(), {(int64_t)b.size, b.allocated, b.active, s.is_large});
  crc = crc32(crc, reinterpret_cast<const Bytef*>(blocks.data()), blocks.size() * 8);
  printf("%08x%s\n", crc, places.str().c_str());
  fflush(stdout);
  std::cout.flush();
  _exit(0);
}
namespace c10::cuda::detail { C10_CUDA_API void init_p2p_access_cache(int64_t); }
int main(int argc, char**) {
  c10::cuda::detail::init_p2p_access_cache(1);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  std::string line;
  while (std::getline(std::cin, line)) {
    fflush(stdout);
    if (pid_t child = fork()) {
      int st;
      waitpid(child, &st, 0);
      if (st) {
        printf("crash %d\n", st);
        fflush(stdout);
      }
    } else
      run(line, argc > 1);
  }
}
