// Race checker: a happens-before test with one vector clock per stream and one for the host.
//
// Each launch on stream s gets the next sequence number of s. clock[s][r] is the last launch of stream r that s
// is known to run after; recording an event copies the clock, waiting for it merges the copy. Two accesses to
// overlapping bytes, at least one of them a write, race unless one is known to run after the other.
// The method is that of Fidge and Mattern (1988); the checker finds a missing wait even when the timing of this
// particular run happens to hide it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emu::race {

enum Mode { OFF = 0, COLLECT = 1, RAISE = 2 };
extern std::atomic<int> mode;

using Clock = std::vector<uint64_t>;

// Accesses to one allocation that later ones may still conflict with. Kept by byte range, since one arena holds
// several slots that streams may use at the same time.
struct Access {
  size_t lo, hi; // bytes [lo, hi) of the allocation
  int gid;
  uint64_t seq;
  bool write;
};
using Log = std::vector<Access>;

struct Touch {
  Log* log;
  size_t lo, hi;
  bool write;
};

// A launch on stream gid that touches these ranges. Throws in mode RAISE if it races.
void launch(int gid, const Touch* touches, size_t n, const char* what);
void also_writes(int gid, Log& log, size_t lo, size_t hi); // an output of the launch just made
Clock record(int gid);
void stream_waits(int gid, const Clock& c);
void host_joins_stream(int gid);
void host_joins(const Clock& c);
// The host itself reads or writes these bytes (of pinned memory) now.
void host_touches(const Log& log, size_t lo, size_t hi, bool write, const char* what);
// Freed memory is reused in the order of its allocation's stream: other streams' uses must be known to be over,
// or be declared by record_stream. Never throws (it runs in destructors); see reports.
void check_free(const Log& log, int alloc_gid, const std::vector<int>& recorded);
std::vector<std::string> take_reports();

} // namespace emu::race
