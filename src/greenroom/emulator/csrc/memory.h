// Device memory: a pool with a set capacity per device.
//
// The figures are those of a stream-ordered allocator: a freed block counts as free at once, and may be reused
// in the order of the stream that it was allocated on, unless record_stream named other streams; then it stays
// "active" until they have finished what they had been given by the time of the release.
#pragma once
#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "race.h"
#include "streams.h"

namespace emu {

struct Block {
  Block(void* p, size_t n, int d, int g) : ptr(p), size(n), device(d), gid(g) {}
  void* ptr;
  size_t size;
  int device;
  int gid; // of the stream it was allocated on
  std::atomic<int> refs{1}; // the tensor's, plus one for each CPU alias and each copy under way
  std::vector<Stream*> recorded;
  race::Log log;
};
void retain(Block* b);
void release(void* block);  // deleter of CPU aliases; context is the Block
void delete_data(void* data); // deleter of device memory; context is the data pointer
Block* block_of(const c10::StorageImpl* s);

c10::DataPtr allocate(size_t bytes, int device); // throws OutOfMemoryError
c10::DeviceAllocator* device_allocator();
void set_capacity(int device, int64_t bytes);
extern std::atomic<bool> poison; // fill memory with 0xFF (NaN) when it is handed out and when it is given back

// (seconds, bytes allocated after) of each allocation and release
void set_memory_timeline(int device, bool on);
std::vector<std::pair<double, size_t>> take_memory_timeline(int device);

// While a CPU kernel runs on behalf of a device, all CPU memory that this thread allocates, outputs and
// workspaces alike, comes from that device's pool.
class KernelScope {
 public:
  explicit KernelScope(int device);
  ~KernelScope();

 private:
  int outer;
};
void install_cpu_hook();
c10::Allocator* cpu_hook();

void restart_virtual_time(bool on); // once nothing is under way

} // namespace emu
