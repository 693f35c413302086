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
//   5. read the states of all peers, sleeping until each is set. So all are ready, or all see a refusal
//   6. after a refusal, take gloo, and keep one's own memory open until gloo has connected all ranks. So a process that
//      has closed its memory is ending, which may be why a peer refused: wait for its end and raise. gloo would wait
//      for it until the time limit
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

#include "../dry.h"
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

// Limit for a process that has closed its memory to end. The kernel does one right after the other, but a rank that
// raised while the group was made has closed its memory too, and may live.
constexpr auto kLongestEnd = std::chrono::seconds(10);

// Pauses between polls of the store for missing ranks, doubled from first to last.
constexpr std::chrono::microseconds kFirstPause{100}, kLastPause{12800};

constexpr const char* kGloo = "gloo";

std::string setting(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

struct Address {
  std::string settings;        // no spaces
  std::string machine = kGloo; // kGloo if this rank does not share memory
  int pid = 0;
  int file = -1;
  uint64_t inode = 0;

  std::string text() const { return c10::str(settings, " ", machine, " ", pid, " ", file, " ", inode); }

  static Address parse(const std::vector<uint8_t>& bytes) {
    Address read;
    std::istringstream words(std::string(bytes.begin(), bytes.end()));
    words >> read.settings >> read.machine >> read.pid >> read.file >> read.inode;
    return read;
  }
};

// 0 if there is no such file.
uint64_t inode_of(int file) {
  struct stat about{};
  return fstat(file, &about) == 0 ? about.st_ino : 0;
}

// Another rank of the group.
struct Peer {
  int rank;
  Address address;
  Member member{};

  bool is_open() const { return member.memory != nullptr; }
  std::string path() const { return c10::str("/proc/", address.pid, "/fd/", address.file); }

  // Opens its memory; leaves it unset where that fails.
  void open(int size) {
    member.process = Process::find(address.pid);
    if (member.process == nullptr) {
      return;
    }
    const int file = ::open(path().c_str(), O_RDWR | O_CLOEXEC);
    if (file >= 0 && inode_of(file) == address.inode) {
      member.memory = std::make_unique<Segment>(file, size, /*is_own=*/false);
    } else {
      ::close(file);
    }
  }

  // Raises if its process, on this machine, has ended.
  void check_running() const {
    const bool has_ended =
        member.process != nullptr ? member.process->has_ended() : ::kill(address.pid, 0) != 0 && errno == ESRCH;
    TORCH_CHECK(!has_ended, "simccl: rank ", rank, " (process ", address.pid, ") ended while the group was made.");
  }

  // Whether its process has closed its memory: step 6 of Note [Agreeing on a transport].
  bool has_closed() const {
    struct stat now{};
    const bool is_there = stat(path().c_str(), &now) == 0;
    return member.process != nullptr && (is_there ? now.st_ino != address.inode : errno == ENOENT);
  }

  // Waits until it has opened the memory of its peers, or has refused. Returns which.
  GroupState state(Clock::time_point deadline) const {
    const auto& word = member.memory->header().state;
    while (true) {
      const auto state = word.load(std::memory_order_acquire);
      if (state != static_cast<uint32_t>(GroupState::kNew)) {
        return static_cast<GroupState>(state);
      }
      check_running();
      TORCH_CHECK(Clock::now() < deadline, "simccl: the group timed out while it was made: rank ", rank, " stopped.");
      sleep_while(word, state, kSlice);
    }
  }
};

std::vector<Address> exchange(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    const Address& mine) {
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    keys.push_back(c10::str("address/", peer));
  }
  const std::string text = mine.text();
  store->set(keys[static_cast<size_t>(rank)], std::vector<uint8_t>(text.begin(), text.end()));
  // Poll faster than a FileStore, whose 10 ms are longer than the ranks of one machine take to join.
  for (auto pause = kFirstPause; !store->check(keys); pause *= 2) {
    if (pause > kLastPause) {
      store->wait(keys, timeout);
      break;
    }
    std::this_thread::sleep_for(pause);
  }
  return c10::fmap(keys, [&](const std::string& key) { return Address::parse(store->get(key)); });
}

// Raises if a peer has ended or is ending.
void check_all_live(const std::vector<Peer>& peers, Clock::time_point deadline) {
  const auto last = std::min(Clock::now() + kLongestEnd, deadline);
  while (true) {
    for (const auto& peer : peers) {
      peer.check_running();
    }
    if (std::ranges::none_of(peers, &Peer::has_closed) || Clock::now() >= last) {
      return;
    }
    std::this_thread::sleep_for(kFirstPause);
  }
}

// The ranks' agreement. members: each rank's memory in order of rank, this rank's included; this rank's alone where
// they use gloo, if it made one.
struct Agreed {
  bool shared;
  std::vector<Member> members;
};

// Blocks: call it without the GIL. settings: must be the same on all ranks, or a ValueError names two that differ.
Agreed meet(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    bool want_shared, const std::string& settings) {
  const auto deadline = Clock::now() + timeout;
  Address mine;
  mine.settings = settings;
  mine.pid = getpid();
  std::unique_ptr<Segment> own;
  if (want_shared) {
    mine.machine = this_machine();
    own = Segment::create(size);
    mine.file = own->file();
    mine.inode = inode_of(mine.file);
  }
  bool possible = mine.machine != kGloo;
  std::vector<Peer> peers;
  for (auto& address : exchange(store, rank, size, timeout, mine)) {
    const int peer = static_cast<int>(peers.size());
    TORCH_CHECK_VALUE(
        address.settings == settings, "simccl: rank ", rank, " has ", settings, ", but rank ", peer, " has ",
        address.settings, ". Set the variables alike on all ranks.");
    possible = possible && address.machine == mine.machine;
    peers.push_back({peer, std::move(address)});
  }
  if (!possible) {
    return {.shared = false, .members = {}};
  }
  std::vector<Member> members(static_cast<size_t>(size));
  members[static_cast<size_t>(rank)].memory = std::move(own);
  auto& state = members[static_cast<size_t>(rank)].memory->header().state;
  peers.erase(peers.begin() + rank);
  for (auto& peer : peers) {
    peer.open(size);
  }
  bool all_ready = std::ranges::all_of(peers, &Peer::is_open);
  state.store(static_cast<uint32_t>(all_ready ? GroupState::kReady : GroupState::kRefused), std::memory_order_release);
  wake(state);
  for (const auto& peer : peers) {
    all_ready = (!peer.is_open() || peer.state(deadline) != GroupState::kRefused) && all_ready;
  }
  if (!all_ready) {
    check_all_live(peers, deadline);
    return {.shared = false, .members = std::move(members)};
  }
  for (auto& peer : peers) {
    members[static_cast<size_t>(peer.rank)] = std::move(peer.member);
  }
  return {.shared = true, .members = std::move(members)};
}

// Makes the gloo backend of a group: (store, rank, size, timeout) -> Backend. Written in Python, which has gloo's
// constructor. Set once, never freed.
pybind11::object* gloo_factory = nullptr;

} // namespace

// A name that is equal only for processes that see each other's pids; kGloo if there is none. TORCH_EXT_HOST separates
// processes that simulate several machines.
std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space{};
  if (boot.empty() || stat("/proc/self/ns/pid", &space) != 0) {
    return kGloo;
  }
  return c10::str(boot, "/", space.st_ino, "/", kLayoutVersion, "/", setting("TORCH_EXT_HOST"));
}

std::shared_ptr<Transport> make_transport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int64_t>& global_ranks,
    std::chrono::milliseconds timeout, bool any_device) {
  if (is_dry()) {
    return make_dry_transport(std::make_shared<Group>(rank, global_ranks, timeout, any_device));
  }
  WithoutGil without;
  const auto kind = setting("TORCH_EXT_SIM_TRANSPORT");
  TORCH_CHECK_VALUE(
      kind.empty() || kind == "shared" || kind == kGloo, "TORCH_EXT_SIM_TRANSPORT=", kind,
      ": expected shared or gloo.");
  const auto order = setting("TORCH_EXT_SIM_REDUCE");
  const int size = static_cast<int>(global_ranks.size());
  auto agreed = meet(store, rank, size, timeout, kind != kGloo, "TORCH_EXT_SIM_REDUCE=" + order);
  if (agreed.shared) {
    return std::make_shared<SharedMemory>(std::make_shared<SharedGroup>(
        std::move(agreed.members), FoldOrder::parse(order), rank, global_ranks, timeout, any_device));
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
