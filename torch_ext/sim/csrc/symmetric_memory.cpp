#include "symmetric_memory.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/device_lazy_init.h>

#include "allocator.h"
#include "device.h"
#include "dry.h"
#include "kernel_observer.h"
#include "races/journal.h"
#include "std.h"
#include "transport/fingerprint.h"
#include "transport/segment.h"
#include "transport/transport.h"
#include "transport/wait_note.h"
#include "without_gil.h"

namespace torch_ext::sim::symmetric {
namespace {

namespace torch_api = c10d::symmetric_memory;

using MemoryPtr = std::shared_ptr<Memory>;

constexpr std::chrono::microseconds kFirstLook{100}, kLastLook{12800}; // pauses between polls of a store

constexpr size_t kReserved = 1024; // the kernel allows a process some 65,000 mappings

std::atomic<int64_t> global_rank{-1};

// All mappings by their first address. An entry of freed memory has lost its memory.
struct Mapped {
  size_t bytes;
  std::weak_ptr<Memory> memory;
  std::string owner; // "rank 1's", for messages
};

struct Mappings {
  std::mutex mutex;
  std::map<const char*, Mapped> by_start;
  std::deque<const char*> freed; // whose addresses are reserved

  // Call it with the lock.
  const Mapped* at(const void* pointer) const {
    const auto* address = static_cast<const char*>(pointer);
    const auto after = by_start.upper_bound(address);
    if (after == by_start.begin()) {
      return nullptr;
    }
    const auto& [start, mapped] = *std::prev(after);
    return address < start + mapped.bytes ? &mapped : nullptr;
  }
};

Mappings& mappings = *new Mappings(); // never freed: tensors may outlive static objects

void add(const MemoryPtr& memory, const std::string& owner) {
  std::lock_guard<std::mutex> lock(mappings.mutex);
  mappings.by_start[memory->pad()] = {memory->whole_bytes(), memory, owner};
  exists = true;
}

// What the ranks of a rendezvous tell one another. A stamp follows it.
struct Address {
  int64_t rank; // global
  int pid;
  int file;
  uint64_t inode;
  int device;
  size_t pad_bytes;
  size_t buffer_bytes;
  char machine[kSiteBytes];
  char site[kSiteBytes];
};

// The ranks of a group at a rendezvous. Blocks: call it without the GIL.
class Meeting {
 public:
  explicit Meeting(const std::string& group) : name_(group), group_(c10d::resolve_process_group(group)) {
    // Counted in the store, which is new when a group is made again, with ranks that may have ended in between.
    number_ = group_->getStore()->add(c10::str("torch_ext/symmetric/", name_, "/", rank()), 1);
    timeout_ = std::chrono::duration_cast<std::chrono::milliseconds>(group_->getStore()->getTimeout());
    for (int rank = 0; rank < size(); ++rank) {
      global_ranks_.push_back(rank);
    }
    try {
      backend_ = group_->getBackend(kSim);
      const auto options = backend_->getBackendOptions();
      timeout_ = std::min(timeout_, options->timeout);
      if (options->global_ranks_in_group.size() == global_ranks_.size()) {
        std::copy(options->global_ranks_in_group.begin(), options->global_ranks_in_group.end(), global_ranks_.begin());
      }
    } catch (const c10::Error&) {
      return; // a group without a backend for the device
    }
  }

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }
  int64_t global_rank_of(int rank) const { return global_ranks_[static_cast<size_t>(rank)]; }

  // Every rank's `text`, in order of rank.
  std::vector<std::string> exchange(const char* phase, const std::string& text, const char* site) {
    const auto store = group_->getStore();
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    std::vector<std::string> keys;
    keys.reserve(static_cast<size_t>(size()));
    for (int rank = 0; rank < size(); ++rank) {
      keys.push_back(c10::str("torch_ext/symmetric/", name_, "/", number_, "/", phase, rank));
    }
    store->set(keys[static_cast<size_t>(rank())], std::vector<uint8_t>(text.begin(), text.end()));
    std::optional<WaitNote> note;
    for (auto pause = kFirstLook; !store->check(keys); pause = std::min(2 * pause, kLastLook)) {
      if (std::chrono::steady_clock::now() >= deadline) {
        refuse_missing(missing_of(keys), site);
      }
      if (pause == kLastLook) {
        if (!note.has_value()) {
          note.emplace(name_, "rendezvous", site, 0, deadline);
        }
        const auto missing = missing_of(keys);
        note->waits_for(missing.empty() ? -1 : global_rank_of(missing.front()));
        check_present(missing, keys, site);
      }
      std::this_thread::sleep_for(pause);
    }
    return c10::fmap(keys, [&](const std::string& key) {
      const auto bytes = store->get(key);
      return std::string(bytes.begin(), bytes.end());
    });
  }

 private:
  bool came(const std::vector<std::string>& keys, int rank) const {
    return group_->getStore()->check({keys[static_cast<size_t>(rank)]});
  }
  std::vector<int> missing_of(const std::vector<std::string>& keys) const {
    std::vector<int> missing;
    for (int rank = 0; rank < size(); ++rank) {
      if (!came(keys, rank)) {
        missing.push_back(rank);
      }
    }
    return missing;
  }
  // Raises if one of `missing` has ended, or left the group, and so never comes.
  void check_present(const std::vector<int>& missing, const std::vector<std::string>& keys, const char* site) const {
    const auto arrived = [&](int rank) { return came(keys, rank); };
    for (const int rank : missing) {
      const auto why = backend_ == nullptr ? "" : gone_from(*backend_, rank, arrived);
      if (!why.empty() && !came(keys, rank)) { // it may have come just before
        refuse(c10::str(why, " and takes no part in"), site);
      }
    }
  }
  [[noreturn]] void refuse_missing(const std::vector<int>& missing, const char* site) const {
    const auto ranks = c10::fmap(missing, [&](int rank) { return global_rank_of(rank); });
    refuse(
        c10::str(
            "rank", ranks.size() > 1 ? "s " : " ", c10::Join(", ", ranks), " did not join within ", timeout_.count(),
            " ms"),
        site, " Call rendezvous() on every rank of the group, in the same order.");
  }
  [[noreturn]] void refuse(const std::string& why, const char* site, const char* advice = "") const {
    const auto mine = global_rank_of(rank());
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "symmetric memory on rank ", mine, ": ", why, " the rendezvous number ", number_, " of group ", name_,
            ", which rank ", mine, " called at ", site, ".", advice));
  }

  const std::string name_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_; // of the device; null if the group has none
  int64_t number_;
  std::chrono::milliseconds timeout_;
  std::vector<int64_t> global_ranks_;
};

bool allows_overlapping_devices() {
  const char* text = std::getenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES");
  return text != nullptr && std::string_view(text) == "1";
}

// Raises where the ranks' allocations differ, in CUDA's words where it has any.
void check_alike(const std::vector<Address>& all) {
  std::set<int> devices;
  for (const auto& each : all) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        std::string_view(each.machine) == all.front().machine,
        "Symmetric memory of the simulated accelerator needs ranks that see one "
        "another's processes, but rank ",
        each.rank, " runs on another machine or in another container than rank ", all.front().rank, ".");
    TORCH_CHECK(
        each.buffer_bytes == all.front().buffer_bytes && each.pad_bytes == all.front().pad_bytes,
        "symmetric memory differs between ranks: rank ", all.front().rank, " has a buffer of ",
        all.front().buffer_bytes, " bytes and a signal pad of ", all.front().pad_bytes, " at ", all.front().site,
        ", rank ", each.rank, " has ", each.buffer_bytes, " and ", each.pad_bytes, " at ", each.site, ".");
    devices.insert(each.device);
  }
  TORCH_CHECK(
      devices.size() == all.size() || allows_overlapping_devices() || device_count_of_all() == 1, kSimTitle,
      "SymmetricMemoryAllocator::rendezvous: detected allocations from overlapping devices from different "
      "ranks.");
}

// Maps the memory of another rank. Returns the reason where that fails.
std::string open_peer(const Address& address, Peer& peer, c10::DeviceIndex device) {
  peer.process = Process::find(address.pid);
  const int file = ::open(c10::str("/proc/", address.pid, "/fd/", address.file).c_str(), O_RDWR | O_CLOEXEC);
  struct stat about{};
  if (file < 0 || fstat(file, &about) != 0 || about.st_ino != address.inode) {
    ::close(file);
    return c10::str("cannot map the memory of rank ", address.rank, " (process ", address.pid, ")");
  }
  peer.memory = std::make_shared<Memory>(file, address.pad_bytes, address.buffer_bytes, device, address.rank);
  add(peer.memory, c10::str("rank ", address.rank, "'s"));
  return "";
}

class Allocator final : public torch_api::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device_index, const std::optional<std::string>& group_name) override {
    torch::utils::device_lazy_init(kSim);
    TORCH_CHECK_NOT_IMPLEMENTED(!is_dry(), "A dry run has no peers, and so no symmetric memory.");
    const auto device = checked_index(static_cast<c10::DeviceIndex>(device_index));
    const auto amounts = pool_of(device).amounts();
    std::lock_guard<std::mutex> lock(mutex_);
    size_t held = 0;
    for (const auto& [start, owned] : owned_) {
      held += owned.memory->device == device ? owned.memory->buffer_bytes : 0;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, amounts.reserved + held + size <= amounts.limit, kSimTitle, " driver error: out of memory. ",
        size, " bytes of symmetric memory exceed the ", amounts.limit, " of ", kSimName, ":", static_cast<int>(device),
        ", of which ", amounts.reserved, " are reserved and ", held, " are symmetric memory.");
    const int file = memfd_create("symmetric", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0, "cannot make symmetric memory: ", std::strerror(errno), ".");
    const size_t pad = rounded_up(torch_api::get_signal_pad_size(), kPage);
    auto made = std::make_shared<Memory>(file, pad, size, device, -1);
    add(made, "this rank's");
    void* data = made->buffer();
    owned_[data] = {std::move(made), group_name, {}};
    return data;
  }

  void free(void* data) override {
    Owned dropped; // without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = owned_.find(data); found != owned_.end()) {
      dropped = std::move(found->second);
      owned_.erase(found);
    }
  }

  size_t get_alloc_size(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = owned_.find(data);
    TORCH_CHECK(
        found != owned_.end(), kSimTitle, "SymmetricMemoryAllocator::get_alloc_size: input must be allocated via ",
        kSimTitle, "SymmetricMemoryAllocator::alloc");
    return found->second.memory->buffer_bytes;
  }

  HandlePtr rendezvous(void* data, const std::optional<std::string>& group_name) override {
    WithoutGil without;
    MemoryPtr memory;
    std::string group;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = covering(data);
      if (found == owned_.end()) {
        return nullptr;
      }
      const auto& named = group_name.has_value() ? group_name : found->second.group;
      TORCH_CHECK(
          named.has_value(), kSimTitle,
          "SymmetricMemory::rendezvous: `group_name` is neither specified during "
          "allocation nor passed to rendezvous().");
      group = *named;
      memory = found->second.memory;
      if (const auto known = found->second.handles.find(group); known != found->second.handles.end()) {
        return known->second;
      }
    }
    const auto offset = static_cast<size_t>(static_cast<char*>(data) - memory->buffer());
    Meeting meeting(group);
    auto peers = meet(meeting, memory);
    auto handle = make_handle(std::move(peers), group, meeting.rank(), offset);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = covering(data);
    if (found != owned_.end()) {
      found->second.handles[group] = handle;
    }
    return handle;
  }

  bool has_multicast_support(int /*device_index*/) override { return false; }
  c10::DeviceType supported_device_type() override { return kSim; }
  std::string name() override { return kSimTitle; }
  bool has_allocation(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return covering(data) != owned_.end();
  }

 private:
  struct Owned {
    MemoryPtr memory;
    std::optional<std::string> group; // of the allocation
    std::map<std::string, HandlePtr> handles;
  };

  // Call it with the lock.
  std::map<const void*, Owned, std::less<>>::iterator covering(const void* data) {
    auto after = owned_.upper_bound(data);
    if (after == owned_.begin()) {
      return owned_.end();
    }
    --after;
    const auto& memory = *after->second.memory;
    const auto* address = static_cast<const char*>(data);
    return address == memory.buffer() || address < memory.buffer() + memory.buffer_bytes ? after : owned_.end();
  }

  static std::shared_ptr<const std::vector<Peer>> meet(Meeting& meeting, const MemoryPtr& memory) {
    const auto rank = static_cast<size_t>(meeting.rank());
    struct stat about{};
    fstat(memory->file, &about);
    Address mine{
        meeting.global_rank_of(meeting.rank()),
        getpid(),
        memory->file,
        about.st_ino,
        index_among_all(memory->device),
        memory->pad_bytes,
        memory->buffer_bytes,
        {},
        {}};
    copy_text(mine.machine, kSiteBytes, this_machine());
    copy_text(mine.site, kSiteBytes, site_of_call());
    global_rank = mine.rank;
    std::string text(reinterpret_cast<const char*>(&mine), sizeof mine);
    notify([&](Observer& to) { text += to.host_stamp(); });
    std::vector<Address> all;
    std::vector<std::string> stamps;
    for (const auto& other : meeting.exchange("address", text, mine.site)) {
      TORCH_CHECK(other.size() >= sizeof mine, "symmetric memory: the ranks run different versions of torch_ext.");
      copy_bytes(&all.emplace_back(), other.data(), sizeof mine);
      stamps.push_back(other.substr(sizeof mine));
    }
    check_alike(all);
    auto peers = std::make_shared<std::vector<Peer>>();
    std::string why;
    for (size_t each = 0; each < all.size(); ++each) {
      Peer peer{all[each].rank, memory, nullptr};
      if (each != rank) {
        const auto failed = open_peer(all[each], peer, memory->device);
        why = why.empty() ? failed : why;
      }
      peers->push_back(std::move(peer));
    }
    for (const auto& failed : meeting.exchange("opened", why, mine.site)) { // until then the files must stay
      TORCH_CHECK_WITH(DistBackendError, failed.empty(), "symmetric memory: a rank ", failed, ".");
    }
    notify([&](Observer& to) {
      if (const auto moment = to.learned(stamps)) {
        to.host_knows(moment);
      }
    });
    return peers;
  }

  std::mutex mutex_;
  std::map<const void*, Owned, std::less<>> owned_; // by start of the buffer
};

} // namespace

std::atomic<bool> exists{false};

Memory::Memory(int file, size_t pad_bytes, size_t buffer_bytes, c10::DeviceIndex device, int64_t rank)
    : file(file), pad_bytes(pad_bytes), buffer_bytes(buffer_bytes), device(device), rank(rank) {
  const size_t bytes = whole_bytes() + races::journal_bytes(pad_bytes);
  const bool is_sized = rank >= 0 || ftruncate(file, static_cast<off_t>(bytes)) == 0;
  void* mapped = is_sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  const int why = errno;
  if (mapped == MAP_FAILED) {
    ::close(file);
  }
  TORCH_CHECK(mapped != MAP_FAILED, "cannot map symmetric memory: ", std::strerror(why), ".");
  start_ = static_cast<char*>(mapped);
}

Memory::~Memory() {
  munmap(journal(), races::journal_bytes(pad_bytes));
  constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(start_, whole_bytes(), PROT_NONE, kNothing, -1, 0) == MAP_FAILED) {
    munmap(start_, whole_bytes());
  }
  ::close(file);
  std::lock_guard<std::mutex> lock(mappings.mutex);
  mappings.freed.push_back(start_);
  if (mappings.freed.size() > kReserved) {
    const auto oldest = mappings.by_start.find(mappings.freed.front());
    munmap(const_cast<char*>(oldest->first), oldest->second.bytes);
    mappings.by_start.erase(oldest);
    mappings.freed.pop_front();
  }
}

void Memory::map_buffer(int sharing) {
  const size_t bytes = whole_bytes() - pad_bytes;
  const auto begin = static_cast<off_t>(pad_bytes);
  const void* mapped = mmap(buffer(), bytes, PROT_READ | PROT_WRITE, sharing | MAP_FIXED, file, begin);
  TORCH_CHECK(mapped != MAP_FAILED, "cannot map symmetric memory: ", std::strerror(errno), ".");
}

void Memory::isolate() {
  if (isolations_++ == 0) {
    map_buffer(MAP_PRIVATE);
  }
}

void Memory::rejoin() {
  if (--isolations_ == 0) {
    map_buffer(MAP_SHARED);
  }
}

MemoryPtr memory_at(const void* pointer) {
  if (!exists) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mappings.mutex);
  const auto* found = mappings.at(pointer);
  return found == nullptr ? nullptr : found->memory.lock();
}

std::string why_gone(const void* pointer) {
  std::lock_guard<std::mutex> lock(mappings.mutex);
  const auto* found = mappings.at(pointer);
  return found == nullptr || !found->memory.expired()
      ? ""
      : c10::str(found->owner, " symmetric memory, which was freed: keep its tensor, or the handle of the rendezvous");
}

int64_t rank_of_process() {
  return global_rank;
}

using AllocatorPtr = c10::intrusive_ptr<Allocator>;

// Serves a MemPool: a tensor is one allocation.
class PoolAllocator final : public c10::Allocator {
 public:
  explicit PoolAllocator(const AllocatorPtr& from) { source = from; }
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kSim, current_device());
    if (nbytes == 0) {
      return {nullptr, device};
    }
    void* data = source->alloc(nbytes, device.index(), std::nullopt);
    return {data, data, raw_deleter(), device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { source->free(data); };
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  static inline AllocatorPtr source;
};

void install() {
  const auto allocator = c10::make_intrusive<Allocator>();
  torch_api::register_mempool_allocator(kSim, std::make_shared<PoolAllocator>(allocator));
  torch_api::register_allocator(kSim, allocator);
  torch_api::register_availability(allocator->name(), allocator);
}

} // namespace torch_ext::sim::symmetric
