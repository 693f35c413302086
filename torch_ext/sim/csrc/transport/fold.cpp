#include "fold.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../std.h"

namespace torch_ext::sim {
namespace {

using c10d::ReduceOp;

constexpr uint64_t kBlock = 4096; // elements whose partial result stays in the L1 cache
constexpr uint64_t kTile = 64;    // of a fixed length, so that compilers vectorize

// Overflow wraps, as it does on devices.
template <typename T>
auto wrapping(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<std::make_unsigned_t<T>>(value);
  } else {
    return value;
  }
}

constexpr auto kAdd = [](auto a, auto b) { return wrapping(a) + wrapping(b); };
constexpr auto kMultiply = [](auto a, auto b) { return wrapping(a) * wrapping(b); };
constexpr auto kMinimum = [](auto a, auto b) { return b < a ? b : a; };
constexpr auto kMaximum = [](auto a, auto b) { return a < b ? b : a; };
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };

template <typename T, auto f>
void combine(std::byte* into, const std::byte* with, uint64_t count) {
  T* __restrict__ a = reinterpret_cast<T*>(into);
  const T* __restrict__ b = reinterpret_cast<const T*>(with);
  uint64_t i = 0;
  for (; i + kTile <= count; i += kTile) {
    for (uint64_t j = 0; j < kTile; ++j) {
      a[i + j] = static_cast<T>(f(a[i + j], b[i + j]));
    }
  }
  for (; i < count; ++i) {
    a[i] = static_cast<T>(f(a[i], b[i]));
  }
}

using Combine = void (*)(std::byte*, const std::byte*, uint64_t);

template <typename T>
Combine combine_of(ReduceOp::RedOpType op) {
  Combine found = nullptr;
  const auto row = [&](ReduceOp::RedOpType of, Combine function) { found = op == of ? function : found; };
  row(ReduceOp::SUM, combine<T, kAdd>);
  row(ReduceOp::PRODUCT, combine<T, kMultiply>);
  row(ReduceOp::MIN, combine<T, kMinimum>);
  row(ReduceOp::MAX, combine<T, kMaximum>);
  if constexpr (std::is_integral_v<T>) {
    row(ReduceOp::BAND, combine<T, kAnd>);
    row(ReduceOp::BOR, combine<T, kOr>);
    row(ReduceOp::BXOR, combine<T, kXor>);
  }
  TORCH_CHECK_VALUE(found != nullptr, "simccl cannot use a bitwise reduction with this type.");
  return found;
}

template <typename... Types>
Combine combine_of_any(at::ScalarType type, ReduceOp::RedOpType op) {
  Combine found = nullptr;
  ((found = type == c10::CppTypeToScalarType<Types>::value ? combine_of<Types>(op) : found), ...);
  TORCH_CHECK_VALUE(found != nullptr, "simccl cannot reduce ", type, " tensors.");
  return found;
}

constexpr auto combine_of_type =
    combine_of_any<float, double, c10::Half, c10::BFloat16, uint8_t, int8_t, int32_t, int64_t>;

std::vector<size_t> ranks_from(size_t first, size_t count) {
  std::vector<size_t> ranks(count);
  for (size_t i = 0; i < count; ++i) {
    ranks[i] = (first + i) % count;
  }
  return ranks;
}

// A buffer for partial results, one per thread, since several groups may reduce at a time.
std::vector<std::byte>& scratch(size_t bytes) {
  thread_local std::vector<std::byte> kept;
  kept.resize(std::max(kept.size(), bytes));
  return kept;
}

struct Step {
  Combine combine;
  uint64_t item; // bytes of an element

  // Writes elements [begin, end), combined in the order of `ranks`, or in pairs.
  void run(
      std::byte* to, const std::vector<const std::byte*>& from, const std::vector<size_t>& ranks, bool in_pairs,
      uint64_t begin, uint64_t end) const {
    // Keep partial results in the output, unless another rank's input lies there.
    const auto lies_there = [&](size_t rank) { return from[rank] + begin * item == to; };
    const bool in_place = !in_pairs && (lies_there(ranks[0]) || std::ranges::none_of(ranks, lies_there));
    auto& parts = scratch(kBlock * item * (in_pairs ? ranks.size() : 1));
    for (uint64_t at = begin; at < end; at += kBlock) {
      const uint64_t count = std::min(kBlock, end - at);
      std::byte* const block = to + (at - begin) * item;
      const auto part = [&](size_t i) { return in_place ? block : parts.data() + i * kBlock * item; };
      for (size_t i = 0; i < (in_pairs ? ranks.size() : 1); ++i) {
        if (const auto* source = from[ranks[i]] + at * item; source != part(i)) {
          std::memcpy(part(i), source, count * item);
        }
      }
      for (size_t stride = 1; in_pairs && stride < ranks.size(); stride *= 2) {
        for (size_t i = 0; i + stride < ranks.size(); i += 2 * stride) {
          combine(part(i), part(i + stride), count);
        }
      }
      for (size_t i = 1; !in_pairs && i < ranks.size(); ++i) {
        combine(part(0), from[ranks[i]] + at * item, count);
      }
      if (part(0) != block) {
        std::memcpy(block, part(0), count * item);
      }
    }
  }
};

} // namespace

FoldOrder FoldOrder::parse(const std::string& text) {
  static const std::map<std::string_view, Kind> kinds{
      {"", Kind::kRank}, {"rank", Kind::kRank}, {"ring", Kind::kRing}, {"tree", Kind::kTree}};
  if (const auto found = kinds.find(text); found != kinds.end()) {
    return {found->second, 0};
  }
  constexpr std::string_view kRandom = "random:";
  if (text.starts_with(kRandom)) {
    FoldOrder order{Kind::kRandom, 0};
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data() + kRandom.size(), end, order.seed);
    if (error == std::errc() && stopped == end) {
      return order;
    }
  }
  TORCH_CHECK_VALUE(false, "TORCH_EXT_SIM_REDUCE=", text, ": expected rank, ring, tree or random:SEED with a number.");
}

void Fold::run(std::byte* to, const std::vector<const std::byte*>& from, uint64_t begin, uint64_t end) const {
  const Step step{combine_of_type(type, op), c10::elementSize(type)};
  auto ranks = ranks_from(0, from.size());
  if (order.kind == FoldOrder::Kind::kRing) {
    for (uint64_t part = 0; part < ranks.size(); ++part) {
      const uint64_t first = std::max(begin, elements * part / ranks.size());
      const uint64_t last = std::min(end, elements * (part + 1) / ranks.size());
      if (first < last) {
        step.run(to + (first - begin) * step.item, from, ranks_from(part + 1, ranks.size()), false, first, last);
      }
    }
    return;
  }
  if (order.kind == FoldOrder::Kind::kRandom) {
    std::mt19937_64 source(order.seed * 0x9E3779B97F4A7C15u + number);
    for (size_t left = ranks.size(); left > 1; --left) { // std::shuffle differs between libraries
      std::swap(ranks[left - 1], ranks[source() % left]);
    }
  }
  step.run(to, from, ranks, order.kind == FoldOrder::Kind::kTree, begin, end);
}

} // namespace torch_ext::sim
