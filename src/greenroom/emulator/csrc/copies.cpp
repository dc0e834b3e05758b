#include "copies.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include <ATen/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "aliases.h"
#include "faults.h"
#include "streams.h"

namespace emu {

Link bus;
Link::Link() {
  const char* text = getenv("EMU_BANDWIDTH");
  for (auto& b : bandwidth) b = text ? atof(text) : 0.0;
}

namespace {

struct Engine {
  std::mutex mutex;
  double free_at = 0;
};
Engine& engine(int device, Direction dir) {
  static auto* engines = new std::vector<Engine>(3 * device_count());
  return engines->at(3 * device + dir);
}

double duration(Direction dir, size_t bytes, bool pageable) {
  double bw = bus.bandwidth[dir] * (pageable ? bus.pageable_factor.load() : 1.0);
  return bus.latency + (bw > 0 ? (double)bytes / bw : 0);
}

struct Transfer {
  int device;
  Direction dir;
  void* dst; // null: charge the time only
  const void* src;
  size_t bytes;
  bool pageable;
  int gid;
  double issued_at = 0;
};

void count(const Transfer& t) {
  trace::counters.bytes[t.dir] += (int64_t)t.bytes;
  trace::counters.copies[t.dir]++;
}

void transfer_virtually(const Transfer& t) {
  vclock::run_copy(t.gid, 3 * t.device + t.dir, duration(t.dir, t.bytes, t.pageable), kDirectionNames[t.dir], t.bytes);
  if (t.dst) memcpy(t.dst, t.src, t.bytes);
  count(t);
}

// Byte after byte at the set bandwidth, so that a reader that does not wait sees a partly arrived tensor.
void transfer_really(const Transfer& t) {
  constexpr size_t kChunk = 512 << 10;
  constexpr double kBackToBack = 300e-6;
  auto& e = engine(t.device, t.dir);
  std::lock_guard<std::mutex> g(e.mutex);
  double begun = now_s(), total = duration(t.dir, t.bytes, t.pageable);
  // A copy that was queued before its predecessor ended starts at that end, not when the thread woke up:
  // otherwise late wake-ups would add up.
  bool follows = t.issued_at <= e.free_at && begun - e.free_at < kBackToBack;
  double t0 = follows ? e.free_at : std::max(begun, e.free_at);
  double payload = total - bus.latency;
  for (size_t off = 0; off < t.bytes; off += kChunk) {
    size_t n = std::min(kChunk, t.bytes - off);
    if (total > 0) sleep_until(t0 + bus.latency + payload * (double)(off + n) / (double)t.bytes);
    if (t.dst) memcpy((char*)t.dst + off, (const char*)t.src + off, n);
  }
  if (t.bytes == 0) sleep_until(t0 + total);
  e.free_at = payload > 0 ? t0 + total : now_s();
  count(t);
  trace::add_span(kDirectionNames[t.dir], t.gid, begun, now_s(), t.bytes);
}

void transfer(const Transfer& t) {
  if (vclock::on) transfer_virtually(t);
  else transfer_really(t);
}

// Both memories live until the copy has ended. Blocks are held, not tensors: a stream's thread must never run a
// tensor's destructor, which may need Python's lock.
std::vector<std::shared_ptr<void>> hold(const at::Tensor& a, const at::Tensor& b) {
  std::vector<std::shared_ptr<void>> held;
  for (const auto* t : {&a, &b}) {
    if (is_emu(*t)) {
      auto* block = block_of(t->storage().unsafeGetStorageImpl());
      if (!block) continue;
      retain(block);
      held.emplace_back(block, [](void* p) { release(p); });
    } else if (auto* block = find_pinned(t->const_data_ptr(), true))
      held.emplace_back(block, [](void* p) { release_pinned(p); });
  }
  return held;
}

// Equal dtype and layout without gaps: the copy is one memcpy.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && a.sizes().equals(b.sizes()) &&
      ((a.is_contiguous() && b.is_contiguous()) || (a.strides().equals(b.strides()) && a.is_non_overlapping_and_dense()));
}

void copy_bytes(Stream* s, Direction dir, const at::Tensor& dst, const at::Tensor& src, bool async, bool pageable) {
  Transfer t{s->device, dir, dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(), pageable && !async, s->gid, now_s()};
  if (async) trace::counters.async_copies[dir]++;
  // On the virtual clock the bytes move at once; only the clocks know that the copy is asynchronous.
  if (!async || vclock::on) {
    s->drain(s->gid);
    transfer(t);
    return;
  }
  s->enqueue([t, held = hold(dst, src)] { transfer(t); });
}

void copy_on_device(const at::Tensor& src, const at::Tensor& dst) {
  auto* s = current_stream(dst.device().index());
  s->drain(s->gid);
  if (race::mode) {
    race::Touch touches[] = {touch_of(src, false), touch_of(dst, true)};
    race::launch(s->gid, touches, 2, "copy_");
  }
  double t0 = now_s();
  auto to = cpu_alias(dst);
  {
    KernelScope scope(s->device);
    to.copy_(cpu_alias(src));
  }
  if (vclock::on) vclock::run_kernel(s->gid, 0, (double)dst.nbytes() + (double)src.numel() * src.element_size(), "copy_");
  else trace::add_span("copy_", s->gid, t0, now_s(), 0);
}

// Runs on the source device's stream, fenced both ways with the destination's.
void copy_to_peer(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  TORCH_CHECK(!copy_fault.due(), "emu: p2p copy failed (injected by fail_copy)");
  auto *s = current_stream(src.device().index()), *d = current_stream(dst.device().index());
  stream_wait(s, record_event(d));
  if (race::mode) {
    race::Touch touches[] = {touch_of(src, false), touch_of(dst, true)};
    race::launch(s->gid, touches, 2, "copy_");
  }
  if (same_layout(dst, src)) {
    copy_bytes(s, P2P, dst, src, true, false);
    stream_wait(d, record_event(s));
    if (!non_blocking) host_wait(s);
    return;
  }
  s->drain(s->gid);
  d->drain(d->gid);
  transfer({s->device, P2P, nullptr, nullptr, (size_t)src.numel() * src.element_size(), false, s->gid, now_s()});
  cpu_alias(dst).copy_(cpu_alias(src));
  stream_wait(d, record_event(s));
  host_wait(s);
}

void copy_over_link(const at::Tensor& unexpanded, const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  bool to_device = is_emu(dst);
  const auto &e = to_device ? dst : src, &h = to_device ? src : dst;
  TORCH_CHECK(h.is_cpu(), "Expected all tensors to be on the same device, but found emu:", e.device().index(), " and ", h.device(),
              ": copies between emu and ", h.device(), " are not supported");
  Direction dir = to_device ? H2D : D2H;
  TORCH_CHECK(!copy_fault.due(), "emu: ", kDirectionNames[dir], " copy failed (injected by fail_copy)");
  auto* s = current_stream(e.device().index());
  auto* pinned = find_pinned(h.const_data_ptr(), false);
  if (race::mode) {
    Touches touches{touch_of(e, to_device)};
    if (pinned) touches.push_back(touch_of_pinned(h, pinned, !to_device));
    race::launch(s->gid, touches.data(), touches.size(), "copy_");
  }
  if (same_layout(dst, src)) {
    bool async = non_blocking && pinned;
    copy_bytes(s, dir, dst, src, async, !pinned);
    if (!async) host_knows(s);
    return;
  }
  // Another layout or dtype: the source's bytes cross the link, through a staging buffer, and the host waits;
  // the conversion itself costs nothing.
  s->drain(s->gid);
  transfer({s->device, dir, nullptr, nullptr, (size_t)unexpanded.numel() * unexpanded.element_size(), true, s->gid, now_s()});
  if (to_device) cpu_alias(dst).copy_(src);
  else const_cast<at::Tensor&>(dst).copy_(cpu_alias(src));
  host_knows(s);
}

} // namespace

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (dst.numel() == 0) return dst;
  at::Tensor expanded = src.sizes().equals(dst.sizes()) ? src : src.expand(dst.sizes());
  if (!is_emu(src) || !is_emu(dst)) copy_over_link(src, expanded, dst, non_blocking);
  else if (src.device() == dst.device()) copy_on_device(expanded, dst);
  else copy_to_peer(expanded, dst, non_blocking);
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (!src.sizes().equals(dst.sizes())) const_cast<at::Tensor&>(dst).resize_(src.sizes());
  return copy_from(src, dst, false);
}

void charge_collective(int device, size_t bytes, int gid, const char* name) {
  vclock::run_copy(gid, 3 * device + P2P, duration(P2P, bytes, false), name, bytes);
  count({device, P2P, nullptr, nullptr, bytes, false, gid});
}
void finish_collective(double started_at, size_t bytes, int gid, const char* name) {
  sleep_until(started_at + duration(P2P, bytes, false));
  trace::add_span(name, gid, started_at, now_s(), bytes);
  count({0, P2P, nullptr, nullptr, bytes, false, gid});
}

} // namespace emu
