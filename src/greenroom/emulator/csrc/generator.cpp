#include "generator.h"

#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "streams.h"

namespace emu {

namespace {
struct EmuGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit EmuGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  EmuGenerator* clone_impl() const override {
    auto* g = new EmuGenerator(device().index());
    g->inner = inner.clone();
    return g;
  }
};
} // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<EmuGenerator>(i));
    return v;
  }();
  return all->at(resolve_device(device));
}
at::Generator new_generator(int device) { return at::make_generator<EmuGenerator>((c10::DeviceIndex)resolve_device(device)); }
at::Generator cpu_generator(const at::Generator& g) { return static_cast<EmuGenerator*>(g.unsafeGetGeneratorImpl())->inner; }

} // namespace emu
