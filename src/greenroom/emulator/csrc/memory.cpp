#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "faults.h"

namespace emu {

std::atomic<bool> poison{false};

namespace {

constexpr size_t kTotal = 0; // index of the overall figure in torch's statistics
constexpr size_t kGranularity = 512;
constexpr size_t kCacheLimit = size_t(1) << 30;
constexpr int kPoison = 0xFF;

// Memory is [header: Block*][data]. The DataPtr's context equals its data pointer, because
// Allocator::raw_allocate (oneDNN's scratch buffers) insists on that; the header leads back to the block.
constexpr size_t kHeader = 64;
Block*& header(void* data) { return *(Block**)((char*)data - kHeader); }
void system_free(void* data) { free((char*)data - kHeader); }

struct Deferred { // released, but recorded streams still have work to do
  Block* block;
  std::vector<std::pair<Stream*, uint64_t>> tickets;
  std::vector<vclock::Moment> moments;
};

struct Pool {
  std::mutex mutex; // guards all below
  int64_t capacity;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::vector<Deferred> deferred;
  // Pages that were touched before are much faster to hand out again than new ones from the system.
  std::unordered_map<size_t, std::vector<void*>> cache;
  size_t cached = 0;
  std::unordered_set<void*> live; // data pointers that tensors own (for raw_deallocate)
  bool timeline_on = false;
  double last_stamp = 0;
  std::vector<std::pair<double, size_t>> timeline;
};

std::vector<Pool*>& pools() {
  static auto* v = [] {
    const char* text = getenv("EMU_CAPACITY");
    auto* v = new std::vector<Pool*>();
    for (int i = 0; i < device_count(); i++) {
      v->push_back(new Pool());
      v->back()->capacity = text ? (int64_t)atof(text) : int64_t(16) << 30;
    }
    return v;
  }();
  return *v;
}

// On the virtual clock the host runs ahead of the device, so an event is stamped with the time at which the
// block's own stream gets to that point (never before the previous event's stamp, since the order is the
// host's, which is what memory_allocated and its peak follow).
void stamp(Pool* p, int gid) { // p->mutex held
  if (!p->timeline_on) return;
  double t = vclock::on ? vclock::seconds(vclock::stream_end(gid)) : now_s();
  p->last_stamp = std::max(p->last_stamp, t);
  p->timeline.emplace_back(p->last_stamp, (size_t)p->stats.allocated_bytes[kTotal].current);
}

void no_longer_active(Pool* p, Block* b) { // p->mutex held
  p->stats.active_bytes[kTotal].decrease(b->size);
  p->stats.reserved_bytes[kTotal].decrease(b->size);
  p->stats.active[kTotal].decrease(1);
}

void recycle(Block* b) { // nobody refers to it any more
  if (poison) memset(b->ptr, kPoison, b->size);
  auto* p = pools()[b->device];
  {
    std::lock_guard<std::mutex> g(p->mutex);
    if (p->cached + b->size <= kCacheLimit) {
      p->cache[b->size].push_back(b->ptr);
      p->cached += b->size;
    } else
      system_free(b->ptr);
  }
  delete b;
}

bool is_over(const Deferred& d) {
  for (const auto& t : d.tickets)
    if (!t.first->has_finished(t.second)) return false;
  if (vclock::on)
    for (const auto& m : d.moments)
      if (!vclock::host_is_past(m)) return false;
  return true;
}

void wait_for_deferred(Pool* p) { // as an allocator does before it gives up
  std::vector<std::pair<Stream*, uint64_t>> tickets;
  std::vector<vclock::Moment> moments;
  {
    std::lock_guard<std::mutex> g(p->mutex);
    for (const auto& d : p->deferred) {
      tickets.insert(tickets.end(), d.tickets.begin(), d.tickets.end());
      moments.insert(moments.end(), d.moments.begin(), d.moments.end());
    }
  }
  for (const auto& t : tickets) t.first->wait_for(t.second, trace::kHost);
  if (vclock::on)
    for (const auto& m : moments) vclock::host_reaches(m);
}

void collect_deferred(Pool* p) {
  std::vector<Block*> over;
  {
    std::lock_guard<std::mutex> g(p->mutex);
    for (size_t i = 0; i < p->deferred.size();) {
      if (!is_over(p->deferred[i])) {
        i++;
        continue;
      }
      no_longer_active(p, p->deferred[i].block);
      over.push_back(p->deferred[i].block);
      p->deferred[i] = std::move(p->deferred.back());
      p->deferred.pop_back();
    }
  }
  for (auto* b : over) release(b);
}

[[noreturn]] void out_of_memory(int device, size_t size, int64_t capacity, int64_t active, const char* why) {
  using c10::CachingAllocator::format_size;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "emu out of memory", why, ". Tried to allocate ", format_size(size), ". Device ", device,
                   " has a total capacity of ", format_size(capacity), " of which ", format_size(std::max<int64_t>(0, capacity - active)),
                   " is free.");
}

} // namespace

void retain(Block* b) { b->refs++; }
void release(void* block) {
  auto* b = (Block*)block;
  if (b && --b->refs == 0) recycle(b);
}

void delete_data(void* data) {
  if (!data) return;
  auto* b = header(data);
  auto* p = pools()[b->device];
  {
    std::lock_guard<std::mutex> g(p->mutex);
    if (race::mode) {
      std::vector<int> recorded;
      for (auto* s : b->recorded) recorded.push_back(s->gid);
      race::check_free(b->log, b->gid, recorded);
    }
    p->live.erase(data);
    p->stats.allocated_bytes[kTotal].decrease(b->size);
    p->stats.requested_bytes[kTotal].decrease(b->size);
    p->stats.allocation[kTotal].decrease(1);
    p->stats.num_device_free++;
    stamp(p, b->gid);
    Deferred d{b, {}, {}};
    for (auto* s : b->recorded) {
      d.tickets.emplace_back(s, s->last_ticket());
      if (vclock::on) d.moments.push_back(vclock::stream_end(s->gid));
    }
    if (!is_over(d)) {
      p->deferred.push_back(std::move(d));
      return;
    }
    no_longer_active(p, b);
  }
  release(b);
}

Block* block_of(const c10::StorageImpl* s) {
  const auto& dp = s->data_ptr();
  if (!dp.get_context()) return nullptr;
  if (dp.get_deleter() == &delete_data) return header(dp.get_context());
  return dp.get_deleter() == &release ? (Block*)dp.get_context() : nullptr;
}

c10::DataPtr allocate(size_t bytes, int device) {
  c10::Device where(c10::DeviceType::PrivateUse1, (c10::DeviceIndex)device);
  if (bytes == 0) return {nullptr, nullptr, &delete_data, where};
  size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  int gid = current_stream(device)->gid;
  auto* p = pools().at(device);
  auto& st = p->stats;
  void* ptr = nullptr;
  for (bool retried = false;; retried = true) {
    if (retried) wait_for_deferred(p);
    collect_deferred(p);
    std::lock_guard<std::mutex> g(p->mutex);
    if (!retried && allocation_fault.due(device))
      out_of_memory(device, size, p->capacity, st.active_bytes[kTotal].current, " (injected by fail_allocation)");
    if (st.active_bytes[kTotal].current + (int64_t)size > p->capacity) {
      if (!retried && !p->deferred.empty()) {
        st.num_alloc_retries++;
        continue;
      }
      st.num_ooms++;
      out_of_memory(device, size, p->capacity, st.active_bytes[kTotal].current, "");
    }
    auto it = p->cache.find(size);
    if (it != p->cache.end() && !it->second.empty()) {
      ptr = it->second.back();
      it->second.pop_back();
      p->cached -= size;
    } else {
      TORCH_CHECK(posix_memalign(&ptr, kHeader, size + kHeader) == 0, "emu: the host is out of memory (", size, " bytes)");
      ptr = (char*)ptr + kHeader;
    }
    for (auto* s : {&st.allocated_bytes, &st.requested_bytes, &st.active_bytes, &st.reserved_bytes}) (*s)[kTotal].increase(size);
    st.allocation[kTotal].increase(1);
    st.active[kTotal].increase(1);
    st.num_device_alloc++;
    p->live.insert(ptr);
    stamp(p, gid);
    break;
  }
  trace::counters.allocations++;
  if (poison) memset(ptr, kPoison, size);
  header(ptr) = new Block(ptr, size, device, gid);
  return {ptr, ptr, &delete_data, where};
}

void set_capacity(int device, int64_t bytes) {
  auto* p = pools().at(device);
  std::lock_guard<std::mutex> g(p->mutex);
  p->capacity = bytes;
}
void set_memory_timeline(int device, bool on) {
  auto* p = pools().at(device);
  std::lock_guard<std::mutex> g(p->mutex);
  p->timeline_on = on;
  p->timeline.clear();
  p->last_stamp = 0;
}
std::vector<std::pair<double, size_t>> take_memory_timeline(int device) {
  auto* p = pools().at(device);
  std::lock_guard<std::mutex> g(p->mutex);
  return std::exchange(p->timeline, {});
}
void restart_virtual_time(bool on) {
  for (int i = 0; i < device_count(); i++) synchronize(i);
  for (auto* p : pools()) {
    collect_deferred(p);
    std::lock_guard<std::mutex> g(p->mutex);
    p->last_stamp = 0;
  }
  vclock::restart(on);
}

// ---------------------------------------------------------- torch's interface
namespace {
struct EmuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override { return emu::allocate(n, current_device()); }
  void copy_data(void* dst, const void* src, size_t n) const override { default_copy_data(dst, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (auto* p : pools()) {
      collect_deferred(p);
      std::lock_guard<std::mutex> g(p->mutex);
      for (auto& entry : p->cache)
        for (auto* data : entry.second) system_free(data);
      p->cache.clear();
      p->cached = 0;
    }
  }
  void recordStream(const c10::DataPtr& dp, c10::Stream stream) override {
    if (dp.get_deleter() != &delete_data || !dp.get_context()) return;
    auto* b = header(dp.get_context());
    auto* s = stream_of(stream);
    std::lock_guard<std::mutex> g(pools()[b->device]->mutex);
    if (s->gid != b->gid && std::find(b->recorded.begin(), b->recorded.end(), s) == b->recorded.end()) b->recorded.push_back(s);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    auto* p = pools().at(i);
    collect_deferred(p);
    std::lock_guard<std::mutex> g(p->mutex);
    return p->stats;
  }
  template <class F>
  void for_each_stat(c10::DeviceIndex i, F f) {
    auto* p = pools().at(i);
    collect_deferred(p);
    std::lock_guard<std::mutex> g(p->mutex);
    auto& s = p->stats;
    for (auto* a : {&s.allocation, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      f((*a)[kTotal]);
  }
  void resetAccumulatedStats(c10::DeviceIndex i) override { for_each_stat(i, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex i) override { for_each_stat(i, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override {
    auto* p = pools().at(i);
    collect_deferred(p);
    std::lock_guard<std::mutex> g(p->mutex);
    return {(size_t)std::max<int64_t>(0, p->capacity - p->stats.active_bytes[kTotal].current), (size_t)p->capacity};
  }
};

thread_local int kernel_device = -1;

struct CpuHook final : c10::Allocator {
  c10::Allocator* base;
  explicit CpuHook(c10::Allocator* b) : base(b) {}
  c10::DataPtr allocate(size_t n) override {
    // Kernels turn their scalar arguments into tensors of one element; on a device they are plain arguments.
    constexpr size_t kScalar = 16;
    if (kernel_device < 0 || n <= kScalar) return base->allocate(n);
    auto dp = emu::allocate(n, kernel_device);
    dp.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    return dp;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &raw_delete; }
  void copy_data(void* dst, const void* src, size_t n) const override { base->copy_data(dst, src, n); }
  static void raw_delete(void* data);
};
CpuHook* hook = nullptr;
void CpuHook::raw_delete(void* data) {
  for (auto* p : pools()) {
    bool ours;
    {
      std::lock_guard<std::mutex> g(p->mutex);
      ours = p->live.count(data);
    }
    if (ours) return delete_data(data);
  }
  hook->base->raw_deleter()(data);
}
} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* a = new EmuAllocator();
  return a;
}
KernelScope::KernelScope(int device) : outer(kernel_device) { kernel_device = device; }
KernelScope::~KernelScope() { kernel_device = outer; }
void install_cpu_hook() {
  if (hook) return;
  hook = new CpuHook(c10::GetCPUAllocator());
  c10::SetCPUAllocator(hook, /*priority=*/255);
}
c10::Allocator* cpu_hook() { return hook; }

} // namespace emu
