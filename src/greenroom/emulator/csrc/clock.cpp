#include "clock.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <ctime>
#include <mutex>
#include <vector>

#include "trace.h"

namespace emu {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double t) {
  if (t - now_s() < 10e-6) return;
  timespec ts;
  ts.tv_sec = (time_t)t;
  ts.tv_nsec = (long)((t - (double)ts.tv_sec) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, nullptr) == EINTR) {
  }
}

namespace vclock {

CostModel model;
std::atomic<bool> on{false};

namespace {
struct StreamClock {
  int64_t end = 0;        // its own work is done
  int64_t wait_until = 0; // the events it was told to wait for have happened
};
constexpr double kPs = 1e12;
std::mutex mutex; // guards all below
// The containers are never destroyed: stream threads and late tensors use them while the process exits.
auto& streams = *new std::vector<StreamClock>(kMaxStreams);
auto& engines = *new std::vector<int64_t>();
int64_t host = 0;
uint64_t epoch = 1;

int64_t ps(double s) { return (int64_t)std::llround(s * kPs); }
int64_t value(const Moment& m) { return m.epoch == epoch ? m.ps : 0; }

// When work issued now on this stream can begin. The part that only the awaited events explain is a stall:
// a wait that had ended before the host issued the next work cost nothing.
int64_t begin(int gid) {
  auto& c = streams[gid];
  int64_t free = std::max(c.end, host), t0 = std::max(free, c.wait_until);
  if (t0 > free) {
    trace::add_stall(gid, (t0 - free) / kPs);
    trace::add_span("wait", gid, free / kPs, t0 / kPs, 0);
  }
  return t0;
}
} // namespace

void restart(bool enable) {
  std::lock_guard<std::mutex> g(mutex);
  std::fill(streams.begin(), streams.end(), StreamClock());
  std::fill(engines.begin(), engines.end(), 0);
  host = 0;
  epoch++;
  on = enable;
}
double seconds(const Moment& m) {
  std::lock_guard<std::mutex> g(mutex);
  return value(m) / kPs;
}
double host_seconds() {
  std::lock_guard<std::mutex> g(mutex);
  return host / kPs;
}
Moment host_now() {
  std::lock_guard<std::mutex> g(mutex);
  return {host, epoch};
}
Moment stream_end(int gid) {
  std::lock_guard<std::mutex> g(mutex);
  const auto& c = streams[gid];
  return {std::max({c.end, c.wait_until, host}), epoch};
}
void host_reaches(const Moment& m) {
  std::lock_guard<std::mutex> g(mutex);
  int64_t t = value(m);
  if (t <= host) return;
  trace::add_stall(trace::kHost, (t - host) / kPs);
  trace::add_span("wait", trace::kHost, host / kPs, t / kPs, 0);
  host = t;
}
bool host_is_past(const Moment& m) {
  std::lock_guard<std::mutex> g(mutex);
  return value(m) <= host;
}
bool poll(const Moment& m) {
  std::lock_guard<std::mutex> g(mutex);
  if (value(m) <= host) return true;
  host += ps(1e-6);
  return false;
}
void stream_waits(int gid, const Moment& m) {
  std::lock_guard<std::mutex> g(mutex);
  auto& c = streams[gid];
  c.wait_until = std::max(c.wait_until, value(m));
}
void run_kernel(int gid, double flops, double bytes, const std::string& name) {
  std::lock_guard<std::mutex> g(mutex);
  int64_t t0 = begin(gid);
  int64_t t1 = t0 + ps(std::max(flops / model.flops, bytes / model.memory_bandwidth) + model.kernel_latency);
  streams[gid].end = t1;
  host += ps(model.launch);
  trace::add_span(name, gid, t0 / kPs, t1 / kPs, (size_t)bytes);
}
void run_copy(int gid, int engine, double duration, const std::string& name, size_t bytes) {
  std::lock_guard<std::mutex> g(mutex);
  if ((size_t)engine >= engines.size()) engines.resize(engine + 1, 0);
  int64_t t0 = std::max(begin(gid), engines[engine]), t1 = t0 + ps(duration);
  streams[gid].end = engines[engine] = t1;
  host += ps(model.launch);
  trace::add_span(name, gid, t0 / kPs, t1 / kPs, bytes);
}

} // namespace vclock
} // namespace emu
