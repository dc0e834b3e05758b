// What happened: counters, stalls, the timeline, and the names that appear in them.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace emu {

constexpr int kMaxStreams = 1024; // whole process, all devices

enum Direction { H2D = 0, D2H = 1, P2P = 2 };
constexpr const char* kDirectionNames[] = {"h2d", "d2h", "p2p"};

namespace trace {

constexpr int kHost = -1; // the "stream id" of the host

struct Counters {
  std::atomic<int64_t> bytes[3], copies[3], async_copies[3];
  std::atomic<int64_t> kernels{0};        // operations run through the CPU fallback
  std::atomic<int64_t> copied_outputs{0}; // of these, outputs that could not be adopted without a copy
  std::atomic<int64_t> allocations{0};    // device allocations
  std::atomic<int64_t> pins{0}, pinned_bytes{0}, unpins{0};
};
extern Counters counters;
void reset_counters();

int register_stream(const std::string& name); // -> the stream's process-wide id
std::string stream_name(int gid);

// Seconds that a stream (or the host) spent waiting for another one.
void add_stall(int gid, double seconds);
std::vector<std::pair<std::string, double>> stalls();

struct Span {
  std::string name;
  int gid;
  double t0, t1;
  size_t bytes;
};
extern std::atomic<bool> timeline_on;
void add_span(const std::string& name, int gid, double t0, double t1, size_t bytes); // if timeline_on
std::vector<Span> take_timeline();

} // namespace trace
} // namespace emu
