// Writes to regular files, for fault plans: reports each to a hook, and makes those below a folder fail as on a full
// disk.
//
// Note [Writes]
// Each library reaches `write` of libc through a slot, which the loader fills. Watching fills the slots of all
// loaded libraries with the functions below: then Python's files, and the std::ofstream of torch.save(path), pass here.
// Libraries loaded later keep their slots, and libc's own fwrite and copy_file_range pass unseen. The functions stay in
// the slots until the process ends; unwatched, they only call libc.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <linux/limits.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "bindings.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

const auto real_write = reinterpret_cast<decltype(&write)>(dlsym(RTLD_DEFAULT, "write"));
const auto real_writev = reinterpret_cast<decltype(&writev)>(dlsym(RTLD_DEFAULT, "writev"));

std::atomic<PyObject*> write_hook{nullptr}; // never freed: a write may be in it
thread_local bool is_in_hook = false;       // which may write
std::mutex full_mutex;
std::vector<std::pair<std::string, size_t>> full_folders; // each with the bytes until it is full

// The path of a regular file; empty for a pipe, a socket, memory or a file of the kernel's.
std::string path_of(int fd) {
  struct stat found{};
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
    return "";
  }
  std::array<char, PATH_MAX> path{};
  const auto length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path.data(), path.size());
  const std::string text(path.data(), length > 0 ? static_cast<size_t>(length) : 0);
  const auto is_other = [&](const char* start) { return text.starts_with(start); };
  return std::ranges::any_of(std::array{"/dev/", "/memfd:", "/proc/", "/sys/"}, is_other) ? "" : text;
}

// Calls the hook, and returns how many of `count` bytes the disk takes; nothing if it is full.
std::optional<size_t> room(int fd, size_t count) {
  PyObject* const hook = write_hook.load(std::memory_order_relaxed);
  if (hook == nullptr || is_in_hook || count == 0 || Py_IsInitialized() == 0) {
    return count;
  }
  const auto leave = c10::make_scope_exit([before = errno] {
    is_in_hook = false;
    errno = before;
  });
  is_in_hook = true;
  const auto path = path_of(fd);
  if (path.empty()) {
    return count;
  }
  {
    const pybind11::gil_scoped_acquire gil;
    try {
      pybind11::reinterpret_borrow<pybind11::object>(hook)(path);
    } catch (pybind11::error_already_set& error) { // of a signal's handler, say: none can pass a caller in C
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("a fault plan at a write");
      }
    }
  }
  const std::lock_guard<std::mutex> lock(full_mutex);
  for (auto& [folder, left] : full_folders) {
    if (path.starts_with(folder)) {
      if (left == 0) {
        return std::nullopt;
      }
      count = std::min(count, left);
      left -= count;
    }
  }
  return count;
}

ssize_t write_file(int fd, const void* data, size_t count) {
  const auto taken = room(fd, count);
  errno = taken ? errno : ENOSPC;
  return taken ? real_write(fd, data, *taken) : -1;
}

ssize_t writev_file(int fd, const iovec* parts, int number) {
  std::vector<iovec> given(parts, parts + number);
  const auto taken = room(
      fd, std::transform_reduce(given.begin(), given.end(), size_t{0}, std::plus<>(), [](auto& each) {
        return each.iov_len;
      }));
  size_t left = taken.value_or(0);
  for (auto& each : given) {
    each.iov_len = std::min(each.iov_len, left);
    left -= each.iov_len;
  }
  errno = taken ? errno : ENOSPC;
  return taken ? real_writev(fd, given.data(), number) : -1;
}

// The loader's tables hold addresses as numbers.
template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address); // NOLINT(performance-no-int-to-ptr)
}

// Fills the slots of one library; see elf(5).
int replace_slots(dl_phdr_info* library, size_t /*size*/, void* /*data*/) {
  std::map<decltype(ElfW(Dyn)::d_tag), uintptr_t> entries;
  for (int number = 0; number < library->dlpi_phnum; ++number) {
    const auto& header = library->dlpi_phdr[number];
    const auto* entry = at<const ElfW(Dyn)>(library->dlpi_addr + header.p_vaddr);
    for (; header.p_type == PT_DYNAMIC && entry->d_tag != DT_NULL; ++entry) {
      entries[entry->d_tag] = entry->d_un.d_ptr;
    }
  }
  const auto* symbols = at<const ElfW(Sym)>(entries[DT_SYMTAB]);
  const auto* names = at<const char>(entries[DT_STRTAB]);
  if (entries[DT_SYMTAB] < library->dlpi_addr) {
    return 0; // the kernel's own library, whose offsets the loader has left as they are
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [tag, bytes] : {std::pair{DT_JMPREL, DT_PLTRELSZ}, std::pair{DT_RELA, DT_RELASZ}}) {
    const std::span slots(at<const ElfW(Rela)>(entries[tag]), entries[bytes] / sizeof(ElfW(Rela)));
    for (const auto& slot : slots) {
      const auto& symbol = symbols[ELF64_R_SYM(slot.r_info)];
      const std::string_view name = names + symbol.st_name;
      if (symbol.st_shndx == SHN_UNDEF && (name == "write" || name == "writev")) {
        const auto address = library->dlpi_addr + slot.r_offset;
        // The loader has protected some slots after it filled them.
        mprotect(at<void>(address & ~(page - 1)), page, PROT_READ | PROT_WRITE);
        auto* function = name == "write" ? reinterpret_cast<void*>(&write_file) : reinterpret_cast<void*>(&writev_file);
        std::atomic_ref<void*>(*at<void*>(address)).store(function);
      }
    }
  }
  return 0;
}

} // namespace

void bind_disk(pybind11::module_& m) {
  m.def("watch_writes", [](const pybind11::object& hook) {
    write_hook = hook.is_none() ? nullptr : pybind11::object(hook).release().ptr();
    if (write_hook != nullptr) {
      dl_iterate_phdr(&replace_slots, nullptr);
    }
    const std::lock_guard<std::mutex> lock(full_mutex);
    full_folders.clear();
  });
  m.def("fill_disk", [](std::string folder, size_t left) {
    const std::lock_guard<std::mutex> lock(full_mutex);
    full_folders.emplace_back(std::move(folder), left);
  });
}

} // namespace torch_ext::sim
