#include "streams.h"

#include <sys/prctl.h>

#include <cstdlib>
#include <thread>

#include <c10/util/Exception.h>

namespace emu {

// ------------------------------------------------------------------ devices
namespace {
struct DeviceStreams {
  std::mutex mutex;
  std::vector<Stream*> all; // never freed: a torch.Stream is an index into this
  size_t next_reused = 1;
};
constexpr size_t kPoolSize = 32;
std::vector<DeviceStreams*>& devices() {
  static auto* v = [] {
    const char* text = getenv("EMU_DEVICE_COUNT");
    int n = text ? atoi(text) : 2;
    TORCH_CHECK(n >= 1 && n <= 16, "EMU_DEVICE_COUNT=", text ? text : "", ": must be 1 to 16");
    auto* v = new std::vector<DeviceStreams*>();
    for (int i = 0; i < n; i++) v->push_back(new DeviceStreams());
    return v;
  }();
  return *v;
}
thread_local int tls_device = 0;
thread_local std::vector<Stream*> tls_streams;
} // namespace

int device_count() { return (int)devices().size(); }
int current_device() { return tls_device; }
void set_device(int d) {
  TORCH_CHECK(d >= 0 && d < device_count(), "invalid emu device index ", d, ": there are ", device_count());
  tls_device = d;
}
int resolve_device(int i) {
  if (i < 0) return current_device();
  TORCH_CHECK(i < device_count(), "invalid emu device index ", i, ": there are ", device_count());
  return i;
}

// ------------------------------------------------------------------ streams
static Stream* make_stream(int device, int64_t id) {
  auto* s = new Stream();
  s->device = device;
  s->id = id;
  s->gid = trace::register_stream("emu:" + std::to_string(device) + "/stream" + std::to_string(id));
  return s;
}
static Stream* default_of(DeviceStreams* d, int device) { // d->mutex held
  if (d->all.empty()) d->all.push_back(make_stream(device, 0));
  return d->all[0];
}
Stream* default_stream(int device) {
  auto* d = devices().at(device);
  std::lock_guard<std::mutex> g(d->mutex);
  return default_of(d, device);
}
Stream* pool_stream(int device) {
  auto* d = devices().at(device);
  std::lock_guard<std::mutex> g(d->mutex);
  default_of(d, device);
  if (d->all.size() <= kPoolSize) {
    d->all.push_back(make_stream(device, (int64_t)d->all.size()));
    return d->all.back();
  }
  auto* s = d->all[d->next_reused];
  d->next_reused = d->next_reused % kPoolSize + 1;
  return s;
}
Stream* current_stream(int device) {
  if (C10_UNLIKELY(tls_streams.empty())) tls_streams.assign(device_count(), nullptr);
  auto*& s = tls_streams.at(device);
  if (!s) s = default_stream(device);
  return s;
}
void set_current_stream(Stream* s) {
  current_stream(s->device);
  tls_streams[s->device] = s;
}
Stream* stream_of(const c10::Stream& s) {
  auto* d = devices().at(s.device_index());
  std::lock_guard<std::mutex> g(d->mutex);
  return s.id() == 0 ? default_of(d, s.device_index()) : d->all.at(s.id());
}
c10::Stream wrap(Stream* s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, (c10::DeviceIndex)s->device), s->id);
}

void Stream::loop() {
  prctl(PR_SET_TIMERSLACK, 1UL); // wake up when asked to, not up to 50 us later
  prctl(PR_SET_NAME, "emu_stream");
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    has_work.wait(lock, [&] { return !queue.empty(); });
    auto work = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    work();
    work = nullptr; // may release memory: not under the lock
    lock.lock();
    finished++;
    has_progress.notify_all();
  }
}
uint64_t Stream::enqueue(std::function<void()> work) {
  std::lock_guard<std::mutex> g(mutex);
  if (!has_thread) {
    has_thread = true;
    std::thread([this] { loop(); }).detach();
  }
  queue.push_back(std::move(work));
  has_work.notify_one();
  return ++issued;
}
void Stream::wait_for(uint64_t ticket, int who) {
  if (has_finished(ticket)) return;
  double t0 = now_s();
  {
    std::unique_lock<std::mutex> lock(mutex);
    has_progress.wait(lock, [&] { return has_finished(ticket); });
  }
  if (!vclock::on) {
    double t1 = now_s();
    trace::add_stall(who, t1 - t0);
    trace::add_span("wait", who, t0, t1, 0);
  }
}

// ------------------------------------------------------------------- events
void Recording::complete() {
  std::lock_guard<std::mutex> g(mutex);
  done = true;
  completed_at = now_s();
  completed.notify_all();
}
void Recording::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  completed.wait(lock, [&] { return done; });
}
bool Recording::is_complete() {
  std::lock_guard<std::mutex> g(mutex);
  return done;
}
RecordingPtr record_event(Stream* s) {
  auto e = std::make_shared<Recording>();
  if (vclock::on) e->moment = vclock::stream_end(s->gid);
  e->clock = race::record(s->gid);
  if (s->idle()) e->complete();
  else s->enqueue([e] { e->complete(); });
  return e;
}
void stream_wait(Stream* s, const RecordingPtr& e) {
  race::stream_waits(s->gid, e->clock);
  if (vclock::on) vclock::stream_waits(s->gid, e->moment);
  if (!e->is_complete()) s->enqueue([e] { e->wait(); });
}
void host_knows(Stream* s) {
  if (vclock::on) vclock::host_reaches(vclock::stream_end(s->gid));
  race::host_joins_stream(s->gid);
}
void host_wait(Stream* s) {
  s->drain(trace::kHost);
  host_knows(s);
}
void host_wait(const RecordingPtr& e) {
  if (!e->is_complete()) {
    double t0 = now_s();
    e->wait();
    if (!vclock::on) trace::add_stall(trace::kHost, now_s() - t0);
  }
  if (vclock::on) vclock::host_reaches(e->moment);
  race::host_joins(e->clock);
}
void synchronize(int device) {
  std::vector<Stream*> all;
  {
    auto* d = devices().at(device);
    std::lock_guard<std::mutex> g(d->mutex);
    all = d->all;
  }
  for (auto* s : all) host_wait(s);
}

} // namespace emu
