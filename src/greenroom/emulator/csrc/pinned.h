// Pinned host memory: byte-exact, found by address so that copies know what may be asynchronous.
#pragma once
#include <atomic>
#include <cstddef>

#include <ATen/core/CachingHostAllocator.h>

#include "race.h"

namespace emu {

struct PinnedBlock {
  PinnedBlock(void* p, size_t n, bool own) : ptr(p), size(n), owned(own) {}
  void* ptr;
  size_t size;
  bool owned;               // allocated here; otherwise somebody else's memory that was registered
  std::atomic<int> refs{1}; // the tensor's, plus one for each copy under way
  race::Log log;            // accesses by copies
};
PinnedBlock* find_pinned(const void* address, bool add_ref); // null: not pinned
void release_pinned(void* block);
void register_pinned(void* address, size_t bytes); // somebody else's memory, as cudaHostRegister does
void unregister_pinned(void* address);             // waits for the copies that use it
at::HostAllocator* host_allocator();

} // namespace emu
