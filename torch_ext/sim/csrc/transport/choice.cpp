// Finds the memory of a group's ranks, or makes all ranks agree that they cannot share it.
//
// Note [Agreeing on a transport]
// Every rank takes these steps when the group is made; a rank that waits past the group's time limit, or for a process
// that has ended, raises.
//
//   1. make memory, and write an address to the store: machine, pid namespace, process, descriptor, inode
//   2. read all addresses. If one is "gloo" or names another machine or namespace, every rank takes gloo, because all
//      ranks read the same addresses
//   3. open each peer's memory through /proc/PID/fd and compare the inode: another process may have reused the pid, or
//      another file the descriptor
//   4. set the state of one's own memory: kReady if all could be opened, else kRefused
//   5. read the states of all peers, sleeping until each is set. So all are ready, or all see a refusal and take gloo
//
// Ranks find a memory by its owner's process and not by a name, so no file is left behind. After the last step every
// rank has mapped every memory, and a process may end without its peers losing its data.

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <pybind11/chrono.h>
#include <signal.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "../std.h"
#include "../without_gil.h"
#include "fold.h"
#include "segment.h"
#include "shared_memory.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSlice = std::chrono::milliseconds(50);

// Limit for a process that has closed its memory to end: the kernel does one right after the other.
constexpr auto kLongestEnd = std::chrono::seconds(1);

// Number of polls of the store for missing ranks, and the pause before the second.
constexpr int kStoreLooks = 8;
constexpr std::chrono::microseconds kFirstPause{100};

struct Address {
  std::string machine;  // empty if this rank does not share memory
  std::string settings; // no spaces
  int pid = 0;
  int file = -1;
  uint64_t inode = 0;

  std::string text() const {
    return c10::str(settings, " ", machine.empty() ? "gloo" : machine, " ", pid, " ", file, " ", inode);
  }

  static Address parse(const std::vector<uint8_t>& bytes) {
    Address read;
    std::istringstream words(std::string(bytes.begin(), bytes.end()));
    words >> read.settings >> read.machine >> read.pid >> read.file >> read.inode;
    if (read.machine == "gloo") {
      read.machine.clear();
    }
    return read;
  }
};

// A name that is equal only for processes that see each other's pids. TORCH_EXT_HOST separates processes that simulate
// several machines.
std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space{};
  if (boot.empty() || stat("/proc/self/ns/pid", &space) != 0) {
    return "";
  }
  const char* host = std::getenv("TORCH_EXT_HOST");
  return c10::str(boot, "/", space.st_ino, "/", kLayoutVersion, "/", host == nullptr ? "" : host);
}

// 0 if there is no such file.
uint64_t inode_of(int file) {
  struct stat about{};
  return fstat(file, &about) == 0 ? about.st_ino : 0;
}

std::string path_of(const Address& address) {
  return c10::str("/proc/", address.pid, "/fd/", address.file);
}

// Opens a peer's memory; leaves it unset where that fails.
Member open_peer(const Address& address, int size) {
  Member peer;
  peer.process = Process::find(address.pid);
  if (peer.process == nullptr) {
    return peer;
  }
  const int file = ::open(path_of(address).c_str(), O_RDWR | O_CLOEXEC);
  if (file >= 0 && inode_of(file) == address.inode) {
    peer.memory = std::make_unique<Segment>(file, size, /*is_own=*/false);
  } else {
    ::close(file);
  }
  return peer;
}

// Whether the process at `address`, on this machine, has ended.
bool has_ended(const Member& peer, const Address& address) {
  return peer.process != nullptr ? peer.process->has_ended() : ::kill(address.pid, 0) != 0 && errno == ESRCH;
}

// Whether a running peer has closed its memory: it is ending, or has refused and uses gloo.
bool has_closed(const Member& peer, const Address& address) {
  return peer.process != nullptr && peer.memory == nullptr && ::access(path_of(address).c_str(), F_OK) != 0 &&
      errno == ENOENT;
}

[[noreturn]] void raise_ended(int rank, int pid) {
  TORCH_CHECK(false, "simccl: rank ", rank, " (process ", pid, ") ended while the group was made.");
}

std::string key_of(int rank) {
  return c10::str("address/", rank);
}

// Polls faster than a FileStore, whose 10 ms are longer than the ranks of one machine take to join.
void wait_for_all(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<std::string>& keys,
    std::chrono::milliseconds timeout) {
  auto pause = kFirstPause;
  for (int look = 0; look < kStoreLooks; ++look) {
    if (store->check(keys)) {
      return;
    }
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
  store->wait(keys, timeout);
}

std::vector<Address> exchange(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    const Address& mine) {
  const std::string text = mine.text();
  store->set(key_of(rank), std::vector<uint8_t>(text.begin(), text.end()));
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    keys.push_back(key_of(peer));
  }
  wait_for_all(store, keys, timeout);
  return c10::fmap(keys, [&](const std::string& key) { return Address::parse(store->get(key)); });
}

GroupState state_of(int peer, const Member& member, Clock::time_point deadline) {
  const auto& word = member.memory->header().state;
  while (true) {
    const auto state = word.load(std::memory_order_acquire);
    if (state != static_cast<uint32_t>(GroupState::kNew)) {
      return static_cast<GroupState>(state);
    }
    if (member.process->has_ended()) {
      raise_ended(peer, member.process->pid());
    }
    TORCH_CHECK(Clock::now() < deadline, "simccl: the group timed out while it was made: rank ", peer, " stopped.");
    sleep_while(word, state, kSlice);
  }
}

// Returns each rank's memory in order of rank, this rank's included; empty where the ranks agree on gloo. Blocks: call
// it without the GIL. settings: must be the same on all ranks, or a ValueError names two that differ.
std::vector<Member> meet(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    bool want_shared, const std::string& settings) {
  const auto deadline = Clock::now() + timeout;
  std::vector<Member> members(static_cast<size_t>(size));
  Address mine;
  mine.settings = settings;
  mine.pid = getpid();
  if (want_shared) {
    mine.machine = this_machine();
    auto& memory = members[static_cast<size_t>(rank)].memory;
    memory = Segment::create(size);
    mine.file = memory->file();
    mine.inode = inode_of(mine.file);
  }
  const auto addresses = exchange(store, rank, size, timeout, mine);
  bool possible = !mine.machine.empty();
  for (int peer = 0; peer < size; ++peer) {
    const auto& address = addresses[static_cast<size_t>(peer)];
    TORCH_CHECK_VALUE(
        address.settings == settings, "simccl: rank ", rank, " has ", settings, ", but rank ", peer, " has ",
        address.settings, ". Set the variables alike on all ranks.");
    possible = possible && address.machine == mine.machine;
  }
  if (!possible) {
    return {};
  }
  auto& own = members[static_cast<size_t>(rank)].memory->header();
  bool opened_all = true;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      auto& member = members[static_cast<size_t>(peer)];
      member = open_peer(addresses[static_cast<size_t>(peer)], size);
      opened_all = opened_all && member.memory != nullptr;
    }
  }
  own.state.store(
      static_cast<uint32_t>(opened_all ? GroupState::kReady : GroupState::kRefused), std::memory_order_release);
  wake(own.state);
  bool all_ready = opened_all;
  for (int peer = 0; peer < size; ++peer) {
    const auto& member = members[static_cast<size_t>(peer)];
    if (peer != rank && member.memory != nullptr) {
      all_ready = state_of(peer, member, deadline) != GroupState::kRefused && all_ready;
    }
  }
  if (all_ready) {
    return members;
  }
  // Do not fall back to gloo because of a rank that has ended: gloo would wait for it until the time limit.
  const auto last = std::min(Clock::now() + kLongestEnd, deadline);
  for (int peer = 0; peer < size; ++peer) {
    const auto& member = members[static_cast<size_t>(peer)];
    const auto& address = addresses[static_cast<size_t>(peer)];
    while (peer != rank && has_closed(member, address) && !has_ended(member, address) && Clock::now() < last) {
      std::this_thread::sleep_for(kFirstPause);
    }
    if (peer != rank && has_ended(member, address)) {
      raise_ended(peer, address.pid);
    }
  }
  return {};
}

std::string setting(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

// Makes the gloo backend of a group: (store, rank, size, timeout) -> Backend. Written in Python, which has gloo's
// constructor. Set once, never freed.
pybind11::object* gloo_factory = nullptr;

} // namespace

std::shared_ptr<Transport> make_transport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int64_t>& global_ranks,
    std::chrono::milliseconds timeout, bool any_device) {
  WithoutGil without;
  const auto kind = setting("TORCH_EXT_SIM_TRANSPORT");
  TORCH_CHECK_VALUE(
      kind.empty() || kind == "shared" || kind == "gloo", "TORCH_EXT_SIM_TRANSPORT=", kind,
      ": expected shared or gloo.");
  const auto order = setting("TORCH_EXT_SIM_REDUCE");
  const int size = static_cast<int>(global_ranks.size());
  auto members = meet(store, rank, size, timeout, kind != "gloo", "TORCH_EXT_SIM_REDUCE=" + order);
  if (!members.empty()) {
    return std::make_shared<SharedMemory>(std::make_shared<SharedGroup>(
        std::move(members), FoldOrder::parse(order), rank, global_ranks, timeout, any_device));
  }
  TORCH_CHECK(
      kind != "shared",
      "TORCH_EXT_SIM_TRANSPORT=shared, but the ranks of this group cannot map one another's memory: they run on "
      "several hosts, in several containers or as several users. Unset it to use gloo there.");
  pybind11::gil_scoped_acquire gil;
  auto made = (*gloo_factory)(store, rank, size, timeout);
  return make_gloo_transport(
      made.cast<c10::intrusive_ptr<c10d::Backend>>(), std::make_shared<Group>(rank, global_ranks, timeout, any_device));
}

void bind_gloo_factory(pybind11::module_& m) {
  m.def("set_gloo_factory", [](const pybind11::function& made) { gloo_factory = new pybind11::object(made); });
}

} // namespace torch_ext::sim
