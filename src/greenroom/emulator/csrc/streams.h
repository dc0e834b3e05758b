// Devices, streams and events.
//
// A stream is a queue. Kernels are not put on it: they run on the calling thread, once the stream's queue is
// empty. Copies, waits for other streams' events and collectives are queued and executed by the stream's own
// thread, so that they really happen later than the call that issued them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Stream.h>

#include "clock.h"
#include "race.h"
#include "trace.h"

namespace emu {

struct Stream {
  int device;
  int64_t id;  // within the device; 0 is the default stream
  int gid;     // within the process
  uint64_t enqueue(std::function<void()> work); // -> a ticket
  void wait_for(uint64_t ticket, int who);      // who (a gid or the host) stalls meanwhile
  void drain(int who) { wait_for(issued.load(), who); }
  bool idle() const { return finished.load() == issued.load(); }
  uint64_t last_ticket() const { return issued.load(); }
  bool has_finished(uint64_t ticket) const { return finished.load() >= ticket; }

 private:
  void loop();
  std::mutex mutex;
  std::condition_variable has_work, has_progress;
  std::deque<std::function<void()>> queue;
  std::atomic<uint64_t> issued{0}, finished{0};
  bool has_thread = false;
};

// One recording of an event; a torch.Event points to its latest one.
struct Recording {
  void complete();
  void wait();
  bool is_complete();
  double completed_at = 0; // real seconds
  vclock::Moment moment;   // virtual
  race::Clock clock;

 private:
  std::mutex mutex;
  std::condition_variable completed;
  bool done = false;
};
using RecordingPtr = std::shared_ptr<Recording>;

int device_count();
int current_device();
void set_device(int device);
int resolve_device(int index); // -1: the current one

Stream* default_stream(int device);
Stream* pool_stream(int device); // a new one, or after 32 an old one again, as other backends do
Stream* current_stream(int device);
void set_current_stream(Stream* s);
Stream* stream_of(const c10::Stream& s);
c10::Stream wrap(Stream* s);

RecordingPtr record_event(Stream* s);
void stream_wait(Stream* s, const RecordingPtr& e);
void host_wait(Stream* s);
void host_wait(const RecordingPtr& e);
void host_knows(Stream* s); // the stream is empty and the host has seen it
void synchronize(int device);

} // namespace emu
