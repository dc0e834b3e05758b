// Fault injection: the k-th event from now fails, once.
#pragma once
#include <atomic>
#include <cstdint>

namespace emu {

struct Fault {
  std::atomic<int64_t> left{0}; // 0: none planned
  std::atomic<int> device{-1};  // -1: any
  void plan(int64_t k, int on_device = -1) {
    device = on_device;
    left = k;
  }
  bool due(int on_device = -1) { // true exactly once
    if (left.load(std::memory_order_relaxed) <= 0) return false;
    if (device >= 0 && device != on_device) return false;
    return left.fetch_sub(1) == 1;
  }
};

inline Fault allocation_fault, pin_fault, copy_fault;

} // namespace emu
