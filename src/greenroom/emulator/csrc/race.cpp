#include "race.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>

#include "trace.h"

namespace emu::race {

std::atomic<int> mode{OFF};

namespace {
struct Stream {
  Clock clock;
  uint64_t seq = 0;
};
std::mutex mutex; // guards all below and every Log
// Never destroyed: stream threads and late tensors use them while the process exits.
auto& streams = *new std::vector<Stream>(kMaxStreams);
auto& host = *new Clock();
auto& found = *new std::vector<std::string>();

uint64_t at(const Clock& c, int gid) { return (size_t)gid < c.size() ? c[gid] : 0; }
void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}
Stream& next_launch(int gid) {
  auto& s = streams[gid];
  merge(s.clock, host); // the host issues it, so it runs after all the host has waited for
  if (s.clock.size() <= (size_t)gid) s.clock.resize(gid + 1, 0);
  s.clock[gid] = ++s.seq;
  return s;
}
void report(std::string text, bool may_raise) {
  if (may_raise && mode == RAISE) TORCH_CHECK(false, "emu race: ", text);
  found.push_back(std::move(text));
}
std::string range(size_t lo, size_t hi) {
  return "bytes [" + std::to_string(lo) + ", " + std::to_string(hi) + ")";
}

void note(Log& log, const Clock& clock, const Access& a, const char* what) {
  size_t keep = 0;
  std::string conflict;
  for (size_t i = 0; i < log.size(); i++) {
    Access r = log[i];
    if (r.hi > a.lo && r.lo < a.hi) {
      bool ordered = r.gid == a.gid || at(clock, r.gid) >= r.seq;
      if (!ordered && (a.write || r.write) && conflict.empty())
        conflict = std::string(what) + " on " + trace::stream_name(a.gid) + (a.write ? " writes " : " reads ") +
            range(std::max(r.lo, a.lo), std::min(r.hi, a.hi)) + " of an allocation, " +
            (r.write ? "written by un-synchronised work on " : "still being read on ") + trace::stream_name(r.gid);
      // Whatever will conflict with r conflicts with a as well, and whatever is ordered after a is ordered
      // after r: the part of r that a covers need not be kept. A read does not stand in for an earlier write.
      // (An unordered r was reported above; once is enough.)
      if ((a.write || !r.write) && (ordered || a.write)) {
        if (r.lo >= a.lo && r.hi <= a.hi) continue;
        if (r.lo >= a.lo) r.lo = a.hi;
        else if (r.hi <= a.hi) r.hi = a.lo;
      }
    }
    log[keep++] = r;
  }
  log.resize(keep);
  log.push_back(a);
  if (!conflict.empty()) report(std::move(conflict), true);
}
} // namespace

void launch(int gid, const Touch* touches, size_t n, const char* what) {
  std::lock_guard<std::mutex> g(mutex);
  auto& s = next_launch(gid);
  for (size_t i = 0; i < n; i++) {
    const auto& t = touches[i];
    if (t.log && t.lo < t.hi) note(*t.log, s.clock, {t.lo, t.hi, gid, s.seq, t.write}, what);
  }
}
void also_writes(int gid, Log& log, size_t lo, size_t hi) {
  std::lock_guard<std::mutex> g(mutex);
  auto& s = streams[gid];
  note(log, s.clock, {lo, hi, gid, s.seq, true}, "output");
}
Clock record(int gid) {
  std::lock_guard<std::mutex> g(mutex);
  return next_launch(gid).clock;
}
void stream_waits(int gid, const Clock& c) {
  std::lock_guard<std::mutex> g(mutex);
  merge(streams[gid].clock, host);
  merge(streams[gid].clock, c);
}
void host_joins_stream(int gid) {
  std::lock_guard<std::mutex> g(mutex);
  merge(host, streams[gid].clock);
}
void host_joins(const Clock& c) {
  std::lock_guard<std::mutex> g(mutex);
  merge(host, c);
}
void host_touches(const Log& log, size_t lo, size_t hi, bool write, const char* what) {
  std::lock_guard<std::mutex> g(mutex);
  for (const auto& r : log)
    if (r.hi > lo && r.lo < hi && (write || r.write) && at(host, r.gid) < r.seq) {
      report(std::string(what) + " on the host " + (write ? "writes " : "reads ") + range(std::max(r.lo, lo), std::min(r.hi, hi)) +
                 " of pinned memory that a copy on " + trace::stream_name(r.gid) + " may still " + (r.write ? "write" : "read"),
             true);
      return;
    }
}
void check_free(const Log& log, int alloc_gid, const std::vector<int>& recorded) {
  std::lock_guard<std::mutex> g(mutex);
  const auto& owner = streams[alloc_gid].clock;
  for (const auto& r : log) {
    if (r.gid == alloc_gid || at(owner, r.gid) >= r.seq || at(host, r.gid) >= r.seq) continue;
    if (std::find(recorded.begin(), recorded.end(), r.gid) != recorded.end()) continue;
    report("memory allocated on " + trace::stream_name(alloc_gid) + " was freed while work on " + trace::stream_name(r.gid) +
               " may still use it (needs record_stream or a wait)",
           false);
    return;
  }
}
std::vector<std::string> take_reports() {
  std::lock_guard<std::mutex> g(mutex);
  return std::exchange(found, {});
}

} // namespace emu::race
