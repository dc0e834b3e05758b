// Pinned host memory: byte-exact, found by address so that copies know what may be asynchronous.
#pragma once
#include <atomic>
#include <cstddef>

#include <ATen/core/CachingHostAllocator.h>

#include "race.h"

namespace emu {

struct PinnedBlock {
  PinnedBlock(void* p, size_t n) : ptr(p), size(n) {}
  void* ptr;
  size_t size;
  std::atomic<int> refs{1}; // the tensor's, plus one for each copy under way
  race::Log log;            // accesses by copies
};
PinnedBlock* find_pinned(const void* address, bool add_ref); // null: not pinned
void release_pinned(void* block);
at::HostAllocator* host_allocator();

} // namespace emu
