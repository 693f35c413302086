// The shared memory of a rank, which its peers map, and the primitives to wait on it.
//
// Note [Memory of a rank]
// Each rank of a group has one file without a name (memfd), which its peers map and read. Only the owner writes there,
// except for the fields marked "by peers", so no lock is needed.
//
//   offset            size                             what
//   0                 4096                             Header
//   4096              kSlots * sizeof(Slot)            Slot of collective number n: n % kSlots
//   ...               size * 8                         where the first letter to each rank lies in the heap, or 0
//   rounded to 4096   grows                            the heap (Arena): data of collectives, and letters (Letter)
//
//   Slot (1024)                                        Letter (320), in the heap
//   +-----------------------------+ 0                  +-----------------------------+ 0
//   | number, written last        |                    | next: the letter after it   |
//   | inputs, counts: in the heap |                    | state: by the reader        |
//   | claims[kPieces]: by peers   |                    | envelope                    |
//   | timing, fingerprint         |                    | then the data               |
//   +-----------------------------+                    +-----------------------------+
//
// A rank publishes a collective by writing its slot, then `Slot::number`. A rank that then finds all others published
// rings `Header::complete` of rank 0, on which all sleep: of two that publish at once, at least one sees the other. The
// slot and its data are free again when `Header::finished` of every peer is past the collective. A sender publishes a
// letter by the `next` of the previous letter and the reader's `Header::doorbell`. The reader marks in `state` that it
// has copied the letter, and that it has gone on to the next one: both marks together free the letter.
//
// Note [States of a group]
//
//   kNew --> kReady ----> kLeft        the group was destroyed in good order
//     |         `-------> kAborted     a thread called abort
//     `----> kRefused                  this rank cannot map a peer's memory: the group takes the other transport
//
// A process that dies leaves its state as it is; peers see its pidfd instead.
//
// Ownership: the mapping belongs to the object. The memory has no name; the kernel frees it with the last process that
// mapped it, however that process ends. Threading: any thread may read the control area, which never moves. The heap
// may move when it grows: hold the group's lock.
#pragma once

#include <sys/types.h>

#include "../std.h"

namespace torch_ext::sim {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kCacheLine = 64; // two ranks never write to one
constexpr uint64_t kSlots = 256;    // as many collectives of a group can be under way
constexpr uint32_t kPieces = 64;    // as many parts of an all-reduce are shared out between ranks
constexpr size_t kSiteBytes = 200;  // file and line of a call, cut off in front, with a closing 0
constexpr size_t kNameBytes = 40;
constexpr uint64_t kLayoutVersion = 6;

enum class GroupState : uint8_t { kNew = 0, kReady, kRefused, kLeft, kAborted };

struct Header {
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> complete; // by peers, of rank 0: grows when all have published a collective; all sleep on it
  std::atomic<uint32_t> doorbell; // by peers: grows with each letter to this rank, which sleeps on it
  std::atomic<uint32_t> reduced;  // by peers: grows with each piece of an all-reduce; all sleep on it
  std::atomic<uint64_t> finished; // number of the last collective whose data this rank no longer needs
};

// Virtual time of a call on one rank (clock.h), counted from its start: the moment at which the call is ready, -1
// without virtual time, how long it lasts as far as this rank goes, and the moment at which the host launched it.
struct Timing {
  int64_t ready = -1;
  int64_t lasts = 0;
  int64_t launched = 0;
};

// The parts of a call that must agree between ranks, and those that messages show.
struct Fingerprint {
  int32_t root;        // -1 where there is none
  int8_t kind;         // c10d::OpType
  int8_t reduction;    // c10d::ReduceOp, -1 where there is none
  int8_t type;         // at::ScalarType, -1 where there are no tensors
  int8_t device;       // -1 where there are no tensors
  uint32_t count_size; // how many counts there are; of an all-to-all half are sent, half received, rank by rank
  char name[kNameBytes];
  char site[kSiteBytes];
  char model[kNameBytes]; // of virtual time; empty without
};

struct Slot {
  std::atomic<uint64_t> number;
  uint64_t inputs; // in the heap: a uint64_t for each input, the offset of its data
  uint64_t counts; // in the heap: numbers of elements, an int64_t each
  uint64_t stamp;  // in the heap
  uint64_t stamp_bytes;
  Timing timing;
  std::atomic<uint32_t> claims[kPieces]; // by peers, in the slot of the group's rank 0: see Note [Who reduces]
  Fingerprint fingerprint;
};

constexpr size_t kSlotStride = 1024;

constexpr uint32_t kLetterRead = 1;
constexpr uint32_t kLetterPassed = 2;

// The place of a transfer between two ranks among theirs: see Note [Transfers that block each other] in transport.cpp.
// By default it blocks nothing.
struct Turn {
  uint64_t opposite; // transfers of the pair in the other direction that this rank started earlier
  uint64_t blocking; // of a send: 1 if it blocks; of a receive: number of the last earlier send that blocks, 0: none
};

// A sender's call, for the receiver.
struct Envelope {
  int64_t elements;
  Timing timing; // `ready`: the start of the send
  Turn turn;
  uint32_t stamp_bytes; // behind the data
  int8_t type;
  char site[kSiteBytes];
  char model[kNameBytes]; // as of Fingerprint
};

struct alignas(kCacheLine) Letter {
  std::atomic<uint64_t> next;
  std::atomic<uint32_t> state; // by the reader
  Envelope envelope;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4, "the kernel sleeps on 32 bits");
static_assert(sizeof(Header) <= kPage && sizeof(Slot) <= kSlotStride);

constexpr uint64_t rounded_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

inline void copy_bytes(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0) { // empty tensors may have null pointers
    std::memcpy(to, from, bytes);
  }
}

// Returns when `word` is no longer `seen`, at the latest after `slice`; may return early. Spins for a few microseconds
// before it sleeps: peers rarely start a small collective further apart.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds slice);

// Wakes all who sleep on `word`, in every process.
void wake(const std::atomic<uint32_t>& word);

// Adds one to `word` and wakes all who sleep on it.
void ring(std::atomic<uint32_t>& word);

// Whether a process lives, by its pidfd, which no other process can take over.
class Process {
 public:
  // Null where there is no such process, or the kernel has no pidfds (before Linux 5.3). Groups share the object of a
  // pid, and so its descriptor.
  static std::shared_ptr<const Process> find(pid_t pid);

  explicit Process(pid_t pid, int file) : pid_(pid), file_(file) {}
  ~Process();
  C10_DISABLE_COPY_AND_ASSIGN(Process);

  bool has_ended() const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int file_;
};

// The bytes in use of a rank's heap. Only the owner has an Arena; peers get offsets. Hold the group's lock.
class Arena {
 public:
  // Returns the lowest free range that is large enough, so that the same few pages are reused. Never 0: it means none.
  uint64_t allocate(uint64_t bytes);
  // Returns the length of the range.
  uint64_t free(uint64_t offset);

  // End of the highest range used so far: the minimum size of the heap.
  uint64_t high_water() const { return high_water_; }

 private:
  std::map<uint64_t, uint64_t> used_; // offset to length
  uint64_t high_water_ = kCacheLine;
};

class Segment {
 public:
  // Creates this rank's segment in a group of `size` ranks. Raises RuntimeError where the kernel refuses.
  static std::unique_ptr<Segment> create(int size);

  // Maps a rank's segment, and takes the descriptor: `is_own` keeps it, to grow the file.
  Segment(int file, int size, bool is_own);
  ~Segment();
  C10_DISABLE_COPY_AND_ASSIGN(Segment);

  Header& header() const { return *reinterpret_cast<Header*>(control_); }
  Slot& slot(uint64_t number) const;
  std::atomic<uint64_t>& first_letter(int to) const;

  // Bytes at an offset of the heap, valid until the next call that grows it.
  std::byte* heap(uint64_t offset, uint64_t bytes);

  // For the owner: makes the heap at least `bytes` long.
  void grow(uint64_t bytes);

  // Drops the pages behind a range that is no longer used.
  void discard(uint64_t offset, uint64_t bytes);

  int file() const { return file_; } // the owner's; -1 of a peer's

 private:
  void remap_heap(uint64_t bytes);

  int file_;
  uint64_t control_bytes_;
  uint64_t heap_bytes_ = 0;
  std::byte* control_ = nullptr;
  std::byte* heap_ = nullptr;
};

// A name that is equal only for processes that see each other's pids; "gloo" if there is none.
std::string this_machine(); // choice.cpp

struct Member {
  std::unique_ptr<Segment> memory;
  std::shared_ptr<const Process> process; // of a peer
};

} // namespace torch_ext::sim
