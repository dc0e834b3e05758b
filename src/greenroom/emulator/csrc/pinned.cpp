#include "pinned.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>

#include <c10/util/Exception.h>

#include "faults.h"
#include "memory.h"
#include "streams.h"
#include "trace.h"

namespace emu {

namespace {
constexpr int kPoison = 0xFF;
std::shared_mutex blocks_mutex;
auto& blocks = *new std::map<uintptr_t, PinnedBlock*>(); // by address; never destroyed, as copies may outlive main
std::mutex stats_mutex;
at::HostStats& stats() {
  static auto* s = new at::HostStats();
  return *s;
}

void add(PinnedBlock* b) {
  {
    std::unique_lock<std::shared_mutex> g(blocks_mutex);
    blocks[(uintptr_t)b->ptr] = b;
  }
  {
    std::lock_guard<std::mutex> g(stats_mutex);
    stats().active_bytes.increase(b->size);
    stats().allocated_bytes.increase(b->size);
    stats().active_requests.increase(1);
    stats().allocations.increase(1);
    stats().num_host_alloc++;
  }
  trace::counters.pins++;
  trace::counters.pinned_bytes += b->size;
}

void delete_pinned(void* block) { // the owner is gone: counted as free now, memory kept until its copies end
  auto* b = (PinnedBlock*)block;
  if (!b) return;
  {
    std::lock_guard<std::mutex> g(stats_mutex);
    stats().active_bytes.decrease(b->size);
    stats().allocated_bytes.decrease(b->size);
    stats().active_requests.decrease(1);
    stats().allocations.decrease(1);
    stats().num_host_free++;
  }
  trace::counters.unpins++;
  release_pinned(b);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
    TORCH_CHECK(!pin_fault.due(), "emu: pinning ", n, " bytes failed (injected by fail_pin)");
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, (n + 63) / 64 * 64) == 0, "emu: the host is out of memory (", n, " bytes to pin)");
    // Without this the system may hand back memory that still holds the very data a late copy should bring.
    if (poison) memset(p, kPoison, n);
    auto* b = new PinnedBlock(p, n, true);
    add(b);
    return {p, b, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* dst, const void* src, size_t n) const override { default_copy_data(dst, src, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; } // copies hold a reference instead
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> g(stats_mutex);
    return stats();
  }
  template <class F>
  void for_each_stat(F f) {
    std::lock_guard<std::mutex> g(stats_mutex);
    for (auto* s : {&stats().active_bytes, &stats().allocated_bytes, &stats().active_requests, &stats().allocations}) f(*s);
  }
  void reset_accumulated_stats() override { for_each_stat([](auto& s) { s.reset_accumulated(); }); }
  void reset_peak_stats() override { for_each_stat([](auto& s) { s.reset_peak(); }); }
};
} // namespace

PinnedBlock* find_pinned(const void* address, bool add_ref) {
  auto a = (uintptr_t)address;
  std::shared_lock<std::shared_mutex> g(blocks_mutex);
  auto it = blocks.upper_bound(a);
  if (it == blocks.begin()) return nullptr;
  auto* b = (--it)->second;
  if (a >= it->first + b->size) return nullptr;
  if (add_ref) b->refs++;
  return b;
}
void release_pinned(void* block) {
  auto* b = (PinnedBlock*)block;
  if (!b || --b->refs) return;
  {
    std::unique_lock<std::shared_mutex> g(blocks_mutex);
    blocks.erase((uintptr_t)b->ptr);
  }
  if (b->owned) {
    if (poison) memset(b->ptr, kPoison, b->size);
    free(b->ptr);
  }
  delete b;
}
void register_pinned(void* address, size_t bytes) {
  TORCH_CHECK(bytes > 0, "emu: nothing to register");
  TORCH_CHECK(!pin_fault.due(), "emu: pinning ", bytes, " bytes failed (injected by fail_pin)");
  {
    std::shared_lock<std::shared_mutex> g(blocks_mutex);
    auto a = (uintptr_t)address;
    auto it = blocks.lower_bound(a + bytes);
    bool overlaps = it != blocks.begin() && (--it)->first + it->second->size > a;
    TORCH_CHECK(!overlaps, "emu: part of this memory is pinned already");
  }
  add(new PinnedBlock(address, bytes, false));
}
void unregister_pinned(void* address) {
  auto* b = find_pinned(address, false);
  TORCH_CHECK(b && b->ptr == address && !b->owned, "emu: this memory was not registered");
  for (int d = 0; d < device_count(); d++) synchronize(d);
  delete_pinned(b);
}
at::HostAllocator* host_allocator() {
  static auto* a = new PinnedAllocator();
  return a;
}

} // namespace emu
