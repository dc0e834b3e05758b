// Time: the real monotonic clock, and the virtual clock that a cost model advances.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace emu {

double now_s(); // monotonic seconds
// Sleeps, never spins: the host has few cores. The deadline is absolute, so a late wake-up does not add up.
void sleep_until(double monotonic_seconds);

// Under virtual time nothing sleeps: work is executed at once, and every stream, every copy engine and the host
// only carry a clock. Times are whole picoseconds, since sums of integers do not depend on the order or the
// offset in which they are formed: two equal runs agree to the last digit.
namespace vclock {

struct CostModel {
  std::atomic<double> flops{1e12};            // floating-point operations per second
  std::atomic<double> memory_bandwidth{1e11}; // bytes per second
  std::atomic<double> launch{5e-6};           // host seconds to issue one operation
  std::atomic<double> kernel_latency{2e-6};   // seconds that every kernel takes at least
};
extern CostModel model;
extern std::atomic<bool> on;

// A moment of virtual time. Moments of an earlier epoch (before the last restart) count as long past.
struct Moment {
  int64_t ps = 0;
  uint64_t epoch = 0;
};

void restart(bool enable); // all clocks at zero
double seconds(const Moment& m);
double host_seconds();
Moment host_now();
Moment stream_end(int gid); // when the stream will have finished all it was given so far
void host_reaches(const Moment& m);
bool host_is_past(const Moment& m);
// As host_is_past, for a caller that may be polling: a "no" costs host time, otherwise a loop over query()
// would never end.
bool poll(const Moment& m);
void stream_waits(int gid, const Moment& m);
void run_kernel(int gid, double flops, double bytes, const std::string& name);
void run_copy(int gid, int engine, double seconds, const std::string& name, size_t bytes);

} // namespace vclock
} // namespace emu
