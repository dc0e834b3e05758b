// What makes PrivateUse1 a device: hooks, the device guard (streams and events), allocators.
#include "backend.h"

#include <algorithm>
#include <cstring>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "aliases.h"
#include "generator.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"

namespace emu {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto outer = current_device();
    if (d >= 0) set_device(d);
    return (c10::DeviceIndex)outer;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return find_pinned(p, false) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kEmu, (c10::DeviceIndex)current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return new_generator(i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* s = storage.unsafeGetStorageImpl();
    auto dp = allocate(n, s->device().index());
    if (size_t keep = std::min(n, s->nbytes())) {
      auto* stream = current_stream(s->device().index());
      stream->drain(stream->gid);
      memcpy(dp.get(), s->data(), keep);
    }
    s->set_data_ptr_noswap(std::move(dp));
    s->set_nbytes(n);
  }
};

// A torch.Event's handle: the latest recording, if any.
struct EventHandle {
  RecordingPtr latest;
};
Recording* recording(void* event) { return event ? ((EventHandle*)event)->latest.get() : nullptr; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int i) { return c10::Device(kEmu, (c10::DeviceIndex)i); }
  static int index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
  c10::DeviceType type() const override { return kEmu; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto outer = current_device();
    if (d.has_index()) set_device(d.index());
    return device(outer);
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) set_device(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) set_device(d.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device d) const override { return wrap(current_stream(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return wrap(default_stream(index(d))); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return wrap(pool_stream(index(d))); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return wrap(pool_stream(index(d))); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto* outer = current_stream(s.device_index());
    set_current_stream(stream_of(s));
    return wrap(outer);
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return stream_of(s); }
  bool queryStream(const c10::Stream& s) const override {
    auto* st = stream_of(s);
    bool over = st->idle() && (!vclock::on || vclock::poll(vclock::stream_end(st->gid)));
    if (over) race::host_joins_stream(st->gid); // a host that was told so may rely on it
    return over;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_wait(stream_of(s)); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { synchronize(resolve_device(d)); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventHandle();
    ((EventHandle*)*event)->latest = record_event(stream_of(s));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (EventHandle*)event; }
  void block(void* event, const c10::Stream& s) const override {
    if (recording(event)) stream_wait(stream_of(s), ((EventHandle*)event)->latest);
  }
  bool queryEvent(void* event) const override {
    auto* r = recording(event);
    if (!r) return true;
    bool over = r->is_complete() && (!vclock::on || vclock::poll(r->moment));
    if (over) race::host_joins(r->clock);
    return over;
  }
  void synchronizeEvent(void* event) const override {
    if (recording(event)) host_wait(((EventHandle*)event)->latest);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto *x = recording(a), *y = recording(b);
    TORCH_CHECK(x && y, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(x->is_complete() && y->is_complete(), "Both events must be completed before calculating elapsed time.");
    double s = vclock::on ? vclock::seconds(y->moment) - vclock::seconds(x->moment) : y->completed_at - x->completed_at;
    return s * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { device_allocator()->recordStream(p, s); }
};

} // namespace

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_allocator());
static at::HostAllocatorRegistry<c10::DeviceType::PrivateUse1> register_host_allocator(host_allocator());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void register_backend() {
  static auto* hooks = new Hooks(); // torch asks it until the process is gone
  install_cpu_hook();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

} // namespace emu
