#include "trace.h"

#include <cmath>
#include <mutex>

#include <c10/util/Exception.h>

namespace emu::trace {

Counters counters;
std::atomic<bool> timeline_on{false};

namespace {
std::mutex mutex;
// Never destroyed: stream threads and late tensors use them while the process exits.
auto& names = *new std::vector<std::string>();
std::atomic<int64_t> stall_ps[kMaxStreams + 1]; // the last one is the host's
auto& spans = *new std::vector<Span>();
int slot(int gid) { return gid == kHost ? kMaxStreams : gid; }
} // namespace

void reset_counters() {
  for (int i = 0; i < 3; i++) counters.bytes[i] = counters.copies[i] = counters.async_copies[i] = 0;
  counters.kernels = counters.copied_outputs = counters.allocations = 0;
  counters.pins = counters.pinned_bytes = counters.unpins = 0;
  for (auto& s : stall_ps) s = 0;
}
int register_stream(const std::string& name) {
  std::lock_guard<std::mutex> g(mutex);
  TORCH_CHECK(names.size() < kMaxStreams, "emu: more than ", kMaxStreams, " streams in one process");
  names.push_back(name);
  return (int)names.size() - 1;
}
std::string stream_name(int gid) {
  if (gid == kHost) return "host";
  std::lock_guard<std::mutex> g(mutex);
  return names.at(gid);
}
void add_stall(int gid, double seconds) { stall_ps[slot(gid)] += (int64_t)std::llround(seconds * 1e12); }
std::vector<std::pair<std::string, double>> stalls() {
  std::lock_guard<std::mutex> g(mutex);
  std::vector<std::pair<std::string, double>> r{{"host", stall_ps[kMaxStreams] * 1e-12}};
  for (size_t i = 0; i < names.size(); i++) r.emplace_back(names[i], stall_ps[i] * 1e-12);
  return r;
}
void add_span(const std::string& name, int gid, double t0, double t1, size_t bytes) {
  if (!timeline_on) return;
  std::lock_guard<std::mutex> g(mutex);
  spans.push_back({name, gid, t0, t1, bytes});
}
std::vector<Span> take_timeline() {
  std::lock_guard<std::mutex> g(mutex);
  return std::exchange(spans, {});
}

} // namespace emu::trace
